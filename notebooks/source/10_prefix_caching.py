# %% [markdown]
# # 10 · Prefix caching
#
# **Claim.** What a model stores for a token depends on the tokens up to it, and on nothing that
# comes after. So a text that begins like an earlier one can begin with its blocks, and compute only
# what is new. Chats send everything again with each turn: most of their prompts is old.
#
# You will see that equal beginnings have equal keys, predict how much of eight conversations must
# be computed, and count it. Then: what it does to the time to first token, what a hash that
# collides would do, which blocks to forget first, and what a cache tells about others. You need
# notebooks 07 and 08: blocks, tables, and attention that follows them.

# %%
import os
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

import torch

import course.notebook as nb
from course.engine import Runner
from course.model import load
from course.types import OutOfBlocks, Request, Sequence, Step

torch.set_num_threads(max(1, os.cpu_count() - 1))  # as the gate does: times are steadier
lesson = nb.Lesson(10)
model, config, tokenizer, device = lesson.model, lesson.config, lesson.tokenizer, lesson.device
reference = lesson.reference
PrefixCachingAllocator = reference.PrefixCachingAllocator
PagedAttention, step_batch = nb.reference(8).PagedAttention, nb.reference(8).step_batch
generate = nb.reference(2).generate
BLOCK = 16


def sequence_of(tokens, salt=""):
    """A request that has just come."""
    return Sequence.of(Request("r", tuple(tokens), cache_salt=salt))


# %% [markdown]
# ## Predict first
#
# Prompts of 108, 132, 156 and 180 tokens, of which 96 are always the same. A first guess: what is
# saved is the system prompt, more than half of it all.

# %%
guess = 3
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## What can be used again
#
# Attention is causal: position p sees positions 0 to p. So keys and values at p depend on these
# tokens alone. Two questions about one instruction, and the same instruction behind a greeting:

# %%
instruction = "You answer in one short sentence, and you never use a list."
first, second = (
    tokenizer.encode(f"{instruction} {question}")
    for question in ("Why is the sky blue?", "Who wrote Hamlet?")
)
moved = tokenizer.encode(f"Hello! {instruction} Why is the sky blue?")
same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def stored(tokens):
    """Keys of the last layer for a text, [n, Hkv, D]."""
    attention = PagedAttention(config, 8, BLOCK, dtype=model.dtype, device=device)
    sequence = sequence_of(tokens)
    sequence.block_table = list(range(8))
    Runner(model, attention, step_batch)(Step([sequence], [len(tokens)]))
    return attention.keys[-1].flatten(0, 1)[: len(tokens)]


keys, others, shifted = stored(first), stored(second), stored(moved)
offset = next(i for i in range(len(moved)) if moved[i : i + 6] == first[1:7])
scale = float(keys.abs().mean())
nb.table(
    ["keys of the last layer, compared with the first text's", "largest difference / mean size"],
    [
        [
            f"another question, the {same} positions that are alike",
            f"{float((keys[:same] - others[:same]).abs().max()) / scale:.1e}",
        ],
        [
            "another question, the positions after",
            f"{float((keys[same:][:4] - others[same:][:4]).abs().max()) / scale:.1f}",
        ],
        [
            "the same words behind a greeting",
            f"{float((keys[1:7] - shifted[offset : offset + 6]).abs().max()) / scale:.1f}",
        ],
    ],
)

# %% [markdown]
# Where two texts are alike from the start, their keys agree, up to rounding. The same words in
# another place have other keys. So it is beginnings that can be shared, and nothing else.
#
# ## A name for a beginning
#
# Full blocks are shared, since nobody writes into them any more. A block must be found by its own
# tokens and all those before them, so its hash is made of both: a chain.

# %%
lesson.code("hash_block")

# %% [markdown]
# A hash proposes. What decides is the comparison, back to where both texts are one object:

# %%
lesson.code("Prefix.__eq__")

# %%
lesson.code("PrefixCachingAllocator.cached_blocks")

# %%
lesson.code("PrefixCachingAllocator.admit")

# %% [markdown]
# At most (n - 1) div 16 blocks are found: at least one token is computed, since only a pass gives
# logits.
#
# ## Conversations: a prediction
#
# Eight users, four turns each. A prompt is everything so far, and a question. When a turn comes,
# its whole past is in full blocks, but for three things: the question, the last token of the
# answer, which was never fed, and what lay in a block that was not full, (16 - 1) / 2 on average.

