# %% [markdown]
# # 05 · Continuous batching
#
# **Claim.** A static batch runs until its longest member ends. If a request that ends leaves its
# slot at once, and the next one takes it before the next step, then every slot works as long as
# anybody waits. How many steps that saves follows from the lengths of the outputs alone; how much
# time it saves does not.
#
# You will draw the bill of static batches, bound the steps on paper, count them, and then find out
# why the time falls by less. You need notebook 04: a batch, and what a rectangle costs.

# %%
import math
import random
import statistics

import numpy as np
import torch
from matplotlib.colors import ListedColormap

import course.notebook as nb
from course.measure import CountingModel, timed
from course.model import load
from course.types import Request, SamplingParams

lesson = nb.Lesson(5)
model, tokenizer, device = lesson.model, lesson.tokenizer, lesson.device
ContinuousBatcher = lesson.reference.ContinuousBatcher
generate, generate_batch = nb.reference(2).generate, nb.reference(4).generate_batch

# %% [markdown]
# ## Predict first
#
# Half of these requests are at most a quarter as long as the longest. The first guess concludes
# that a static batch takes four times as many steps as it should.

# %%
guess = 4
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## The bill of static batches
#
# Let the lengths of answers be *log-uniform*: as many between 8 and 16 tokens as between 64 and
# 128. Here are 32 of them, spread evenly over that distribution and dealt like cards: of every
# eight in a row, one is among the four longest, one among the next four, and so on.

# %%
slots = 8


def lengths_of(count, shortest, longest):
    """Output lengths, shortest first: as many in each doubling."""
    span = math.log(longest / shortest)
    return [round(shortest * math.exp(span * (i + 0.5) / count)) for i in range(count)]


def deal(lengths, rng):
    """Every eight that follow each other hold one of each eighth."""
    each = len(lengths) // slots
    decks = [lengths[i : i + each] for i in range(0, len(lengths), each)]
    hands = zip(*(rng.sample(deck, each) for deck in decks), strict=True)
    return [length for hand in hands for length in rng.sample(hand, slots)]


rng = random.Random(5)
outputs = deal(lengths_of(32, 8, 128), rng)
decodes = [new - 1 for new in outputs]  # the first token comes from prefill
batches = [decodes[i : i + slots] for i in range(0, len(decodes), slots)]
static_steps = sum(max(batch) for batch in batches)

busy = np.zeros((slots, static_steps))
begins = 0
for number, batch in enumerate(batches):
    for row, length in enumerate(batch):
        busy[row, begins : begins + length] = number + 1
    begins += max(batch)

shades = ["#FFFFFF", *(nb.COLOURS[name] for name in ("cached", "host", "kv", "arithmetic"))]
fig, ax = nb.figure(8, 2.2)
ax.imshow(busy, aspect="auto", cmap=ListedColormap(shades), interpolation="nearest")
ax.set(xlabel="decode step", ylabel="row", yticks=range(slots))
ax.grid(False)
nb.show(
    fig,
    "Four static batches, one after the other. White is computed as well: rows that have ended.",
)

# %% jupyter={"source_hidden": true}
nb.say(f"""
{static_steps} steps of {slots} rows, for {sum(decodes):,} rows that somebody needs:
{sum(decodes) / (slots * static_steps):.0%}. Each batch takes as long as its longest member, and a
deal gives each batch one of the four longest: {" + ".join(map(str, sorted(decodes)[-4:]))}.
""")

# %% [markdown]
# ## On paper
#
# Now let every slot be taken again in the step after it falls free. With *w* the decode steps of
# the request that ends last, and N slots:
#
# $$ \frac{\sum (\text{new} - 1)}{N} \;\le\; \text{steps} \;\le\;
# \frac{\sum (\text{new} - 1) - w}{N} + w $$
#
# On the left, every slot works in every step. On the right: the last to end was admitted when a
# slot fell free, and until then all slots had worked, since it waited itself. From there it takes
# w steps more (R. L. Graham, 1966). Between the two, the *order* decides, and it is drawn at
# random. The prediction takes the middle.

# %%
least = math.ceil(sum(decodes) / slots)
most = int((sum(decodes) - max(decodes)) / slots + max(decodes))
derived = static_steps / ((least + most) / 2)
nb.table(
    ["", "steps", "times fewer than static"],
    [
        ["static batches", static_steps, 1.0],
        ["at least", least, static_steps / least],
        ["at most", most, static_steps / most],
        ["the middle", f"{(least + most) / 2:g}", derived],
    ],
)

