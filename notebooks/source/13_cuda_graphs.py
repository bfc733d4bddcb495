# %% [markdown]
# # 13 · CUDA graphs
#
# **Claim.** A decode step is a list of operations that hardly changes from step to step. Asking for
# each of them anew takes the host microseconds, and on a fast device that is longer than carrying
# them out. A CUDA graph is the list, recorded once. Replaying it takes one request, whatever the
# number of layers; what it costs is that nothing in it may move: no address, no shape, no branch.
#
# You will count a step, time what an operation costs the host, record a step, run into the traps of
# a recording, and pay for fixed shapes with padding. You need notebooks 03 and 08.
#
# On a CPU the graphs are a recorder's: operations are written down with the addresses of their
# tensors, and carried out again. It behaves as a GPU does, and it is not faster. No gain in time is
# claimed here.

# %%
import random
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import course.notebook as nb
from course import graphs as recorder
from course.measure import decode_work
from course.model import load
from course.model.seeded import BENCH_1B, BENCH_8B, NANO, seeded_decoder
from course.types import Request, Sequence

torch.set_num_threads(1)  # the host's time is what counts, and threads wait for each other
lesson = nb.Lesson(13)
device = lesson.device
graphs = torch.cuda if lesson.tier == "cuda" else recorder
GraphDecodeAttention = lesson.reference.GraphDecodeAttention
GraphRunner = lesson.reference.GraphRunner
PagedAttention, step_batch = nb.reference(8).PagedAttention, nb.reference(8).step_batch
nano = load("nano", device=device).model
rng = random.Random(13)
BLOCK = 16

# %% [markdown]
# ## Predict first
#
# Seven tensors describe a step. Perhaps five of them differ from one decode step to the next; a
# bucket may have rows left over, which must be filled with something; and one replay. The first
# guess takes five copies, one fill and the replay: 149 over 7.

# %%
guess = 21
prediction = lesson.predict(guess, "x")

# %% [markdown]
# ## What a step asks for
#
# Every call into torch arrives at one place, where it can be counted. Views are left out: they move
# no memory, and launch nothing. The models are of nano's shape, with more or fewer layers.