# %%
USERS, TURNS, SYSTEM, LENGTH, WIDTH = 8, 4, 96, 12, 4
prompts = [SYSTEM + LENGTH + 2 * LENGTH * turn for turn in range(TURNS)]
total = USERS * sum(prompts)
opening = WIDTH * prompts[0] + (USERS - WIDTH) * LENGTH  # four find nothing, four the instructions
later = LENGTH + 1 + (BLOCK - 1) / 2
derived = total / (opening + USERS * (TURNS - 1) * later)

# %% jupyter={"source_hidden": true}
nb.say(f"""
{total:,} prompt tokens come. In the first turn {WIDTH} users are served in one step and find
nothing; the other {USERS - WIDTH} find {SYSTEM} tokens: {opening} are computed. Each later turn
computes {LENGTH} + 1 + {(BLOCK - 1) / 2} = {later} of its own. That makes {total:,} /
{opening + USERS * (TURNS - 1) * later:,.0f} = **{derived:.2f}x** fewer.
""")

# %% [markdown]
# ## Conversations: counted
#
# Lengths are drawn from 9 to 15, and no model is needed: which blocks are found does not depend on
# what the tokens mean.


# %%
@dataclass
class Count:
    """Prompt tokens that came, and those that were computed, by turn."""

    came: list[int] = field(default_factory=lambda: [0] * TURNS)
    computed: list[int] = field(default_factory=lambda: [0] * TURNS)

    @property
    def ratio(self):
        """How many times fewer."""
        return sum(self.came) / sum(self.computed)


def converse(kind, num_blocks, seed=10):
    """Serve all conversations, at most four at a time, first come, first served."""
    rng = random.Random(seed)
    allocator, found = kind(num_blocks, BLOCK), Count()

    def draw(count):
        return [rng.randrange(50_000) for _ in range(count)]

    system = draw(SYSTEM)
    queue = deque((0, [*system, *draw(rng.randrange(9, 16))]) for _ in range(USERS))
    while queue:
        together = []
        while queue and len(together) < WIDTH:
            turn, tokens = queue[0]
            sequence = sequence_of(tokens)
            try:  # with room for the answers of all, so that none is in the way of another
                allocator.admit(sequence, reserve=len(together) + 1)
            except OutOfBlocks:
                break
            queue.popleft()
            answer = draw(rng.randrange(9, 16))
            found.came[turn] += len(tokens)
            found.computed[turn] += len(tokens) - sequence.num_cached
            together.append((turn, sequence, answer))
        for turn, sequence, answer in together:
            allocator.append(sequence.block_table, len(sequence.tokens), len(answer) - 1)
            sequence.tokens += answer[:-1]
            sequence.num_computed = len(sequence.tokens)
            allocator.publish(sequence)
            if turn + 1 < TURNS:
                queue.append(
                    (turn + 1, [*sequence.tokens, answer[-1], *draw(rng.randrange(9, 16))])
                )
        for _, sequence, _ in together:
            allocator.free(sequence.block_table)
    allocator.check([])
    return found


runs = [converse(PrefixCachingAllocator, 400, seed) for seed in range(20)]
counted = statistics.median(run.ratio for run in runs)
prediction.score(counted, derived=derived)

# %%
one = runs[0]
fig, ax = nb.figure(7, 2.8)
turns = range(1, TURNS + 1)
cached = [a - b for a, b in zip(one.came, one.computed, strict=True)]
ax.bar(turns, cached, bottom=one.computed, color=nb.COLOURS["faint"], label="found")
ax.bar(turns, one.computed, color=nb.COLOURS["measured"], label="computed")
ax.plot(
    turns,
    [opening, *[USERS * later] * (TURNS - 1)],
    "D",
    color=nb.COLOURS["predicted"],
    label="computed, as derived",
)
ax.set(xlabel="turn", ylabel="prompt tokens of eight users", xticks=turns)
ax.legend()
nb.show(fig, "Prompt tokens by turn. A turn costs the same however long the conversation is.")

