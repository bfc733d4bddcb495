# %% [markdown]
# # 03 · The roofline
#
# **Claim.** A decode step for one sequence waits. It reads every weight of the model to use each of
# them once, and any machine can compute faster than it can read. Two measured rates, how fast this
# machine reads and how fast it multiplies, put a *floor* under every step. The floor is known
# before anything is built, and no cleverness goes below it without changing what is read.
#
# You will count what a step reads and computes, measure both rates, draw the roofline, and see
# where decode and prefill lie below it. You need notebook 02: a decode step, and its bills.

# %%
import torch

import course.notebook as nb
from course.measure import decode_work, split_step
from course.measure.roofline import cache_bytes, read_probe
from course.model.published import PUBLISHED

lesson = nb.Lesson(3)
model, config, device = lesson.model, lesson.config, lesson.device
roofline = lesson.reference  # the worked solution of this stage
KVCache = nb.reference(2).KVCache

# %% [markdown]
# ## Predict first
#
# Divide the bytes of the weights by the rate at which this machine reads memory: that is the time
# that reading them takes at least. Which share of a step is it? The first guess believes the claim
# without reserve.

# %%
guess = 100
prediction = lesson.predict(guess, "%")

# %% [markdown]
# ## What a step must do
#
# **Read.** All weights of the layers, the final norm, and the head. The embedding table is looked
# up, one row per token, so it does not count; the head is read whole, even where it is the same
# matrix (*tied*).

# %%
lesson.code("decode_weights")

# %% [markdown]
# **Compute.** Each weight is used for one multiplication and one addition: 2 floating-point
# operations (FLOP) per *weight*. What that is per *byte* depends on how many bytes a weight has.
# FLOP per byte is called *arithmetic intensity*.

# %%
itemsize = model.embed.weight.element_size()
weights = roofline.decode_weights(config)
nb.table(
    ["one decode step, one sequence", ""],
    [
        ["weights in the model", f"{config.num_weights:,}"],
        ["weights that the step reads", f"{weights:,}"],
        ["bytes that it reads", nb.bytes_text(weights * itemsize)],
        ["FLOP", nb.short(2 * weights)],
        [f"intensity at {8 * itemsize} bits per weight", 2 / itemsize],
        ["intensity at 16 bits", 2 / 2],
    ],
)

# %% [markdown]
# ## What the machine can do
#
# **Reading.** Read an array that is several times larger than the last-level cache, and compute as
# little as possible on the way.

# %%
lesson.code("measure_bandwidth")

# %% [markdown]
# Why several times larger? Here is the same measurement for arrays of many sizes. Before you look:
# where will the curve fall, and how often?

# %%
cache = cache_bytes(device)
largest = max(8 * cache, 256 << 20)
sizes = [1 << k for k in range(16, largest.bit_length())]
speed = {size: read_probe(device, size).rate(0.04, least_runs=3).best for size in sizes}

fig, ax = nb.figure()
ax.plot(
    [s / 2**20 for s in sizes],
    [v / 1e9 for v in speed.values()],
    "o-",
    color=nb.COLOURS["measured"],
)
ax.axvline(cache / 2**20, color=nb.COLOURS["predicted"], label="last-level cache")
nb.doublings(ax, [s / 2**20 for s in sizes[::2]])
ax.set(xlabel="size of the array, MiB", ylabel="GB/s", ylim=(0, None))
ax.legend()
nb.show(
    fig,
    "How fast an array is read again and again, by its size. Points are the best of several runs.",
)

# %% jupyter={"source_hidden": true}
top = max(speed, key=speed.get)
beyond = speed[sizes[-1]]
nb.say(f"""
An array of {top / 2**20:.3g} MiB is read at {nb.per_second(speed[top], "B")}, one of
{sizes[-1] / 2**20:.0f} MiB at {nb.per_second(beyond, "B")}: {speed[top] / beyond:.1f} times more
slowly. Who measures with the small one gets the speed of a cache, and a floor that is
{speed[top] / beyond:.1f} times too low. (The smallest arrays are slow for another reason: the call
itself takes longer than the reading.)
""")

