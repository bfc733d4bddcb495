# %% [markdown]
# # 04 · Static batching
#
# **Claim.** A decode step for one text reads every weight to use it once. A step for eight texts
# reads them once, too, and uses them eight times. So tokens per second grow almost in proportion to
# the batch, until multiplying takes longer than reading; and what each text reads for itself, its
# cache, is not shared at all.
#
# You will put prompts of different lengths into one rectangle, see what the mask must hide, predict
# what a batch is worth from two measured rates, and find out what it does not pay for. You need
# notebook 02, a decode step with a cache, and notebook 03, its floor.

# %%
import statistics
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import course.notebook as nb
from course.measure import Bar, CountingModel, decode_work, measure_pair, split_step, timed
from course.model import load

lesson = nb.Lesson(4)
model, tokenizer, device = lesson.model, lesson.tokenizer, lesson.device
static = lesson.reference  # the worked solution of this stage
generate, KVCache = nb.reference(2).generate, nb.reference(2).KVCache

# %% [markdown]
# ## Predict first
#
# Eight rows are eight times the work of one, and the weights are read as often: once. The first
# guess says that reading is all that counts.

# %%
guess = 8
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## A rectangle
#
# A pass takes token ids `[B, T]`. Prompts have different lengths, so padding fills the shorter
# ones, *on the left*: then the newest token of every row stands in the last column. One column
# gives all the logits, and one append to the cache of stage 02 stores all the keys.

# %%
lesson.code("pad_left")