# %% jupyter={"source_hidden": true}
spread = sorted(run.ratio for run in runs)
blocks = SYSTEM // BLOCK * BLOCK
alone = USERS * sum(prompts) / (opening + USERS * sum(n - blocks for n in prompts[1:]))
nb.say(f"""
Over {len(runs)} draws of the lengths it is {spread[0]:.2f} to {spread[-1]:.2f} times fewer, with
{counted:.2f} in the middle; derived was {derived:.2f}. The first turn is
{one.computed[0] / sum(one.computed):.0%} of all that is computed, because four users came at once
and none of them could find what the others were about to write. With the system prompt alone in the
cache, and no conversations, it would be {alone:.1f}x.
""")

# %% [markdown]
# ## The same with a real model
#
# Three turns of one chat, and beside them the same prompts without a cache. What is found must not
# change what is said.


# %%
class Pool:
    """An allocator, memory, and a model to fill it."""

    def __init__(self, model, num_blocks, kind=PrefixCachingAllocator, **options):
        self.allocator = kind(num_blocks, BLOCK, **options)
        attention = PagedAttention(
            model.config, num_blocks, BLOCK, dtype=model.dtype, device=model.device
        )
        self.runner = Runner(model, attention, step_batch)

    def feed(self, sequence):
        """Compute all that is left of a sequence; the token that comes next."""
        left = len(sequence.tokens) - sequence.num_computed
        (token,) = self.runner(Step([sequence], [left]))
        sequence.num_computed += left
        self.allocator.publish(sequence)
        return token

    def answer(self, tokens, new, salt=""):
        """Tokens that were found, and what the model goes on with."""
        sequence = sequence_of(tokens, salt)
        self.allocator.admit(sequence)
        for _ in range(new):
            sequence.tokens.append(self.feed(sequence))
            if len(sequence.output_ids) < new:
                self.allocator.append(sequence.block_table, len(sequence.tokens) - 1, 1)
        self.allocator.free(sequence.block_table)
        return sequence.num_cached, sequence.output_ids


pool, text, rows = Pool(model, 60), [], []
for question in ("Name a fruit.", "What colour is it?", "And one that is blue?"):
    text = text + tokenizer.chat([{"role": "user", "content": question}])
    found, said = pool.answer(text, 12)
    alone = list(generate(model, text, 12))
    rows.append(
        [question, len(text), found, tokenizer.decode(said), "yes" if said == alone else "no"]
    )
    text = text + said
nb.table(["question", "prompt", "found", "answer begins", "as without a cache"], rows)

# %% [markdown]
# ## Time to first token
#
# It is a pass over what is left. Timed on `bench`: texts of 272 tokens of which more and more is
# found. The prediction uses passes over as many tokens without any past, which know nothing of
# caches.

# %%
bench = load("bench", device=device).model
vocabulary = bench.config.vocab_size
rng = random.Random(3)
TOTAL, shares = 272, [0, 64, 128, 192, 224, 256]
begin = [rng.randrange(vocabulary) for _ in range(TOTAL)]
timed_pool = Pool(bench, 700)  # so large that the first text is never forgotten


def first_token(shared):
    """Serve a text that shares so many tokens with the first one; new ones in each call."""

    def step():
        tokens = begin[:shared] + [rng.randrange(vocabulary) for _ in range(TOTAL - shared)]
        found, _ = timed_pool.answer(tokens, 1)
        assert found == shared

    return step


def bare(count):
    """A pass over as many tokens, and nothing before them."""
    attention = PagedAttention(bench.config, 20, BLOCK, dtype=bench.dtype, device=device)
    runner = Runner(bench, attention, step_batch)
    sequence = sequence_of([1] * count)
    sequence.block_table = list(range(20))
    return lambda: runner(Step([sequence], [count]))


timed_pool.answer(begin, 1)
steps = {("found", n): first_token(n) for n in shares}
steps |= {("bare", n): bare(TOTAL - n) for n in shares}
times = {key: t.median for key, t in nb.take_turns(steps, device, rounds=5).items()}

fig, ax = nb.figure(7, 3)
for kind, colour, mark, label in (
    ("bare", "predicted", "D--", "a pass over what is left, without a past"),
    ("found", "measured", "o-", "time to first token"),
):
    ax.plot(
        shares,
        [1e3 * times[kind, n] for n in shares],
        mark,
        color=nb.COLOURS[colour],
        label=label,
    )