# %% [markdown]
# **Computing.** Multiply two large matrices: n³ multiplications and as many additions, for 3 n²
# numbers.

# %%
lesson.code("measure_flops")

# %% [markdown]
# The quotient of the two rates is the *ridge*: how many operations the machine could do for each
# byte that it reads. The course's own probe measures the same figures in another way, and remembers
# the best that it saw on this machine.

# %%
bandwidth = roofline.measure_bandwidth(device, cache)
flops = roofline.measure_flops(device, model.dtype)
probe = lesson.roofline
nb.table(
    ["", "this stage's solution", "the course's probe"],
    [
        ["reading", nb.per_second(bandwidth, "B"), nb.per_second(probe.read_bandwidth, "B")],
        [
            f"multiplying, {probe.tried[0]}",
            nb.per_second(flops, "FLOP"),
            nb.per_second(probe.flops[probe.tried[0]], "FLOP"),
        ],
        ["ridge, FLOP per byte", flops / bandwidth, probe.ridge(model.dtype)],
    ],
)

# %% jupyter={"source_hidden": true}
ridge = probe.ridge(model.dtype)
nb.say(f"""
Decode offers {2 / itemsize:g} FLOP per byte, and this machine could do {nb.short(ridge)}. So a step
for one sequence can use {2 / itemsize / ridge:.1%} of its arithmetic at the very most. The rest
waits for memory.
""")

# %% [markdown]
# ## The roofline
#
# At intensity I a machine can do at most I · bandwidth operations per second, because it must read
# the bytes, and at most its FLOP/s, because it must do the work. The lower of the two is the roof:
# a slope, then a ceiling, with the ridge between them.
#
# How does intensity rise? With B sequences in one pass, each weight is read once and used B times.
# The cache does not share in that: each sequence reads its own. In *prefill*, the positions of one
# text share the weights in the same way. So predict: where do decode at batch 1 to 256 and prefill
# lie, and which of them reach the roof?

# %%
context = 32  # tokens in each sequence's cache
batches = [1, 4, 16, 64, 256]
prompts = [16, 128] if lesson.tier == "cpu" else [16, 128, 1024]


def decode_step(model, batch, context):
    """One token for each of `batch` sequences; `context` positions each, the new one included."""
    cache = KVCache(model.config, context, batch_size=batch, dtype=model.dtype, device=device)
    cache.keys.normal_()  # what the past says does not change how long it takes
    cache.values.normal_()
    token_ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    positions = torch.full((batch, 1), context - 1, device=device)

    def step():
        cache.length = context - 1
        return model.forward(token_ids, positions, cache)

    return step


def prefill(rows):
    """A pass over a prompt of this length."""
    token_ids = torch.zeros(1, rows, dtype=torch.int64, device=device)
    positions = torch.arange(rows, device=device)[None]
    cache = KVCache(config, rows, dtype=model.dtype, device=device)

    def step():
        cache.length = 0
        return model.forward(token_ids, positions, cache, logit_rows=[-1])

    return step


work = {
    ("decode", b): decode_work(
        config, [context] * b, weight_itemsize=itemsize, kv_itemsize=itemsize
    )
    for b in batches
}
work |= {("prefill", rows): nb.pass_work(config, rows, itemsize) for rows in prompts}
steps = {("decode", b): decode_step(model, b, context) for b in batches}
steps |= {("prefill", rows): prefill(rows) for rows in prompts}
times = nb.take_turns(steps, device, rounds=5)

# %%
peak = probe.flops[probe.tried[0]]


def roof(intensity):
    """The most FLOP/s at this intensity."""
    return min(peak, intensity * probe.read_bandwidth)


