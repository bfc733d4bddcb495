# %% [markdown]
# # 12 · Chunked prefill
#
# **Claim.** A long prompt that goes through the model in one step stops everybody who is being
# answered for as long as that step takes. Give every step a budget of tokens instead, let those
# that decode have theirs first, and feed the prompt what is left, chunk by chunk. Then the longest
# gap is that of a full step, whatever anybody sends. The prompt pays with a later first token, and
# those that decode with a chunk in each of their gaps while it is cut: the tail is bought with the
# median. Throughput hardly changes, as long as the budget is not too small.
#
# You will watch a prompt being cut, measure what a step of b tokens costs, predict the longest gap
# from that, measure it, and look for the budget at which cutting becomes expensive. You need the
# ideas of notebooks 03 (the roofline), 05 (continuous batching) and 06 (percentiles).

# %%
import os
import random
import statistics

import numpy as np
import torch

import course.notebook as nb
from course.data import prompts
from course.engine import Engine, Runner
from course.measure import decode_work, timed
from course.model import load
from course.model.seeded import BENCH_8B
from course.types import Request, SamplingParams, Sequence, Stamp, Step, Timeline

torch.set_num_threads(max(1, os.cpu_count() - 1))  # as the gate does: times are steadier
lesson = nb.Lesson(12)
model, tokenizer, device = lesson.model, lesson.tokenizer, lesson.device
ChunkedScheduler = lesson.reference.ChunkedScheduler
Scheduler = nb.reference(11).Scheduler
Allocator = nb.reference(10).PrefixCachingAllocator
PagedAttention, step_batch = nb.reference(8).PagedAttention, nb.reference(8).step_batch
generate = nb.reference(2).generate
load_harness = nb.reference(6)
rng = random.Random(12)
BLOCK = 16

# %% [markdown]
# ## Predict first
#
# 4 decode, 264 tokens arrive, 48 fit into a step: 268 positions against 48, 5.6 times as many. The
# first guess takes positions for time.

# %%
guess = 5.6
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## Two methods
#
# Stage 11's scheduler asks `share` how many tokens a sequence feeds, and that is all the budget
# needs to know. The other half is to take no token from a prompt that is not at its end.

# %%
lesson.code("ChunkedScheduler.share")

# %%
lesson.code("ChunkedScheduler.update")

# %% [markdown]
# ## A prompt is cut
#
# Three questions are being answered by the real model, when somebody comes with a longer text. The
# budget is 32.


# %%
def engine_of(decoder, kind, num_blocks, **settings):
    """An engine on `decoder` around a scheduler of this kind."""
    attention = PagedAttention(
        decoder.config, num_blocks, BLOCK, dtype=decoder.dtype, device=decoder.device
    )
    scheduler = kind(Allocator(num_blocks, BLOCK), decoder.config, **settings)
    return Engine(scheduler, Runner(decoder, attention, step_batch))


