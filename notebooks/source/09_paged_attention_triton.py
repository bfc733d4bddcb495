# %% [markdown]
# # 09 · Paged attention in Triton
#
# **Claim.** Gathering moves every key and value three times, and pads every text to the longest. A
# kernel that follows the block table reads each of them once, where it lies, because softmax can be
# computed without seeing all scores first. How many bytes that saves follows from the lengths of
# the texts alone.
#
# You will count what gathering moves, derive softmax in pieces, run the kernel in an interpreter
# that counts its loads, cut one long text into splits, and read the machine code of a GPU that you
# need not have. No time is measured here: an interpreter has none. You need notebook 08.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels then run in numpy

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import course.notebook as nb
from course.check.edits import edited_solution
from course.check.gate import GateOptions, GateRun
from course.measure import CopiedBytes
from course.measure.kernel_builds import read_build
from course.measure.kernel_loads import LoadedBytes
from course.model import causal_attention
from course.types import Request, Sequence, StepBatch

lesson = nb.Lesson(9)
model, config, tokenizer = lesson.model, lesson.config, lesson.tokenizer
paged_attention = lesson.reference.paged_attention
PagedAttention, step_batch = nb.reference(8).PagedAttention, nb.reference(8).step_batch
generate = nb.reference(2).generate
torch.manual_seed(9)
BLOCK, TILE = 16, lesson.reference.TILE

# %% [markdown]
# ## Predict first
#
# Follow one key through stage 08. It is read where it lies, written into a copy, and the copy is
# read again. That makes three, and the first guess stops there.

# %%
guess = 3
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## What gathering moves
#
# The eight texts in one decode step. They have one query each, so stage 08 makes one group of them,
# `[8, longest]`: every text is padded to the longest.

# %%
lengths = [38, 54, 76, 107, 152, 215, 304, 431]
longest, total = max(lengths), sum(lengths)
derived = 3 * len(lengths) * longest / total

