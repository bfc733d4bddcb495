# %% [markdown]
# # 08 · Paged attention in PyTorch
#
# **Claim.** Attention does not care where keys and values lie, as long as a table says where. With
# blocks instead of whole contexts, the same memory holds several times as many texts, and more
# texts in a step are more tokens per second. At equal batch nothing is gained: each step copies the
# past together before it can attend to it.
#
# You will follow the table, lay three texts end to end in one pass, see what must not be read, and
# predict what equal memory buys. You need notebooks 04 and 05 (rows that share the weights, slots),
# and the idea of notebook 07: memory in blocks, and a table for each text.

# %%
import os
import random

import numpy as np
import torch
from matplotlib.colors import ListedColormap

import course.notebook as nb
from course.measure import Bar, CopiedBytes, decode_work, measure_pair, timed
from course.model import FullAttention, load, masked_attention
from course.types import Request, Sequence

torch.set_num_threads(max(1, os.cpu_count() - 1))  # as the gate does: times are steadier
lesson = nb.Lesson(8)
model, config, tokenizer, device = lesson.model, lesson.config, lesson.tokenizer, lesson.device
slot_mapping, step_batch = lesson.reference.slot_mapping, lesson.reference.step_batch
PagedAttention = lesson.reference.PagedAttention
SlotCache = nb.reference(5).SlotCache
generate = nb.reference(2).generate
rng = random.Random(8)
BLOCK = 16

# %% [markdown]
# ## Predict first
#
# Four slots of 1,024 are 4,096 positions. Texts of 32 to 160 tokens, with room to go on, take some
# 160 each. So six times as many fit, and the first guess takes that for the answer.

# %%
guess = 6
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## Where a position lies
#
# Memory is cut into blocks of equal size, and a text's *block table* lists its blocks, in the order
# of its positions. From here on, a *slot* is the place of one position:
#
# $$ \text{slot} = \text{table}[p \;\text{div}\; \text{size}] \cdot \text{size}
#    + p \;\text{mod}\; \text{size} $$

# %%
lesson.code("slot_mapping")


# %%
def shuffled_tables(needed):
    """A table for each text, of as many blocks as it needs, with ids in random order."""
    ids = list(range(sum(needed)))
    rng.shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in needed]


