# %% [markdown]
# # 07 · The block allocator
#
# **Claim.** A slot that is reserved for the longest text there could be is mostly empty. Cut the
# memory into small blocks instead, hand them out one by one, and write down for every text which
# ones it has. Then nothing is lost but the rest of each last block, and the same bytes hold several
# times as many texts. Texts that begin alike can even hold the same blocks.
#
# You will predict how many texts fit, fill the same memory in both ways, and look at it. Then: what
# the size of a block decides, how texts share blocks without disturbing each other, and what it
# costs to ask for one. You need notebook 05: slots, and the trace.

# %%
import math
import random
import statistics

import numpy as np
from matplotlib.colors import ListedColormap

import course.notebook as nb
from course.model.published import PUBLISHED
from course.types import OutOfBlocks

lesson = nb.Lesson(7)
config, device = lesson.config, lesson.device
BlockAllocator = lesson.reference.BlockAllocator
kv_bytes_per_token = nb.reference(3).kv_bytes_per_token

# %% [markdown]
# ## Predict first
#
# Most texts are short, and a slot is long. The first guess: a text takes up half a slot.

# %%
guess = 2
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## What a slot keeps back
#
# The trace is that of stage 05: prompts of 16 to 32 tokens, and outputs that are *log-uniform*
# between 8 and 128. As many have 8 to 16 as have 64 to 128. Of each output the last token is never
# fed, so its keys and values are never stored.

# %%
context, slots = 256, 64  # positions of a slot, and how many there are
shortest, longest, prompt = 8, 128, 32


