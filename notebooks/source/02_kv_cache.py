# %% [markdown]
# # 02 · The KV cache
#
# **Claim.** Nothing that a causal model computed about the past ever changes when the text grows.
# So it can be kept: two vectors per layer and position, the *key* and the *value*. Then a step
# computes one position instead of all of them, and the time per token stops growing with the text.
#
# You will check that the past really is unchanged, read the cache, and predict what it is worth.
# The prediction is the point: 186 times fewer positions will *not* be 186 times faster, and the
# measurements say why not. You need notebook 01: positions, and the line a + b·T.

# %%
import time

import numpy as np
import torch

import course.notebook as nb
from course.measure import (
    Bar,
    CountingModel,
    decode_work,
    measure_pair,
    split_step,
    tensor_bytes,
    timed,
)
from course.model import FullAttention, load

lesson = nb.Lesson(2)
model, tokenizer, config, device = lesson.model, lesson.tokenizer, lesson.config, lesson.device
KVCache, generate = lesson.reference.KVCache, lesson.reference.generate
generate_naive = nb.reference(1).generate

# %% [markdown]
# ## Predict first
#
# Without a cache, a step at 186 tokens computes 186 positions. With one it computes a single one.
# The first guess takes that at its word.

# %%
guess = 186
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## The past does not change
#
# A causal mask lets position t see positions 0 to t, and nothing later. So in every layer, what is
# computed at position t is a function of the tokens 0 to t. Appending a token cannot change it.
#
# What do later positions need from position t? In attention, a position compares its *query* with
# the *keys* of all positions up to its own, and adds up their *values*, weighted by how well they
# match. So later positions need the key and the value of t in every layer. They need neither its
# query nor its logits.
#
# That is an argument. Here is the experiment: an attention that remembers nothing, except that it
# notes the keys and values that pass by.


# %%
class Recorder(FullAttention):
    """FullAttention that notes every layer's keys and values."""

    def __init__(self):
        self.keys, self.values = [], []

    def __call__(self, layer, q, k, v):
        """Note k and v [1, T, Hkv, D], then attend as always."""
        self.keys.append(k[0].clone())
        self.values.append(v[0].clone())
        return super().__call__(layer, q, k, v)


def record(ids):
    """Keys and values of one pass over these tokens, [layers, T, Hkv, D] each."""
    recorder = Recorder()
    positions = torch.arange(len(ids), device=device)[None]
    model.forward(torch.tensor([ids], device=device), positions, recorder, logit_rows=[-1])
    return torch.stack(recorder.keys), torch.stack(recorder.values)


question = (
    "Explain to a friend who cooks, but does not program, why a cache makes a computer faster."
)
text = tokenizer.chat([{"role": "user", "content": question}])
half = len(text) // 2

keys, values = record(text)
half_keys, half_values = record(text[:half])  # the same beginning, without the continuation