def request_of(name, prompt, new):
    """A request for exactly so many tokens."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return Request(name, tuple(prompt), params)


questions = {
    "a": "Name three fruits.",
    "b": "What is the capital of France?",
    "c": "Why is the sky blue?",
    "long": "Shorten this: " + " ".join(prompts("chat"))[:700],
}
texts = {n: tokenizer.chat([{"role": "user", "content": q}]) for n, q in questions.items()}
blocks = sum(-(-(len(t) + 24) // BLOCK) for t in texts.values())
engine = engine_of(model, ChunkedScheduler, blocks, max_running=4, max_tokens=32)
for name in "abc":
    engine.add(request_of(name, texts[name], 20))

said = {name: [] for name in texts}
log = []
while engine.has_work:
    if len(log) == 6:
        engine.add(request_of("long", texts["long"], 6))
    before = {s.request.request_id: s.num_computed for s in engine.scheduler.running}
    lengths = {s.request.request_id: len(s.tokens) for s in engine.scheduler.running}
    outputs = engine.step()
    fed = {
        s.request.request_id: s.num_computed - before.get(s.request.request_id, s.num_cached)
        for s in engine.scheduler.running
    }
    fed |= {o.request_id: lengths[o.request_id] - before[o.request_id]
            for o in outputs if o.finish_reason}  # fmt: skip
    for output in outputs:
        said[output.request_id] += output.token_ids
    log.append((fed, [output.request_id for output in outputs]))

nb.table(
    ["step", *texts, "tokens of the step", "gets a token"],
    [
        [i, *(fed.get(n, "") for n in texts), sum(fed.values()), ", ".join(got)]
        for i, (fed, got) in enumerate(log[:16])
    ],
    f"Tokens that each text feeds. `long` has {len(texts['long'])}.",
)

# %%
rows = []
for name, tokens in said.items():
    alone = list(generate(model, texts[name], len(tokens)))
    rows.append([name, tokenizer.decode(tokens), "yes" if tokens == alone else "no"])
nb.table(["text", "begins", "same as alone"], rows)

# %% jupyter={"source_hidden": true}
first = next(i for i, (_, got) in enumerate(log) if "long" in got)
fed_by_then = sum(fed.get("long", 0) for fed, _ in log[: first + 1])
cached = len(texts["long"]) - fed_by_then
nb.say(f"""
`long` came before step 6, and got its first token in step {first}. {cached} of its tokens were not
fed at all: all chats begin alike, and the prefix cache had that block. Everybody else got a token
in every step. No step had more than {max(sum(fed.values()) for fed, _ in log)} tokens.
""")

# %% [markdown]
# ## What a step costs
#
# On `bench`, with its wide layers: steps in which 4 sequences decode, and the rest of the positions
# belong to a prompt. The roofline of notebook 03 says that it is flat as long as reading weights
# sets the pace, and then grows with every position.

# %%
bench = load("bench", device=device).model
RUNNING, PROMPT, BUDGET, STEPS = 4, 264, 48, 7


def step_of(positions, decodes=RUNNING):
    """A pass in which some sequences decode and a prompt takes the other positions."""
    pool = PagedAttention(bench.config, 64, BLOCK, dtype=bench.dtype, device=device)
    pool.keys.zero_(), pool.values.zero_()
    runner = Runner(bench, pool, step_batch)
    table = iter(range(64))
    step = Step()
    for _ in range(min(decodes, positions)):
        past = [next(table), next(table)]
        step.sequences.append(Sequence(Request("d", (7,)), [7] * 30, 29, past))
        step.counts.append(1)
    rest = positions - decodes
    if rest > 0:
        own = [next(table) for _ in range(-(-rest // BLOCK))]
        step.sequences.append(Sequence(Request("p", (7,)), [7] * rest, 0, own))
        step.counts.append(rest)
    return lambda: runner(step)


sizes = [1, 2, 4, 8, 16, 32, BUDGET, 64, 128, RUNNING + PROMPT]
taken = nb.take_turns({b: step_of(b) for b in sizes}, device, rounds=5)
cost = {b: taken[b].median for b in sizes}

itemsize = bench.dtype.itemsize
work = {
    b: decode_work(bench.config, [30] * b, weight_itemsize=itemsize, kv_itemsize=itemsize)
    for b in sizes
}
roof = lesson.roofline
rate = roof.ridge(bench.dtype) * roof.read_bandwidth  # FLOP/s
floor = {b: max(w.weight_bytes / roof.read_bandwidth, w.flops / rate) for b, w in work.items()}
ridge = rate / roof.read_bandwidth * itemsize / 2  # positions

fig, ax = nb.figure(7, 3.4)
ax.plot(sizes, [1e3 * floor[b] for b in sizes], color=nb.COLOURS["predicted"], label="floor")
ax.plot(sizes, [1e3 * cost[b] for b in sizes], "o-", color=nb.COLOURS["measured"], label="measured")
ax.axvline(BUDGET, color=nb.COLOURS["unexplained"], linestyle=":")
ax.axvline(RUNNING + PROMPT, color=nb.COLOURS["unexplained"], linestyle=":")
ax.set(xlabel="positions in the step", ylabel="ms", yscale="log")
nb.doublings(ax, sizes)
ax.legend()
nb.show(fig, "Time of a step against its positions. Dotted: the two steps that are compared.")

# %% jupyter={"source_hidden": true}
derived = cost[RUNNING + PROMPT] / cost[BUDGET]
nb.say(f"""
The ridge of this machine lies at {ridge:.0f} positions: from there on each costs
{1e3 * (cost[RUNNING + PROMPT] - cost[BUDGET]) / (RUNNING + PROMPT - BUDGET):.2f} ms. A step of
{BUDGET} takes {nb.seconds_text(cost[BUDGET])} and one of {RUNNING + PROMPT}
{nb.seconds_text(cost[RUNNING + PROMPT])}, so the longest gap should become
**{derived:.1f}x** shorter. Positions alone promise {(RUNNING + PROMPT) / BUDGET:.1f}x; a step that
only decodes takes {nb.seconds_text(cost[RUNNING])}, and what of it does not depend on positions
makes the difference.
""")

# %% [markdown]
# ## Measured
#
# Both schedulers, each with an engine of its own, and the same requests: 4 decode, a prompt joins
# them, 7 steps are made. Then the next prompt, and the other side's turn.


# %%
class Side:
    """An engine in which 4 requests decode for ever."""

    def __init__(self, kind, **settings):
        blocks = RUNNING * 40 + -(-(PROMPT + 2) // BLOCK)
        self.engine = engine_of(bench, kind, blocks, max_running=RUNNING + 1, **settings)
        self.clock, self.stamps = 0.0, {f"r{i}": [] for i in range(RUNNING)}
        for name in self.stamps:
            self.engine.add(request_of(name, [rng.randrange(256) for _ in range(24)], 500))
        while any(len(s.tokens) == s.num_prompt for s in self.sequences()):
            self.engine.step()
        self.first, self.whole, self.longest, self.steps = [], [], [], []

    def sequences(self):
        """All that run or wait."""
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting]

    def episode(self, prompt, steps=STEPS):
        """The prompt arrives, and so many steps are made."""
        name = f"p{len(self.whole)}"
        self.engine.add(request_of(name, prompt, 2))
        begun, waiting = self.clock, True
        seconds = []
        for _ in range(steps):
            outputs, taken = timed(self.engine.step, device)
            seconds.append(taken)
            self.clock += taken
            for output in outputs:
                if output.request_id in self.stamps:
                    self.stamps[output.request_id].append(Stamp(self.clock, 1))
                elif waiting:
                    self.first.append(self.clock - begun)
                    waiting = False
        self.whole.append(sum(seconds))
        self.longest.append(max(seconds))  # everybody who decodes is in every step
        self.steps.append(seconds)

    def gaps(self):
        """Inter-token latencies of those that decode, as stage 06 takes them."""
        lines = [Timeline(0.0, 0.0, chunks, ended=self.clock) for chunks in self.stamps.values()]
        return [gap for line in lines for gap in load_harness.itl(line)]


sides = {
    "in one piece": Side(Scheduler),
    "in chunks": Side(ChunkedScheduler, max_tokens=BUDGET),
}
for index in range(7):
    prompt = [rng.randrange(256) for _ in range(PROMPT)]
    for side in list(sides.values())[:: 1 if index % 2 else -1]:
        side.episode(prompt)
one, cut = sides["in one piece"], sides["in chunks"]
ratios = [a / b for a, b in zip(one.longest, cut.longest, strict=True)]
measured = statistics.median(ratios)

# %%
fig, ax = nb.figure(8, 3)
for side, (name, colour) in zip(
    sides.values(),
    (("in one piece", "predicted"), ("in chunks", "measured")),
    strict=True,
):
    steps = [1e3 * s for episode in side.steps[1:4] for s in episode]
    ax.step(range(len(steps)), steps, where="mid", color=nb.COLOURS[colour], label=name)
ax.set(xlabel="step", ylabel="ms", ylim=(0, None))
ax.legend()
nb.show(fig, "Three episodes: what those that decode wait for their next token, step by step.")

# %%
percentiles = {
    name: [1e3 * load_harness.percentile(side.gaps(), q) for q in (50, 95, 99, 100)]
    for name, side in sides.items()
}
nb.table(
    ["the prompt", "ITL p50", "p95", "p99", "longest", "its own first token", "tokens/s"],
    [
        [
            name,
            *(f"{p:.0f} ms" for p in percentiles[name]),
            nb.seconds_text(statistics.median(side.first)),
            f"{(RUNNING * STEPS + 2 + PROMPT) / statistics.median(side.whole):.0f}",
        ]
        for name, side in sides.items()
    ],
    "The same requests on both sides. Tokens of prompts are counted among the tokens per second.",
)

# %%
prediction.score(measured, derived=derived)

# %% jupyter={"source_hidden": true}
later = statistics.median(cut.first) / statistics.median(one.first)
total = statistics.median(one.whole) / statistics.median(cut.whole)
chunk_steps = [s for episode in cut.steps for s in episode[: STEPS - 1]]
text = f"""The longest gap became **{measured:.1f}x** shorter ({min(ratios):.1f} to
{max(ratios):.1f} in {len(ratios)} episodes), where single steps promised {derived:.1f}x. The
prompt's first token came {later:.2f}x as late. The whole took {total:.2f}x as long in one piece as
in chunks."""
usual, worst = statistics.median(chunk_steps), statistics.median(cut.longest)
text += f""" A step with a chunk takes {nb.seconds_text(usual)} in the median, and the longest of an
episode {nb.seconds_text(worst)}, {worst / usual:.2f} times that."""
if worst > 1.1 * usual:
    text += """ Something else was at work on this machine: six steps with a chunk give it six