ax.set(xlabel=f"tokens found, of {TOTAL}", ylabel="ms", ylim=(0, None), xticks=shares)
ax.legend()
nb.show(fig, "Time to first token by how much of the prompt is found.")

# %% jupyter={"source_hidden": true}
most = shares[-1]
gain = times["found", 0] / times["found", most]
expected = times["bare", 0] / times["bare", most]
extra = times["found", most] - times["bare", most]
floor = times["bare", most] * TOTAL / (TOTAL - most) / times["bare", 0]
nb.say(f"""
With {most} of {TOTAL} tokens found, the first token comes **{gain:.1f} times** sooner
({nb.seconds_text(times["found", most])} for {nb.seconds_text(times["found", 0])}); two bare passes
give {expected:.1f}. Why not {TOTAL / (TOTAL - most):.0f}, as the tokens go? A token in a pass over
{TOTAL - most} costs {floor:.1f} times as much as one in a pass over {TOTAL}: few rows do not share
the weights as well, which is notebook 03's ridge. The past that attention reads, the lookup and the
bookkeeping add {nb.seconds_text(max(extra, 0.0))}.
""")

# %% [markdown]
# ## A hash is no text
#
# A hash that only counts blocks does no harm to an allocator that compares. To one that trusts, all
# first blocks are the same, and all second ones:


# %%
class Trusting(reference.Prefix):
    """A text is what its hash says."""

    __hash__ = reference.Prefix.__hash__

    def __eq__(self, other):
        """Equal hashes, equal texts."""
        return self.hash == other.hash


class TrustingAllocator(PrefixCachingAllocator):
    """Looks texts up by their hashes alone."""

    def _prefix(self, sequence, index, parent):
        prefix = super()._prefix(sequence, index, parent)
        return Trusting(prefix.parent, prefix.tokens, prefix.space, prefix.hash)


def counting(parent, tokens):
    """The hash of any block that stands in this place."""
    return parent + 1


