# %% [markdown]
# # 11 · The scheduler
#
# **Claim.** Nobody knows how long an answer will be, so nothing should be reserved for it. Admit
# whoever fits now, and if no block is left, let the newest request give its blocks back and compute
# them again later. A pool of half the size then serves bursts nearly as fast, nobody starves, and
# no user can tell from the text.
#
# You will look at what bursts need over time, predict what half of it is worth, and serve them.
# Then: what a watermark is for, how small a pool may be, and a real text that was interrupted. You
# need notebooks 05 and 07: the trace, and blocks.

# %%
import itertools
import math
import random
import statistics

import numpy as np
import torch

import course.notebook as nb
from course.engine import Engine, Runner
from course.types import Request, SamplingParams

lesson = nb.Lesson(11)
Scheduler = lesson.reference.Scheduler
PrefixCachingAllocator = nb.reference(10).PrefixCachingAllocator
paged = nb.reference(8)

# %% [markdown]
# ## Predict first
#
# Half of the memory holds half of the batch. The first guess: half of the throughput.

# %%
guess = 50
prediction = lesson.predict(guess, "%")

# %% [markdown]
# ## What bursts need
#
# Three bursts of 32 requests come 160 steps apart. Outputs are log-uniform from 8 to 128 tokens,
# prompts have 16 to 32, and blocks hold 8. Which tokens are said does not matter here, so nothing
# is computed: the "model" always says 7.

# %%
block_size, burst, gap, bursts = 8, 32, 160, 3


def draw_trace(seed=11):
    """[(step of arrival, prompt tokens, new tokens)]: each burst is dealt the same lengths."""
    rng = random.Random(seed)
    each = [round(8 * math.exp(math.log(16) * (i + 0.5) / burst)) for i in range(burst)]
    trace = []
    for index in range(bursts):
        rng.shuffle(each)
        trace += [(index * gap, rng.randrange(16, 33), new) for new in each]
    return trace


class NoCache(PrefixCachingAllocator):
    """Nobody finds anything in it, so that whatever is preempted is computed again."""

    def cached_blocks(self, sequence):
        """None."""
        return []


def serve(trace, num_blocks, watermark=6, pool=NoCache):
    """Serve a trace; for every step: used blocks, running, waiting, tokens computed, preempted."""
    allocator = pool(num_blocks, block_size)
    scheduler = Scheduler(allocator, lesson.config, max_running=len(trace), watermark=watermark)
    pending, rows = list(enumerate(trace)), []
    while pending or scheduler.has_work:
        while pending and pending[0][1][0] <= len(rows):
            name, (_, prompt, new) = pending.pop(0)
            tokens = tuple((97 * name + i) % lesson.config.vocab_size for i in range(prompt))
            scheduler.add(Request(str(name), tokens, SamplingParams(max_new_tokens=new)))
        before = {id(sequence) for sequence in scheduler.running}
        step = scheduler.schedule()
        lost = before - {id(sequence) for sequence in scheduler.running}
        used = num_blocks - allocator.num_free
        rows.append((used, len(step.sequences), len(scheduler.waiting), step.num_tokens, len(lost)))
        scheduler.update(step, [7] * len(step.sequences))
    return np.array(rows)