# %% [markdown]
# ## Slots
#
# In a static batch all rows end in the same column, so nobody can join who is longer than what has
# been used. Here each sequence has a *slot*: a row of the cache that counts its own length, with
# position p in column p. `plan` says which slots the next pass serves.

# %%
lesson.code("SlotCache.plan")

# %%
lesson.code("SlotCache.__call__")

# %% [markdown]
# What lies to the right of a row's own position, leftovers of the last owner or memory that was
# never used, is masked: multiplied by 0, that is, not skipped. Hence zeros in the beginning, and no
# clearing when a slot is released.
#
# One step: admit while a slot is free, each newcomer with a prefill of its own; then one decode
# pass for all who run.

# %%
lesson.code("ContinuousBatcher.step")

# %% [markdown]
# ## Each request is its own text
#
# Seven questions for the real model, three slots. What each of them says must be what it says
# alone, whoever comes and goes beside it.

# %%
questions = {
    "fruits": ("Name three fruits.", 14),
    "sky": ("Why is the sky blue?", 22),
    "seven": ("What is seven times eight?", 8),
    "sea": ("Describe the sea in one sentence.", 18),
    "cat": ("Give me a name for a cat.", 6),
    "capital": ("What is the capital of France?", 10),
    "bread": ("How do I bake bread?", 16),
}
asked = {
    name: Request(
        name,
        tuple(tokenizer.chat([{"role": "user", "content": question}])),
        SamplingParams(max_new_tokens=limit),
        tuple(tokenizer.eos_ids),
    )
    for name, (question, limit) in questions.items()
}
room = max(len(r.prompt_ids) + r.params.max_new_tokens for r in asked.values())
batcher = ContinuousBatcher(model, 3, room)
for request in asked.values():
    batcher.add(request)
said = {name: [] for name in asked}
spans, step = {}, 0  # name -> [slot, first step, last step]
while batcher.has_work:
    for output in batcher.step():
        said[output.request_id] += output.token_ids
        spans.setdefault(output.request_id, [None, step, step])[2] = step
    for slot, sequence in batcher.running.items():
        spans[sequence.request.request_id][0] = slot
    step += 1

fig, ax = nb.figure(8, 2.2)
cycle = [nb.COLOURS[name] for name in ("cached", "host", "kv", "arithmetic", "weights")]
for number, (name, (slot, first, last)) in enumerate(spans.items()):
    if slot is None:  # it ended in the step that admitted it
        continue
    colour = cycle[number % len(cycle)]
    ax.barh(slot, last - first + 1, left=first, height=0.8, color=colour, edgecolor="white")
    ax.annotate(name, (first + 0.2, slot), va="center", fontsize=8)
ax.set(xlabel="step", ylabel="slot", yticks=range(3), ylim=(2.6, -0.6))
ax.grid(False)
nb.show(fig, "Who is in which slot. Each bar begins with a prefill.")

# %%
alone = {
    name: list(generate(model, r.prompt_ids, r.params.max_new_tokens, r.eos_ids))
    for name, r in asked.items()
}
nb.table(
    ["request", "text", "tokens", "same as alone"],
    [
        [
            question,
            tokenizer.decode(said[name]).strip()[:60],
            len(said[name]),
            "yes" if said[name] == alone[name] else "no",
        ]
        for name, (question, _) in questions.items()
    ],
)

# %% jupyter={"source_hidden": true}
differ = [name for name in asked if said[name] != alone[name]]
nb.say(
    "Every text is what it is alone."
    if not differ
    else f"""{", ".join(differ)} part from the text alone. In float32 that happens at near-ties: a
pass over three rows adds up in another order than a pass over one."""
)

# %% [markdown]
# ## Steps, counted
#
# The trace from above, on `nano`: counts are the same for every model.

# %%
nano = CountingModel(load("nano", device=device).model)
prompt_lengths = [rng.randrange(16, 33) for _ in outputs]


def request_of(number, prompt_length, new):
    """A request with a random prompt."""
    prompt = tuple(rng.randrange(256) for _ in range(prompt_length))
    return Request(f"r{number}", prompt, SamplingParams(max_new_tokens=new))