questions = [
    "My password is swordfish. Keep it to yourself, please, and say hello to me.",
    "What is the capital of France? Answer with the name of the city and no more.",
]
asked = [tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
rows = []
for kind in (PrefixCachingAllocator, TrustingAllocator):
    shared = Pool(model, 40, kind, hash_block=counting)
    shared.answer(asked[0], 8)
    found, said = shared.answer(asked[1], 8)
    rows.append(
        ["compares" if kind is PrefixCachingAllocator else "trusts", found, tokenizer.decode(said)]
    )
common = next(i for i, (a, b) in enumerate(zip(*asked, strict=False)) if a != b)
nb.table(
    ["the allocator", "found", "its answer to the question about France"],
    rows,
    note=f"The two prompts are alike for {common} tokens: what the chat template puts in front.",
)

# %% [markdown]
# No error was raised. Somebody who can find texts of equal hashes can do this on purpose, which is
# why vLLM's chains of hashes begin with a secret, and why it hashes with SHA-256 by default now.
#
# ## Which to forget
#
# The same conversations in pools that become smaller. Three orders of eviction: given back longest
# ago, with the end of a text before its beginning; the same with the beginning first; and the block
# that was published first, however often it is asked for. Before you look: which of them will
# suffer most?


# %%
class HeadFirst(PrefixCachingAllocator):
    """Gives the first block of a table back first."""

    def free(self, table):
        """Turned round."""
        table.reverse()
        super().free(table)


class FirstInFirstOut(PrefixCachingAllocator):
    """Takes the block that was published first."""

    def take(self):
        """Dictionaries keep the order in which keys came."""
        if self.num_free > len(self._free_cached):
            return super().take()
        oldest = next(b for b in self._cached.values() if b in self._free_cached)
        self._free_cached.move_to_end(oldest, last=False)
        return super().take()


orders = {
    "least recently used, tail first": (PrefixCachingAllocator, "measured", "o-"),
    "least recently used, head first": (HeadFirst, "predicted", "s--"),
    "first in, first out": (FirstInFirstOut, "host", "^:"),
}
sizes = [20, 28, 36, 44, 52, 60, 68, 76, 84]
found = {
    name: [statistics.mean(converse(kind, n, seed).ratio for seed in range(6)) for n in sizes]
    for name, (kind, _, _) in orders.items()
}
fig, ax = nb.figure(7, 3.2)
for name, (_, colour, mark) in orders.items():
    ax.plot(sizes, found[name], mark, color=nb.COLOURS[colour], label=name)
ax.axhline(1, color=nb.COLOURS["reference"], linewidth=1, linestyle=":")
ax.set(xlabel="blocks in the pool", ylabel="times fewer tokens computed", ylim=(0, None))
ax.legend()
nb.show(fig, "What is saved, by the size of the pool and by what is forgotten first.")

# %% jupyter={"source_hidden": true}
tail, head, fifo = (found[name] for name in orders)
worst = max(range(len(sizes)), key=lambda i: tail[i] / min(head[i], fifo[i]))
enough = next(n for n, ratio in zip(sizes, tail, strict=True) if ratio > 0.98 * tail[-1])
nb.say(f"""
With {enough} blocks nothing that matters is forgotten, and then the order is all the same. It
matters most with {sizes[worst]}: {tail[worst]:.1f}x tail first, {head[worst]:.1f}x head first,
{fifo[worst]:.1f}x first in, first out. A text whose first block has gone is out of reach as a
whole, whatever else of it is cached; and the system prompt was published first and is asked for
most.
""")

# %% [markdown]
# ## What a cache tells
#
# Somebody else has asked about a certain disease. You guess, ask, and look at the clock. A salt
# makes two caches of one.

# %%
asked_by_others = begin[:256]
secret_pool = Pool(bench, 300)
secret_pool.answer([*asked_by_others, 5], 1)


def probe(tokens, salt):
    """A guess, with something new behind it so that one's own guesses are not found whole."""
    return lambda: secret_pool.answer([*tokens, rng.randrange(vocabulary)], 1, salt)


def fresh_guess():
    """Another wrong guess each time: one's own last one would be found."""
    secret_pool.answer([rng.randrange(vocabulary) for _ in range(257)], 1)


salts = (str(i) for i in range(10**6))


def salted_guess():
    """The right guess, with a salt of one's own."""
    probe(asked_by_others, next(salts))()


guesses = nb.take_turns(
    {
        "right": probe(asked_by_others, ""),
        "wrong": fresh_guess,
        "right, but with another salt": salted_guess,
    },
    device,
    rounds=5,
)
nb.table(
    ["the guess", "time to first token"],
    [[name, nb.seconds_text(t.median)] for name, t in guesses.items()],
)

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
Whoever is admitted here has room for the whole answer put aside: a block for each of {WIDTH} users,
however short the answers turn out. A server that puts nothing aside must take blocks away from
somebody when the pool is full. Stage 11 decides who runs, who waits, and who gives blocks back; and
those who gave find their own blocks again, if nobody took them.
""")

# %% [markdown]
# ## Questions
#
# 1. A prompt of 160 tokens comes twice, in blocks of 16. How much of the second is computed?
# 2. The system prompt begins with today's date. What does that cost, and what if it is the time?
# 3. Twenty texts that fill a pool one and a half times are asked for in turn, for ever. What does
#    this allocator find?
#
# <details><summary>Answers</summary>
#
# 1. 16 tokens: (160 - 1) div 16 = 9 blocks are found, although all ten are cached.
# 2. Once a day everything is computed anew. With the time nothing is ever found, since every block
#    behind that line has another beginning.
# 3. Nothing: the text that is asked for next is the one that was used longest ago, so it has just
#    been evicted.
# </details>
#
# **Your turn.** `./course check 10` lets your allocator serve such conversations, and thousands of
# random operations besides.
#
# ## Sources
#
# - vLLM, "Automatic Prefix Caching", <https://docs.vllm.ai/en/latest/design/prefix_caching/>.
# - L. Zheng et al. "SGLang: Efficient Execution of Structured Language Model Programs." 2023.
#   arXiv:2312.07104.
# - GHSA-rm76-4mrf-v9r8, CVE-2025-25183, 2025. Predictable hashes in vLLM's prefix cache.
# - L. Song et al. "The Early Bird Catches the Leak: Unveiling Timing Side Channels in LLM Serving
#   Systems." 2024. arXiv:2409.20002.