fig, ax = nb.figure(7, 4.4)
intensities = sorted([2**k / 8 for k in range(14)] + [ridge])
gflops = {key: work[key].flops / times[key].median / 1e9 for key in work}
ax.plot(
    intensities, [roof(i) / 1e9 for i in intensities], color=nb.COLOURS["reference"], label="roof"
)
for kind, mark, meaning in (("decode", "o", "measured"), ("prefill", "s", "predicted")):
    points = {key[1]: (work[key].intensity, gflops[key]) for key in work if key[0] == kind}
    ax.plot(*zip(*points.values(), strict=True), mark, color=nb.COLOURS[meaning], label=kind)
    for size, point in points.items():
        ax.annotate(str(size), point, (7, -9), textcoords="offset points")
ax.set(xscale="log", yscale="log", xlabel="intensity, FLOP per byte", ylabel="GFLOP/s")
ax.axvline(ridge, color=nb.COLOURS["reference"], linestyle=":", linewidth=1)
ax.annotate("ridge", (ridge, 1.15 * peak / 1e9), ha="center")
ax.set_ylim(top=2 * peak / 1e9)
ax.legend()
nb.show(
    fig,
    "The roofline of this machine, and measured passes. Numbers are the batch size (decode) "
    "and the length of the prompt (prefill).",
)

# %%
nb.table(
    ["pass", "intensity", "floor", "measured", "of the roof", "tokens per second"],
    [
        [
            f"{kind}, {size}",
            work[kind, size].intensity,
            nb.seconds_text(work[kind, size].flops / roof(work[kind, size].intensity)),
            nb.seconds_text(taken.median),
            f"{work[kind, size].flops / roof(work[kind, size].intensity) / taken.median:.0%}",
            f"{size / taken.median:,.0f}",
        ]
        for (kind, size), taken in times.items()
    ],
)

# %% jupyter={"source_hidden": true}
share = {key: work[key].flops / roof(work[key].intensity) / times[key].median for key in work}
best, worst = max(share, key=share.get), min(share, key=share.get)
one, many = times["decode", 1].median, times["decode", batches[-1]].median
beyond_ridge = [b for b in batches if work["decode", b].intensity > ridge]
if beyond_ridge:
    crossing = f"""Batch {beyond_ridge[0]} is the first here beyond the ridge. From there on the
roof is level: what this machine can compute per second no longer rises with the batch."""
else:
    crossing = "None of these batches reaches the ridge."
nb.say(f"""
{batches[-1]} sequences at once take {many / one:.1f} times as long as one, so each second brings
{batches[-1] * one / many:.0f} times the tokens. {crossing}

Nearest to the roof is {best[0]} with {best[1]} ({share[best]:.0%}), farthest {worst[0]} with
{worst[1]} ({share[worst]:.0%}). The roof says what cannot be beaten. It does not say that anything
reaches it; what keeps a step below is the next question.
""")

# %% [markdown]
# ## The floor, and the step
#
# `decode_floor` turns this into a time: the longer of reading and computing.

# %%
lesson.code("decode_floor")

# %% [markdown]
# A step for one sequence, against its floor. Floor over measured time is the *model-bandwidth
# utilisation*. One more thing belongs to a step, and it can be measured alone: the **host
# overhead**, a step of the same model, so narrow that nothing is left to read or to multiply. What
# remains is calling operations. Host and floor together predict the step, and with it the share in
# question. (On a GPU the host works ahead, and the longer of the two counts.)

# %%
host = lesson.host_overhead(lambda narrow: decode_step(narrow, 1, context))
floor = roofline.decode_floor(config, 1, context, itemsize, probe.read_bandwidth, peak)
reading_weights = weights * itemsize / probe.read_bandwidth
derived_step = host + floor if lesson.tier == "cpu" else max(host, floor)
derived_share = 100 * reading_weights / derived_step

# %% jupyter={"source_hidden": true}
nb.say(f"""
Floor {nb.seconds_text(floor)}, host {nb.seconds_text(host)}: a step should take
**{nb.seconds_text(derived_step)}**, of which reading the weights is {derived_share:.0f}%.
""")

# %% [markdown]
# Now measure it. Beside it, in turns, run **the weight layers alone**: all of them one after the
# other on a single row, and nothing between them. They read exactly the weights. If that takes
# longer than the floor, it is the kernels that stay below the roof.

