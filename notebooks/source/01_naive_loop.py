# %% [markdown]
# # 01 · The naive loop
#
# **Claim.** A language model does not write. It takes a list of tokens and returns one score for
# every token that could come next; a loop of a dozen lines turns that into text. Written in the
# plainest way, the loop spends nearly all of its work on computing again what it computed one step
# before, and so each token costs more than the one before it.
#
# You will take one token out of a real model by hand, read the loop, predict how much it computes
# and how long its steps take, and hold both predictions against measurements on this machine. You
# need no more than to know what a matrix product is. Everything below was computed when the
# notebook ran: numbers in the text come from the measurements, not from the author.

# %%
import time

import numpy as np
import torch

import course.notebook as nb
from course.measure import Bar, CountingModel, measure_pair, timed
from course.model import FullAttention, load

lesson = nb.Lesson(1)
model, tokenizer, device = lesson.model, lesson.tokenizer, lesson.device

# %% [markdown]
# ## Predict first
#
# A *position* is computed once whenever one token of the text passes through all layers of the
# model. The prompt has 64 positions, the answer 128, and the loop remembers nothing from one step
# to the next. Replace the first guess below, which takes each token once, by your own. It will be
# scored.

# %%
guess = 192
prediction = lesson.predict(guess, " positions")

# %% [markdown]
# ## One token by hand
#
# The model knows no letters. A tokenizer cuts text into pieces from a fixed *vocabulary*, and a
# token is the number of such a piece. (A space in front of a word belongs to the piece; it is shown
# as ␣.)

# %%
prompt_ids = tokenizer.encode("The capital of France is")


def piece(token):
    """The text of one token, with its spaces made visible."""
    return f"`{tokenizer.decode([token])}`".replace(" ", "␣")


nb.table(
    ["position", *range(len(prompt_ids))],
    [["piece", *map(piece, prompt_ids)], ["token", *prompt_ids]],
)

# %% [markdown]
# One *forward pass* takes the tokens `[B, T]` and their positions `[B, T]`: here one sequence, so
# B = 1. The third argument is the attention. In this course it is an object that is handed in,
# because the whole course is about what that object may remember. `FullAttention` remembers
# nothing: it sees exactly the positions of this pass.

# %%
token_ids = torch.tensor([prompt_ids], device=device)  # [1, T]
positions = torch.arange(len(prompt_ids), device=device)[None]  # [1, T]
logits = model.forward(token_ids, positions, FullAttention())  # [1, T, V]

# %% jupyter={"source_hidden": true}
rows, vocabulary = logits.shape[1:]
nb.say(f"""
The pass returns *logits* of shape `[1, {rows}, {vocabulary}]`: for each of the {rows} positions a
score for each of the {vocabulary:,} tokens. Softmax turns a row of scores into probabilities. The
last row is about what follows the whole text:
""")

# %%
probabilities = logits[0, -1].softmax(-1)  # [V]
top = probabilities.topk(5)
nb.table(
    ["next token", "logit", "probability"],
    [
        [piece(int(i)), float(logits[0, -1, i]), f"{float(p):.1%}"]
        for p, i in zip(top.values, top.indices, strict=True)
    ],
)

# %% [markdown]
# *Greedy decoding* takes the largest score: an `argmax`, no softmax needed, because softmax keeps
# the order. That is the one new token. But the pass returned a row for *every* position, and each
# of them is a prediction, too. Here they all are, beside what the text really goes on with:

# %%
predicted = logits[0].argmax(-1).tolist()
nb.table(
    ["after position", "text so far", "the model expects", "the text has"],
    [
        [
            t,
            f"`{tokenizer.decode(prompt_ids[: t + 1])}`",
            piece(predicted[t]),
            piece(prompt_ids[t + 1]) if t + 1 < rows else "**nothing yet**",
        ]
        for t in range(rows)
    ],
)

# %% [markdown]
# Row t depends on the tokens 0 to t and on nothing after them: attention is *causal*, it never
# looks ahead. In training all rows are useful, since each is compared with the token that follows.
# In generation only the last row tells something that we do not have. Keep both facts in mind: the
# first makes stage 02 possible, the second will save work in this one.
#
# ## The loop
#
# Append the new token, run the model again, and so on. A model that reads its own output in this
# way is called *autoregressive*. This is the reference solution, cut from its file:

# %%
lesson.code("generate")

# %% [markdown]
# - `check_generation` refuses bad arguments, and gives the number of tokens that fit the context.
# - `tokens` is all the state there is. Every step feeds *all* of it, from position 0.
# - `logit_rows=[-1]` sends only the last row through the LM head, the matrix that makes scores for
#   the whole vocabulary.
# - The token is yielded before anything else is computed, the end token included.
#
# Let it talk. `watch` prints each token as it comes, and notes how long it took.

