# %% [markdown]
# # 06 · The load harness
#
# **Claim.** What a user feels can be measured from outside, to a few percent, by a client that only
# notes what comes when. But a harness is wrong in silence: it may stop asking while the server is
# slow, take a chunk for a token, or count the empty tail of a run. One law tells whether it counts
# right. Tokens per second times the mean gap between tokens is the number of requests that are
# between their first and their last token, for every server there is.
#
# You will see a stall vanish and come back, measure a server that writes down what it does, and
# then the engine of notebook 05. You need that notebook: continuous batching, and its slots.

# %%
import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import course.notebook as nb
from course.data import prompts
from course.load import virtual_time
from course.load.client import Client
from course.load.fake_server import Answer, FakeServer
from course.types import Chunk, Request, SamplingParams

lesson = nb.Lesson(6)
harness = lesson.reference  # the worked solution of this stage
ContinuousBatcher = nb.reference(5).ContinuousBatcher


def run(main, runner=asyncio.run):
    """Run a coroutine in a thread of its own: this notebook's thread has a loop already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: runner(main())).result()


# %% [markdown]
# ## Predict first
#
# A load has 16 requests in flight, always. But a request that waits for its first token is in
# flight, too, and gets no tokens. The first guess forgets that.

# %%
guess = 16
prediction = lesson.predict(guess)

# %% [markdown]
# ## One request
#
# A *timeline* is all that a client knows of a request: when it was due, when it was sent, and when
# each chunk came. The harness sees chunks through a function `send`. Behind it can be HTTP, or, as
# here, a script. And the clock need not be real: in *virtual time*, an event loop jumps to whatever
# is due next, so that waiting takes no time and every stamp is exact.


# %%
async def one_request():
    """A request that is due at 1 s, and whose answer comes in ragged chunks."""

    async def send(_):
        for seconds, tokens in ((0.5, 0), (0.25, 1), (0.25, 2), (0.5, 1)):
            await asyncio.sleep(seconds)
            yield Chunk(tokens)

    log = []
    await harness.open_loop(send, ["hello"], [1.0], log)
    return log[0]


timeline = run(one_request, virtual_time.run)
nb.table(
    ["the chunk that came", "at", "tokens in it"],
    [[i + 1, f"{c.time} s", c.tokens] for i, c in enumerate(timeline.chunks)],
)

# %%
nb.table(
    ["figure", "in seconds"],
    [
        [
            "time to first token (TTFT): from when it was due to the first text",
            harness.ttft(timeline),
        ],
        ["inter-token latencies (ITL): the gap before each later token", harness.itl(timeline)],
        ["time per output token (TPOT): first to last, over the gaps", harness.tpot(timeline)],
        ["end-to-end latency (E2E)", harness.e2e(timeline)],
    ],
    "The first chunk has no text (it names a role), and two tokens came together.",
)

# %% [markdown]
# The same chunks, if nobody says how many tokens each has: what can still be said?

# %%
for chunk_number, chunk in enumerate(timeline.chunks):
    timeline.chunks[chunk_number] = chunk._replace(tokens=None if chunk.tokens else 0)
timeline.output_tokens = 4  # the server counts them at the end
nb.table(
    ["figure", "in seconds"],
    [
        [name, str(getattr(harness, name.lower())(timeline))]
        for name in ("TTFT", "ITL", "TPOT", "E2E")
    ],
    "None means: not measured. A 0 would be averaged with the rest, and look like a good server.",
)

# %% [markdown]
# ## A stall, and a harness that looks away
#
# A server handles one request at a time, quickly, but one request in a thousand makes it stall for
# a second. Two harnesses measure it. One has a single user who sends, waits, and sends again when
# the next request would be due. The other sends each request when it is due, whatever became of
# those before it, and counts from then.

# %%
PERIOD, QUICK, STALL, COUNT, UNLUCKY = 0.020, 0.010, 1.0, 1000, 300


def server():
    """One at a time, in order."""
    free = asyncio.Semaphore(1)

    async def send(index):
        async with free:
            await asyncio.sleep(STALL if index == UNLUCKY else QUICK)
            yield Chunk(1, 1)

    return send


async def waits_for_answers():
    """Sends on schedule if it can, and else after the answer: the clock starts at the sending."""
    log, send, clock = [], server(), asyncio.get_running_loop().time
    for index in range(COUNT):
        await asyncio.sleep(max(0.0, PERIOD * index - clock()))
        await harness.closed_loop(send, [index], 1, log)
    return log


async def keeps_the_schedule():
    """Stage 06's open loop."""
    log = []
    arrivals = harness.arrival_times(1 / PERIOD, COUNT, "constant")
    await harness.open_loop(server(), range(COUNT), arrivals, log)
    return log


