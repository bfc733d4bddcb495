# %% [markdown]
# # 14 · Weight quantization
#
# **Claim.** At batch 1 a step waits for the bytes of the weights. Kept in 8 bits, with a scale for
# each output channel, they are a quarter of what they were, and the model says nearly the same. In
# 4 bits it depends on what shares a scale.
#
# You will derive what rounding costs, count bytes, time steps, find out why the gain is less than
# the bytes promise, and see one activation ruin its neighbours. You need notebooks 03 and 04.

# %%
import math
import os

import torch
import torch.nn.functional as F

import course.notebook as nb
from course.data import passage
from course.measure import StepWork, decode_work, split_step
from course.measure.counters import NewTensors
from course.model import FullAttention, load

torch.set_num_threads(max(1, os.cpu_count() - 1))  # as the gate does: times are steadier
lesson = nb.Lesson(14)
model, config, tokenizer = lesson.model, lesson.config, lesson.tokenizer
quantize_int8, quantize_int4 = lesson.reference.quantize_int8, lesson.reference.quantize_int4
QuantLinear, quantize_model = lesson.reference.QuantLinear, lesson.reference.quantize_model
torch.manual_seed(14)

# %% [markdown]
# ## Predict first
#
# From 32 bits to 8 the weights shrink four times. The first guess is that time does, too.

# %%
guess = 4
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## What rounding costs
#
# A row's largest magnitude becomes 127. The error of a weight is then spread evenly over one step,
# and its root mean square is step / √12.

# %%
lesson.code("quantize_int8")