# %%
question = (
    "Explain to a friend who cooks, but does not program, why a cache makes a computer faster."
)
chat_ids = tokenizer.chat([{"role": "user", "content": question}])
generate = lesson.reference.generate


def watch(tokens):
    """Print tokens as they come; the seconds that each one took."""
    seconds, last = [], time.perf_counter()
    for token in tokens:
        seconds.append(time.perf_counter() - last)
        print(tokenizer.decode([token]), end="")
        last = time.perf_counter()
    return seconds


live = watch(generate(model, chat_ids, 24, tokenizer.eos_ids))

# %% jupyter={"source_hidden": true}
nb.say(f"""
{len(live)} tokens after a prompt of {len(chat_ids)} took {nb.seconds_text(sum(live))}, or
{1 / (sum(live) / len(live)):.1f} tokens per second. Keep these times; they come back at the end.
""")

# %% [markdown]
# ## How much is computed
#
# Step i, counted from 0, feeds the n tokens of the prompt and the i tokens generated so far. So m
# new tokens cost
#
# $$ n + (n+1) + \dots + (n+m-1) \;=\; n\,m + \frac{m\,(m-1)}{2} $$
#
# positions. The first term is the prompt, paid anew in each step. The second grows with the square
# of what is generated. Try it for a case that can be drawn: a prompt of 8, and 12 new tokens. Each
# row is a step, each square a position that it computes. Blue are those that no step had computed
# before.

# %%
n, m = 8, 12
squares = [(position, step) for step in range(m) for position in range(n + step)]
new = [(x, y) for x, y in squares if y == 0 or x == n + y - 1]
again = [square for square in squares if square not in new]
fig, ax = nb.figure(6.4, 3.8)
ax.scatter(*zip(*again, strict=True), s=190, marker="s", color=nb.COLOURS["faint"])
ax.scatter(*zip(*new, strict=True), s=190, marker="s", color=nb.COLOURS["measured"])
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="position in the text", ylabel="step", xticks=range(0, n + m, 2), yticks=range(m))
nb.show(
    fig,
    f"{len(squares)} positions are computed, {len(new)} of them for the first time: "
    f"{len(again) / len(squares):.0%} of the squares are grey.",
)

# %% [markdown]
# Now the case of the question: n = 64, m = 128. The formula gives the derived number. The measured
# one comes from a model that counts the positions handed to it. How many there are does not depend
# on the size of the model, so the tiny `nano` can do the counting.

# %%
n, m = 64, 128
derived = n * m + m * (m - 1) // 2

counter = CountingModel(load("nano", device=device).model)
tokens = list(generate(counter, list(range(n)), m))
prediction.score(counter.counts.positions, derived=derived)

# %% jupyter={"source_hidden": true}
counts = counter.counts
nb.say(f"""
{counts.positions:,} positions in {counts.forward_passes} passes, for {len(tokens)} tokens. A text
of {n + m} tokens, the last of which is never fed, has {n + m - 1} positions; so each of them was
computed {counts.positions / (n + m - 1):.1f} times on average. This is a count, and equal on every
machine. {counts.logit_rows} rows went through the head, one per token.
""")

# %% [markdown]
# ## How long a step takes
#
# A pass over T positions should take about
#
# $$ \text{seconds}(T) \;\approx\; a + b\,T . $$
#
# *a* is paid once per pass, however many positions it has: all weights are read from memory, every
# operation is called. *b* is paid for each position: two floating-point operations per weight, a
# multiplication and an addition. (Attention adds a term that grows with T², because every position
# meets every earlier one. At these lengths it should be small. We shall see.)
#
# So measure a few *short* texts, draw a line, and predict a longer one. The steps are timed in
# turns, one of each length per round and in swapped order, so that a slow moment of the machine
# hits all lengths alike.