def serve(model, requests, capacity, slots=slots):
    """A batcher with all requests, and after each step: (batcher, outputs)."""
    batcher = ContinuousBatcher(model, slots, capacity)
    for request in requests:
        batcher.add(request)
    while batcher.has_work:
        yield batcher, batcher.step()


trace = [request_of(i, n, m) for i, (n, m) in enumerate(zip(prompt_lengths, outputs, strict=True))]
prompt_of = {request.request_id: len(request.prompt_ids) for request in trace}
capacity = nano.config.max_context
known, rows_at_work, waiting, held, counted = set(), [], [], [], 0
for served, results in serve(nano, trace, capacity):
    newcomers = {output.request_id for output in results} - known
    known |= newcomers
    fresh = nano.counts.positions - counted - sum(prompt_of[name] for name in newcomers)
    counted = nano.counts.positions
    rows_at_work.append(fresh)  # one position for each row of the decode pass
    waiting.append(len(served.waiting))
    held.append(sum(s.num_computed for s in served.running.values()))
steps = sum(rows > 0 for rows in rows_at_work)

# %%
prediction.score(static_steps / steps, derived=derived)

# %%
static_rows = [sum(length > s for length in batch) for batch in batches for s in range(max(batch))]
fig, ax = nb.figure(8, 3)
ax.step(range(static_steps), static_rows, where="post", color=nb.COLOURS["naive"], label="static")
ax.step(
    range(len(rows_at_work)),
    rows_at_work,
    where="post",
    color=nb.COLOURS["measured"],
    label="continuous, counted",
)
ax.axvspan(least, most, color=nb.COLOURS["faint"], label="predicted end")
ax.set(xlabel="decode step", ylabel="rows that somebody needs", ylim=(0, slots + 0.5))
ax.legend(loc="upper right")
nb.show(
    fig,
    "Useful rows in each decode step. Both areas are the same work; grey is where the bounds let "
    "the continuous one end.",
)

# %% jupyter={"source_hidden": true}
dry = next((i for i, left in enumerate(waiting) if left == 0), len(waiting))
tail = rows_at_work[dry:]
empty = sum(slots - rows for rows in tail)
occupied = [rows / slots for rows, left in zip(rows_at_work, waiting, strict=True) if left]
nb.say(f"""
{steps} steps against {static_steps}: {static_steps / steps:.2f}x fewer. While requests waited,
{statistics.mean(occupied):.0%} of the slots were at work. What separates the {steps} from the least
possible {least} is the tail: after step {dry} nobody waited any more, slots fell empty, and
{empty} of their rows went unused, {empty / slots:.0f} steps' worth. The middle of the bounds
promised {(least + most) / 2:g}. Your {prediction.guess:g}x is out of reach of any order: without a
tail it would be {static_steps / least:.2f}x.
""")

# %% [markdown]
# **The order.** Is that tail typical? The steps follow from the lengths, so many orders can be
# played through without a model. Two ways to draw them: shuffled, and dealt as above.


# %%
def steps_of(decodes):
    """Decode steps of slots that are taken again at once."""
    queue, running, steps = list(reversed(decodes)), [], 0
    while queue or running:
        while queue and len(running) < slots:
            running.append(queue.pop())
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps


def static_of(decodes):
    """Decode steps of static batches."""
    return sum(max(decodes[i : i + slots]) for i in range(0, len(decodes), slots))


assert steps_of(decodes) == steps  # what was counted is what the rule says
ordered = [new - 1 for new in sorted(outputs)]
draws = {
    "shuffled": [rng.sample(ordered, len(ordered)) for _ in range(2000)],
    "dealt": [deal(ordered, rng) for _ in range(2000)],
}
ratios = {name: [static_of(d) / steps_of(d) for d in drawn] for name, drawn in draws.items()}

fig, ax = nb.figure(7, 3)
bins = np.linspace(1.2, 2.6, 57)
for name, colour in (("shuffled", "unexplained"), ("dealt", "measured")):
    ax.hist(ratios[name], bins, color=nb.COLOURS[colour], alpha=0.7, label=name)
for bound in (least, most):
    ax.axvline(static_steps / bound, color=nb.COLOURS["predicted"], linestyle=":")