chances to lengthen the longest of them, and in one piece there is one long step only."""
p50 = percentiles["in chunks"][0] / percentiles["in one piece"][0]
text += f"""

The median gap is {p50:.1f} times that of the other side: while a prompt is being cut, every step
carries a chunk. The tail was bought with it."""
nb.say(text)

# %% [markdown]
# ## Which budget?
#
# A smaller budget makes shorter gaps, and more of each step belongs to those that decode anyway.
# From the costs above, the time of the prompt in steps of b tokens is
# ceil(264 / (b - 4)) × t(b). One episode for each of some budgets:


# %%
def cost_of(positions):
    """Seconds of a step, between the measured ones on a line."""
    return float(np.interp(positions, sizes, [cost[b] for b in sizes]))


budgets = [12, 16, 24, 32, BUDGET, 64, 128, RUNNING + PROMPT]
found = {}
for budget in budgets:
    side = Side(ChunkedScheduler, max_tokens=budget)
    for _ in range(1 if budget < 16 else 2):
        prompt = [rng.randrange(256) for _ in range(PROMPT)]
        side.episode(prompt, steps=-(-PROMPT // (budget - RUNNING)) + 1)
    found[budget] = (min(side.longest), min(side.first))
alone = min(nb.take_turns({"decode": step_of(RUNNING)}, device, rounds=5)["decode"].readings)
promised = {b: (cost_of(b), -(-PROMPT // (b - RUNNING)) * cost_of(b)) for b in budgets}

fig, axes = nb.figure(8, 3, ncols=2)
for ax, which, label in zip(axes, (0, 1), ("longest gap, ms", "first token, ms"), strict=True):
    for values, colour, style, name in (
        (promised, "predicted", "--", "predicted"),
        (found, "measured", "o-", "measured"),
    ):
        ax.plot(budgets, [1e3 * values[b][which] for b in budgets], style,
                color=nb.COLOURS[colour], label=name)  # fmt: skip
    ax.set(xlabel="budget", ylabel=label, ylim=(0, None))
    nb.doublings(ax, budgets)
axes[0].legend()
nb.show(fig, "The same prompt with different budgets: gaps of those that decode, and its own wait.")

# %% jupyter={"source_hidden": true}
smallest, largest = budgets[0], budgets[-1]
nb.say(f"""
With {smallest} tokens a step the longest gap is {nb.seconds_text(found[smallest][0])}, and the
prompt waits {nb.seconds_text(found[smallest][1])}; with {largest}, which is stage 11,
{nb.seconds_text(found[largest][0])} and {nb.seconds_text(found[largest][1])}. The gap cannot fall
below a step that only decodes, {nb.seconds_text(alone)} at the same time: a budget that comes near
it makes the prompt pay for a reading of the weights with every chunk, and gains little.
""")

# %% [markdown]
# ## On a large card
#
# The same arithmetic for Llama-3-8B at 16 bits on an H100, by its data sheet: a prompt of 8,192
# tokens while 32 decode. Each chunk also reads the keys and values of all chunks before it.

# %%
bandwidth, flops, kv_token = 3.35e12, 989e12, 131_072
big = decode_work(BENCH_8B, [1], weight_itemsize=2, kv_itemsize=2).weight_bytes
many = np.array([40, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8224])
step_s = np.maximum(big / bandwidth, big * many / flops)  # 2 FLOP per weight of 2 bytes
count = np.ceil(8192 / (many - 32))
reading = count * (count + 1) / 2 * (many - 32) * kv_token / bandwidth

fig, ax = nb.figure(7, 3.2)
ax.plot(many, 1e3 * count * step_s, color=nb.COLOURS["weights"], label="the prompt, in all")
ax.plot(many, 1e3 * reading, color=nb.COLOURS["kv"], label="of that, keys read again")
ax.plot(many, 1e3 * step_s, color=nb.COLOURS["measured"], label="the longest gap")
ax.axvline(flops / bandwidth, color=nb.COLOURS["unexplained"], linestyle=":", label="ridge")
ax.set(xlabel="budget", ylabel="ms", yscale="log")
nb.doublings(ax, [64, 128, 256, 512, 1024, 2048, 4096, 8192])
ax.legend()
nb.show(fig, "Derived, not measured: what a budget buys and costs on an H100.")

# %% jupyter={"source_hidden": true}
at = {int(b): i for i, b in enumerate(many)}
nb.say(f"""
The gap stays at {1e3 * step_s[at[256]]:.1f} ms up to {flops / bandwidth:.0f} tokens, and grows from
there on. The prompt takes {1e3 * count[at[64]] * step_s[at[64]]:,.0f} ms with a budget of 64,
{1e3 * count[at[512]] * step_s[at[512]]:,.0f} with 512, and
{1e3 * count[-1] * step_s[-1]:,.0f} in one piece. Somewhat above the ridge almost nothing is lost,
and the gap is {step_s[-1] / step_s[at[512]]:.0f} times shorter than in one piece.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid
#
# A step is now between a few tokens and the budget, and never more. On a GPU, a small one is over
# before the host has launched all of its kernels: stage 13 records them once.
#
# ## Questions
#
# 1. Why is there never more than one text in the middle of its prompt?
# 2. `max_tokens` equals `max_running`, and all seats but one decode. Does the prompt ever end?
# 3. Which percentile would you show to somebody who wants chunks turned off?
#
# <details><summary>Answers</summary>
#
# 1. It was cut because the budget was used up, so nobody was admitted behind it; and as long as it
#    is not done, it takes all that is left of each step.
# 2. Yes. It occupies a seat, so at most max_running - 1 decode, and one token is left for it in
#    every step.
# 3. The median: it is worse with chunks. Which is why one percentile is no description.
# </details>
#
# **Your turn.** `./course check 12` looks at every step of your own scheduler.
#
# ## Sources
#
# - A. Agrawal et al. "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve." OSDI
#   2024. Chunked prefills, and a token budget for each step.
# - C. Holmes et al. "DeepSpeed-FastGen: High-throughput Text Generation for LLMs via MII and
#   DeepSpeed-Inference." 2024. The same idea, as Dynamic SplitFuse.