# %%
row = torch.randn(1, 4096)
values, scales = quantize_int8(row)
errors = ((row - values * scales.float()[:, None]) / scales.float()[:, None]).flatten()
fig, ax = nb.figure(7, 2.8)
ax.hist(errors, bins=41, color=nb.COLOURS["measured"])
ax.axhline(len(errors) / 41, color=nb.COLOURS["predicted"])
ax.set(xlabel="error of a weight, in steps", ylabel="weights")
nb.show(fig, "Errors of 4,096 normal weights in 8 bits, and what an even spread would be.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
The root mean square is {float(errors.square().mean().sqrt()):.3f} steps; 1 / √12 is
{1 / math.sqrt(12):.3f}. None is further than {float(errors.abs().max()):.3f}.
""")

# %% [markdown]
# ## What shares a scale
#
# One layer of the model, in several ways: how far a product with a random row is off.

# %%
name, linear = next((n, x) for n, x in model.linears() if n.endswith("down"))
weight = linear.weight.float()
x = torch.randn(16, weight.shape[1])
exact = x.double() @ weight.double().T


def off(other):
    """Error of the product, relative to its size."""
    return float((x.double() @ other.double().T - exact).norm() / exact.norm())


def levels(group_size):
    """The weight after 4 bits, and back."""
    values, *steps = quantize_int4(weight, group_size)
    scale, zero = (
        part.float().repeat_interleave(group_size, 1)[:, : weight.shape[1]] for part in steps
    )
    return (values.float() - 8) * scale + zero


values, scales = quantize_int8(weight)
step = weight.abs().max() / 127
ways = {
    "8 bits, one scale for all": ((weight / step).round() * step, 8.0),
    "8 bits, one for each channel": (
        values * scales.float()[:, None], 8 + 16 / weight.shape[1],
    ),
    "4 bits, groups of 128": (levels(128), 4 + 32 / 128),
    "4 bits, groups of 64": (levels(64), 4 + 32 / 64),
    "4 bits, groups of 32": (levels(32), 4 + 32 / 32),
}  # fmt: skip
nb.table(
    ["layer " + name, "bits a weight", "product off by"],
    [[way, f"{bits:.2f}", f"{off(other):.2%}"] for way, (other, bits) in ways.items()],
)

# %% [markdown]
# ## Bytes, and what the model says
#
# The passage that the course ships, through the model as it is and quantized, in one pass.
# Perplexity asks for the tokens that came, the divergence for all that might have come.

# %%
ids = torch.tensor([tokenizer.encode(passage())[:384]], device=model.device)
positions = torch.arange(ids.shape[1], device=model.device)[None]


def read(judged):
    """Log-probabilities at every position of the passage."""
    return judged.forward(ids, positions, FullAttention())[0].float().log_softmax(-1)


plain = read(model)
surprise = float(F.nll_loss(plain[:-1], ids[0, 1:]))
rows, found = [], {}
for label, bits, group in (("8 bits", 8, 32), ("4 bits, groups of 32", 4, 32),
                           ("4 bits, groups of 64", 4, 64)):  # fmt: skip
    made = NewTensors()
    small = quantize_model(model, bits, group)
    count = made.bytes()
    other = read(small)
    divergence = float((plain.exp() * (plain - other)).sum(-1).mean())
    ratio = math.exp(float(F.nll_loss(other[:-1], ids[0, 1:])) - surprise)
    same = float((plain.argmax(-1) == other.argmax(-1)).float().mean())
    found[label] = (ratio, divergence)
    rows.append([label, nb.bytes_text(count), f"{ratio - 1:+.2%}", f"{divergence:.4f}",
                 f"{same:.0%}"])  # fmt: skip
    del small, other
nb.table(["layers in", "bytes", "perplexity", "divergence, nats", "same likeliest token"], rows)

# %% jupyter={"source_hidden": true}
narrow, wide = found["4 bits, groups of 32"], found["4 bits, groups of 64"]
origin = (
    "This model's layers come from a file of 4 bits, in groups of 32 with a least value each. "
    "Groups of 32 find those levels again; groups of 64 put two of them under one scale. Neither "
    "says what 4 bits do to a model that was trained in 16."
    if lesson.loaded.name == "smollm2-135m" else "Random weights say little about either."
)  # fmt: skip
nb.say(f"""
Groups of 64 diverge {wide[1] / narrow[1]:.0f} times as much as groups of 32. {origin}
""")

# %% [markdown]
# ## Time
#
# A decode step of `bench`, at batch 1 and at more rows, in turns.

# %%
bench = load("bench", device=model.device)
forms = {
    "as it is": bench.model,
    "8 bits": quantize_model(bench.model, 8),
    "4 bits": quantize_model(bench.model, 4),
}


class Alone:
    """Attention of tokens that have no past and do not see each other: the layers are timed."""

    def __call__(self, layer, q, k, v):
        """The value of each token itself."""
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)


def step_of(judged, rows):
    """A pass over some rows."""
    tokens = torch.randint(0, 64, (rows, 1), device=model.device)
    return lambda: judged.forward(tokens, torch.zeros_like(tokens), Alone())


counts = (1, 2, 4, 8, 16, 32)
with torch.inference_mode():
    times = nb.take_turns(
        {(form, n): step_of(judged, n) for form, judged in forms.items() for n in counts},
        model.device, rounds=5,
    )  # fmt: skip
fig, ax = nb.figure()
for form, colour in zip(forms, ("naive", "measured", "predicted"), strict=True):
    ax.plot(counts, [1e3 * times[form, n].median for n in counts], "o-",
            color=nb.COLOURS[colour], label=form)  # fmt: skip
ax.set(xlabel="rows", ylabel="ms a pass", xscale="log", yscale="log")
nb.doublings(ax, counts)
ax.legend()
nb.show(fig, "A pass over 1 to 32 rows.")

# %% [markdown]
# ## Where the rest went

# %%
size = bench.model.dtype.itemsize
work = decode_work(bench.config, [1], weight_itemsize=size, kv_itemsize=size)
shares = {"as it is": 1.0, "8 bits": 1 / size, "4 bits": 5 / 8 / size}
host = lesson.host_overhead(lambda small: step_of(small, 1), bench.config)
splits = {
    form: split_step(
        StepWork(share * work.weight_bytes, work.kv_bytes, work.flops),
        lesson.roofline,
        dtype=bench.model.dtype,
        host_s=host,
        measured_s=times[form, 1].median,
    )
    for form, share in shares.items()
}
fig, ax = nb.figure(7, 3)
nb.split_bars(ax, splits)
nb.show(fig, "The bills of a step at batch 1, and what they leave unexplained.")

# %%
promised = splits["as it is"].predicted / splits["8 bits"].predicted
prediction.score(times["as it is", 1].median / times["8 bits", 1].median, derived=promised)

# %% jupyter={"source_hidden": true}
plain_split, small_split = splits["as it is"], splits["8 bits"]
gain = plain_split.measured / small_split.measured
many = counts[-1]
prefill = times["as it is", many].median / times["8 bits", many].median
left = (
    "the gain is gone, since arithmetic sets the pace there, and unpacking comes on top"
    if prefill < 1 else "some of the gain is left"
)  # fmt: skip
nb.say(f"""
The weights shrank {size:.0f} times, the step {gain:.2f} times. The bills alone say
{promised:.2f}. As it is, a step reaches
{plain_split.utilisation:.0%} of its floor, in 8 bits {small_split.utilisation:.0%}. The bills leave
{plain_split.unexplained / plain_split.measured:.0%} of the one and
{small_split.unexplained / small_split.measured:.0%} of the other unexplained: kernels that do not
read as fast as a plain read does. At {many} rows 8 bits
are {prefill:.2f} times as fast as the layers as they are: {left}.
""")

# %% [markdown]
# ## An outlier, and one scale for all rows
#
# Integers on both sides can be faster still. Here activations are rounded to 8 bits with one
# scale for the whole batch, and a neighbour grows.

# %%
batch, largest = torch.randn(4, weight.shape[1]), (3, 10, 30, 100, 300, 1000, 3000)
layer = QuantLinear(weight)
wanted = batch[0].double() @ weight.double().T


def first_row_off(out):
    """How far row 0 is from the product in float64."""
    return float((out[0].double() - wanted).norm() / wanted.norm())


kept, rounded = [], []
for value in largest:
    batch[2, 5] = value
    one = batch.abs().max() / 127
    kept.append(first_row_off(layer(batch)))
    rounded.append(first_row_off(layer((batch / one).round() * one)))
fig, ax = nb.figure(7, 3)
ax.plot(largest, rounded, "o-", color=nb.COLOURS["naive"], label="activations in 8 bits")
ax.plot(largest, kept, "o-", color=nb.COLOURS["measured"], label="weights only")
ax.set(xscale="log", yscale="log", xlabel="largest activation of a neighbour", ylabel="row 0 off")
ax.legend()
nb.show(fig, "One row, beside a neighbour that grows.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
With weights alone in 8 bits, row 0 is off by {kept[0]:.1%} beside 3 and by {kept[-1]:.1%} beside
3,000. With activations rounded it goes from {rounded[0]:.1%} to {rounded[-1]:.0%}.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid
#
# A step is shorter now, and still gives one token for every sequence. A small copy of a model that
# says nearly what the model says is worth more than its speed alone: stage 19 lets it guess ahead.
#
# ## Questions
#
# 1. How many bits does a weight take at 4 bits in groups of 128?
# 2. Why does rounding toward zero hurt more than its size says?
# 3. At which number of rows would you go back to the layers as they were?
#
# <details><summary>Answers</summary>
#
# 1. 4 + 32 / 128 = 4.25.
# 2. Its errors all shrink the weights, so they add up where errors of both signs cancel.
# 3. Where the curves cross above: it depends on the kernels of your machine.
# </details>
#
# **Your turn.** `./course check 14` counts your bytes and times your layers.
#
# ## Sources
#
# - T. Dettmers et al. "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale." 2022.
#   arXiv:2208.07339.
# - E. Frantar et al. "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
#   Transformers." 2022. arXiv:2210.17323.
# - J. Lin et al. "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration."
#   2023. arXiv:2306.00978.