latencies = {
    "waits for answers": [harness.e2e(t) for t in run(waits_for_answers, virtual_time.run)],
    "keeps the schedule": [harness.e2e(t) for t in run(keeps_the_schedule, virtual_time.run)],
}
nb.table(
    ["harness", "p50", "p95", "p99", "worst"],
    [
        [name, *(nb.seconds_text(harness.percentile(values, q)) for q in (50, 95, 99, 100))]
        for name, values in latencies.items()
    ],
)

# %%
fig, ax = nb.figure(7, 2.8)
for (name, values), colour, mark in zip(
    latencies.items(), ("predicted", "measured"), ("s", "o"), strict=True
):
    shown = range(UNLUCKY - 20, UNLUCKY + 120)
    ax.plot(shown, [values[i] for i in shown], mark, ms=3, color=nb.COLOURS[colour], label=name)
ax.set(xlabel="request", ylabel="seconds")
ax.legend()
nb.show(
    fig,
    "The same server and the same stall. Who waits for an answer before sending the next request "
    "sees a single slow one.",
)

# %% jupyter={"source_hidden": true}
slow = sum(value > 1.01 * QUICK for value in latencies["keeps the schedule"])
ratio = harness.percentile(latencies["keeps the schedule"], 99)
ratio /= harness.percentile(latencies["waits for answers"], 99)
nb.say(f"""
{slow} of {COUNT:,} requests are slow, and one of the two harnesses sees one of them. Its p99 is
{ratio:.0f} times too good. It did not measure wrongly: it did not ask. This is called **coordinated
omission**, since client and server agree, so to speak, to leave those moments out.
""")

# %% [markdown]
# ## The prediction, measured
#
# Now real time and real HTTP: a server that computes nothing, but answers after the delays of the
# question and writes down when it sent each chunk. The harness keeps 16 requests in flight.

# %%
USERS, TOKENS, REQUESTS = 16, 40, 96
WAIT, GAP = (0.3, 0.6), (0.020, 0.044)  # seconds, each drawn evenly from between


def planned(index):
    """The answer to request number `index`."""
    rng = random.Random(index)
    return Answer(rng.uniform(*WAIT), tuple(rng.uniform(*GAP) for _ in range(TOKENS - 1)))


async def over_http():
    """A closed loop: the client's timelines, and the server's own records."""
    log, texts = [], [f"prompt {index}" for index in range(REQUESTS)]
    with FakeServer(planned) as fake:
        async with Client(fake.url, model="fake", connections=USERS) as client:
            await harness.closed_loop(client.send, texts, USERS, log)
        return log, fake.records


log, records = run(over_http)
window = harness.steady_window(log, warmup=USERS, cooldown=USERS)
found = harness.summarize(log, window)

# %% [markdown]
# Client and server read the same clock, so the two can be held side by side: the percentiles that
# the harness found, and those of the server's own times.

# %%
inside = [r for r in records if window.holds(r.received)]
sent = [np.array([when for when, _ in r.sent]) for r in records]
gaps = [g for s in sent for g, when in zip(np.diff(s), s[1:], strict=True) if window.holds(when)]
recorded = {"TTFT": [r.sent[0][0] - r.received for r in inside], "ITL": gaps}
rows = []
for name, stat in (("TTFT", found.ttft), ("ITL", found.itl)):
    for q in (50, 90, 99):
        measured, truth = getattr(stat, f"p{q}"), float(np.percentile(recorded[name], q))
        rows.append(
            [
                f"{name} p{q}",
                nb.seconds_text(measured),
                nb.seconds_text(truth),
                f"{measured / truth - 1:+.2%}",
            ]
        )
nb.table(["figure", "measured by the client", "recorded by the server", "apart"], rows)

# %% [markdown]
# And the question. On paper: each request waits w and then decodes for (n - 1) gaps of g, so of N
# in flight, N (n - 1) g / (w + (n - 1) g) are between their first and their last token. Little's
# law finds the same number from two figures that every benchmark prints: tokens per second, less
# one for each request (a first token closes no gap), times the mean gap.

# %%
lesson.code("occupancy")

# %%
wait, decode = sum(WAIT) / 2, (TOKENS - 1) * sum(GAP) / 2
prediction.score(found.occupancy.product, derived=USERS * decode / (wait + decode))