# %%
far = 186 if lesson.tier == "cpu" else 3000  # a GPU needs longer texts to show any slope at all
near = [far * k // 10 for k in (1, 2, 3, 4, 5)]
text_ids = (chat_ids * 200)[:far]  # what the tokens say does not change how long they take
rounds = 7


def naive_step(length, logit_rows=(-1,)):
    """One step of the loop: a pass over the whole text of this length."""
    token_ids = torch.tensor([text_ids[:length]], device=device)
    positions = torch.arange(length, device=device)[None]
    return model.forward(token_ids, positions, FullAttention(), logit_rows=logit_rows)


def time_steps(lengths):
    """Times of a step at each length, taken in turns."""
    return nb.take_turns(
        {length: lambda length=length: naive_step(length) for length in lengths},
        device,
        rounds=rounds,
    )


near_times = time_steps(near)
nb.table(
    ["length", *near],
    [["step, median", *(nb.seconds_text(t.median) for t in near_times.values())]],
)

# %% [markdown]
# Before you go on: what will a step at the far length take? The first guess below is "as long as
# the longest one so far".

# %%
guess_ms = 1e3 * near_times[near[-1]].median
step_prediction = nb.Prediction(f"A step at length {far}", guess_ms, " ms")

# %% [markdown]
# Each round gives a line of its own. (It is the median of the slopes between all pairs of points,
# which one bad reading cannot bend.) The line in the middle makes the prediction; how far the
# others lie apart is how far it can be trusted.

# %%
lines = [
    nb.Line.through({length: times.readings[r] for length, times in near_times.items()})
    for r in range(rounds)
]
lines.sort(key=lambda line: line.at(far))
line = lines[rounds // 2]
low, high = nb.Times(tuple(line.at(far) for line in lines)).spread

# %% jupyter={"source_hidden": true}
layer_weights = sum(
    np.prod(shape) for name, shape in lesson.config.weight_shapes().items() if "layers" in name
)
if line.slope > 0:
    price = f"""
The layers hold {nb.short(layer_weights / 1e6)} million weights, so b stands for
{nb.short(2 * layer_weights / 1e6)} million operations, done at
{nb.per_second(2 * layer_weights / line.slope, "FLOP")}."""
else:
    price = """
A position cannot cost less than nothing: the machine was so busy, or these steps so short, that
noise hides the slope. Run the notebook again when little else runs."""
nb.say(f"""
a = {nb.seconds_text(line.fixed)} per pass, b = {nb.seconds_text(line.slope)} per position. {price}
At length {far} the line says **{nb.seconds_text(line.at(far))}**; the middle half of the
{rounds} rounds says {nb.seconds_text(low)} to {nb.seconds_text(high)}.
""")

# %% [markdown]
# Now measure it. The longest of the short texts is timed once more beside it, as a *control*: if
# the control has changed, the machine has, and not the loop.

# %%
control = near[-1]
again = time_steps([control, far])
far_time = again[far]
step_prediction.score(1e3 * far_time.median, derived=1e3 * line.at(far))

# %%
fig, ax = nb.figure()
blue, orange = nb.COLOURS["measured"], nb.COLOURS["predicted"]
ax.plot([0, far], [1e3 * line.fixed, 1e3 * line.at(far)], color=orange, label="the middle line")
for length, times in {**near_times, far: far_time}.items():
    ax.vlines(length, *(1e3 * end for end in times.spread), color=blue, linewidth=5, alpha=0.4)
    ax.plot(length, 1e3 * times.median, "o", color=blue, label="measured" * (length == far))
ax.plot(far, 1e3 * line.at(far), "x", color=orange, markersize=10)
ax.set(
    xlabel="length of the text, in tokens", ylabel="ms per token", ylim=(0, None), xlim=(0, None)
)
ax.legend()
nb.show(
    fig,
    f"A step of the naive loop at {len(near) + 1} lengths. The line knows the first {len(near)}; "
    f"the cross is what it predicts. Dots are medians of {rounds} readings, bars the middle half.",
)

# %% [markdown]
# ## Where the time goes
#
# torch can record every operation that it runs. Sorted by kind, for a step at the shortest and at
# the longest length:

# %%
kinds = {
    length: nb.time_by_kind(lambda length=length: naive_step(length), device)
    for length in (near[0], far)
}
first, last = kinds[near[0]], kinds[far]
nb.table(
    ["kind of operation", f"{near[0]} tokens", f"{far} tokens", "growth"],
    [
        [
            kind,
            nb.seconds_text(first[kind]),
            nb.seconds_text(last[kind]),
            f"{last[kind] / first[kind]:.1f}x",
        ]
        for kind in last
    ],
    f"The text grew {far / near[0]:.1f}-fold. Recording costs some microseconds per operation.",
)

# %% jupyter={"source_hidden": true}
largest = max(last, key=last.get)
gap = far_time.median - line.at(far)
bend = last["attention"] - first["attention"] * far / near[0]  # beyond proportional growth
drift = again[control].median / near_times[control].median
corrected = drift * line.at(far)
if far_time.spread[0] <= high and low <= far_time.spread[1]:
    verdict = f"""
The middle halves overlap ({nb.seconds_text(low)} to {nb.seconds_text(high)} predicted,
{nb.seconds_text(far_time.spread[0])} to {nb.seconds_text(far_time.spread[1])} measured), so nothing
here speaks against the line."""
elif abs(far_time.median - corrected) < abs(gap) / 2:
    verdict = f"""
Most of that is not the length: the control at {control} tokens took {drift:.2f} times as long as
before. Multiplied by that, the line says {nb.seconds_text(corrected)}."""
elif gap > 0 and bend > gap / 2:
    verdict = f"""
That is more than the readings scatter. Attention explains {nb.seconds_text(bend)} of it: its work
grows with the square of the length, and a line cannot follow."""
else:
    verdict = f"""
Neither the machine explains that (the control took {drift:.2f} times as long as before) nor
attention, which bends the curve by {nb.seconds_text(bend)}. So a position costs a little
{"more" if gap > 0 else "less"} in a long pass than in a short one."""
nb.say(f"""
**Predicted against measured.** The step took {nb.seconds_text(far_time.median)},
{nb.seconds_text(abs(gap))} {"more" if gap > 0 else "less"} than the line said.{verdict}

**What grew.** Of the recorded step at {far} tokens, {last[largest] / sum(last.values()):.0%} is
{largest}, and that part grew {last[largest] / first[largest]:.1f}-fold. Attention is
{last["attention"] / sum(last.values()):.0%}. What hardly grew is what a pass pays for being a pass.
""")

# %% [markdown]
# A second check of the same line: the answer that you watched above. Add up the line over its
# steps, and compare with the clock. (The first step is left out. It also had to warm up.)

# %%
added_up = sum(line.at(len(chat_ids) + i) for i in range(1, len(live)))
nb.table(
    ["the answer above, without its first token", "time"],
    [
        ["the line, added up over its steps", nb.seconds_text(added_up)],
        ["the clock", nb.seconds_text(sum(live[1:]))],
    ],
)

# %% [markdown]
# ## Only the last row goes through the head
#
# What does `logit_rows=[-1]` save? Count weights. Without it, a row uses all layers and the head;
# with it, the layers only, since one row of many does not count. So a step over all rows should be
# slower by the factor
#
# $$ 1 + \frac{\text{weights of the head}}{\text{weights of the layers}} . $$
#
# The two versions are timed as a *pair*: one step of each makes a slice, the order is swapped from
# slice to slice, and the median of the ratios counts. That is how every gate of this course
# measures.

# %%
head_weights = lesson.config.vocab_size * lesson.config.hidden_size
derived_ratio = 1 + head_weights / layer_weights
pair = measure_pair(
    lambda: timed(lambda: naive_step(far, logit_rows=None), device)[1],
    lambda: timed(lambda: naive_step(far), device)[1],
    Bar(1.0),
    max_slices=9,
)
low, high = pair.ratio.interval()
nb.table(
    ["all rows against one", "ratio"],
    [
        ["derived", f"{derived_ratio:.2f}x"],
        ["measured, with a 99% interval", f"{pair.median:.2f}x [{low:.2f}, {high:.2f}]"],
    ],
)

# %% jupyter={"source_hidden": true}
scores = nb.bytes_text(far * lesson.config.vocab_size * 4)
if high / low > 1.5:
    verdict = "the interval is too wide to say more, since the machine was busy"
elif low <= derived_ratio <= high:
    verdict = "the interval holds the derived ratio, so the count of weights explains it"
elif pair.median > derived_ratio:
    verdict = f"""the rest is not multiplication. All rows fill a matrix of {scores} with scores:
memory that must be found and written, and of which one row is read"""
else:
    verdict = """a weight of the head costs less than one of the layers: one large product comes
closer to the speed of the machine than many small ones"""
nb.say(f"""
Counting weights said {derived_ratio:.2f}x, the clock says {pair.median:.2f}x: {verdict}.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
At length {far} a step computes {far} positions. {far - 1} of them were computed in the step before,
with the same tokens before them, hence with the same result: **{1 - 1 / far:.1%}** of the
positions. Of the {nb.seconds_text(far_time.median)}, the line puts
{nb.seconds_text(line.at(1))} on a pass over a single position. The next stage keeps what is
computed, and finds out how much of the difference can be had.
""")

# %% [markdown]
# ## Questions
#
# 1. Why is the last token never fed to the model?
# 2. For a prompt of 1,000 tokens, after how many new tokens does the second term of the formula
#    overtake the first?
# 3. Which of a and b would a machine with twice the arithmetic and the same memory change?
#
# <details><summary>Answers</summary>
#
# 1. Feeding a token serves to predict the one after it. After the last one nobody asks.
# 2. m(m - 1)/2 > 1,000 m when m > 2,001. Long before that, the loop is unusable.
# 3. b, which is arithmetic. a is mostly the reading of weights and the calling of operations. Stage
#    03 takes it apart.
# </details>
#
# **Your turn.** `./course check 1` measures your own loop.
#
# ## Sources
#
# - A. Vaswani et al. "Attention Is All You Need." NeurIPS 2017. arXiv:1706.03762. Causal attention
#   and autoregressive generation.
# - H. Touvron et al. "LLaMA: Open and Efficient Foundation Language Models." 2023.
#   arXiv:2302.13971. The family of models that this course runs.
# - L. Ben Allal et al. "SmolLM2: When Smol Goes Big." 2025. arXiv:2502.02737. The model used here.