# %%
class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def texts_of(lengths):
    """Texts in the middle of their lives, each with blocks of its own."""
    tables = iter(range(len(lengths) * (max(lengths) // BLOCK + 1)))
    return [
        Sequence(Request("t", (0,)), [7] * n, n - 1, [next(tables) for _ in range(n // BLOCK + 1)])
        for n in lengths
    ]


def eager_step(model, rows):
    """A decode step of so many texts through stage 08, as a function."""
    texts = texts_of([9] * rows)
    attend = PagedAttention(model.config, rows, BLOCK, dtype=model.dtype, device=device)
    attend.keys.zero_()
    attend.values.zero_()
    batch = step_batch(texts, [1] * rows, BLOCK, device=device)

    def step():
        attend.plan(batch)
        return model.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)

    return step


def counted(step):
    """Operations that a step asks for."""
    with Operations() as asked:
        step()
    return asked.count


depths = [1, 2, 3, 6, 12]
deep = {
    layers: seeded_decoder(replace(NANO, num_layers=layers), device=device, dtype=torch.float32)
    for layers in depths
}
asked = {layers: counted(eager_step(model, 2)) for layers, model in deep.items()}
per_layer = (asked[12] - asked[1]) / 11
fixed = asked[1] - per_layer
many = counted(eager_step(nano, 8))

# %% jupyter={"source_hidden": true}
nb.table(["layers", "operations"], [[layers, count] for layers, count in asked.items()])
nb.say(f"""
That is a straight line: **{fixed:.0f} + {per_layer:.0f} × L**. A step of eight texts on nano takes
{many} operations, one of two {asked[3]}: rows are not what is counted.
""")

# %% [markdown]
# ## What an operation costs the host
#
# On models this narrow there is nothing to compute, so the time of a step is the host's. Time steps
# of several depths in turn and take the quickest of each: the slope of the line is
# the cost of an operation on this machine.

# %%
steps = {layers: eager_step(model, 1) for layers, model in deep.items()}
times = nb.take_turns(steps, device, rounds=40, warmup=3)
quickest = {layers: min(found.readings) for layers, found in times.items()}  # noise only adds
each = (quickest[12] - quickest[1]) / (asked[12] - asked[1])

fig, ax = nb.figure()
counts = [asked[layers] for layers in depths]
ax.plot(
    counts, [1e3 * quickest[n] for n in depths], "o", color=nb.COLOURS["measured"], label="step"
)
ax.plot(
    [0, max(counts)],
    [1e3 * (quickest[1] + each * (n - asked[1])) for n in (0, max(counts))],
    "--",
    color=nb.COLOURS["host"],
    label="a fixed cost for each operation",
)
ax.set(xlabel="operations in a step", ylabel="ms", xlim=(0, None), ylim=(0, None))
ax.legend()
nb.show(fig, "Time of a decode step with next to nothing in it, by its operations.")

# %% jupyter={"source_hidden": true}
nb.say(f"""
One operation costs **{1e6 * each:.1f} us** here: Python's part, torch's, and a kernel with next to
nothing to do. On a GPU the driver's part takes the place of the kernel's, which runs elsewhere.
""")

# %% [markdown]
# Now put the host's time beside the floor of notebook 03: the weights over the memory bandwidth of
# an H100, from its data sheet. The count is exact; the cost of an operation is the one measured
# above, and would be another one on the host of that GPU.

# %%
H100 = 3.35e12  # bytes/s
floors = {}
for name, config in (("1B", BENCH_1B), ("8B", BENCH_8B)):
    work = decode_work(config, [1], weight_itemsize=2, kv_itemsize=2)
    host = each * (fixed + per_layer * config.num_layers)
    floors[name] = (work.weight_bytes / H100, host)

fig, ax = nb.figure(7, 2.4)
for name, (floor, host) in floors.items():
    ax.barh(f"{name}, host", 1e3 * host, color=nb.COLOURS["host"])
    ax.barh(f"{name}, weights", 1e3 * floor, color=nb.COLOURS["weights"])
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set_xlabel("ms of a decode step at batch 1")
nb.show(fig, "What the host needs to ask for a step, and what an H100 needs to read the weights.")

# %% jupyter={"source_hidden": true}
words = ", ".join(
    f"{host / floor:.1f} times the floor of {n}" for n, (floor, host) in floors.items()
)
nb.say(f"""
At that cost the host needs {words}. Where this is above 1, the device waits for orders, and a
replay in their place is worth up to that factor. Where it is below, a graph gains nothing.
""")

# %% [markdown]
# ## A recording, and its traps
#
# First a graph that is three operations long. The side stream is for the warm-up: a library that is
# used for the first time sets things up, and that cannot be recorded.


# %%
def captured(work):
    """A graph of some work, and what the work returned while it was recorded."""
    side = graphs.Stream()
    side.wait_stream(graphs.current_stream())
    with graphs.stream(side):
        work()
    graphs.current_stream().wait_stream(side)
    graph = graphs.CUDAGraph()
    with graphs.graph(graph):
        out = work()
    return graph, out


box = {"x": torch.ones(3, device=device)}
graph, out = captured(lambda: (box["x"] * 2 + 1).sqrt())
seen = [["after the capture", "1", out.tolist()]]
graph.replay()
seen.append(["after a replay", "1", out.tolist()])
box["x"].fill_(4)
seen.append(["x filled with 4", "4", out.tolist()])
graph.replay()
seen.append(["and replayed", "4", out.tolist()])
old, box["x"] = box["x"], torch.full((3,), 24.0, device=device)
graph.replay()
seen.append(["x bound to another tensor, replayed", "24", out.tolist()])

# %% jupyter={"source_hidden": true}
shown = [
    [what, x, ", ".join("not computed" if n != n else f"{n:.3g}" for n in values)]
    for what, x, values in seen
]
nb.table(["", "box['x'] holds", "the output holds"], shown)
nb.say("""
A capture computes nothing. A replay reads an address: filling the tensor there is seen, binding the
name to another one is not. And there is one output, which each replay writes over.
""")

# %% [markdown]
# What happens if the old tensor is let go as well? And what if Python wants to look at a value
# while a capture goes on?


# %%
def recorded(work):
    """Record some work."""
    with graphs.graph(graphs.CUDAGraph()):
        work()


complaints = []
if graphs is recorder:  # a GPU would read whatever lies there now, or stop with an error
    del old
    attempts = {
        "the old tensor is freed, then a replay": graph.replay,
        "`int(x.max())` in a capture": lambda: recorded(lambda: int(box["x"].max())),
        "`x[x > 1]` in a capture": lambda: recorded(lambda: box["x"][box["x"] > 1]),
        "`torch.tensor([1, 2])` in a capture": lambda: recorded(lambda: torch.tensor([1, 2])),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except RuntimeError as error:
            complaints.append([what, str(error).split(". ")[0]])

# %% jupyter={"source_hidden": true}
if complaints:
    nb.table(["what was tried", "what came"], complaints)
else:
    nb.say("This ran on a GPU, where such an error ends the use of the device: nothing was tried.")

# %% [markdown]
# ## A decode step in a graph
#
# Stage 08 asks for values twice: how many queries each text has, and how long the longest context
# is. In decode the first is a shape, and for the second this stage takes the whole width of the
# table. What layer 0 works out, all layers use.

# %%
lesson.code("GraphDecodeAttention.__call__")

# %% [markdown]
# The runner captures a graph for each bucket, and copies each step into the buffers of the smallest
# one that has room.

# %%
lesson.code("GraphRunner.__call__")

# %%
WIDTH, BUCKETS = 4, [1, 2, 4, 8]
attend = GraphDecodeAttention(nano.config, 64, BLOCK, dtype=nano.dtype, device=device)
attend.keys.zero_()
attend.values.zero_()
runner = GraphRunner(nano, attend, BUCKETS, WIDTH, graphs)

texts = [
    Sequence(Request(f"t{i}", (0,)), [rng.randrange(256) for _ in range(n)], 0, [4 * i, 4 * i + 1])
    for i, n in enumerate((5, 9, 14, 3, 8))
]
for text in texts:
    runner(step_batch([text], [len(text.tokens)], BLOCK, device=device))
    text.num_computed = len(text.tokens)

beside = PagedAttention(nano.config, 64, BLOCK, dtype=nano.dtype, device=device)
rows, worst = [], 0.0
for size in (2, 3, 5, 1, 4, 2):
    members = rng.sample(texts, size)
    for text in members:
        text.tokens.append(rng.randrange(256))
    batch = step_batch(members, [1] * size, BLOCK, device=device)
    beside.keys.copy_(attend.keys)
    beside.values.copy_(attend.values)
    beside.plan(batch)
    due = nano.forward(batch.token_ids[None], batch.positions[None], beside, batch.logit_rows)
    with Operations() as host:
        logits = runner(batch)
    for text in members:
        text.num_computed += 1
    off = float((logits - due).abs().max())
    worst = max(worst, off)
    bucket = min(b for b in BUCKETS if b >= size)
    rows.append([size, bucket, bucket - size, host.count + 1, f"{off:.0e}"])

# %% jupyter={"source_hidden": true}
nb.table(["texts", "bucket", "rows for nobody", "operations asked for", "off from eager"], rows)

# %%
through_graph = rows[0][3]
prediction.score(round(asked[3] / through_graph, 1), derived=asked[3] / (5 + 5 + 1 + 1))

# %% jupyter={"source_hidden": true}
nb.say(f"""
{through_graph} operations in place of {asked[3]}: tables, tokens, positions, lengths and slots are
copied, the same five are filled for rows that stand for nobody, `logit_rows` is copied, and there
is one replay. On {BENCH_8B.num_layers} layers it would be {through_graph} in place of
{fixed + per_layer * BENCH_8B.num_layers:,.0f}. The largest difference from eager steps is
{worst:.0e}: a bucket's matrix products have more rows, and round otherwise.
""")

# %% [markdown]
# ## What fixed shapes cost
#
# Rows are padded to a bucket. With powers of two and batch sizes up to 64 whose logarithm is
# uniform, which share of the rows stands for nobody? By summing, and by drawing.

# %%
LARGEST = 64
ladders = {
    "powers of two": [1 << n for n in range(7)],
    "multiples of 8 from 8 on": [1, 2, 4, *range(8, LARGEST + 1, 8)],
    "multiples of 16 from 16 on": [1, 2, 4, 8, *range(16, LARGEST + 1, 16)],
    "the largest only": [LARGEST],
}


def share(sizes, weights, buckets):
    """The part of all computed rows that stands for nobody."""
    real = sum(w * n for n, w in zip(sizes, weights, strict=True))
    room = [min(b for b in buckets if b >= n) for n in sizes]
    return 1 - real / sum(w * b for b, w in zip(room, weights, strict=True))


sizes = list(range(1, LARGEST + 1))
derived = {name: share(sizes, [1 / n for n in sizes], b) for name, b in ladders.items()}
draws = rng.choices(sizes, [1 / n for n in sizes], k=20_000)
drawn = {name: share(draws, [1] * len(draws), b) for name, b in ladders.items()}
nb.table(
    ["buckets", "graphs", "for nobody, derived", "drawn"],
    [[n, len(b), f"{derived[n]:.1%}", f"{drawn[n]:.1%}"] for n, b in ladders.items()],
)

# %% [markdown]
# Memory is the other price. A capture's tensors lie in a pool that stays reserved. How many bytes
# do the graphs of some buckets hold, by the order of their captures, and with a pool for each?


# %%
def held(sizes, own_pools=False):
    """Bytes of the pools of graphs that are captured in this order."""
    if graphs is not recorder:
        return None
    attend = GraphDecodeAttention(nano.config, 16, BLOCK, dtype=nano.dtype, device=device)
    shared, kept = graphs.graph_pool_handle(), []
    for size in sizes:
        texts = texts_of([9] * size)
        batch = step_batch(texts, [1] * size, BLOCK, device=device)
        attend.plan(batch)
        graph = graphs.CUDAGraph()
        with graphs.graph(graph, pool=None if own_pools else shared):
            logits = nano.forward(
                batch.token_ids[None], batch.positions[None], attend, batch.logit_rows
            )
        kept.append((graph, batch, logits))
    return sum(graphs.reserved_bytes(pool) for pool in {graph.pool() for graph, _, _ in kept})


ladder = [16, 8, 4, 2, 1]
bytes_held = {
    "the largest alone": held(ladder[:1]),
    "all, largest first": held(ladder),
    "all, smallest first": held(ladder[::-1]),
    "all, a pool for each": held(ladder, own_pools=True),
}

# %% jupyter={"source_hidden": true}
if graphs is recorder:
    alone = bytes_held["the largest alone"]
    nb.table(
        ["graphs of 1, 2, 4, 8 and 16 rows", "held", "times the largest alone"],
        [[name, nb.bytes_text(n), n / alone] for name, n in bytes_held.items()],
    )
else:
    nb.say("On a GPU the allocator tells the bytes of the whole process, so none are shown here.")

# %% [markdown]
# ## How long a step takes
#
# The same decode step on nano, eagerly and as a replay, in turn.

# %%
texts[0].tokens.append(7)
batch = step_batch(texts[:1], [1], BLOCK, device=device)
eager_one = eager_step(nano, 1)
both = nb.take_turns(
    {"eager": eager_one, "graph": lambda: runner(batch)}, device, rounds=25, warmup=3
)
ratio = both["eager"].median / both["graph"].median

# %% jupyter={"source_hidden": true}
if lesson.tier == "cuda":
    verdict = "That is what the host's part was worth."
else:
    verdict = """That says nothing about graphs: the recorder replays in Python, operation by
operation, and looks up the address of every tensor besides. What a graph is worth shows on a GPU
only."""
nb.say(f"""
An eager step takes {nb.seconds_text(both["eager"].median)}, a replay
{nb.seconds_text(both["graph"].median)}: {ratio:.2f} times the speed. {verdict}
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
floor_8b = floors["8B"][0]
nb.say(f"""
The host is out of the way, and what is left is the floor: at batch 1 every weight is read for
every token, {1e3 * floor_8b:.1f} ms of each step for the 8B shape on that card. Only fewer bytes
make that shorter. Stage 14 stores each weight in fewer bits.
""")

# %% [markdown]
# ## Questions
#
# 1. A model is twice as deep, and each layer half as wide. What becomes of the gain of a graph?
# 2. Why does a row that stands for nobody need a block of the pool in its table, if its slot is -1?
# 3. A graph is captured with `x * factor`, where `factor` is a Python number. It is changed later.
#    What does a replay multiply by?
#
# <details><summary>Answers</summary>
#
# 1. It grows. There are twice as many operations to ask for, and half as many weights to read.
# 2. The slot says where it writes, the table what it reads. It reads one position, and that must
#    lie in memory that exists.
# 3. By the number that it was in the capture: numbers of Python's are arguments, and are recorded
#    with the rest. What may change must be a tensor, in a buffer that stays.
# </details>
#
# **Your turn.** `./course check 13` counts what your own graphs ask for.
#
# ## Sources
#
# - V. Nguyen et al. "Accelerating PyTorch with CUDA Graphs." PyTorch blog, 2021.
# - PyTorch documentation, "CUDA semantics", section on CUDA graphs.