# %%
inputs = {
    name: torch.randn(1, 1, linear.weight.shape[1], device=device, dtype=model.dtype)
    for name, linear in model.linears()
}


def weight_layers():
    """Every weight layer once, on a single row."""
    for name, linear in model.linears():
        linear(inputs[name])


single = nb.take_turns(
    {"step": decode_step(model, 1, context), "weight layers": weight_layers}, device, rounds=15
)
measured, linears = single["step"].median, single["weight layers"].median
bill = split_step(work["decode", 1], probe, dtype=model.dtype, host_s=host, measured_s=measured)

# %%
prediction.score(100 * reading_weights / measured, derived=derived_share)

# %%
parts = {
    "host overhead": (host, "host"),
    "reading the weights, at full bandwidth": (bill.weights, "weights"),
    "reading the KV cache": (bill.kv, "kv"),
    "the weight layers, beyond that": (linears - bill.weights, "predicted"),
    "not explained": (measured - host - bill.kv - linears, "unexplained"),
}
fig, ax = nb.figure(7, 2)
left = 0.0
for label, (seconds, colour) in parts.items():
    ax.barh("step", 1e3 * max(0, seconds), left=left, color=nb.COLOURS[colour], label=label)
    left += 1e3 * max(0, seconds)
ax.axvline(1e3 * measured, color=nb.COLOURS["reference"], linestyle=":")
ax.grid(axis="y", visible=False)
ax.set_xlabel("ms")
ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(fig, "A decode step for one sequence, taken apart. The dotted line is the measured step.")

# %%
nb.table(
    ["part of the step", "time", "share"],
    [[label, nb.seconds_text(s), f"{s / measured:.0%}"] for label, (s, _) in parts.items()]
    + [
        ["**measured**", f"**{nb.seconds_text(measured)}**", ""],
        ["floor", nb.seconds_text(floor), f"{floor / measured:.0%}"],
        [
            "arithmetic, at the same time as the reading",
            nb.seconds_text(bill.arithmetic),
            f"{bill.arithmetic / measured:.0%}",
        ],
    ],
)

# %% jupyter={"source_hidden": true}
reading = weights * itemsize / linears
left_over = parts["not explained"][0]
if reading < 0.8 * probe.read_bandwidth:
    kernels = "For a single row, the kernels of this machine stay below the roof."
else:
    kernels = "That is close to the roof."
if left_over > 0.05 * measured:
    rest = f"""{nb.seconds_text(left_over)} are left over: attention, norms and activations at their
full width, which the narrow model has not, and whatever else this machine did meanwhile."""
elif left_over > -0.05 * measured:
    rest = "Together they cover the step."
else:
    rest = """Together they are more than the step took, since some of it is in both: a weight layer
is called, too, and on a GPU the host works ahead."""
nb.say(f"""
**Why not your {prediction.guess:g}%.** The floor is {nb.seconds_text(floor)}, the step takes
{nb.seconds_text(measured)}: a utilisation of **{floor / measured:.0%}**. The weight layers take
{nb.seconds_text(linears)} by themselves, so they read at {nb.per_second(reading, "B")},
{reading / probe.read_bandwidth:.0%} of what the memory can do. {kernels} Calling operations takes
{nb.seconds_text(host)}, {host / measured:.0%} of the step. {rest}
""")

# %% [markdown]
# ## Other machines, other models
#
# The same arithmetic, with data sheets in place of measurements: bandwidth in bytes per second, and
# dense bf16 operations per second.

# %%
GPUS = {
    "A100 80GB SXM": (2.039e12, 312e12),
    "H100 SXM": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
}
nb.table(
    ["device", "TB/s", "TFLOP/s", "ridge", "share of arithmetic that batch-1 decode can use"],
    [
        [name, read / 1e12, rate / 1e12, f"{rate / read:.0f}", f"{read / rate:.2%}"]
        for name, (read, rate) in GPUS.items()
    ],
    "At 16 bits, where decode has 1 FLOP per byte. Data sheets, not measurements.",
)

# %% [markdown]
# **The cache is read, too**, and it takes memory besides. Both follow from a model's shape: keys
# and values of every KV head, in every layer.