# %%
layers = [0, config.num_layers // 2, config.num_layers - 1]
key_change = (keys[:, :half] - half_keys).abs().amax((1, 2, 3))  # [layers]
value_change = (values[:, :half] - half_values).abs().amax((1, 2, 3))
nb.table(
    ["layer", "largest key", "change of a key", "change of a value"],
    [
        [
            layer,
            float(half_keys[layer].abs().max()),
            f"{float(key_change[layer]):.1e}",
            f"{float(value_change[layer]):.1e}",
        ]
        for layer in layers
    ],
    f"The first {half} positions, computed with and without the {len(text) - half} that follow.",
)

# %% jupyter={"source_hidden": true}
largest = float(torch.maximum(key_change, value_change).max())
scale = float(keys.abs().max())
if largest == 0:
    verdict = "Bit for bit the same."
else:
    verdict = f"""
The largest change anywhere is {largest:.1e}, beside keys of up to {nb.short(scale)}. That is
{largest / scale / torch.finfo(model.dtype).eps:.1f} times the rounding unit of
{str(model.dtype).removeprefix("torch.")}, and it comes from rounding: a pass over {len(text)} rows
adds up its products in another order than one over {half}. Nothing that the continuation *says*
arrives here."""
nb.say(verdict)

# %% [markdown]
# Now the opposite: change *one* token in the middle, and look which keys move. Before you look at
# the picture, say which squares will be dark: which positions, and in which layers?

# %%
where = half
changed = list(text)
changed[where] = (text[where] + 1) % config.vocab_size

moved = (record(changed)[0] - keys).abs().amax((2, 3)).cpu()  # [layers, T]
floor = float(scale * torch.finfo(model.dtype).eps)  # below this, it is rounding
fig, ax = nb.figure(7, 3.6)
image = ax.imshow(
    moved.clamp(min=floor).log10(),
    aspect="auto",
    origin="lower",
    cmap="cividis",
    interpolation="nearest",
)
fig.colorbar(image, label="change of the key, log₁₀")
ax.set(xlabel="position", ylabel="layer", yticks=layers)
ax.grid(False)
nb.show(fig, f"Which keys move when the token at position {where} is another one.")

# %% jupyter={"source_hidden": true}
before = float(moved[:, :where].max())
in_first_layer = int((moved[0] > floor).sum())
after = moved[-1, where:]
nb.say(f"""
Before position {where}, the largest change is {before:.1e}. In layer 0 {in_first_layer} position{
    "" if in_first_layer == 1 else "s"
} moved: a key there is a function of its own token and nothing
else. In the last layer {int((after > floor).sum())} of the {len(after)} positions from {where} on
moved: attention has carried the change forward, and never back. *This* is what makes a cache exact.
An attention that looks both ways, as in BERT, has no such cache.
""")

# %% [markdown]
# ## The cache
#
# All memory is reserved at once. `append` stores the new keys and values, and hands out views of
# everything so far; calling the cache attends over that. It takes the place of `FullAttention` in
# the forward pass, and the model does not notice.

# %%
lesson.code("KVCache.append")

# %%
lesson.code("KVCache.__call__")

# %% [markdown]
# - `length` counts the tokens *fed*. It moves when the *last* layer has written, because every
#   layer of one pass must see the same past.
# - The end is checked before anything is written. A slice assignment past the end would not fail.
# - `causal_attention` is aligned bottom-right: the last query sees every key. So one query sees the
#   whole past, and needs no mask.
#
# By hand, on the text above: everything but its last token in one pass (*prefill*), then the last
# token alone (*decode*). Its position is the number of tokens fed before it.

# %%
cache = KVCache(config, capacity=len(text), dtype=model.dtype, device=device)


def feed(ids):
    """One pass over these tokens, after those that the cache holds; the last row's logits [V]."""
    positions = torch.arange(cache.length, cache.length + len(ids), device=device)[None]
    return model.forward(torch.tensor([ids], device=device), positions, cache, logit_rows=[-1])[0]


lengths = [cache.length]
feed(text[:-1])
lengths.append(cache.length)
with_cache = feed(text[-1:])
lengths.append(cache.length)

positions = torch.arange(len(text), device=device)[None]
token_ids = torch.tensor([text], device=device)
without = model.forward(token_ids, positions, FullAttention(), logit_rows=[-1])[0]

# %% jupyter={"source_hidden": true}
difference = float((with_cache - without).abs().max())
same = int(with_cache.argmax()) == int(without.argmax())
nb.say(f"""
`length` was {lengths[0]}, then {lengths[1]}, then {lengths[2]}. The logits after the last token
differ from those of a full pass by at most {difference:.1e}, and the next token is
{"the same" if same else "another one (a tie within rounding)"}:
`{tokenizer.decode([int(with_cache.argmax())])}`. One position was computed for it instead of
{len(text)}.
""")

# %% [markdown]
# The loop now feeds the prompt once, and then only the newest token:

# %%
lesson.code("generate")

# %% [markdown]
# ## What is counted
#
# Prefill computes the n positions of the prompt. Each of the m - 1 later passes computes one; the
# last token is emitted and never fed. So n + m - 1 instead of n·m + m(m - 1)/2. For 64 + 128:

# %%
n, m = 64, 128
nano = load("nano", device=device).model  # counts are the same for every model
counts = {}
for name, loop in {"naive": generate_naive, "cached": generate}.items():
    counter = CountingModel(nano)
    tokens = list(loop(counter, list(range(n)), m))
    counts[name] = counter.counts

nb.table(
    ["for 64 + 128 tokens", "positions", "passes", "derived"],
    [
        [
            "naive",
            f"{counts['naive'].positions:,}",
            counts["naive"].forward_passes,
            f"{n * m + m * (m - 1) // 2:,}",
        ],
        [
            "cached",
            f"{counts['cached'].positions:,}",
            counts["cached"].forward_passes,
            f"{n + m - 1:,}",
        ],
    ],
    f"{counts['naive'].positions / counts['cached'].positions:.1f} times fewer, on every machine.",
)

# %% [markdown]
# ## What it costs: memory
#
# Per position and layer, one key and one value for each KV head:
#
# $$ 2 \cdot \text{layers} \cdot \text{KV heads} \cdot \text{width} \cdot \text{bytes per number} $$
#
# In *grouped-query attention* several query heads share a KV head. Keys and values stored for each
# *query* head would be copies.

# %%
itemsize = model.embed.weight.element_size()
per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
held = tensor_bytes(cache)
weight_bytes = config.num_weights * itemsize
groups = config.num_heads // config.num_kv_heads
nb.table(
    ["memory", "bytes"],
    [
        ["per position, derived", f"{per_token:,}"],
        [
            f"held by the cache above, divided by its {len(text)} positions",
            f"{held / len(text):,.0f}",
        ],
        [
            f"per position, if stored for all {config.num_heads} query heads",
            f"{per_token * groups:,}",
        ],
        [
            f"a text of {config.max_context:,} positions, the whole context",
            nb.bytes_text(per_token * config.max_context),
        ],
        ["the weights, for comparison", nb.bytes_text(weight_bytes)],
    ],
)

# %% jupyter={"source_hidden": true}
nb.say(f"""
With {weight_bytes / per_token:,.0f} positions the cache is as large as the weights: a few long
texts, or many short ones at once. From stage 07 on, the course is about this memory.
""")

# %% [markdown]
# ## What it is worth: a prediction
#
# In notebook 01 a pass over T positions took a + b·T: *a* once per pass, *b* for each position. A
# step at length n then takes
#
# $$ \text{without: } a + b\,n \qquad \text{with: } a + b
# \qquad \text{gain} = \frac{a + b\,n}{a + b} $$
#
# The cache saves b·n and leaves a alone. Measure the line on short texts only, without any cache:

# %%
far = 186 if lesson.tier == "cpu" else 6144
lengths = [66, 128, far] if lesson.tier == "cpu" else [256, 2048, far]
near = [far * k // 10 for k in (1, 2, 3, 4, 5)]
ids = torch.tensor([(text * 200)[:far]], device=device)


def naive_step(rows):
    """A pass over this many positions that knows no past."""
    positions = torch.arange(rows, device=device)[None]
    return model.forward(ids[:, :rows], positions, FullAttention(), logit_rows=[-1])


near_times = nb.take_turns({t: lambda t=t: naive_step(t) for t in near}, device, rounds=5)
line = nb.Line.through({t: times.median for t, times in near_times.items()})


def derived_gain(n):
    """What the line says that a cache is worth at length n."""
    return line.at(n) / line.at(1)


# %% jupyter={"source_hidden": true}
if line.slope > 0 and line.fixed > 0:
    a, b = 1e3 * line.fixed, 1e3 * line.slope
    nb.say(f"""
a = {a:.1f} ms, b = {b:.3f} ms. At {far} positions that makes
({a:.1f} + {far} · {b:.3f}) / ({a:.1f} + {b:.3f}) = **{derived_gain(far):.1f}x**.
""")
else:
    nb.say("""
The short texts gave no sensible line: this machine was busy, or its steps are so short that noise
hides the slope. What follows is derived from it all the same; run it again when little else runs.
""")

# %% [markdown]
# ## What it is worth: measured
#
# Single steps at three lengths. The two sides are timed as a pair: one step of each makes a slice,
# the order is swapped from slice to slice, and the median of the ratios counts. The cached step
# starts from a cache that holds everything but the last token, and is set back after each reading.


# %%
def cached_step(model, length):
    """A step that feeds one token after length - 1 others."""
    cache = KVCache(model.config, length, dtype=model.dtype, device=device)
    cache.keys.normal_()  # what the past says does not change how long it takes
    cache.values.normal_()
    token_ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    positions = torch.tensor([[length - 1]], device=device)

    def step():
        cache.length = length - 1
        return model.forward(token_ids, positions, cache, logit_rows=[-1])

    return step


def compare(length, slices=9):
    """Naive against cached steps at this length."""
    cached = cached_step(model, length)
    return measure_pair(
        lambda: timed(lambda: naive_step(length), device)[1],
        lambda: timed(cached, device)[1],
        Bar(1.0),
        max_slices=slices,
    )


pairs = {length: compare(length) for length in lengths}

# %%
prediction.score(pairs[far].median, derived=derived_gain(far))

# %%
nb.table(
    ["length", "naive", "cached", "gain", "99% interval", "derived"],
    [
        [
            n,
            nb.seconds_text(pair.baseline_s),
            nb.seconds_text(pair.candidate_s),
            f"{pair.median:.1f}x",
            "{:.1f} to {:.1f}".format(*pair.ratio.interval()),
            f"{derived_gain(n):.1f}x",
        ]
        for n, pair in pairs.items()
    ],
)

# %%
fig, ax = nb.figure()
all_lengths = range(1, far + 1, max(1, far // 100))
black, orange, blue = (nb.COLOURS[name] for name in ("reference", "predicted", "measured"))
ax.plot(all_lengths, all_lengths, ":", color=black, label="positions saved")
ax.plot(
    all_lengths, [derived_gain(n) for n in all_lengths], color=orange, label="(a + bn) / (a + b)"
)
for n, pair in pairs.items():
    ax.vlines(n, *pair.ratio.interval(), color=blue, linewidth=5, alpha=0.4)
    ax.plot(n, pair.median, "o", color=blue, label="measured" * (n == far))
ax.set(xlabel="length of the text", ylabel="times faster", yscale="log", xlim=(0, None))
ax.legend()
nb.show(
    fig,
    "How many times faster a cached step is. Dots are medians of pairs, bars their 99% intervals; "
    "the dotted line would be a gain in proportion to the positions.",
)

# %% jupyter={"source_hidden": true}
far_pair = pairs[far]
off_many = far_pair.baseline_s / line.at(far)  # above 1: slower than the line says
off_one = far_pair.candidate_s / line.at(1)
low, high = far_pair.ratio.interval()
if low <= derived_gain(far) <= high:
    verdict = "The interval holds the derived gain, so the line is all that is needed here."
else:
    which = "single row" if abs(np.log(off_one)) > abs(np.log(off_many)) else "long pass"
    verdict = f"""
The derived gain lies outside of the interval, and it is the {which} that the line misjudged more.
It was drawn through passes over {near[0]} to {near[-1]} rows, where much of the reading of weights
hides behind arithmetic. A single row has nothing to hide it behind. It is also a matrix times a
*vector*, for which a library has other routines, and a cached step reads its cache besides."""
nb.say(f"""
**Derived against measured.** For {far} rows the line said {nb.seconds_text(line.at(far))}, the
clock says {nb.seconds_text(far_pair.baseline_s)} ({off_many:.2f} times that). For a single row it
said {nb.seconds_text(line.at(1))}, and a cached step takes {nb.seconds_text(far_pair.candidate_s)}
({off_one:.2f} times). {verdict}
""")

# %% [markdown]
# ## Why not 186
#
# The gain is the quotient of two passes: one over 186 rows, and one over a single row. So look at
# the time of a pass against its rows. If time were proportional to rows, the points would lie on
# the dotted line.

# %%
sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256] if lesson.tier == "cpu" else [4**k for k in range(7)]
ids = torch.tensor([(text * 200)[: max(*sizes, far)]], device=device)
passes = nb.take_turns(
    {rows: lambda rows=rows: naive_step(rows) for rows in sizes}, device, rounds=5
)
ms = {rows: 1e3 * times.median for rows, times in passes.items()}

fig, ax = nb.figure()
ax.plot(sizes, [ms[1] * rows for rows in sizes], ":", color=black, label="proportional to rows")
ax.plot(sizes, [1e3 * line.at(rows) for rows in sizes], color=orange, label="a + b · rows")
ax.plot(sizes, ms.values(), "o-", color=blue, label="measured")
nb.doublings(ax, sizes)
ax.set(yscale="log", ylim=(0.5 * min(ms.values()), 8 * max(ms.values())))
ax.set(xlabel="rows in a pass", ylabel="ms")
ax.legend()
nb.show(fig, "Time of one pass against the number of positions that it computes.")

# %% jupyter={"source_hidden": true}
most = sizes[-1]
doubled = max((r for r in sizes if ms[r] < 2 * ms[1]), default=1)
nb.say(f"""
One row takes {nb.short(ms[1])} ms; {most} rows take {nb.short(ms[most])} ms, which is
{ms[most] / ms[1]:.1f} times as long for {most} times the work. Up to {doubled} row{
    "s" if doubled > 1 else ""
} a pass takes less than twice as long as with a single one. A row in
company costs {nb.seconds_text(passes[most].median / most)}, a row alone
{nb.seconds_text(passes[1].median)}: **what the cache saves are the cheap rows**. The one that it
leaves is the expensive one.
""")

# %% [markdown]
# ## The bills of both steps
#
# What is so expensive about a single row? Split the step at the far length into its bills:
#
# - **host**: calling a thousand operations from Python. Measured: a step of the same model, so
#   narrow that nothing is left to read or to multiply.
# - **weights** and **KV cache**: their bytes over the memory bandwidth of this machine, measured.
# - **arithmetic**: two operations per weight and row, over the measured FLOP per second.
#
# Reading and computing overlap, so only the longer of the two counts. What is left over is
# *not explained*: kernels that stay below what the machine can do.

# %%
cached_work = decode_work(config, [far], weight_itemsize=itemsize, kv_itemsize=itemsize)
naive_work = nb.pass_work(config, far, itemsize)

host = lesson.host_overhead(lambda narrow: cached_step(narrow, far))
seconds = {"cached": pairs[far].candidate_s, "naive": pairs[far].baseline_s}
bills = {
    name: split_step(
        work, lesson.roofline, dtype=model.dtype, host_s=host, measured_s=seconds[name]
    )
    for name, work in {"cached": cached_work, "naive": naive_work}.items()
}
nb.table(
    [
        f"at {far} tokens",
        "host",
        "weights",
        "KV cache",
        "arithmetic",
        "sum of what counts",
        "measured",
    ],
    [
        [
            name,
            *map(
                nb.seconds_text,
                (bill.host, bill.weights, bill.kv, bill.arithmetic, bill.predicted, bill.measured),
            ),
        ]
        for name, bill in bills.items()
    ],
)

# %%
fig, ax = nb.figure(7, 2.4)
nb.split_bars(ax, bills)
nb.show(fig, f"One step at {far} tokens, with the cache and without.")

# %% jupyter={"source_hidden": true}
cached, naive = bills["cached"], bills["naive"]
names = {
    "host": "host overhead",
    "weights": "reading the weights",
    "kv": "reading the cache",
    "arithmetic": "arithmetic",
}
if cached.unexplained > 0.1 * cached.measured:
    rest = f"""
The bills explain {cached.predicted / cached.measured:.0%} of the cached step, and leave
{nb.seconds_text(cached.unexplained)} open. Either the machine was busy, or its kernels read a
matrix for a single row more slowly than the memory allows; stage 03 will tell."""
elif cached.unexplained < -0.1 * cached.measured:
    rest = """
The bills add up to more than the step took: host and device worked side by side."""
else:
    rest = "The bills add up to the measured step, within a tenth."
nb.say(f"""
The largest bill of the naive step is {names[naive.largest]}
({nb.seconds_text(getattr(naive, naive.largest))}), that of the cached step {names[cached.largest]}
({nb.seconds_text(getattr(cached, cached.largest))}). The cache cut arithmetic from
{nb.seconds_text(naive.arithmetic)} to {nb.seconds_text(cached.arithmetic)},
{naive.arithmetic / cached.arithmetic:.0f} times less, and that is the whole of what it can do:
host and weights are the same in both rows of the table. {rest}

If the bills were all there is, the gain would be {naive.predicted / cached.predicted:.1f}x; it is
{pairs[far].median:.1f}x. Your {prediction.guess:g}x would need a pass that costs nothing but its
rows.
""")

# %% [markdown]
# ## What a user sees
#
# The same answer from both loops, token by token. The first token of the cached one comes from
# prefill, which is a pass over the prompt in any case.


# %%
def watch(tokens):
    """Tokens of a loop, and the seconds that each one took."""
    found, seconds, last = [], [], time.perf_counter()
    for token in tokens:
        found.append(token)
        seconds.append(time.perf_counter() - last)
        last = time.perf_counter()
    return found, seconds


new = 24
runs = {
    "naive": watch(generate_naive(model, text, new)),
    "cached": watch(generate(model, text, new)),
}
fig, ax = nb.figure(7, 3)
for name, (_, taken) in runs.items():
    ax.plot(
        range(1, new + 1),
        [1e3 * s for s in taken],
        "o-",
        color=nb.COLOURS[name],
        label=name,
        markersize=4,
    )
ax.set(xlabel="token", ylabel="ms", ylim=(0, None))
ax.legend()
nb.show(fig, f"Time of each of {new} tokens after a prompt of {len(text)}.")

# %% jupyter={"source_hidden": true}
agree = next(
    (i for i, (x, y) in enumerate(zip(*(r[0] for r in runs.values()), strict=True)) if x != y), new
)
total = {name: sum(taken) for name, (_, taken) in runs.items()}
nb.say(f"""
{"All" if agree == new else f"The first {agree} of"} {new} tokens are the same. Together they took
{nb.seconds_text(total["naive"])} without the cache and {nb.seconds_text(total["cached"])} with it:
{total["naive"] / total["cached"]:.1f}x for the whole answer, prefill included. The text begins:

> {tokenizer.decode(runs["cached"][0]).strip()}
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
if cached.unexplained > 0.1 * cached.measured:
    rest = f", and {nb.seconds_text(cached.unexplained)} it cannot name"
else:
    rest = ""
nb.say(f"""
A step now computes one position, and still takes {nb.seconds_text(cached.measured)}. The arithmetic
in it would need {nb.seconds_text(cached.arithmetic)}. What does it wait for the rest of the time?
Of what the split can name, {names[cached.largest]} comes first{rest}.

The next stage measures how fast this machine can read and compute at all, and turns that into a
floor under every step.
""")

# %% [markdown]
# ## Questions
#
# 1. Why does the cache keep keys and values, and not queries?
# 2. A colleague's cache counts the tokens *emitted*. Which test finds it, and which does not?
# 3. On which machine is the gain at the same length larger: one with twice the arithmetic, or one
#    with twice the memory bandwidth?
#
# <details><summary>Answers</summary>
#
# 1. A query is used once, by its own position. Keys and values are used by all later ones.
# 2. Prefill alone does not: there both counts agree. The first decode step does, because its
#    position is off by one. Compare logits, not the looks of the text.
# 3. Twice the bandwidth. It makes a smaller and leaves b; twice the arithmetic does the opposite.
# </details>
#
# **Your turn.** `./course check 2` measures your own cache.
#
# ## Sources
#
# - R. Pope et al. "Efficiently Scaling Transformer Inference." 2022. arXiv:2211.05102. Prefill,
#   decode, and what the cache costs.
# - N. Shazeer. "Fast Transformer Decoding: One Write-Head is All You Need." 2019. arXiv:1911.02150.
# - J. Ainslie et al. "GQA." EMNLP 2023. arXiv:2305.13245. Groups of query heads that share a KV
#   head.