ax.axvline(static_steps / steps, color=nb.COLOURS["reference"], label="the trace above")
ax.set(xlabel="times fewer decode steps than static", yticks=[])
ax.legend()
nb.show(
    fig,
    "The same 32 lengths in 2,000 orders. Dotted lines are the bounds for dealt orders; the gate "
    "deals, so that the verdict is not a matter of luck.",
)

# %% jupyter={"source_hidden": true}
nb.say(f"""
Dealt: {min(ratios["dealt"]):.2f} to {max(ratios["dealt"]):.2f}, on average
{statistics.mean(ratios["dealt"]):.2f}. Shuffled: {min(ratios["shuffled"]):.2f} to
{max(ratios["shuffled"]):.2f}, on average {statistics.mean(ratios["shuffled"]):.2f}, because some
static batch gets by without a long member.
""")

# %% [markdown]
# ## In time: a prediction
#
# Steps are not seconds. Each newcomer is prefilled alone, where a static batch prefills eight in
# one pass; and a step over three rows may be as long as one over eight, or shorter. So measure the
# passes, on `bench` with its wide layers, and add them up for a trace of 16 requests of 4 to 64 new
# tokens.

# %%
bench = load("bench", device=device).model
short_outputs = deal(lengths_of(16, 4, 64), rng)
bench_trace = [request_of(i, rng.randrange(16, 33), new) for i, new in enumerate(short_outputs)]
bench_capacity = max(len(r.prompt_ids) + r.params.max_new_tokens for r in bench_trace)


def pass_of(batch, queries):
    """A pass over so many rows and positions, into a SlotCache with 32 positions before."""
    cache = lesson.reference.SlotCache(
        bench.config, slots, bench_capacity, dtype=bench.dtype, device=device
    )
    token_ids = torch.zeros(batch, queries, dtype=torch.int64, device=device)
    last = [queries * (row + 1) - 1 for row in range(batch)]
    past = 32 if queries == 1 else 0

    def step():
        cache.lengths = [past] * slots
        positions = cache.plan(list(range(batch)), queries)
        return bench.forward(token_ids, positions, cache, last)

    return step


mean_prompt = round(statistics.mean(len(r.prompt_ids) for r in bench_trace))
widest = max(len(r.prompt_ids) for r in bench_trace)
pieces = {("decode", rows): pass_of(rows, 1) for rows in (1, 2, 4, 8)}
pieces |= {("prefill", 1): pass_of(1, mean_prompt), ("prefill", slots): pass_of(slots, widest)}
piece = {key: taken.median for key, taken in nb.take_turns(pieces, device, rounds=9).items()}


def decode_at(rows):
    """Seconds of a decode pass, between the measured ones on a line."""
    known = [1, 2, 4, 8]
    return float(np.interp(rows, known, [piece["decode", k] for k in known]))


def rows_of(decodes):
    """Rows of each decode step of the rule."""
    queue, running, rows = list(reversed(decodes)), [], []
    while queue or running:
        while queue and len(running) < slots:
            running.append(queue.pop())
        rows.append(len(running))
        running = [left - 1 for left in running if left > 1]
    return rows


bench_decodes = [new - 1 for new in short_outputs]
static_count, rows = static_of(bench_decodes), rows_of(bench_decodes)
expected = {
    "static": {
        "prefill": len(bench_trace) / slots * piece["prefill", slots],
        "decode": static_count * decode_at(slots),
    },
    "continuous": {
        "prefill": len(bench_trace) * piece["prefill", 1],
        "decode": sum(map(decode_at, rows)),
    },
}
expected_time = {side: sum(parts.values()) for side, parts in expected.items()}
nb.table(
    ["a pass", "time"],
    [
        [f"{kind}, {batch} row{'s' * (batch > 1)}", nb.seconds_text(s)]
        for (kind, batch), s in piece.items()
    ],
    f"Prefill of {mean_prompt} tokens alone, and of {slots} prompts in {widest} columns.",
)

# %% jupyter={"source_hidden": true}
nb.say(f"""
A decode pass reads all weights, for one row or for eight, so those four times lie close together,
in any order. {static_count} static steps against {len(rows)}:
{static_count / len(rows):.2f}x fewer. In time that should be
{nb.seconds_text(expected_time["static"])} against
{nb.seconds_text(expected_time["continuous"])}:
**{expected_time["static"] / expected_time["continuous"]:.2f}x**.
""")

# %% [markdown]
# ## In time: measured
#
# Both sides serve the trace, a step of each in turn, and every pass is timed.