fig, ax = nb.figure(7, 2.8)
names = [f"{n}" for n in lengths]
ax.barh(names, lengths, color=nb.COLOURS["kv"], label="its own positions")
ax.barh(
    names,
    [longest - n for n in lengths],
    left=lengths,
    color=nb.COLOURS["faint"],
    label="padding",
)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="positions gathered", ylabel="length of the text")
ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(fig, "What is gathered for one step, text by text.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
The texts have {total:,} positions, the rectangle {len(lengths)} × {longest} =
{len(lengths) * longest:,}: {len(lengths) * longest / total:.2f} times as many. Read, written and
read again, that makes 3 × {len(lengths) * longest / total:.2f} = **{derived:.2f} times** the bytes
of reading each key and value once.
""")

# %% [markdown]
# ## Softmax without seeing everything
#
# A kernel that copies nothing sees the scores of a text tile by tile. But softmax divides by a sum
# over all of them, and subtracts their maximum, since exp of a large score is more than a float can
# hold. Keep three numbers of what was seen so far: the largest score m, the sum l, the result o.
# A tile with a larger score makes everything so far too large, by one common factor:
#
# $$ m' = \max(m, \max_j s_j) \qquad
#    l' = l\,e^{m - m'} + \sum_j e^{s_j - m'} \qquad
#    o' = o\,e^{m - m'} + \sum_j e^{s_j - m'} v_j $$


# %%
def online(scores, values, tile=TILE):
    """After each tile: largest score, sum and result, and how far the old sums were shrunk."""
    m, norm, out = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(values.shape[1])
    for s, v in zip(scores.split(tile), values.split(tile), strict=True):
        new = torch.maximum(m, s.max())
        shrink, weights = torch.exp(m - new), torch.exp(s - new)
        norm = norm * shrink + weights.sum()
        out = out * shrink + weights @ v
        m = new
        yield m, norm, out, shrink


scores, values = 3 * torch.randn(longest), torch.randn(longest, 8)
history = list(online(scores, values))
ends = [min((i + 1) * TILE, longest) for i in range(len(history))]
errors = [
    float((out / norm - scores[:end].softmax(0) @ values[:end]).abs().max())
    for end, (_, norm, out, _) in zip(ends, history, strict=True)
]

fig, ax = nb.figure(7, 3)
ax.plot(scores, ".", color=nb.COLOURS["unexplained"], markersize=3, label="scores")
ax.step(
    [0, *ends],
    [float(history[0][0]), *(float(m) for m, *_ in history)],
    where="pre",
    color=nb.COLOURS["measured"],
    label="largest so far",
)
for end in ends[:-1]:
    ax.axvline(end, color=nb.COLOURS["faint"], zorder=0)
ax.set(xlabel="position", ylabel="score")
ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(fig, "Scores of one query, in tiles of 64, and the largest score after each tile.")

# %%
nb.table(
    ["after", "largest", "old sums times", "sum", "off from softmax over all so far"],
    [
        [f"{end} positions", float(m), float(shrink), float(norm), f"{error:.0e}"]
        for end, (m, norm, _, shrink), error in zip(ends, history, errors, strict=True)
    ],
)

# %% jupyter={"source_hidden": true}
steps_up = sum(float(shrink) < 1 for *_, shrink in history[1:])
large = 40 * scores
*_, (_, norm, out, _) = online(large, values)
off = float((out / norm - large.softmax(0) @ values).abs().max())
plain = torch.exp(large)
nb.say(f"""
After every tile o / l *is* softmax over what was seen, up to {max(errors):.0e}. The maximum rose in
{steps_up} of the {len(history) - 1} later tiles; in the others nothing had to be shrunk. Without
the maximum, scores 40 times as large sum to {float(plain.sum())}, and the result is
{float((plain / plain.sum() @ values)[0])}. With it,
{"nothing is lost" if off == 0 else f"it is off by {off:.0e}"}.
""")

# %% [markdown]
# ## The kernel
#
# One program instance for each text, KV head and split of the context. All query heads of that KV
# head, and all queries of the text, are rows of one tile, so its keys are loaded once.

# %%
lesson.code("attend_kernel")

# %% [markdown]
# - Both loads are masked. A masked score would do for the keys; a value is multiplied by a weight
#   of 0, and 0 × NaN is NaN.
# - The slot is computed in 64 bits: a pool of some gigabytes has more elements than 32 bits count.
# - A row that has seen nothing yet has a maximum of -∞, which is not subtracted from itself.
#
# It runs inside the real model, too, in the interpreter: slowly, instance after instance, but with
# true addresses, masks and sums.

# %%
question = "What is the capital of France?"
prompt = tokenizer.chat([{"role": "user", "content": question}])
new = 3
blocks = -(-(len(prompt) + new) // BLOCK)
attend = lesson.reference.TritonPagedAttention(
    config, blocks, BLOCK, dtype=model.dtype, device=model.device
)
text = Sequence(Request("q", tuple(prompt)), list(prompt), 0, torch.randperm(blocks).tolist())
for _ in range(new):
    batch = step_batch([text], [len(text.tokens) - text.num_computed], BLOCK, device=model.device)
    attend.plan(batch)
    logits = model.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)
    text.num_computed = len(text.tokens)
    text.tokens.append(int(logits[0].argmax()))

# %% jupyter={"source_hidden": true}
alone = list(generate(model, prompt, new))
nb.say(f"""
"{question}" begins with "{tokenizer.decode(text.output_ids)}", which is
{"the same" if alone == text.output_ids else "not the same"} as with the cache of stage 02. The
prompt of {len(prompt)} went through dense attention, since it has more than
{lesson.reference.MAX_QUERIES} queries; the rest through the kernel.
""")

# %% [markdown]
# ## What the kernel loads
#
# In the interpreter every load passes through one function, with the addresses of its lanes and
# their mask. So bytes can be counted exactly, on any machine. The eight texts, in blocks at random
# places of a pool that is full of NaN:

# %%
heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim


def a_step(lengths):
    """A decode step of texts of these lengths: the kernel's tensors, and what must come out."""
    needed = [-(-n // BLOCK) for n in lengths]
    ids = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
    tables = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    pools = torch.full((2, sum(needed), BLOCK, kv_heads, width), torch.nan)
    q, out = torch.randn(len(lengths), heads, width), []
    for row, (own, length) in enumerate(zip(ids, lengths, strict=True)):
        tables[row, : len(own)] = own
        slots = (own[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length].long()
        k, v = torch.randn(2, length, kv_heads, width)
        pools[0].flatten(0, 1)[slots], pools[1].flatten(0, 1)[slots] = k, v
        out.append(causal_attention(*(x[None].double() for x in (q[row : row + 1], k, v)))[0])
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    tensors = {"queries": q, "keys": pools[0], "values": pools[1], "tables": tables}
    tensors |= {"lengths": torch.tensor(lengths, dtype=torch.int32), "starts": starts}
    return tensors, torch.cat(out)


def run(kernel, tensors, splits=1):
    """The kernel's result, and a counter of what it loaded."""
    with LoadedBytes(tensors) as loaded:
        out = kernel(*tensors.values(), max_queries=1, num_splits=splits)
    return out, loaded


tensors, expected = a_step(lengths)
out, loaded = run(paged_attention, tensors)
ideal = 2 * total * kv_heads * width * 4

# %% [markdown]
# And stage 08, for the same step: what its attention copies, counted operation by operation.

# %%
gathering = PagedAttention(config, len(tensors["keys"]), BLOCK)
gathering.plan(
    StepBatch(
        token_ids=torch.zeros(len(lengths), dtype=torch.int64),
        positions=tensors["lengths"].long() - 1,
        query_start_loc=tensors["starts"],
        context_lens=tensors["lengths"],
        block_tables=tensors["tables"],
        slot_mapping=torch.full((len(lengths),), -1),
        logit_rows=torch.arange(len(lengths)),
    )
)
new_kv = torch.randn(2, 1, len(lengths), kv_heads, width)
with CopiedBytes() as copied:
    gathering(0, tensors["queries"][None], *new_kv)

# %%
pool_bytes = loaded.of("keys", "values")
prediction.score(3 * copied.bytes / pool_bytes, derived=derived)

# %%
rectangle = 2 * len(lengths) * longest * kv_heads * width * 4
nb.table(
    ["bytes", "stage 08 copies", "the kernel loads"],
    [
        ["keys and values", f"{rectangle:,}", f"{pool_bytes:,}"],
        ["of these, of the texts themselves", f"{ideal:,}", f"{ideal:,}"],
        [
            "queries, masks, tables, and the like",
            f"{copied.bytes - rectangle:,}",
            f"{loaded.total - pool_bytes:,}",
        ],
    ],
    "What is copied was read before, and is read again: it counts three times.",
)

# %% jupyter={"source_hidden": true}
found = 3 * copied.bytes / pool_bytes
exactly = ", not one lane more" if pool_bytes == ideal else ""
nb.say(f"""
The result is off from dense attention in float64 by {float((out - expected).abs().max()):.1e}. The
kernel loads {pool_bytes / ideal:.3f} times the bytes of the texts' keys and values{exactly}.
Gathering moves {found:.2f} times as much; the lengths alone said {derived:.2f}. What lies between
the two are the {nb.bytes_text(copied.bytes - rectangle)} that stage 08 copies besides: queries,
masks, and the new keys. Padding is a factor of {len(lengths) * longest / total:.2f} in it. Texts of
equal length have none, and it would be 3 for them. (The gate has other heads: its figure is near.)
""")

# %% [markdown]
# ## Kernels that are right and load too much
#
# One program instance for each *query* head is the natural cut. A mask that lets whole tiles of
# keys through looks harmless, as their scores are masked. Both give the right result. The same
# step, counted for these two, which are solutions that the gate must fail.


# %%
scratch = TemporaryDirectory()


def variant(name):
    """The kernel of a wrong solution: an edit of the reference, in gates/wrong."""
    [diff] = [path for path in lesson.stage.wrong if path.stem == name]
    path = edited_solution(lesson.stage.reference, diff, Path(scratch.name))
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.paged_attention


clean = {name: tensor.nan_to_num() for name, tensor in tensors.items()}  # one of them reads NaN
shares, off = {"each key and value once": 1.0, "the kernel": pool_bytes / ideal}, {}
for label, name in {
    "keys masked by the tile": "reads_the_padding",
    "an instance per query head": "once_per_query_head",
}.items():
    result, counter = run(variant(name), clean)
    shares[label] = counter.of("keys", "values") / ideal
    off[label] = float((result - expected).abs().max())
shares["gathering, stage 08"] = 3 * rectangle / ideal

fig, ax = nb.figure(7, 2.6)
colours = ["predicted", *["measured"] * (len(shares) - 2), "naive"]
ax.barh(list(shares), list(shares.values()), color=[nb.COLOURS[c] for c in colours], height=0.6)
for label, share in shares.items():
    ax.annotate(f" {share:.2f}", (share, label), va="center")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(
    xlabel="bytes of keys and values, over those of the texts",
    xlim=(0, 1.15 * max(shares.values())),
)
nb.show(fig, "What four ways of attending move for the same step.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
Both are right to {max(off.values()):.0e}, and no test of values finds them. {heads} query heads on
{kv_heads} KV heads are groups of {heads // kv_heads}: that is the factor of the first cut,
{shares["an instance per query head"]:.2f}.
""")

# %% [markdown]
# ## One long text: splits
#
# A text has one program instance for each KV head. That is a handful, on a GPU with a hundred
# processors and more. So cut its context, let each split end with its own m, l and o, and put them
# together by the same rule: splits are nothing but large tiles. An empty split has m = -∞, so its
# weight is 0.

# %%
lesson.code("merge_kernel")

# %%
one, wanted = a_step([longest])
rows = []
for splits in (1, 2, 4, 8, 16):
    result, counter = run(paged_attention, one, splits)
    per_split = math.ceil(math.ceil(longest / TILE) / splits)
    used = math.ceil(math.ceil(longest / TILE) / per_split)
    rows.append(
        [
            splits,
            splits - used,
            kv_heads * splits,
            f"{kv_heads * splits / 132:.0%}",
            f"{counter.of('keys', 'values') / (2 * longest * kv_heads * width * 4):.3f}",
            f"{counter.elsewhere:,}",
            f"{float((result - wanted).abs().max()):.0e}",
        ]
    )
nb.table(
    [
        "splits",
        "of these empty",
        "instances",
        "of an H100's 132 processors",
        "KV bytes over ideal",
        "bytes that the merge reads",
        "off",
    ],
    rows,
    f"One text of {longest} positions, {kv_heads} KV heads.",
)

# %% jupyter={"source_hidden": true}
nb.say(f"""
The result does not depend on the splits, empty ones included, and each key is still loaded once.
What grows is the merge: {rows[-1][5]} bytes for {rows[-1][0]} splits, beside
{2 * longest * kv_heads * width * 4:,} of keys and values. Worth it where processors stand idle, and
waste where there are texts enough.
""")

# %% [markdown]
# ## What the machine code says
#
# Triton compiles for a GPU that is not there. The gate's own scenario builds the kernel for two of
# them; here is what stands in the code. First a derivation: a program's tiles lie in the registers
# of its threads, and a thread has at most 255, of 32 bits. The result has rows × width numbers, the
# scores rows × 64; divide by the threads.

# %%
FIELDS = ("heads", "kv_heads", "width", "queries", "splits")
shapes = {
    "decode, 32 heads on 8": (32, 8, 64, 1, 4),
    "5 queries, 32 on 8": (32, 8, 128, 5, 1),
    "decode, 9 on 3": (9, 3, 64, 1, 1),
    "16 queries, 32 on 4": (32, 4, 128, 16, 1),
}
shapes = {label: dict(zip(FIELDS, shape, strict=True)) for label, shape in shapes.items()}
gate = GateRun(lesson.stage, GateOptions(lesson.stage.reference))
steps = gate.candidate_in("cpu", TRITON_INTERPRET="0").start(
    "builds",
    shapes=[{**shape, "sequences": 4, "block_size": BLOCK} for shape in shapes.values()],
    capabilities=[80, 90],
)
launches = [step.value for step in steps]
gate.close()


def held(shape):
    """Registers of a thread for result and scores, by the sizes of their tiles."""
    group = shape["heads"] // shape["kv_heads"]
    rows = max(16, 1 << (shape["queries"] * group - 1).bit_length())
    threads = 32 * (4 if rows * shape["width"] <= 4096 else 8)
    return rows, rows * shape["width"] // threads, rows * TILE // threads


built, rows = {}, []
for index, (label, shape) in enumerate(shapes.items()):
    for offset, capability in enumerate((80, 90)):
        launch = next(one for one in launches[2 * index + offset] if one["reads_pool"])
        code = built[label, capability] = read_build(launch["cubin"])
        count, result, scores_held = held(shape)
        rows.append(
            [
                f"{label}, sm_{capability}",
                count,
                result + scores_held,
                code.registers,
                code.spills,
                f"{launch['shared']:,}",
                ", ".join(f"{n} of {bits}" for bits, n in sorted(code.loads.items())),
                f"{code.wide_share:.0%}",
            ]
        )
nb.table(
    [
        "build",
        "rows",
        "result and scores",
        "registers",
        "spills",
        "shared memory",
        "loads, by bits",
        "bytes in 128-bit loads",
    ],
    rows,
)

# %%
fig, ax = nb.figure(7, 3)
labels = list(shapes)
result = [held(shape)[1] for shape in shapes.values()]
scores_held = [held(shape)[2] for shape in shapes.values()]
ax.barh(labels, result, color=nb.COLOURS["predicted"], height=0.6, label="result, derived")
ax.barh(labels, scores_held, left=result, color=nb.COLOURS["host"], height=0.6,
        label="scores, derived")  # fmt: skip
for capability, mark in ((80, "o"), (90, "D")):
    ax.plot(
        [built[label, capability].registers for label in labels],
        labels,
        mark,
        color=nb.COLOURS["measured"],
        label=f"all registers, sm_{capability}",
    )
ax.axvline(255, color=nb.COLOURS["reference"], linestyle=":")
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set_xlabel("registers of a thread")
ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
nb.show(fig, "Registers by the sizes of two tiles, and as built. The dotted line is all there are.")

# %% jupyter={"source_hidden": true}
most = max(built, key=lambda key: built[key].registers)
count, result, scores_held = held(shapes[most[0]])
spills = sum(code.spills for code in built.values())
narrow = {bits for code in built.values() for bits in code.loads if bits < 128}
nb.say(f"""
The fullest is {most[0]} for sm_{most[1]}: {built[most].registers} registers, of which
{result} hold the result and {scores_held} the scores. The other
{built[most].registers - result - scores_held} hold pieces of keys and values on their way, weights,
and addresses. {"Nothing is spilled." if not spills else f"{spills} instructions spill."} Keys and
values come 128 bits at a time; what is narrower ({", ".join(f"{b} bits" for b in sorted(narrow))})
are table entries and lengths. All of this is exact, and none of it is a speed.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
Each key is now read once per step, and not copied at all. It was still *computed* anew for each
request: of the {len(prompt)} tokens in the prompt above, those of the chat template's beginning are
the same in every conversation. Blocks that hold the same beginning could be shared. Stage 10 finds
them.
""")

# %% [markdown]
# ## Questions
#
# 1. All eight texts have 172 positions. By how many times does gathering move more?
# 2. Why does a row that has seen nothing need care, when softmax over something never fails?
# 3. A kernel loads 1.000 times the ideal, in 128-bit loads, without a spill. Is it fast?
#
# <details><summary>Answers</summary>
#
# 1. By 3: no padding, but read, written and read again.
# 2. Its maximum is -∞. Subtracting it from a score of -∞ is NaN, and NaN stays. It happens to rows
#    of padding, and to queries of which a split holds nothing but the future.
# 3. Nobody knows from that. It may have too few instances to keep the memory busy, or wait for one
#    load before it asks for the next. These three are necessary; only a clock on a GPU says the
#    rest.
# </details>
#
# **Your turn.** `./course check 9` counts your own kernel's loads, and reads its machine code.
#
# ## Sources
#
# - M. Milakov, N. Gimelshein. "Online Normalizer Calculation for Softmax." 2018. arXiv:1805.02867.
# - T. Dao et al. "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness."
#   2022. arXiv:2205.14135.
# - T. Dao, D. Haziza, F. Massa, G. Sizov. "Flash-Decoding for Long-Context Inference." 2023.
# - W. Kwon et al. "Efficient Memory Management for Large Language Model Serving with
#   PagedAttention." SOSP 2023. arXiv:2309.06180.