def draw_trace(count, seed=7):
    """Positions that each of `count` texts has stored when it ends."""
    rng = random.Random(seed)
    ratio = math.log(longest / shortest)
    outputs = [round(shortest * math.exp(ratio * (i + 0.5) / count)) for i in range(count)]
    rng.shuffle(outputs)
    return [rng.randrange(prompt // 2, prompt + 1) + new - 1 for new in outputs]


trace = draw_trace(2000)

fig, ax = nb.figure(7, 2.8)
ax.hist(trace, bins=range(0, context + 1, 8), color=nb.COLOURS["measured"])
ax.axvline(context, color=nb.COLOURS["predicted"], label="what a slot reserves")
ax.set(xlabel="positions stored at the end", ylabel="texts")
ax.legend(loc="upper center")
nb.show(fig, "How long the texts of the trace become, and how long a slot is.")

# %% [markdown]
# The mean can be derived without drawing anything. A log-uniform length between a and b has the
# mean (b - a) / ln(b / a).

# %%
mean_prompt = (prompt // 2 + prompt) / 2
mean_output = (longest - shortest) / math.log(longest / shortest)
mean_stored = mean_prompt + mean_output - 1
nb.table(
    ["positions of a text", "derived", "counted"],
    [
        ["stored at its end, on average", mean_stored, statistics.fmean(trace)],
        ["the most", prompt + longest - 1, max(trace)],
        [
            "share of a slot",
            f"{mean_stored / context:.0%}",
            f"{statistics.fmean(trace) / context:.0%}",
        ],
    ],
)

# %% [markdown]
# Three quarters of every slot are for nobody, and that is at the *end* of a text. What it comes to
# in bytes depends on the model: keys and values of every KV head in every layer.

# %%
GIB = 2**30
shapes = {lesson.loaded.name: (config, 4), "llama-3-8b": (PUBLISHED["llama-3-8b"], 2)}
nb.table(
    ["model", "bytes per token", "a slot of 8,192 tokens", "a text of 500 uses"],
    [
        [
            f"{name}, {8 * width} bits",
            f"{kv_bytes_per_token(shape, width):,.0f}",
            f"{8192 * kv_bytes_per_token(shape, width) / GIB:.2f} GiB",
            f"{500 / 8192:.1%}",
        ]
        for name, (shape, width) in shapes.items()
    ],
)

# %% [markdown]
# ## Blocks
#
# Cut the pool into blocks of `block_size` positions. A text has a *block table*: token p lies in
# block `table[p // block_size]`, at offset `p % block_size`. All that is decided here is which
# block belongs to whom. The memory itself does not matter, so the allocator works with numbers
# alone.

# %%
lesson.code("BlockAllocator.append")

# %% [markdown]
# Everything else is small. `allocate` is `append` to an empty table, `fork` copies a table and adds
# one to every count, `free` takes one off, from the last block to the first. Here is a pool of six
# blocks of four positions, and two texts that grow in it in turn:

# %%
allocator = BlockAllocator(6, 4)
tables = {"a": allocator.allocate(3), "b": allocator.allocate(5)}
lengths = {"a": 3, "b": 5}
rows = [["at first", str(tables["a"]), str(tables["b"]), allocator.num_free]]
for name, more in (("a", 1), ("a", 1), ("b", 3), ("b", 1), ("a", 4)):
    allocator.append(tables[name], lengths[name], more)
    lengths[name] += more
    rows.append(
        [f"{name} grows to {lengths[name]}", str(tables["a"]), str(tables["b"]), allocator.num_free]
    )
allocator.free(tables["a"])
rows.append(["a ends", str(tables["a"]), str(tables["b"]), allocator.num_free])
nb.table(["", "table of a", "table of b", "free blocks"], rows)

# %% [markdown]
# The tables interleave, and it does not matter. No block is better than another, so there are no
# holes that are too small for somebody: no *external* fragmentation.
#
# ## Who fits
#
# What is lost is the rest of each last block: *internal* fragmentation. If every remainder is as
# likely as any other, that is (block size - 1) / 2 positions on average. So a text takes up its own
# length and that, instead of a whole slot:

# %%
block_size = 16
lost = (block_size - 1) / 2
derived = context / (mean_stored + lost)

# %% jupyter={"source_hidden": true}
nb.say(f"""
{mean_stored:.1f} + {lost:g} = {mean_stored + lost:.1f} positions, so there is room for
{context} / {mean_stored + lost:.1f} = **{derived:.2f}** texts where a slot was.
""")


# %% [markdown]
# Now fill the same memory twice, with the same texts in the same order, until nothing more fits.


# %%
def fill(num_blocks, block_size, trace):
    """Tables of the texts that fit, each grown token by token after a prompt of 16."""
    allocator = BlockAllocator(num_blocks, block_size)
    tables = []
    for stored in trace:
        try:
            table = allocator.allocate(16)
            for length in range(16, stored):
                allocator.append(table, length, 1)
        except OutOfBlocks:
            return tables
        tables.append(table)
    raise ValueError("the trace is too short to fill this pool")


tables = fill(slots * context // block_size, block_size, trace)
prediction.score(len(tables) / slots, derived=derived)

# %%
FREE, USED, LOST = range(3)
memory = {"slots": np.full((slots, context), LOST), "blocks": np.full((slots, context), FREE)}
for row, stored in zip(memory["slots"], trace, strict=False):
    row[:stored] = USED
pool = memory["blocks"].reshape(-1, block_size)  # the same positions, a block in each row
for table, stored in zip(tables, trace, strict=False):
    pool[table] = LOST
    for place in range(stored):
        pool[table[place // block_size], place % block_size] = USED

fig, axes = nb.figure(7, 3.2, ncols=2, sharey=True)
colours = ListedColormap([nb.COLOURS[c] for c in ("faint", "measured", "predicted")])
for ax, (name, picture) in zip(axes, memory.items(), strict=True):
    ax.imshow(picture, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    ax.set(title=f"{name}: {slots if name == 'slots' else len(tables)} texts", xlabel="position")
    ax.grid(False)
axes[0].set_ylabel("slot")
nb.show(
    fig,
    "The same memory, filled twice. Blue holds a token, orange is handed out and holds none, "
    "grey is free.",
)

# %% jupyter={"source_hidden": true}
bytes_each = kv_bytes_per_token(config, lesson.model.embed.weight.element_size())
held = sum(trace[: len(tables)])
spread = [len(t) * block_size - n for t, n in zip(tables, trace, strict=False)]
known = slots * context // max(trace)
near = "as derived" if abs(len(tables) / slots / derived - 1) < 0.03 else f"derived: {derived:.2f}"
nb.say(f"""
In {nb.bytes_text(slots * context * bytes_each)} of this model's keys and values, {slots} slots
hold {slots} texts and {len(tables)} texts fit into blocks: {len(tables) / slots:.2f} times as many
({near}). The slots were {sum(trace[:slots]) / (slots * context):.0%} full, the blocks are
{held / (slots * context):.0%} full. A text loses {statistics.fmean(spread):.1f} positions on
average and {max(spread)} at most.

**Why not your {prediction.guess:g}x.** The gain is the slot over the mean text, and nothing else:
it does not depend on how much memory there is. A server that knew its longest request beforehand
could make {known} slots of {max(trace)}, and the gain would be {len(tables) / known:.1f}. With
texts of twice the length it would be {nb.short(context / (2 * mean_stored + lost))}.
""")

# %% [markdown]
# ## The size of a block
#
# Small blocks lose less. Before you look: where will the measured curve leave the derived one, and
# to which side?

# %%
sizes = [2**k for k in range(9)]
found = {}
for size in sizes:
    filled = fill(slots * context // size, size, trace)
    waste = statistics.fmean(
        len(t) * size - stored for t, stored in zip(filled, trace, strict=False)
    )
    found[size] = (waste, len(filled) / slots)

fig, axes = nb.figure(7, 3.2, ncols=2)
formulas = (
    [(size - 1) / 2 for size in sizes],
    [context / (mean_stored + (size - 1) / 2) for size in sizes],
)
for ax, formula, column, label in zip(
    axes, formulas, (0, 1), ("positions lost per text", "texts for each slot"), strict=True
):
    ax.plot(sizes, formula, color=nb.COLOURS["predicted"], label="derived")
    ax.plot(
        sizes,
        [found[size][column] for size in sizes],
        "o",
        color=nb.COLOURS["measured"],
        label="counted",
    )
    nb.doublings(ax, sizes[::2])
    ax.set(xlabel="positions in a block", ylabel=label, ylim=(0, None))
axes[0].legend()
nb.show(fig, "What a larger block loses, and what that does to the number of texts.")

# %% jupyter={"source_hidden": true}
small, large = found[16], found[context]
nb.say(f"""
Up to about the length of a text, the formula holds. Beyond it, its assumption fails: no text is
longer than {max(trace)}, so with blocks of {context} every text has exactly one, and loses
{large[0]:.0f} positions instead of {(context - 1) / 2:g}. That block is the slot again, and
{large[1]:.2f} texts fit in it.

Why not blocks of 1? {found[1][1]:.2f} texts would fit instead of {small[1]:.2f}, and the table of a
text of 8,192 tokens would have 8,192 entries instead of 512. Attention walks along that table, and
reads pieces of one position instead of sixteen.
""")

# %% [markdown]
# ## Sharing
#
# Four answers to one prompt need the prompt's keys and values once. `fork` gives a second table of
# the same blocks and counts one more holder for each. When one of the four writes its next token
# into a block that others hold, it needs a copy of its own: *copy-on-write*. `append` says what
# must be copied.
#
# To see that it is right, give the pool some contents: one letter for each position.


# %%
class Letters:
    """A pool whose memory holds letters. `turn` may turn the pairs round, which is a mistake."""

    def __init__(self, num_blocks, block_size, turn=False):
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.memory = [["·"] * block_size for _ in range(num_blocks)]
        self.turn = turn
        self.copied = []

    def write(self, table, length, text):
        """Append letters to a text of this length."""
        size = self.allocator.block_size
        for source, destination in self.allocator.append(table, length, len(text)):
            if self.turn:
                source, destination = destination, source
            self.memory[destination] = list(self.memory[source])
            self.copied.append((source, destination))
        for place, letter in enumerate(text, start=length):
            self.memory[table[place // size]][place % size] = letter

    def read(self, table, length):
        """The letters of a text."""
        size = self.allocator.block_size
        return "".join(self.memory[table[p // size]][p % size] for p in range(length))


beginning, ends = "the cat sat on", [" a mat", " my hat", " the bed", " it"]


def four_answers(turn):
    """The pool, the tables and what each of the four texts reads in the end."""
    pool = Letters(20, 4, turn)
    first = []
    pool.write(first, 0, beginning)
    answers = [first, *(pool.allocator.fork(first) for _ in ends[1:])]
    for table, end in zip(answers, ends, strict=True):
        pool.write(table, len(beginning), end)
    texts = [
        pool.read(table, len(beginning + end)) for table, end in zip(answers, ends, strict=True)
    ]
    return pool, answers, texts


pool, answers, texts = four_answers(turn=False)
wrong_pool, _, wrong_texts = four_answers(turn=True)
nb.table(
    ["block table", "it reads", "with the copies the wrong way"],
    [
        [str(table), f"`{text}`", f"`{wrong}`"]
        for table, text, wrong in zip(answers, texts, wrong_texts, strict=True)
    ],
)

# %% jupyter={"source_hidden": true}
allocator = pool.allocator
used = allocator.num_blocks - allocator.num_free
alone = sum(allocator.blocks_for(len(beginning + end)) for end in ends)
assert texts == [beginning + end for end in ends]
allocator.check(answers)
nb.say(f"""
{used} blocks are in use; four separate texts would have taken {alone}. The first three entries of
the tables are the same: these blocks are full, and nobody will write into them again. The fourth
was partly empty, and {len(pool.copied)} of the four texts got a copy of it: {pool.copied}. The last
one to write was alone with the old block by then. With the copies the wrong way,
{sum(a != b for a, b in zip(texts, wrong_texts, strict=True))} of the four texts read something that
they never wrote. No error was raised. That is why the gate of this stage keeps contents of its own,
and reads every text back after every operation.
""")

# %% [markdown]
# ## What it costs to ask
#
# A decode step asks for room for every running sequence. In the reference the free list is a
# deque: take at one end, give back at the other. What if it were a list, and `take` were `pop(0)`?
# Every answer stays the same. Predict how the time of an operation depends on the size of the pool.


# %%
class ListAllocator(BlockAllocator):
    """The same, with a list for a free list."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._free = list(self._free)

    def take(self):
        """The first of a list: all the others move up."""
        return self._free.pop(0)


pool_sizes = [10**3, 10**4, 10**5, 10**6]
operations = 50


def churn(allocator):
    """Four blocks taken, and given back; again and again."""

    def step():
        for _ in range(operations):
            allocator.free(allocator.allocate(4 * block_size))

    return step


kinds = {"deque": BlockAllocator, "list": ListAllocator}
times = nb.take_turns(
    {
        (name, size): churn(kind(size, block_size))
        for name, kind in kinds.items()
        for size in pool_sizes
    },
    device,
)

# %%
fig, ax = nb.figure(7, 3.2)
for name, colour in (("deque", "measured"), ("list", "predicted")):
    each = [1e6 * times[name, size].median / operations for size in pool_sizes]
    ax.plot(pool_sizes, each, "o-", color=nb.COLOURS[colour], label=name)
ax.set(xscale="log", yscale="log", xlabel="blocks in the pool", ylabel="µs for four blocks")
ax.legend()
nb.show(fig, "Allocating and freeing four blocks, with the free list in a deque and in a list.")

# %% jupyter={"source_hidden": true}
growth = {
    name: times[name, pool_sizes[-1]].median / times[name, pool_sizes[0]].median for name in kinds
}
least, middle = (times["list", n].median / times["deque", n].median for n in (10**3, 10**5))
nb.say(f"""
From {pool_sizes[0]:,} blocks to {pool_sizes[-1]:,}, the deque takes {growth["deque"]:.1f} times as
long and the list {growth["list"]:.0f} times. At 100,000 blocks, which is an ordinary pool, the list
is {middle:.0f} times slower; in a pool of 1,000 it takes {least:.2g} times as long. A test on a
small pool would hardly find it.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
{len(tables)} texts fit where {slots} did, and not one token has been computed yet. Blocks lie
anywhere, and attention still expects one row of keys and values in a piece. Stage 08 teaches it to
follow a table. And nothing is reserved any more: a text that was let in can find the pool empty in
the middle of its answer, and somebody has to decide what happens then. That is stage 11.
""")

# %% [markdown]
# ## Questions
#
# 1. The trace has a mean of m positions, and a slot has c. For which block size does the formula
#    say that half as many texts fit as with blocks of 1? Why is it wrong there?
# 2. Which blocks are given back when the first of the four answers ends, and which when the last
#    one does?
# 3. A count says how many hold a block, not who. Which mistake can therefore not be found when it
#    happens, and what finds it later?
# 4. `free` gives back the last block of a text first. Who profits?
#
# <details><summary>Answers</summary>
#
# 1. For 2m + 1: then a text loses as much as it holds. But most texts are shorter than such a block
#    and have exactly one, so c / (2m + 1) of them fit, whatever they hold.
# 2. At first those that it holds alone: its copy of the fourth, and what it has written since. The
#    count of the three full blocks at the beginning falls by 1. They are free when the last one
#    ends.
# 3. Freeing a copy of a table whose blocks others hold too. The counts become those of fewer texts
#    than there are, and `check`, which is given the tables, sees it.
# 4. Whoever sends a text that begins alike. What was freed first is used again first, and the
#    beginning was freed last.
# </details>
#
# **Your turn.** `./course check 7` fills a pool with your allocator, and times it against itself.
#
# ## Sources
#
# - W. Kwon et al. "Efficient Memory Management for Large Language Model Serving with
#   PagedAttention." SOSP 2023. arXiv:2309.06180.
# - T. Kilburn et al. "One-Level Storage System." IRE Transactions on Electronic Computers, 1962.
# - B. Randell. "A Note on Storage Fragmentation and Program Segmentation." Communications of the
#   ACM 12(7), 1969.
# - D. Bobrow et al. "TENEX, a Paged Time Sharing System for the PDP-10." Communications of the ACM
#   15(3), 1972.