# %%
class Clocked:
    """A model that notes how long each of its passes took, and what kind it was."""

    def __init__(self, model):
        self.model, self.passes = model, []
        self.config, self.device, self.dtype = model.config, model.device, model.dtype

    def forward(self, token_ids, *rest):
        """As the model's."""
        out, seconds = timed(lambda: self.model.forward(token_ids, *rest), device)
        kind = "decode" if token_ids.shape[1] == 1 else "prefill"
        self.passes.append((kind, len(token_ids), seconds))
        return out

    def total(self, kind):
        """Seconds in passes of this kind."""
        return sum(s for k, _, s in self.passes if k == kind)


def static_steps_of(model):
    """The passes of static batches, one at a time."""
    for start in range(0, len(bench_trace), slots):
        batch = bench_trace[start : start + slots]
        limits = [r.params.max_new_tokens for r in batch]
        yield from generate_batch(model, [list(r.prompt_ids) for r in batch], limits)


def race():
    """Both sides through the trace; seconds of every step, and the passes."""
    clocks = {"static": Clocked(bench), "continuous": Clocked(bench)}
    runs = {
        "static": static_steps_of(clocks["static"]),
        "continuous": serve(clocks["continuous"], bench_trace, bench_capacity),
    }
    seconds = {side: [] for side in runs}
    active = list(runs)
    while active:
        for side in list(active):
            step, taken = timed(lambda side=side: next(runs[side], None), device)
            if step is None:
                active.remove(side)
            else:
                seconds[side].append(taken)
    return seconds, clocks


races = [race() for _ in range(2)]
wall = {side: [sum(seconds[side]) for seconds, _ in races] for side in expected}
faster = [a / b for a, b in zip(wall["static"], wall["continuous"], strict=True)]
spent = {
    side: {
        kind: statistics.mean(clocks[side].total(kind) for _, clocks in races)
        for kind in ("prefill", "decode")
    }
    for side in expected
}

# %%
fig, ax = nb.figure(7, 2.6)
bars = {f"{side}, {what}": parts[side] for side in expected
        for what, parts in (("predicted", expected), ("measured", spent))}  # fmt: skip
for kind, colour in (("prefill", "host"), ("decode", "weights")):
    left = [parts["prefill"] if kind == "decode" else 0 for parts in bars.values()]
    ax.barh(list(bars), [parts[kind] for parts in bars.values()], left=left,
            color=nb.COLOURS[colour], label=kind)  # fmt: skip
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set_xlabel("seconds")
ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(fig, "Where the time of the trace goes: predicted from single passes, and measured.")

# %%
nb.table(
    ["", "steps", "prefill", "decode", "whole trace", "predicted"],
    [
        [
            side,
            count,
            nb.seconds_text(spent[side]["prefill"]),
            nb.seconds_text(spent[side]["decode"]),
            nb.seconds_text(statistics.mean(wall[side])),
            nb.seconds_text(expected_time[side]),
        ]
        for side, count in (("static", static_count), ("continuous", len(rows)))
    ],
)

# %% jupyter={"source_hidden": true}
by_steps = static_count / len(rows)
by_decode = spent["static"]["decode"] / spent["continuous"]["decode"]
found, promised = statistics.mean(faster), expected_time["static"] / expected_time["continuous"]
extra = spent["continuous"]["prefill"] - spent["static"]["prefill"]
each = {
    "static": spent["static"]["decode"] / static_count,
    "continuous": spent["continuous"]["decode"] / len(rows),
}
decode = f"""a step took {nb.seconds_text(each["continuous"])} on average for
{statistics.mean(rows):.1f} rows, a static one {nb.seconds_text(each["static"])} for {slots}"""
if extra > 0:
    prefill = f"""Single prefills took {nb.seconds_text(extra)} more than joint ones
({spent["continuous"]["prefill"] / sum(spent["continuous"].values()):.0%} of the continuous side's
time, against {spent["static"]["prefill"] / sum(spent["static"].values()):.0%})"""
else:
    prefill = f"""Single prefills took {nb.seconds_text(-extra)} less than joint ones, which compute
their padding as well"""
nb.say(f"""
{by_steps:.2f}x fewer steps became **{found:.2f}x** less time ({min(faster):.2f} and
{max(faster):.2f} in two races; predicted {promised:.2f}x). Decode fell by {by_decode:.2f}x:
{decode}. {prefill}. Passes explain
{sum(spent["continuous"].values()) / statistics.mean(wall["continuous"]):.0%} of the continuous
side's time; the rest is Python between them.
""")