# %%
spans = [(s[0], s[-1]) for s in sent]
counted = sum(max(0, min(b, window.end) - max(a, window.start)) for a, b in spans)
nb.table(
    ["requests between first and last token", ""],
    [
        ["by the client: throughput × ITL", found.occupancy.product],
        ["by the client: counted over time", found.occupancy.counted],
        ["by the server: counted over time", counted / window.seconds],
    ],
)

# %%
start = log[0].intended
fig, (rows_ax, busy_ax) = nb.figure(7, 5.2, nrows=2, sharex=True)
for number, t in enumerate(log):
    text = [c.time - start for c in t.chunks if c.tokens != 0]
    rows_ax.hlines(number, t.intended - start, text[0], color=nb.COLOURS["host"], lw=1)
    rows_ax.hlines(number, text[0], text[-1], color=nb.COLOURS["measured"], lw=1)
rows_ax.set_ylabel("request")
rows_ax.invert_yaxis()
moments = np.linspace(0, log[-1].ended - start, 500) + start
busy = [sum(a <= m < b for a, b in spans) for m in moments]
busy_ax.step(moments - start, busy, color=nb.COLOURS["measured"], label="counted")
busy_ax.axhline(found.occupancy.product, color=nb.COLOURS["predicted"], label="throughput × ITL")
busy_ax.set(xlabel="seconds", ylabel="between tokens", ylim=(0, USERS))
for ax in (rows_ax, busy_ax):
    ax.axvspan(window.start - start, window.end - start, color=nb.COLOURS["faint"], zorder=0)
busy_ax.legend(loc="lower center")
nb.show(
    fig,
    "Every request, waiting (orange) and decoding (blue), and how many decode at a time. Grey: the "
    "steady state. At the left all users wait at once; at the right nobody sends any more.",
)

# %% [markdown]
# What if the whole run were taken for steady state?

# %%
whole = harness.Window(log[0].intended, max(t.ended for t in log))
all_of_it = harness.summarize(log, whole)
nb.table(
    ["", "steady state", "the whole run"],
    [
        ["seconds", window.seconds, whole.seconds],
        ["output tokens per second", found.throughput, all_of_it.throughput],
        ["throughput × ITL", found.occupancy.product, all_of_it.occupancy.product],
    ],
)

# %% jupyter={"source_hidden": true}
lost = 1 - all_of_it.throughput / found.throughput
nb.say(f"""
**Why not your {prediction.guess:g}.** {USERS - found.occupancy.product:.1f} of the {USERS} were
waiting for a first token at any moment. With burst and tail, throughput comes out {lost:.0%} lower,
and the law still holds: it is true of any stretch of time. It checks the counting, not the choice
of the window.
""")

# %% [markdown]
# ## A real engine
#
# The same harness, and behind `send` the continuous batcher of notebook 05 with the real model: no
# HTTP, just an engine that steps in another thread. How do its latencies change as more requests
# are in flight?


# %%
class Engine:
    """A ContinuousBatcher that steps while anybody waits, and hands out tokens as they come."""

    def __init__(self, slots):
        self.batcher = ContinuousBatcher(lesson.model, slots, capacity=160)
        self.arrived, self.answers, self.ids = asyncio.Event(), {}, 0

    async def serve(self):
        """Step while there is work; requests join between two steps."""
        while True:
            await self.arrived.wait()
            while self.answers:
                for output in await asyncio.to_thread(self.batcher.step):
                    self.answers[output.request_id].put_nowait(output)
            self.arrived.clear()

    async def send(self, request):
        """One request's chunks: a token each."""
        prompt_ids, new = request
        self.ids += 1
        name, answer = str(self.ids), asyncio.Queue()
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        self.batcher.add(Request(name, tuple(prompt_ids), params))
        self.answers[name] = answer
        self.arrived.set()
        while True:
            output = await answer.get()
            yield Chunk(len(output.token_ids))
            if output.finish_reason is not None:
                del self.answers[name]
                return


async def engine_load(users, rounds):
    """So many users, each with so many requests of different lengths."""
    rng, log, engine = random.Random(users), [], Engine(users)
    texts = [lesson.tokenizer.encode(text)[:48] for text in prompts("chat")]
    requests = [(rng.choice(texts), rng.randrange(16, 33)) for _ in range(rounds * users)]
    serving = asyncio.create_task(engine.serve())
    await harness.closed_loop(engine.send, requests, users, log)
    serving.cancel()
    return harness.summarize(log, harness.steady_window(log, warmup=users, cooldown=users))