lengths = {"a": 38, "b": 21, "c": 50}
tables = dict(
    zip(lengths, shuffled_tables([-(-n // BLOCK) for n in lengths.values()]), strict=True)
)
owner = np.zeros((sum(map(len, tables.values())), BLOCK))
for number, (name, length) in enumerate(lengths.items(), start=1):
    for slot in slot_mapping(tables[name], 0, length, BLOCK):
        owner[divmod(slot, BLOCK)] = number

shades = ["#FFFFFF", *(nb.COLOURS[c] for c in ("cached", "host", "kv"))]
fig, ax = nb.figure(6, 2.8)
ax.imshow(owner, cmap=ListedColormap(shades), aspect="auto", interpolation="nearest")
for name, table in tables.items():
    for order, block in enumerate(table):
        ax.annotate(f"{name}{order}", (0, block), va="center", ha="center", fontsize=8)
ax.set(
    xlabel="place in the block", ylabel="block", yticks=range(len(owner)), xticks=range(0, 16, 4)
)
ax.grid(False)
nb.show(
    fig,
    "A pool of blocks with three texts in it. a0 is the first block of text a; white slots hold "
    "nothing.",
)

# %% jupyter={"source_hidden": true}
used, held = int((owner > 0).sum()), owner.size
nb.say(f"""
{used} of {held} slots hold a token. Only the last block of a text can have empty ones:
{held - used} here. Three slots of a context of {config.max_context:,} would be
{3 * config.max_context:,} positions.
""")

# %% [markdown]
# ## One pass over unequal texts
#
# A rectangle `[B, T]` needs as many tokens from every text. A *ragged batch* does not: tokens lie
# end to end in `[1, T]`, and seven small tensors say what belongs to whom.

# %%
lesson.code("step_batch")

# %% [markdown]
# Attention is planned once for all layers. Texts with equally many queries go together; the slots
# of their contexts are listed, and a mask says which query sees what.

# %%
lesson.code("PagedAttention._group")

# %%
lesson.code("PagedAttention.__call__")

# %% [markdown]
# Three questions for the real model. First text `a` alone; then, in the passes that follow, `b` and
# `c` join with their whole prompts beside the decode of those who are there already.

# %%
questions = {
    "a": "Name three fruits.",
    "b": "What is the capital of France?",
    "c": "Why is the sky blue?",
}
prompts = {n: tokenizer.chat([{"role": "user", "content": q}]) for n, q in questions.items()}
needed = [-(-(len(p) + 16) // BLOCK) for p in prompts.values()]
attend = PagedAttention(config, sum(needed), BLOCK, dtype=model.dtype, device=device)
texts = {
    name: Sequence(Request(name, tuple(prompt)), list(prompt), 0, table)
    for (name, prompt), table in zip(prompts.items(), shuffled_tables(needed), strict=True)
}


def serve(names):
    """One pass over all that these texts have not been fed yet; each gets its next token."""
    sequences = [texts[name] for name in names]
    counts = [len(s.tokens) - s.num_computed for s in sequences]
    batch = step_batch(sequences, counts, BLOCK, device=device)
    attend.plan(batch)
    logits = model.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)
    for sequence, count, token in zip(sequences, counts, logits.argmax(-1).tolist(), strict=True):
        sequence.num_computed += count
        sequence.tokens.append(token)
    return counts, batch


log = []
for names in ["a", "ab", "cab", *["abc"] * 8]:
    counts, batch = serve(names)
    log.append((dict(zip(names, counts, strict=True)), batch))

nb.table(
    ["pass", "tokens of a", "of b", "of c", "T", "a rectangle would have"],
    [
        [
            index + 1,
            *(fed.get(name, 0) for name in "abc"),
            len(batch.token_ids),
            len(fed) * max(fed.values()),
        ]
        for index, (fed, batch) in enumerate(log[:5])
    ],
)

# %%
rows = []
for name, sequence in texts.items():
    said = sequence.output_ids
    alone = list(generate(model, prompts[name], len(said)))
    rows.append([questions[name], tokenizer.decode(said), "yes" if said == alone else "no"])
nb.table(["question", "begins", "same as alone"], rows)

# %% [markdown]
# The mask of the third pass, for one chunk: `c` came with its prompt, so its queries are all of its
# positions. Had the first half been fed before, the queries would be the *last* positions. The
# triangle is aligned at the bottom right.

# %%
half = len(prompts["c"]) // 2
fig, axes = nb.figure(7, 2.8, ncols=2)
for ax, fed, title in ((axes[0], 0, "fed whole"), (axes[1], half, "second half of two")):
    sequence = Sequence(Request("c", (0,)), list(prompts["c"]), fed, texts["c"].block_table)
    attend.plan(step_batch([sequence], [len(sequence.tokens) - fed], BLOCK, device=device))
    [(_, _, visible)] = attend.groups
    ax.imshow(visible[0].cpu(), cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
    ax.set(title=title, xlabel="key at position", ylabel="query")
    ax.grid(False)
nb.show(fig, "Which query sees which key (dark). On the right the first half lies in the pool.")

# %% [markdown]
# ## What must not be read
#
# The last block of a text has slots that were never written. Is it enough to mask them? Fill a new
# pool with NaN, which is what fresh memory may hold, write a text of 38 positions, and attend in
# two ways: to all slots of its blocks with the tail masked, and to the slots that `plan` lists.

# %%
pool = PagedAttention(config, 4, BLOCK, dtype=model.dtype, device=device)
for side in (pool.keys, pool.values):
    side.fill_(torch.nan)
text = Sequence(Request("t", (0,)), [0] * 38, 0, [2, 0, 3])
pool.plan(step_batch([text], [38], BLOCK, device=device))
shape = (config.num_kv_heads, config.head_dim)
k, v = (torch.randn(1, 38, *shape, device=device, dtype=model.dtype) for _ in range(2))
q = torch.randn(1, 38, config.num_heads, config.head_dim, device=device, dtype=model.dtype)
listed = pool(0, q, k, v)[:, -1:]

keys, values = (side[0, text.block_table].flatten(0, 1)[None] for side in (pool.keys, pool.values))
seen = torch.arange(3 * BLOCK, device=device) < 38
masked = masked_attention(q[:, -1:], keys, values, seen[None, None])
dense = masked_attention(q[:, -1:], k, v, torch.ones(1, 1, 38, dtype=torch.bool, device=device))

# %% jupyter={"source_hidden": true}
spoilt = float(masked.isnan().float().mean())
nb.say(f"""
With the tail masked, {spoilt:.0%} of the result is NaN: a masked value is multiplied by a weight of
0, and 0 × NaN is NaN. With the slots that `plan` lists, the largest difference from attention over
the {seen.sum()} positions alone is {float((listed - dense).abs().max()):.1e}. Past the end of a
context, `plan` lists the text's first slot again. It is masked as well, but it has been written.
""")

# %% [markdown]
# ## What equal memory buys: a prediction
#
# The memory of four slots, filled with texts of 32 to 160 tokens and room for 60 more each. How
# many fit, counted in blocks?

# %%
SLOTS, CAPACITY, ROOM = 4, 1024, 60
budget = SLOTS * CAPACITY  # positions
past, taken = [], 0
while True:
    length = rng.randrange(32, 160)
    taken += -(-(length + ROOM) // BLOCK) * BLOCK
    if taken > budget:
        break
    past.append(length)
more = len(past)

# %% [markdown]
# Now, what are so many rows worth? The pass of notebook 02 again, h + max(r, b · rows), measured:
# passes over 1 to 32 texts that have no past at all, so that nothing but the rows is in it. Timings
# are on `bench`: wide layers, so that calling operations is a small part of a step.

# %%
bench = load("bench", device=device).model
sizes = sorted({1, 2, SLOTS, 8, 16, more, 32})


def bare_pass(rows):
    """A pass over one new token of each of `rows` texts without a past."""
    tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    return lambda: bench.forward(tokens, tokens, FullAttention(), list(range(rows)))


bare = nb.take_turns({rows: bare_pass(rows) for rows in sizes}, device, rounds=9)
derived = more / SLOTS * bare[SLOTS].median / bare[more].median

# %% jupyter={"source_hidden": true}
nb.say(f"""
{more} texts fit, {more / SLOTS:.1f} times as many as slots. A pass over {SLOTS} rows takes
{nb.seconds_text(bare[SLOTS].median)}, one over {more} rows {nb.seconds_text(bare[more].median)}. So
the tokens per second should grow by {more} / {SLOTS} × {nb.short(1e3 * bare[SLOTS].median)} /
{nb.short(1e3 * bare[more].median)} = **{derived:.2f}x**. That is the prediction of the rows alone,
before any past is read or gathered.
""")

# %% [markdown]
# ## What equal memory buys: measured
#
# A step of four slots and a step of all that fit, in turn, in seconds per token.


# %%
def contiguous_step(lengths, capacity):
    """A decode step of texts with random pasts in slots of this capacity."""
    cache = SlotCache(bench.config, len(lengths), capacity, dtype=bench.dtype, device=device)
    cache.keys.normal_()  # what the past says does not change how long it takes
    cache.values.normal_()
    tokens = torch.zeros(len(lengths), 1, dtype=torch.int64, device=device)
    slots = list(range(len(lengths)))

    def step():
        cache.lengths = list(lengths)
        return bench.forward(tokens, cache.plan(slots, 1), cache, slots)

    return step, cache


def paged_step(lengths, block_size=BLOCK):
    """The same in blocks, in random order."""
    needed = [-(-(n + ROOM) // block_size) for n in lengths]
    attend = PagedAttention(bench.config, sum(needed), block_size, dtype=bench.dtype, device=device)
    attend.keys.normal_()
    attend.values.normal_()
    sequences = [
        Sequence(Request("t", (0,)), [0] * (n + 1), n, table)
        for n, table in zip(lengths, shuffled_tables(needed), strict=True)
    ]

    def plan():
        batch = step_batch(sequences, [1] * len(lengths), block_size, device=device)
        attend.plan(batch)
        return batch

    def step():
        batch = plan()
        return bench.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)

    return step, plan, attend


def compare(one, other, slices=25):
    """Steps of two sides in turn; how many times faster the second is, per token."""
    (step_one, rows_one), (step_other, rows_other) = one, other
    return measure_pair(
        lambda: timed(step_one, device)[1] / rows_one,
        lambda: timed(step_other, device)[1] / rows_other,
        Bar(1.0),
        max_slices=slices,
    )


in_slots, _ = contiguous_step(past[:SLOTS], CAPACITY)
in_blocks, _, _ = paged_step(past)
equal_memory = compare((in_slots, SLOTS), (in_blocks, more))

# %%
prediction.score(equal_memory.median, derived=derived)

# %%
counts = sorted({1, 2, SLOTS, 8, 16, more})
steps = {("slots", n): contiguous_step(past[:n], CAPACITY)[0] for n in counts if n <= SLOTS}
steps |= {("blocks", n): paged_step(past[:n])[0] for n in counts}
rates = {key: key[1] / t.median for key, t in nb.take_turns(steps, device, rounds=7).items()}

fig, ax = nb.figure()
ax.plot(
    sizes,
    [n / bare[n].median for n in sizes],
    ":",
    color=nb.COLOURS["predicted"],
    label="rows without a past",
)
for side, colour, mark in (("slots", "naive", "s"), ("blocks", "measured", "o")):
    found = {n: rate for (s, n), rate in rates.items() if s == side}
    ax.plot(found.keys(), found.values(), mark + "-", color=nb.COLOURS[colour], label=f"in {side}")
ax.axvline(SLOTS, color=nb.COLOURS["reference"], linestyle=":", linewidth=1)
ax.annotate(" slots end here", (SLOTS, 0.05 * max(rates.values())), fontsize=8)
ax.set(xlabel="texts in a step", ylabel="tokens per second", ylim=(0, None), xlim=(0, None))
ax.legend(loc="lower right")
nb.show(fig, "Tokens per second by the number of texts. Both lines end where the memory is full.")

# %% [markdown]
# ## Where the time of a step goes
#
# What takes the measured gain away from the derived one? Four parts, timed by themselves, each on
# both sides: planning; attention in all layers, with the gathering in it; the bare pass over as
# many rows; and what is left.


# %%
def attention_of(attend, ragged, rows):
    """All layers' attention of the step that was planned last."""
    shape = (1, rows) if ragged else (rows, 1)
    heads = (bench.config.num_heads, *[bench.config.num_kv_heads] * 2)
    q, k, v = (
        torch.randn(*shape, n, bench.config.head_dim, device=device, dtype=bench.dtype)
        for n in heads
    )

    def run():
        for layer in range(bench.config.num_layers):
            attend(layer, q, k, v)

    return run


def parts_of(lengths, capacity, other_lengths):
    """Seconds of the parts of a step in slots, and of one in blocks."""
    step, cache = contiguous_step(lengths, capacity)
    paged, plan, attend = paged_step(other_lengths)

    def plan_slots():
        cache.lengths = list(lengths)
        cache.plan(list(range(len(lengths))), 1)

    plan_slots()
    plan()
    times = nb.take_turns(
        {
            ("slots", "step"): step,
            ("blocks", "step"): paged,
            ("slots", "planning"): plan_slots,
            ("blocks", "planning"): plan,
            ("slots", "attention"): attention_of(cache, False, len(lengths)),
            ("blocks", "attention"): attention_of(attend, True, len(other_lengths)),
            ("slots", "rows"): bare_pass(len(lengths)),
            ("blocks", "rows"): bare_pass(len(other_lengths)),
        },
        device,
        rounds=15,
    )
    return {key: found.median for key, found in times.items()}


PARTS = {"planning": "host", "attention": "kv", "rows": "weights"}


def bars(ax, parts, labels):
    """A stacked bar for each side, and its measured step as a mark."""
    for side, label in labels.items():
        left = 0.0
        for part, colour in PARTS.items():
            width = 1e3 * parts[side, part]
            ax.barh(label, width, left=left, color=nb.COLOURS[colour], height=0.6)
            left += width
        ax.plot([1e3 * parts[side, "step"]], [label], "D", color=nb.COLOURS["reference"])
    ax.grid(axis="y", visible=False)


same = [rng.randrange(128, 256) for _ in range(8)]  # equal batch: eight texts on both sides
unequal = parts_of(past[:SLOTS], CAPACITY, past)
equal = parts_of(same, 256 + ROOM, same)

fig, ax = nb.figure(7.5, 2.8)
bars(ax, unequal, {"slots": f"{SLOTS} texts in slots", "blocks": f"{more} texts in blocks"})
bars(ax, equal, {"slots": "8 texts in slots", "blocks": "8 texts in blocks"})
for part, colour in PARTS.items():
    ax.barh(0, 0, color=nb.COLOURS[colour], label=part)
ax.plot([], [], "D", color=nb.COLOURS["reference"], label="measured step")
ax.invert_yaxis()
ax.set_xlabel("ms")
ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(
    fig,
    "A decode step taken apart, at equal memory (above) and at equal batch (below). The diamond is "
    "the whole step as measured.",
)

# %% jupyter={"source_hidden": true}
found = equal_memory.median
low, high = equal_memory.ratio.interval()
summed = {side: sum(unequal[side, part] for part in PARTS) for side in ("slots", "blocks")}
beside = {side: 1 - unequal[side, "rows"] / summed[side] for side in summed}
by_parts = more / SLOTS * summed["slots"] / summed["blocks"]
by_rows = more / SLOTS * unequal["slots", "rows"] / unequal["blocks", "rows"]
if by_parts < 0.98 * by_rows:
    verdict = "the rest of a step grew more than the rows did"
elif by_parts > 1.02 * by_rows:
    verdict = "the rest of a step grew less than the rows did"
else:
    verdict = "the rest of a step grew as the rows did"
nb.say(f"""
**Equal memory.** {more} texts instead of {SLOTS} gave **{found:.2f}x** the tokens per second
([{low:.2f}, {high:.2f}]); the rows alone promised {derived:.2f}x. The parts say where it goes.
Their rows make {by_rows:.2f}x, and with planning and attention it is {by_parts:.2f}x: {verdict}.
These two are {beside["slots"]:.0%} of the step in slots and {beside["blocks"]:.0%} of the one in
blocks.
""")

# %%
equal_batch = compare((contiguous_step(same, 256 + ROOM)[0], 8), (paged_step(same)[0], 8))

# %% jupyter={"source_hidden": true}
low, high = equal_batch.ratio.interval()
if high < 1:
    verdict = "That is where paging loses: the same keys are read, and copied besides."
elif low > 1:
    verdict = """Faster, although the same keys are read, and copied besides: where memory lies
moves such a ratio by some percent, in either direction."""
else:
    verdict = "The interval holds 1: the copy is lost among the rest of the step."
nb.say(f"""
**Equal batch.** With eight texts on both sides, a step in blocks takes
{1 / equal_batch.median:.2f} times as long as one in slots ([{1 / high:.2f}, {1 / low:.2f}]).
Planning takes {nb.seconds_text(equal["blocks", "planning"])} instead of
{nb.seconds_text(equal["slots", "planning"])}, attention
{nb.seconds_text(equal["blocks", "attention"])} instead of
{nb.seconds_text(equal["slots", "attention"])}. {verdict} What blocks are for is the line above: a
larger batch out of the same memory.
""")

# %% [markdown]
# ## The bill: gathering
#
# How many bytes does attention copy in one decode step? Counted, for one text of several lengths,
# beside what the past itself has.


# %%
def copied_by_a_step(length):
    """Bytes written by copying in all layers' attention of a decode step."""
    _, plan, attend = paged_step([length - 1])
    plan()
    run = attention_of(attend, True, 1)
    with CopiedBytes() as copied:
        run()
    return copied.bytes


lengths = [64, 128, 256, 512, 1024]
itemsize = bench.embed.weight.element_size()
copied = {n: copied_by_a_step(n) for n in lengths}
past_bytes = {
    n: decode_work(bench.config, [n], weight_itemsize=itemsize, kv_itemsize=itemsize).kv_bytes
    for n in lengths
}
nb.table(
    ["positions", "keys and values", "copied in a step", "quotient"],
    [
        [n, nb.bytes_text(past_bytes[n]), nb.bytes_text(copied[n]), copied[n] / past_bytes[n]]
        for n in lengths
    ],
)

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
longest = lengths[-1]
weight_bytes = decode_work(
    bench.config, [1], weight_itemsize=itemsize, kv_itemsize=itemsize
).weight_bytes
balance = weight_bytes / (3 * past_bytes[longest] / longest)
nb.say(f"""
Each step copies the past {copied[longest] / past_bytes[longest]:.1f} times: it is read, written and
read again, so it moves three times. On this model that is as much as its weights once the texts of
a step have {balance:,.0f} positions together. Stage 09 writes a kernel that reads the blocks where
they lie.
""")

# %% [markdown]
# ## Questions
#
# 1. All texts fill their slots to the last position. What is paging worth then?
# 2. Why does the gain stay below the number of texts over the number of slots?
# 3. One text has 8,000 positions, 31 others have 200. What does this stage's gathering cost?
#
# <details><summary>Answers</summary>
#
# 1. Nothing: as many texts fit, and each step is somewhat slower.
# 2. A pass over more rows takes longer once multiplying sets the pace, and each text brings a past
#    of its own to be gathered. Only the weights are shared.
# 3. All 32 are one group of decodes, padded to the longest: 256,000 positions are gathered, of
#    which 14,200 are needed.
# </details>
#
# **Your turn.** `./course check 8` puts your own pool beside contiguous slots.
#
# ## Sources
#
# - W. Kwon et al. "Efficient Memory Management for Large Language Model Serving with
#   PagedAttention." SOSP 2023. arXiv:2309.06180. They report 2 to 4 times the throughput at the
#   same latency.
# - G.-I. Yu et al. "Orca: A Distributed Serving System for Transformer-Based Generative Models."
#   OSDI 2022. Linear layers over all tokens of a step, attention for each request.