# %% [markdown]
# ## The price: everybody waits for a newcomer
#
# A prefill is a pass of its own, and nobody decodes meanwhile. Here is every step of the last race:
# what a running text waits for its next token.

# %%
seconds, clocks = races[-1]
admits, passes = [], iter(clocks["continuous"].passes)
for _ in seconds["continuous"]:
    prefills = 0
    for kind, *_ in passes:
        if kind == "decode":
            break
        prefills += 1
    admits.append(prefills)
gaps = [1e3 * s for s in seconds["continuous"]]

fig, ax = nb.figure(8, 3)
number = np.arange(len(gaps))
with_prefill = np.array(admits) > 0
for chosen, colour, label in (
    (~with_prefill, "measured", "decode only"),
    (with_prefill, "predicted", "admits somebody"),
):
    ax.bar(number[chosen], np.array(gaps)[chosen], color=nb.COLOURS[colour], label=label, width=0.9)
ax.set(xlabel="step", ylabel="ms")
ax.legend()
nb.show(fig, "Each step of the continuous side, in milliseconds.")

# %% jupyter={"source_hidden": true}
plain = [gap for gap, count in zip(gaps, admits, strict=True) if count == 0]
later = [gap for gap, count in zip(gaps[1:], admits[1:], strict=True) if count]
if plain and later:
    usual = statistics.median(plain)
    interrupted = f"""A step without a newcomer takes {usual:.1f} ms (median). One that admits
somebody while others run takes {statistics.median(later):.1f} ms, and up to {max(later):.1f} ms:
{max(later) / usual:.1f} times as long a wait for everybody who runs. Prompts here have {widest}
tokens at most."""
else:
    interrupted = "Nobody was admitted while others ran."
nb.say(interrupted)

# %% [markdown]
# ## The price: what a slot reserves
#
# Each slot reserves as many positions as the longest request could need. How many of them hold a
# token? Counted on the trace of 32 requests on `nano`, whose context is what each slot reserves.

# %%
reserved = slots * capacity
fig, ax = nb.figure(8, 2.8)
ax.fill_between(range(len(held)), held, step="post", color=nb.COLOURS["kv"], label="hold a token")
ax.axhline(reserved, color=nb.COLOURS["reference"], label="reserved")
ax.set(xlabel="step", ylabel="positions", ylim=(0, 1.1 * reserved))
ax.legend(loc="center right")
nb.show(fig, "Positions of the cache that hold a token, and those that are reserved.")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
On average {statistics.mean(held) / reserved:.0%} of the reserved positions hold a token, and never
more than {max(held) / reserved:.0%}. In the memory that was reserved for {slots} texts,
{reserved // max(held)} times as many could have run. Stage 07 reserves in small blocks, as they are
needed. And a long prompt still stops everybody for the length of its prefill: stage 12 cuts it into
pieces.
""")

# %% [markdown]
# ## Questions
#
# 1. All outputs have the same length. What is continuous batching worth then? What does it cost?
# 2. Why are there zeros in an unused slot, and not whatever the memory holds?
# 3. Twice as many slots: what happens to the lower bound, to the tail, and to the time of a step?
#
# <details><summary>Answers</summary>
#
# 1. No step is saved: all slots fall free in the same one. It costs the single prefills. Requests
#    that come at different times still need not wait for each other.
# 2. Masked positions get a weight of 0 and are multiplied by it. Memory may hold NaN, and 0 × NaN
#    is NaN.
# 3. The bound halves, the tail stays as long as the longest request, and a step gets longer as soon
#    as multiplying or the caches set the pace. So the gain from more slots fades.
# </details>
#
# **Your turn.** `./course check 5` counts your own batcher's steps.
#
# ## Sources
#
# - G.-I. Yu, J. S. Jeong, G.-W. Kim, S. Kim, B.-G. Chun. "Orca: A Distributed Serving System for
#   Transformer-Based Generative Models." OSDI 2022. Iteration-level scheduling.
# - R. L. Graham. "Bounds for Certain Multiprocessing Anomalies." Bell System Technical Journal
#   45(9), 1966. The bounds on the steps.