run(lambda: engine_load(1, 3))  # warm-up of the engine itself
loads = {users: run(lambda users=users: engine_load(users, 5)) for users in (1, 2, 4, 8)}

# %%
nb.table(
    [
        "in flight",
        "TTFT p50",
        "ITL p50",
        "ITL p99",
        "tokens per second",
        "throughput × ITL",
        "counted",
    ],
    [
        [
            users,
            nb.seconds_text(got.ttft.p50),
            nb.seconds_text(got.itl.p50),
            nb.seconds_text(got.itl.p99),
            got.throughput,
            got.occupancy.product,
            got.occupancy.counted,
        ]
        for users, got in loads.items()
    ],
)

# %% [markdown]
# The table in the chapter has the same product of a GPU server at 1 to 256 in flight. What it is
# short of, the requests in flight, is the share of a request's life that is spent waiting for a
# first token.

# %%
EXAMPLE = {1: 0.98, 4: 3.91, 16: 15.2, 64: 60.1, 128: 114.6, 256: 220.9}
here = {users: got.occupancy.product for users, got in loads.items()}
fig, ax = nb.figure(7, 3)
for points, colour, label in (
    (EXAMPLE, "reference", "the example, a GPU server"),
    (here, "measured", "the engine of stage 05, here"),
):
    shares = [100 * (1 - product / users) for users, product in points.items()]
    ax.plot(list(points), shares, "o-", color=nb.COLOURS[colour], label=label)
nb.doublings(ax, [2**k for k in range(9)])
ax.set(xlabel="requests in flight", ylabel="waiting for a first token, %", ylim=(0, None))
ax.legend()
nb.show(
    fig,
    "The share of requests in flight that wait for their first token, from throughput × ITL alone.",
)

# %% jupyter={"source_hidden": true}
few, many = min(loads), max(loads)
speedup = loads[many].throughput / loads[few].throughput
slower = loads[many].itl.p50 / loads[few].itl.p50
usual, jerk, prefill = loads[many].itl.p50, loads[many].itl.p99, loads[few].ttft.p50
first = loads[many].ttft.p50 / loads[few].ttft.p50
nb.say(f"""
{many} users get {speedup:.1f} times the tokens per second of {few}, and each of them sees gaps that
are {slower:.1f} times as long, and waits {first:.1f} times as long for a first token. Throughput
tells the first of these three. The longest gaps (p99) are {nb.seconds_text(jerk)}. A step in which
somebody else's prompt is prefilled first should take about {nb.seconds_text(usual + prefill)}: the
median gap of {nb.seconds_text(usual)}, and the {nb.seconds_text(prefill)} that a single user waits
for a first token.
""")

# %% [markdown]
# ## On a GPU

# %%
lesson.published()

# %% [markdown]
# ## What this stage leaves unpaid

# %% jupyter={"source_hidden": true}
nb.say(f"""
The harness shows where users wait, and makes nobody wait less. {many} slots were all that this
engine had, each with memory for the longest text that there could be, whether it comes or not.
More requests in the same memory is the next thing to ask for: stage 07.
""")

# %% [markdown]
# ## Questions
#
# 1. A server sends four tokens in every chunk. Its median ITL is 0. Is it infinitely fast?
# 2. Which of these does Little's law find out: TTFT counted from when a request was sent; TTFT
#    counted as a gap; failed requests averaged into TTFT?
# 3. Requests come twice as fast as a server can answer. What does an open loop show, and what a
#    closed one?
#
# <details><summary>Answers</summary>
#
# 1. Three of four tokens come with the one before them, so more than half of all gaps are 0. The
#    mean is the honest figure here, or TPOT; and p90.
# 2. Only the second. TTFT is not in the product.
# 3. The open loop shows waiting that grows without end, as it would for users. The closed loop
#    shows the capacity, and latencies that look fine.
# </details>
#
# **Your turn.** `./course check 6` holds your harness against a server's own record. Then point it
# at any server: `./course load URL --parts mine`.
#
# ## Sources
#
# - J. D. C. Little. "A Proof for the Queuing Formula: L = λW." Operations Research 9(3), 1961.
# - G. Tene. "How NOT to Measure Latency." Talk, 2013; wrk2, <https://github.com/giltene/wrk2>.
# - B. Schroeder, A. Wierman, M. Harchol-Balter. "Open Versus Closed: A Cautionary Tale." NSDI 2006.
# - A. Agrawal et al. "Etalon: Holistic Performance Evaluation Framework for LLM Inference Systems."
#   2024. arXiv:2407.07000.