# %%
lesson.code("kv_bytes_per_token")

# %%
GIB = 2**30
rows = []
for name, shape in PUBLISHED.items():
    per_token = roofline.kv_bytes_per_token(shape, 2)
    fit = roofline.max_batch(shape, 80 * GIB, 2 * shape.num_weights, 4096, 2)
    rows.append(
        [
            name,
            f"{2 * shape.num_weights / GIB:.1f}",
            f"{shape.num_heads} / {shape.num_kv_heads}",
            f"{per_token:,.0f}",
            f"{1000 * per_token / 2**20:.0f}",
            f"{fit:,}",
        ]
    )
nb.table(
    [
        "model at 16 bits",
        "weights, GiB",
        "query / KV heads",
        "KV bytes per token",
        "MiB per 1,000 tokens",
        "sequences of 4,096 in 80 GiB",
    ],
    rows,
)

# %% [markdown]
# Two models with nearly the same number of weights can differ eightfold in what they remember per
# token. Reading the cache has an intensity of its own, and *batching does not raise it*: every
# sequence reads a different one. So with long texts, intensity stops growing with the batch.

# %%
lesson.code("arithmetic_intensity")

# %%
shape = PUBLISHED["llama-3-8b"]
batches = [2**k for k in range(11)]
fig, ax = nb.figure(7, 4)
for tokens, colour in ((0, "reference"), (1024, "measured"), (8192, "kv"), (32_768, "arithmetic")):
    curve = [roofline.arithmetic_intensity(shape, b, tokens, 2) for b in batches]
    ax.plot(batches, curve, color=nb.COLOURS[colour], label=f"{tokens:,} tokens each")
for name, (read, rate) in GPUS.items():
    ax.axhline(rate / read, color=nb.COLOURS["host"], linestyle=":", linewidth=1)
    ax.annotate(f"ridge of the {name}", (1, rate / read), va="bottom", fontsize=8)
nb.doublings(ax, batches[::2])
ax.set(yscale="log", xlabel="sequences in a step", ylabel="FLOP per byte")
ax.legend(loc="lower right")
nb.show(
    fig,
    "Intensity of a decode step of Llama-3-8B at 16 bits. Without a cache to read it is the "
    "batch size; with one it levels off.",
)

# %% [markdown]
# ## Figures in circulation, worked out
#
# Articles about inference quote figures like these. Each is computed here from its ingredients, and
# the cell fails if one of them does not come out.

# %%
a100, h100 = GPUS["A100 80GB SXM"], GPUS["H100 SXM"]
llama = PUBLISHED["llama-3-8b"]
per_token = roofline.kv_bytes_per_token(llama, 2)
facts = [  # what, as quoted, computed, unit
    ("ridge of an A100", 153, a100[1] / a100[0], "FLOP/byte"),
    ("ridge of an H100", 295, h100[1] / h100[0], "FLOP/byte"),
    ("ridge of an H200", 206, GPUS["H200"][1] / GPUS["H200"][0], "FLOP/byte"),
    ("an A100's arithmetic that batch-1 decode uses", 0.65, 100 * a100[0] / a100[1], "%"),
    ("7 billion weights on an A100, reading", 7, 7e9 * 2 / a100[0] * 1e3, "ms"),
    ("the same, arithmetic of one token", 45, 2 * 7e9 / a100[1] * 1e6, "µs"),
    ("the same, arithmetic of five positions", 225, 5 * 2 * 7e9 / a100[1] * 1e6, "µs"),
    ("8 billion weights, 16 bits, 2 TB/s", 8, 8e9 * 2 / 2e12 * 1e3, "ms"),
    ("the same in tokens per second", 125, 2e12 / (8e9 * 2), "per s"),
    ("8 billion weights, 4 bits, 2 TB/s", 2, 8e9 / 2 / 2e12 * 1e3, "ms"),
    ("the same in tokens per second", 500, 2e12 / (8e9 / 2), "per s"),
    ("Llama-3-8B, KV bytes per token", 131_072, per_token, "bytes"),
    ("the same, 1,000 tokens", 125, 1000 * per_token / 2**20, "MiB"),
    ("the same, 8,192 tokens", 1, 8192 * per_token / GIB, "GiB"),
    (
        "sequences of 8,192 beside 14.9 GiB in 80 GiB",
        65,
        roofline.max_batch(llama, 80 * GIB, 14.9 * GIB, 8192, 2),
        "",
    ),
    (
        "Llama-3-8B on an H100, floor with all weights",
        4.79,
        2 * llama.num_weights / h100[0] * 1e3,
        "ms",
    ),
    (
        "a server's step of 6.09 ms against it",
        79,
        2 * llama.num_weights / h100[0] / 6.09e-3 * 100,
        "%",
    ),
]
for what, quoted, computed, _ in facts:
    assert abs(computed / quoted - 1) < 0.02, f"{what}: {computed} is not {quoted}"