# %%
questions = [
    "Name three fruits.",
    "Why is the sky blue? Answer in one sentence.",
    "Write the first line of a poem about a lighthouse that nobody has visited for many years.",
]
prompts = [tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
token_ids, positions, starts = static.pad_left(prompts, device=device)
nb.table(
    ["row", "tokens", "begins in column", "position of its last column"],
    [
        [row, len(prompt), int(starts[row]), int(positions[row, -1])]
        for row, prompt in enumerate(prompts)
    ],
    f"Three prompts in {token_ids.shape[1]} columns.",
)

# %% [markdown]
# A *column* says where a key is stored, and is the same for all rows. A *position* is what RoPE
# turns by, and each row counts its own: column less start. What a query may see is neither a
# triangle nor the same in every row any more.

# %%
lesson.code("PaddedCache.visible")

# %% [markdown]
# Below: prompts of 9, 4 and 6 tokens, then three decode passes. Before you look: which squares of
# row 1 are dark? What do the queries in its padding see?

# %%
lengths, more = (9, 4, 6), 3
short_starts = torch.tensor([max(lengths) - length for length in lengths])
total = max(lengths) + more
small = static.PaddedCache(load("nano", device="cpu").config, total, short_starts)
seen = np.zeros((len(lengths), total, total))
for first, queries in [(0, max(lengths)), *((max(lengths) + i, 1) for i in range(more))]:
    small.length = first
    mask = small.visible(queries).numpy()  # [B, T, S]
    seen[:, first : first + queries, : mask.shape[2]] = mask

fig, axes = nb.figure(8, 3.1, ncols=3, sharey=True)
for row, ax in enumerate(axes):
    ax.imshow(seen[row], cmap=ListedColormap(["#F4F4F4", nb.COLOURS["measured"]]))
    ax.axhline(max(lengths) - 0.5, color=nb.COLOURS["reference"], linewidth=1)
    ax.set(title=f"row {row}, {lengths[row]} tokens", xlabel="column of the key")
    ax.set(xticks=range(0, total, 3), yticks=range(0, total, 3))
    ax.grid(False)
axes[0].set_ylabel("column of the query")
nb.show(
    fig,
    "What each query sees. Below the line, each query is a decode pass of its own. Queries in the "
    "padding, on the upper left, see themselves.",
)

# %% [markdown]
# The padding sees itself, although nobody wants its result. A softmax over nothing is 0/0. Where a
# kernel makes NaN of that, the next layer stores NaN as a key and a value; and to mask a value is
# to multiply it by 0, which NaN survives.
#
# ## Each row is its own text
#
# One pass for all rows; what each row says must be what it says alone.

# %%
lesson.code("generate_batch")

# %%
new = 20
batched = [[] for _ in prompts]
for step in static.generate_batch(model, prompts, new, tokenizer.eos_ids):
    for text, token in zip(batched, step, strict=True):
        if token is not None:
            text.append(token)
alone = [list(generate(model, prompt, new, tokenizer.eos_ids)) for prompt in prompts]

# %% [markdown]
# And what if the mask were causal and no more? The same three prompts, with a mask that forgets the
# padding.


# %%
def causal_only(cache, queries):
    """A triangle, the same for every row: the padding is in sight."""
    columns = torch.arange(cache.length + queries, device=cache.starts.device)
    triangle = columns <= columns[cache.length :, None]
    return triangle.expand(len(cache.starts), -1, -1)


with patch.object(static.PaddedCache, "visible", causal_only):
    steps = list(static.generate_batch(model, prompts, new, tokenizer.eos_ids))
careless = [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


# %%
def agreement(tokens, wanted):
    """How many tokens from the beginning are the same."""
    pairs = enumerate(zip(tokens, wanted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(wanted)))


nb.table(
    ["prompt", "in the batch", "same as alone", "without hiding the padding", "same as alone"],
    [
        [
            question if len(question) < 30 else question[:28] + " …",
            tokenizer.decode(batched[row]).strip()[:60],
            f"{agreement(batched[row], alone[row])} of {len(alone[row])}",
            tokenizer.decode(careless[row]).strip()[:60],
            f"{agreement(careless[row], alone[row])} of {len(alone[row])}",
        ]
        for row, question in enumerate(questions)
    ],
)

# %% jupyter={"source_hidden": true}
same = [agreement(batched[row], alone[row]) == len(alone[row]) for row in range(len(prompts))]
if all(same):
    verdict = "With the mask, every row says what it says alone."
else:
    verdict = """A row parts from its solo run. In float32 that happens where two tokens are so
close that the order of additions decides; a pass over three rows adds in another order than one."""
rows = range(len(prompts))
hurt = [row for row in rows if agreement(careless[row], alone[row]) < len(alone[row])]
widest = max(rows, key=lambda row: len(prompts[row]))
nb.say(f"""
{verdict} Without it, {len(hurt)} of {len(prompts)} rows part from theirs. The longest prompt, row
{widest}, has no padding to see, and {"parts all the same" if widest in hurt else "is unharmed"}:
the mark of this fault is that it depends on the *length* of one's neighbours.
""")

# %% [markdown]
# ## What a batch is worth: a prediction
#
# From here on, times are taken on `bench`: random weights, few and wide layers, larger than any
# cache of this machine. What it says does not matter.
#
# A pass for B texts reads the weights once and each text's cache, and multiplies every weight by B
# rows. Reading and multiplying overlap, so the longer of the two counts. The host calls every
# operation once, whatever B is:
#
# $$ \text{step}(B) = \text{host} + \max\left(\frac{\text{weights} + B \cdot \text{cache}}
# {\text{bandwidth}},\; \frac{B \cdot \text{FLOP per row}}{\text{FLOP/s}}\right)
# \qquad \text{gain}(B) = \frac{B \cdot \text{step}(1)}{\text{step}(B)} $$
#
# Everything in it can be measured before any batch is made: two rates as in notebook 03, and the
# host with a model too narrow to have anything to read.

# %%
bench = load("bench", device=device).model
shape, itemsize = bench.config, bench.embed.weight.element_size()
context = 64  # positions that each text attends to, the new one included


def batch_step(model, batch, context):
    """One decode step for `batch` texts through a PaddedCache."""
    starts = torch.zeros(batch, dtype=torch.int64, device=device)
    cache = static.PaddedCache(model.config, context, starts, dtype=model.dtype, device=device)
    cache.keys.fill_(0.1)  # what the past says does not change how long it takes
    cache.values.fill_(0.1)
    token_ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    positions = torch.full((batch, 1), context - 1, device=device)

    def step():
        cache.length = context - 1
        return model.forward(token_ids, positions, cache)

    return step


def work(batch, context):
    """What that step must read and compute."""
    return decode_work(shape, [context] * batch, weight_itemsize=itemsize, kv_itemsize=itemsize)


probe = lesson.roofline
peak = probe.flops[probe.tried[0]]
host = lesson.host_overhead(lambda narrow: batch_step(narrow, 1, context), shape)


def derived_step(batch, context=context):
    """Seconds of a step, from the bills alone."""
    todo = work(batch, context)
    floor = max((todo.weight_bytes + todo.kv_bytes) / probe.read_bandwidth, todo.flops / peak)
    return host + floor if lesson.tier == "cpu" else max(host, floor)


def derived_gain(batch, context=context):
    """Tokens per second over those of one text at a time."""
    return batch * derived_step(1, context) / derived_step(batch, context)


corner = probe.ridge(bench.dtype) * itemsize / 2

# %% jupyter={"source_hidden": true}
nb.say(f"""
This machine reads {nb.per_second(probe.read_bandwidth, "B")} and multiplies at
{nb.per_second(peak, "FLOP")}; the host takes {nb.seconds_text(host)}. At {itemsize} bytes per
weight, reading and multiplying take equally long at {corner:.1f} rows. For eight texts of {context}
tokens that makes a step of {nb.seconds_text(derived_step(8))} against
{nb.seconds_text(derived_step(1))} for one: a gain of **{derived_gain(8):.1f}x**.
""")

# %% [markdown]
# ## What a batch is worth: measured
#
# Eight steps for one text each against one step for eight texts, taken in pairs, the order swapped
# from pair to pair.


# %%
one, eight = batch_step(bench, 1, context), batch_step(bench, 8, context)


def eight_times_one():
    """A token for each of eight texts, one after the other."""
    for _ in range(8):
        one()


pair = measure_pair(
    lambda: timed(eight_times_one, device)[1],
    lambda: timed(eight, device)[1],
    Bar(1.0),
    max_slices=15,
)

# %%
prediction.score(pair.median, derived=derived_gain(8))

# %% [markdown]
# The same for other batches: throughput against batch size. Before you look: where will the curve
# leave the straight line, and how far does it go?

# %%
sizes = [1, 2, 4, 8, 16, 32, 64]
times = nb.take_turns(
    {batch: batch_step(bench, batch, context) for batch in sizes}, device, rounds=9
)
rate = {batch: batch / taken.median for batch, taken in times.items()}

fig, ax = nb.figure()
black, orange, blue = (nb.COLOURS[name] for name in ("reference", "predicted", "measured"))
ax.plot(sizes, [rate[1] * b for b in sizes], ":", color=black, label="in proportion")
ax.plot(sizes, [b / derived_step(b) for b in sizes], color=orange, label="predicted")
ax.plot(sizes, list(rate.values()), "o-", color=blue, label="measured")
nb.doublings(ax, sizes)
ax.axvline(corner, color=black, linestyle=":", linewidth=1)
ax.annotate("corner", (corner, rate[1]), ha="center")
ax.set(yscale="log", xlabel="texts in a step", ylabel="tokens per second")
ax.legend()
nb.show(
    fig,
    "Throughput of decode against the batch. The dotted curve starts from the measured batch of 1; "
    "the vertical line is where multiplying should take as long as reading.",
)

# %%
nb.table(
    ["texts", "a step", "predicted", "tokens per second", "gain", "predicted"],
    [
        [
            batch,
            nb.seconds_text(taken.median),
            nb.seconds_text(derived_step(batch)),
            f"{rate[batch]:,.0f}",
            f"{rate[batch] / rate[1]:.1f}x",
            f"{derived_gain(batch):.1f}x",
        ]
        for batch, taken in times.items()
    ],
    "A step is also the latency: how long each of the texts waits for its next token.",
)

# %% [markdown]
# ## Why not as predicted
#
# Take the steps apart. Beside the bills, one more measurement: **the weight layers alone**, all of
# them one after the other on B rows, and nothing between them. They read exactly the weights.


# %%
def weight_layers(rows):
    """Every weight layer once, on so many rows."""
    inputs = {
        name: torch.randn(rows, 1, linear.weight.shape[1], device=device, dtype=bench.dtype)
        for name, linear in bench.linears()
    }

    def step():
        for name, linear in bench.linears():
            linear(inputs[name])

    return step


shown = [1, 8, 32]
layers = nb.take_turns({rows: weight_layers(rows) for rows in shown}, device, rounds=9)
bills = {
    f"{batch} text{'s' * (batch > 1)}": split_step(
        work(batch, context),
        probe,
        dtype=bench.dtype,
        host_s=host,
        measured_s=times[batch].median,
    )
    for batch in shown
}
fig, ax = nb.figure(7, 2.6)
nb.split_bars(ax, bills)
nb.show(fig, "Steps of three sizes, taken apart. What is longer counts: reading, or arithmetic.")

# %%
nb.table(
    ["texts", "host", "weights", "caches", "arithmetic", "measured", "weight layers alone"],
    [
        [
            batch,
            *map(nb.seconds_text, (bill.host, bill.weights, bill.kv, bill.arithmetic)),
            nb.seconds_text(bill.measured),
            nb.seconds_text(layers[batch].median),
        ]
        for batch, bill in zip(shown, bills.values(), strict=True)
    ],
)

# %% jupyter={"source_hidden": true}
single, company, many = bills.values()
slow = {rows: layers[rows].median / max(single.weights, bill.arithmetic)
        for rows, bill in zip(shown, bills.values(), strict=True)}  # fmt: skip
low, high = pair.ratio.interval()
if low <= derived_gain(8) <= high:
    verdict = "The interval of the measurement holds the predicted gain."
elif pair.median > derived_gain(8):
    verdict = f"""The gain is larger than predicted, and the reason lies in the *single* row: its
weight layers take {slow[1]:.2f} times as long as reading their bytes would, those of eight rows
{slow[8]:.2f} times as long as the longer of their two bills. A matrix times a vector is a routine
of its own, and where it stays below the roof, company gains from that as well. Part of the
measured gain is owed to a slow baseline."""
else:
    verdict = f"""The gain is smaller than predicted: the weight layers of eight rows take
{slow[8]:.2f} times as long as the longer of their two bills, those of a single row {slow[1]:.2f}
times as long as reading. A kernel that serves a few rows reaches neither of the two roofs."""
rest = (company.measured - layers[8].median - host) / company.measured
nb.say(f"""
Measured {pair.median:.1f}x [{low:.1f}, {high:.1f}], predicted {derived_gain(8):.1f}x. {verdict}

A gain is a quotient, and hides what both sides have in common: a step for one text takes
{single.measured / single.predicted:.1f} times as long as its bills, a step for eight
{company.measured / company.predicted:.1f} times, one for {shown[-1]}
{many.measured / many.predicted:.1f} times. Where these shrink with the batch, the measured curve
climbs past the predicted corner.

Between the weight layers of eight texts lie {rest:.0%} of their step besides the host: attention,
norms and activations of every row. The caches are {company.kv / company.predicted:.1%} of the
predicted step, since the texts are short. Your {prediction.guess:g}x would need a step for eight
that takes {8 / prediction.guess:.2f} times as long as one for one. It takes {8 / pair.median:.2f}
times as long.
""")

# %% [markdown]
# ## What is not shared
#
# Each text reads a cache of its own. With long texts that is what is read, and a batch shares
# nothing of it. The same formula, at other lengths; then measured.

# %%
far = [64, 1024, 4096]
long_steps = {(b, n): batch_step(bench, b, n) for n in far for b in (1, 8)}
long_times = nb.take_turns(long_steps, device, rounds=9)
del long_steps
long_gain = {}  # the median over rounds: what slows one reading down slows its neighbour, too
for n in far:
    rounds = zip(long_times[1, n].readings, long_times[8, n].readings, strict=True)
    long_gain[n] = statistics.median(8 * one_s / eight_s for one_s, eight_s in rounds)
every = [64 * 2**k for k in range(8)]

fig, ax = nb.figure(7, 3.2)
ax.plot(every, [derived_gain(8, n) for n in every], color=orange, label="predicted")
ax.plot(far, list(long_gain.values()), "o", color=blue, label="measured")
nb.doublings(ax, every)
ax.set(xlabel="tokens in each text", ylabel="gain of 8 texts in a step", ylim=(0, None))
ax.legend()
nb.show(fig, "What a batch of eight is worth, by the length of its texts.")

# %% jupyter={"source_hidden": true}
longest = work(8, far[-1])
nb.say(f"""
At {far[-1]:,} tokens, eight texts read {nb.bytes_text(longest.kv_bytes)} of caches and
{nb.bytes_text(longest.weight_bytes)} of weights in a step. The gain falls from
{long_gain[far[0]]:.1f}x to {long_gain[far[-1]]:.1f}x (predicted: from
{derived_gain(8, far[0]):.1f}x to {derived_gain(8, far[-1]):.1f}x).
""")

# %% [markdown]
# ## What a rectangle costs
#
# All rows of that measurement were alive. In use, prompts differ and outputs differ, and the batch
# runs until its longest member has ended. B rows are computed in each of T + steps - 1 columns; a
# text of n tokens and m new ones needs n + m - 1 of them.

# %%
rng = np.random.default_rng(4)
prompt_lengths = rng.integers(4, 49, 8)
limits = np.round(8 * 16 ** rng.random(8)).astype(int)  # log-uniform from 8 to 128
counter = CountingModel(load("nano", device=device).model)
ragged = [[int(token) for token in rng.integers(0, 256, n)] for n in prompt_lengths]
passes = sum(1 for _ in static.generate_batch(counter, ragged, limits.tolist()))

width, steps = prompt_lengths.max(), limits.max()
columns = width + steps - 1
useful = int((prompt_lengths + limits - 1).sum())
kinds = np.zeros((8, columns), dtype=int)  # 0: before the prompt
for row, (length, limit) in enumerate(zip(prompt_lengths, limits, strict=True)):
    kinds[row, width - length : width] = 1
    kinds[row, width : width + limit - 1] = 2
    kinds[row, width + limit - 1 :] = 3
palette = {
    "padding": "faint",
    "prompt": "cached",
    "new tokens": "kv",
    "has ended": "unexplained",
}
fig, ax = nb.figure(7, 2.6)
colours = [nb.COLOURS[name] for name in palette.values()]
ax.imshow(kinds, aspect="auto", cmap=ListedColormap(colours), interpolation="nearest")
ax.set(xlabel="column", ylabel="row", yticks=range(8))
ax.grid(False)
ax.legend(
    handles=[Patch(color=c, label=name) for name, c in zip(palette, colours, strict=True)],
    ncols=4,
    loc="lower left",
    bbox_to_anchor=(0, 1),
)
nb.show(fig, "What each computed position is for: eight prompts and their outputs in one batch.")

# %%
counted = counter.counts
lost = 1 - useful / (8 * columns)
nb.table(
    ["for this batch", "derived", "counted"],
    [
        ["passes", steps, counted.forward_passes],
        ["positions computed, B · (T + steps - 1)", f"{8 * columns:,}", f"{counted.positions:,}"],
        ["positions that somebody needed", f"{useful:,}", ""],
        ["share that nobody needed", f"{lost:.0%}", ""],
    ],
)

# %% jupyter={"source_hidden": true}
decoded = int((limits - 1).sum())
alive = decoded / (8 * (steps - 1))
nb.say(f"""
Of the decode rows, {alive:.0%} belong to a text that still runs. A step takes as long as before,
so the batch gives {alive:.0%} of the tokens: {alive * pair.median:.1f}x instead of
{pair.median:.1f}x over one by one, for these lengths.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
{lost:.0%} of the positions above are padding, or rows that have ended and go on because one
neighbour has not. And a request that comes just after the batch has begun waits until the longest
row is done, {steps - 1} steps here. Both have one cause: who is in the batch is decided once. The
next stage decides it again at every step.
""")

# %% [markdown]
# ## Questions
#
# 1. Why does padding on the right not work with a cache that has one `length` for all rows?
# 2. RoPE sees distances only. So why must a padded row have positions of its own?
# 3. At 4 bits per weight, where is the corner, in rows? What does that say about quantization for a
#    server with many users?
#
# <details><summary>Answers</summary>
#
# 1. The newest tokens would stand in different columns, and one append stores one column.
# 2. Prefill and decode must agree, or the text has a gap. And the context ends at a position: a
#    short row beside a long one would reach it too early.
# 3. At a quarter of the rows of 16 bits. Beyond it fewer bytes save no time: quantization helps
#    small batches most.
# </details>
#
# **Your turn.** `./course check 4` measures your own batch.
#
# ## Sources
#
# - R. Pope et al. "Efficiently Scaling Transformer Inference." 2022. arXiv:2211.05102. Latency and
#   throughput against the batch size.
# - S. Williams, A. Waterman, D. Patterson. "Roofline: An Insightful Visual Performance Model for
#   Multicore Architectures." Communications of the ACM 52(4), 2009.