trace = draw_trace()
useful = sum(prompt + new - 1 for _, prompt, new in trace)
free = serve(trace, 10_000, watermark=0)
peak, mean = free[:, 0].max(), free[:, 0].mean()
half = -(-int(peak) // 2)

fig, ax = nb.figure(7, 2.8)
ax.fill_between(range(len(free)), free[:, 0], step="post", color=nb.COLOURS["measured"])
ax.axhline(peak / 2, color=nb.COLOURS["predicted"], label="half of the peak")
ax.set(xlabel="step", ylabel="blocks in use", ylim=(0, None))
ax.legend()
nb.show(fig, "What three bursts need, where there is room for all.")

# %% [markdown]
# A peak is short. Blocks times steps are an area, and the area is what must fit:

# %%
area = free[:, 0].sum()
derived = 100 * len(free) / max(len(free), area / half)

# %% jupyter={"source_hidden": true}
nb.say(f"""
The peak is {peak} blocks, the mean {mean:.0f}. A pool of {half} that is full in every step is done
after {area:,} / {half} = {area / half:.0f} steps, where the unlimited one takes {len(free)}. So at
most **{derived:.0f}%** of the throughput can be kept. What will be lost of it?
""")

# %% [markdown]
# ## The scheduler
#
# Who runs comes first, the oldest first. If a block is missing, the newest gives all of its blocks
# back. Only if nobody had to is somebody admitted.

# %%
lesson.code("Scheduler.schedule")

# %%
lesson.code("Scheduler._admit")

# %% [markdown]
# Serve the same bursts with half of the peak:

# %%
tight = serve(trace, half)
prediction.score(100 * len(free) / len(tight), derived=derived)

# %%
fig, axes = nb.figure(7, 4.2, nrows=2, sharex=True)
axes[0].fill_between(range(len(tight)), tight[:, 0], step="post", color=nb.COLOURS["measured"])
axes[0].axhline(half, color=nb.COLOURS["predicted"], label="the pool")
axes[0].set(ylabel="blocks in use", ylim=(0, None))
axes[1].plot(tight[:, 1], color=nb.COLOURS["measured"], label="in the step")
axes[1].plot(tight[:, 2], color=nb.COLOURS["predicted"], label="waiting")
lost = tight[:, 4].nonzero()[0]
axes[1].plot(lost, np.zeros(len(lost)), "|", color=nb.COLOURS["reference"], label="a preemption")
axes[1].set(xlabel="step", ylabel="requests", ylim=(-1, None))
for ax in axes:
    ax.legend(loc="upper right")
nb.show(fig, "The same bursts with half of the blocks.")

# %% jupyter={"source_hidden": true}
again = 1 - useful / tight[:, 3].sum()
first = tight[:, 2].nonzero()[0]
nb.say(f"""
{len(tight)} steps instead of {len(free)}: **{len(free) / len(tight):.0%}** of the throughput. The
pool was {tight[:, 0].mean() / half:.0%} full on average. {tight[:, 4].sum()} times somebody was
preempted, and {again:.1%} of the tokens were computed again. The rest of the loss is the end of
each burst, when nobody waits any more and few run: requests that waited run out alone.

**Why not your {prediction.guess:g}%.** Half of the peak is not half of the need: the mean is
{mean / peak:.0%} of the peak. A load that is always at its peak would lose half.
""")

# %% [markdown]
# ## The watermark
#
# Admit as many as fit, and the pool is full in the very step in which all of them begin to grow.
# What happens then, without a watermark? Predict two curves: steps, and the share of tokens that
# are computed again.

# %%
marks = [0, 1, 2, 4, 6, 8, 12, 16, 24, 32]
traces = [draw_trace(seed) for seed in range(8)]
needs = [serve(t, 10_000, watermark=0) for t in traces]


def kept_and_again(watermark, share=0.5, pool=NoCache):
    """Throughput kept and the share of tokens computed again: means over the traces."""
    found = []
    for t, need in zip(traces, needs, strict=True):
        run = serve(t, math.ceil(share * need[:, 0].max()), watermark, pool)
        work = sum(prompt + new - 1 for _, prompt, new in t)
        found.append((len(need) / len(run), 1 - work / run[:, 3].sum()))
    return [statistics.fmean(column) for column in zip(*found, strict=True)]


by_mark = {mark: kept_and_again(mark) for mark in marks}
cached = {mark: kept_and_again(mark, pool=PrefixCachingAllocator)[1] for mark in marks}

fig, axes = nb.figure(7, 3, ncols=2)
axes[0].plot(marks, [by_mark[m][0] for m in marks], "o-", color=nb.COLOURS["measured"])
axes[0].set(xlabel="watermark, blocks", ylabel="throughput kept", ylim=(0, 1))
axes[1].plot(
    marks, [by_mark[m][1] for m in marks], "o-", color=nb.COLOURS["measured"], label="no cache"
)
axes[1].plot(
    marks, [cached[m] for m in marks], "o-", color=nb.COLOURS["predicted"], label="with a cache"
)
axes[1].set(xlabel="watermark, blocks", ylabel="computed again", ylim=(0, None))
axes[1].legend()
nb.show(fig, f"What an admission leaves free, of some {half} blocks; means over 8 traces.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
Without a watermark {by_mark[0][1]:.0%} of all that is computed has been computed before, with 6
blocks {by_mark[6][1]:.0%}, with 16 {by_mark[16][1]:.0%}. The steps hardly mind:
{by_mark[0][0]:.2f}, {by_mark[6][0]:.2f} and {by_mark[16][0]:.2f} of the throughput are kept. A
victim's tokens ride along in a step with others. On a machine that is past its ridge they would not
ride for nothing, and then the right-hand curve is the bill.

With the prefix cache of stage 10 a victim finds what nobody has taken since:
{cached[6]:.0%} instead of {by_mark[6][1]:.0%} with 6 blocks. It is not much, since a pool that
preempts is a pool in which free blocks are taken at once.
""")

# %% [markdown]
# ## How small may it be?
#
# The area says what is kept at most: a pool that is always full needs area / blocks steps. Where
# will the measured points leave the curve?

# %%
shares = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
by_share = {share: kept_and_again(6, share)[0] for share in shares}
bound = [
    statistics.fmean(
        min(1.0, len(need) * share * need[:, 0].max() / need[:, 0].sum()) for need in needs
    )
    for share in shares
]
fig, ax = nb.figure(7, 3)
ax.plot(shares, bound, color=nb.COLOURS["predicted"], label="at most, by the area")
ax.plot(shares, [by_share[s] for s in shares], "o", color=nb.COLOURS["measured"], label="counted")
ax.plot(shares, shares, ":", color=nb.COLOURS["faint"], label="as much as the memory")
ax.set(xlabel="blocks, as a share of the peak", ylabel="throughput kept", ylim=(0, 1.05))
ax.legend()
nb.show(fig, "Throughput against memory; means over 8 traces.")

# %% jupyter={"source_hidden": true}
gaps = {share: b - by_share[share] for share, b in zip(shares, bound, strict=True)}
widest = max(gaps, key=gaps.get)
nb.say(f"""
Every pool finished every request, down to a fifth of the peak. The distance from the bound is
largest at {widest:g} of the peak, where the area just fits and no block may stand empty for a
moment. Above it the pool has room to spare; below it there is always a queue, and a queue keeps a
pool full.
""")

# %% [markdown]
# ## A text that was interrupted
#
# Now with the model. Four prompts in a pool that is too small for their answers; each text beside
# the one it says when it is alone. A bar shows where it was preempted.

# %%
prompts = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "A list of three fruits:",
]
new, size = 24, 4
ids = [tuple(lesson.tokenizer.encode(text)) for text in prompts]


def answers(num_blocks, chosen):
    """The tokens of each, and after how many of them it was preempted."""
    model = lesson.model
    attention = paged.PagedAttention(
        model.config, num_blocks, size, dtype=model.dtype, device=model.device
    )
    scheduler = Scheduler(PrefixCachingAllocator(num_blocks, size), model.config, max_running=4)
    engine = Engine(scheduler, Runner(model, attention, paged.step_batch))
    said, cut = {}, {}
    for index in chosen:
        engine.add(Request(str(index), ids[index], SamplingParams(max_new_tokens=new)))
        said[str(index)], cut[str(index)] = [], []
    while engine.has_work:
        before = [sequence.request.request_id for sequence in scheduler.running]
        for output in engine.step():
            said[output.request_id] += output.token_ids
        for sequence in scheduler.waiting:
            if sequence.request.request_id in before:
                cut[sequence.request.request_id].append(len(sequence.output_ids))
    return said, cut


need = [-(-(len(prompt) + new - 1) // size) for prompt in ids]
with torch.inference_mode():
    said, cut = answers(max(need) + min(need), range(4))
    alone = {str(i): answers(max(need), [i])[0][str(i)] for i in range(4)}

# %% jupyter={"source_hidden": true}
rows = []
for index, prompt in enumerate(prompts):
    tokens, places = said[str(index)], [0, *cut[str(index)], new]
    pieces = [lesson.tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(places)]
    shown = [f"`{piece.translate({10: '⏎', 96: None, 124: '/'})}`" for piece in pieces]
    verdict = "the same" if tokens == alone[str(index)] else "another"
    rows.append([prompt, " **▌** ".join(shown), verdict])
nb.table(["prompt", "answer", "alone it says"], rows)

# %% jupyter={"source_hidden": true}
times = sum(map(len, cut.values()))
same = sum(said[name] == alone[name] for name in said)
nb.say(f"""
{max(need) + min(need)} blocks, where the four need {sum(need)} in the end: somebody was preempted
{times} times, and {same} of 4 texts are what they would have been. What is computed again is
computed in another shape, one prefill instead of single steps, so in low precision a near-tie may
fall the other way; in float32 it hardly ever does.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
most, usual = int(tight[:, 3].max()), int(np.median(tight[:, 3]))
nb.say(f"""
The median step of the bursts computed {usual} tokens, and the largest one {most}: a burst came,
and all its prompts were prefilled in one step. Everybody who was decoding waited for it. With
prompts of thousands of tokens that is seconds, and it is the bill that stage 12 pays: a budget of
tokens for every step.
""")

# %% [markdown]
# ## Questions
#
# 1. Why does a victim wait in front of the queue and not behind it?
# 2. Which request is never preempted, and why does it follow that nobody starves?
# 3. A pool is preempting in every step, and the throughput is fine. Who complains?
# 4. What would you change if most requests began with the same long prompt?
#
# <details><summary>Answers</summary>
#
# 1. It came before all that wait. Behind them it would wait for requests that came later, each time
#    it is preempted.
# 2. The oldest: it gives way only when it is alone, and then the pool has room for it. So it ends,
#    and another one becomes the oldest.
# 3. The newest users: their text stops and goes on later. It shows in the tail of the inter-token
#    latency, not in tokens per second.
# 4. Nothing in the scheduler: `admit` takes the blocks that are cached, and a victim's beginning is
#    found again as long as anybody holds it. Preemption becomes cheap.
# </details>
#
# **Your turn.** `./course check 11` serves such bursts with your scheduler.
#
# ## Sources
#
# - G. Yu et al. "Orca: A Distributed Serving System for Transformer-Based Generative Models." OSDI
#   2022.
# - W. Kwon et al. "Efficient Memory Management for Large Language Model Serving with
#   PagedAttention." SOSP 2023. arXiv:2309.06180.
# - P. Denning. "Thrashing: Its Causes and Prevention." AFIPS Fall Joint Computer Conference, 1968.