nb.table(
    ["figure", "as quoted", "computed", ""],
    [
        [what, f"{quoted:,}", nb.short(float(computed), 4), unit]
        for what, quoted, computed, unit in facts
    ],
)

# %% jupyter={"source_hidden": true}
honest = 2 * roofline.decode_weights(llama) / h100[0]
nb.say(f"""
The last two count the embedding table as read. It is not: without it the floor is
{1e3 * honest:.2f} ms, and that server's utilisation {honest / 6.09e-3:.0%} instead of 79%. An
overcounted floor flatters.

Three quotations do *not* come out, and you will meet them. "2 FLOP per byte" for decode at 16
bits: it is 2 per weight, 1 per byte. "A quarter of a megabyte per thousand tokens" for Llama-3-8B:
it is {1000 * per_token / 2**20:.0f} MiB. A ridge of {a100[1] / 2e12:.0f} for the A100: that is from
2 TB/s instead of 2.039.

One row deserves a second look. Five positions in one pass need {5 * 14e9 / a100[1] * 1e6:.0f} µs of
arithmetic, behind the same {14e9 / a100[0] * 1e3:.1f} ms of reading. Checking four guessed tokens
costs nearly nothing. Stage 18 is built on that.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
A step for one sequence reads {nb.bytes_text(weights * itemsize)} to compute one token, and uses
{2 * weights / measured / peak:.1%} of this machine's arithmetic. The same reading could have served
others: measured above, 16 sequences together took
{times["decode", 16].median / times["decode", 1].median:.1f} times as long as one. The next stages
let requests share it.
""")

# %% [markdown]
# ## Questions
#
# 1. Weights at 4 bits instead of 16: what happens to the intensity of decode, and to its floor?
# 2. Why does the head count as read, and the embedding table not, when they are one matrix?
# 3. A colleague reports a utilisation of 130%. Name three mistakes that lead there.
#
# <details><summary>Answers</summary>
#
# 1. A quarter of the bytes for the same FLOP: four times the intensity, a quarter of the floor.
# 2. The head multiplies by every row of it, in every step. The embedding looks up one per token.
# 3. A bandwidth measured too low (first touch of fresh memory, or an operation that computes too
#    much), weights counted that are not read, or a step timed without waiting for the GPU.
# </details>
#
# **Your turn.** `./course check 3` holds your own measurements against the course's probe.
#
# ## Sources
#
# - S. Williams, A. Waterman, D. Patterson. "Roofline: An Insightful Visual Performance Model for
#   Multicore Architectures." Communications of the ACM 52(4), 2009.
# - J. D. McCalpin. "Memory Bandwidth and Machine Balance in Current High Performance Computers."
#   IEEE TCCA Newsletter, 1995. STREAM, and why arrays must be four times the cache.
# - R. Pope et al. "Efficiently Scaling Transformer Inference." 2022. arXiv:2211.05102.
# - A. Grattafiori et al. "The Llama 3 Herd of Models." 2024. arXiv:2407.21783.
# - NVIDIA data sheets of the A100 80GB SXM, H100 SXM and H200: bandwidth, dense bf16 throughput.
