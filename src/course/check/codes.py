"""Every way that a check can end badly: a closed list, each with the page that `explain` shows.

A wrong solution in `gates/wrong/` names one of these in its first line, and `course prove` holds it
to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Where in a gate a code comes from."""

    LOADING = "loading"  # before anything could run
    CONTRACT = "contract"  # what comes out is not what it should be
    NUMBER = "number"  # right, but the number did not move
    CONDUCT = "conduct"  # the solution did what no solution may
    COURSE = "course"  # not the student's fault


@dataclass(frozen=True)
class Page:
    """What `course explain CODE` prints."""

    kind: Kind
    means: str
    causes: tuple[str, ...]
    do: str
    usual: bool = True  # the first cause is the likely one; else any stage has others

    @property
    def likely(self) -> str:
        """The cause to name where nothing more is known; empty if that would be a guess."""
        return self.causes[0] if self.usual else ""


class Code(StrEnum):
    """The closed list."""

    # loading
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    MISSING_FILE = "MISSING_FILE"
    SYNTAX_ERROR = "SYNTAX_ERROR"
    LOAD_ERROR = "LOAD_ERROR"
    MISSING_NAME = "MISSING_NAME"
    # contract
    CRASHED = "CRASHED"
    NOT_AN_ITERATOR = "NOT_AN_ITERATOR"
    NOT_STREAMING = "NOT_STREAMING"
    WRONG_TYPE = "WRONG_TYPE"
    WRONG_TOKEN = "WRONG_TOKEN"
    TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
    TOO_FEW_TOKENS = "TOO_FEW_TOKENS"
    WRONG_LOGITS = "WRONG_LOGITS"
    WRONG_VALUE = "WRONG_VALUE"
    MADE_UP = "MADE_UP"
    WRONG_LOAD = "WRONG_LOAD"
    STARVED = "STARVED"
    OUT_OF_TURN = "OUT_OF_TURN"
    LEAKED_BLOCKS = "LEAKED_BLOCKS"
    NO_ERROR_RAISED = "NO_ERROR_RAISED"
    WRONG_ERROR = "WRONG_ERROR"
    MUTATED_INPUT = "MUTATED_INPUT"
    STALE_STATE = "STALE_STATE"
    # number
    WRONG_COUNT = "WRONG_COUNT"
    TOO_MUCH_MEMORY = "TOO_MUCH_MEMORY"
    TOO_MUCH_TRAFFIC = "TOO_MUCH_TRAFFIC"
    SPILLED_REGISTERS = "SPILLED_REGISTERS"
    NARROW_LOADS = "NARROW_LOADS"
    TOO_SLOW = "TOO_SLOW"
    TOO_GOOD = "TOO_GOOD"
    MISMEASURED = "MISMEASURED"
    TOO_NOISY = "TOO_NOISY"
    # conduct
    FORBIDDEN_IMPORT = "FORBIDDEN_IMPORT"
    EXITED = "EXITED"
    TIMEOUT = "TIMEOUT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    SKIPPED = "SKIPPED"
    CLOCK_PATCHED = "CLOCK_PATCHED"
    BACKGROUND_WORK = "BACKGROUND_WORK"
    CHANNEL_FORGED = "CHANNEL_FORGED"
    # course
    NOT_MEASURABLE = "NOT_MEASURABLE"
    BROKEN_GATE = "BROKEN_GATE"

    @property
    def page(self) -> Page:
        """What `course explain` shows for this code."""
        return PAGES[self]


_P = Page
PAGES: dict[Code, Page] = {
    Code.NOT_IMPLEMENTED: _P(
        Kind.LOADING,
        "The stub raised NotImplementedError: this part is not written yet.",
        ("A function of this stage is still a stub: the line above names it.",),
        "Read the chapter (`course read STAGE`), then replace the `raise` line.",
    ),
    Code.MISSING_FILE: _P(
        Kind.LOADING,
        "The solution's file does not exist or cannot be read as text.",
        ("It was renamed or deleted.", "The path given to --solution is wrong."),
        "`course reset STAGE` brings the stub back; a backup of what is there is kept.",
    ),
    Code.SYNTAX_ERROR: _P(
        Kind.LOADING,
        "Python cannot parse the file.",
        ("A missing bracket, colon or quote, often on the line before the one named.",),
        "Open the file at the line that the message names.",
    ),
    Code.LOAD_ERROR: _P(
        Kind.LOADING,
        "Importing the file raised an error, before anything was called.",
        ("A name misspelt at the top of the file.", "Code outside functions that fails."),
        "Read the last line of the traceback; `python FILE` shows the same error.",
    ),
    Code.MISSING_NAME: _P(
        Kind.LOADING,
        "A function or class that this stage builds is not in the file.",
        ("It was renamed.", "It is indented into another function."),
        "Restore the name and the signature that the stub had.",
    ),
    Code.CRASHED: _P(
        Kind.CONTRACT,
        "The solution raised an error where it should have given a result.",
        ("A shape that does not fit.", "A tensor on another device or of another dtype."),
        "The traceback's last line in your file is where to look.",
        usual=False,
    ),
    Code.NOT_AN_ITERATOR: _P(
        Kind.CONTRACT,
        "The function returned something that cannot be stepped through.",
        ("It prints its tokens instead of yielding them.", "It returns a number, or None."),
        "Use `yield token` inside the loop: a caller must get each token when it is known.",
    ),
    Code.NOT_STREAMING: _P(
        Kind.CONTRACT,
        "Tokens come later than they are known: more was computed before one was handed out.",
        ("All tokens are collected first and yielded at the end.", "One pass runs ahead."),
        "`yield token` right after the pass that gave it. A reader sees each one come.",
    ),
    Code.WRONG_TYPE: _P(
        Kind.CONTRACT,
        "A value has the wrong type.",
        ("A tensor of one element instead of an int.", "A numpy number instead of a float."),
        "`int(tensor)` or `tensor.item()` gives a plain number.",
        usual=False,
    ),
    Code.WRONG_TOKEN: _P(
        Kind.CONTRACT,
        "A token differs from what an independent model of the same weights gives.",
        (
            "The logits of another position than the last.",
            "Positions that are off by one after the prompt.",
            "Keys or values that belong to another position.",
        ),
        "Look at the first token that differs: the first one wrong points at prefill, a later one "
        "at the step after it.",
        usual=False,
    ),
    Code.TOO_MANY_TOKENS: _P(
        Kind.CONTRACT,
        "More tokens came than were asked for, or some came after the end token.",
        ("The end token is not looked at.", "It is looked at one step too late.", "No limit."),
        "The end token itself is yielded, and nothing after it.",
    ),
    Code.TOO_FEW_TOKENS: _P(
        Kind.CONTRACT,
        "The text stopped before the limit, and no end token was the reason.",
        ("The loop runs once too few.", "The end token is swallowed.", "Stops at a wrong length."),
        "Count by hand for max_new_tokens = 1.",
    ),
    Code.WRONG_LOGITS: _P(
        Kind.CONTRACT,
        "The logits differ from those of a pass without a cache by more than rounding explains.",
        ("Positions off by one.", "A cache row overwritten or read before it is written."),
        "Compare layer 0's keys at the first position that differs.",
        usual=False,
    ),
    Code.WRONG_VALUE: _P(
        Kind.CONTRACT,
        "A number differs from its closed form.",
        (
            "A factor left out (2 for keys *and* values).",
            "One too few or too many.",
            "Bits for bytes.",
        ),
        "Work the smallest case of the chapter by hand.",
        usual=False,
    ),
    Code.MADE_UP: _P(
        Kind.CONTRACT,
        "A figure stands where nothing was measured: it must be absent, that is None.",
        (
            "0 in place of what is not known.",
            "Chunks counted as tokens, though nobody said how many each of them holds.",
            "The latency of a request that failed.",
        ),
        "Ask what was really seen of this request. A guess among measurements looks like one.",
    ),
    Code.WRONG_LOAD: _P(
        Kind.CONTRACT,
        "The requests were not sent as the load asks for: when, how many at once, or which.",
        (
            "A request waits for one that has nothing to do with it.",
            "The next request waits until a whole group has ended.",
            "Gaps are slept one by one, so that each delay moves all that follows.",
        ),
        "Write down on paper when each request is due, for 2 in flight and 4 requests.",
        usual=False,
    ),
    Code.STARVED: _P(
        Kind.CONTRACT,
        "A request that could be served gets no further: its turn never comes, or its work is "
        "undone again and again.",
        (
            "Nobody is admitted, though there is room or nothing runs.",
            "The oldest request is preempted for a newer one.",
            "A request that can never fit waits in front of all others.",
        ),
        "In every step, the oldest request that is not finished must get on. Find the first step "
        "in which it does not.",
        usual=False,
    ),
    Code.OUT_OF_TURN: _P(
        Kind.CONTRACT,
        "Somebody is served before one who came earlier.",
        (
            "One that does not fit is passed over for one that does.",
            "A preempted request waits at the end of the queue.",
            "The oldest is preempted, and not the newest.",
        ),
        "Write down who came when, and who runs and waits after each step: it is one list, cut in "
        "two.",
        usual=False,
    ),
    Code.LEAKED_BLOCKS: _P(
        Kind.CONTRACT,
        "Blocks are held by nobody, or somebody who does not run still holds some.",
        (
            "What has ended, or was preempted, did not give its blocks back.",
            "A table was emptied, and not freed.",
        ),
        "`allocator.check` with the tables of all that run names the block, after every step.",
    ),
    Code.NO_ERROR_RAISED: _P(
        Kind.CONTRACT,
        "Bad input was accepted in silence.",
        ("The check is missing.", "The check looks at another argument."),
        "Raise a ValueError or TypeError that names the argument and says what was expected.",
    ),
    Code.WRONG_ERROR: _P(
        Kind.CONTRACT,
        "Bad input raised an error, but not one that helps: wrong type, or no argument named.",
        ("An error from deep inside torch came first.",),
        "Check arguments first, and name the argument in the message.",
        usual=False,
    ),
    Code.MUTATED_INPUT: _P(
        Kind.CONTRACT,
        "An argument was changed: the caller's list or tensor is not what it was.",
        ("`tokens = prompt_ids` and then `tokens.append(...)`: both are one list.",),
        "Copy first: `tokens = list(prompt_ids)`.",
    ),
    Code.STALE_STATE: _P(
        Kind.CONTRACT,
        "A second call was disturbed by what an earlier one left behind.",
        ("A global or a default argument that is kept between calls.",),
        "Make the state inside the call, or in the object.",
        usual=False,
    ),
    Code.WRONG_COUNT: _P(
        Kind.NUMBER,
        "The work done, counted exactly, is not the work that the chapter derives.",
        (
            "Something is computed twice, or for nobody: a prompt, a pass, a row.",
            "The head runs over every position.",
        ),
        "Compare the count with the formula, for a prompt of 3 tokens and 2 new ones.",
    ),
    Code.TOO_MUCH_MEMORY: _P(
        Kind.NUMBER,
        "More memory is held than the formula allows.",
        ("Keys and values repeated for every query head.", "A second copy of the cache."),
        "Store Hkv heads; group the queries when attending.",
    ),
    Code.TOO_MUCH_TRAFFIC: _P(
        Kind.NUMBER,
        "More bytes are copied, or loaded, than a step needs.",
        (
            "`torch.cat` onto the old cache copies all of it, every step.",
            "Attention is given all columns that a slot reserves, nearly all of them empty.",
            "A kernel loads the same keys once for each query head, or what lies past a context.",
        ),
        "Reserve once, write in place. In a kernel, let all rows that need a key share its load.",
    ),
    Code.SPILLED_REGISTERS: _P(
        Kind.NUMBER,
        "A kernel, built for a GPU, keeps more values than a thread has registers for.",
        (
            "Tiles too large for the number of warps.",
            "A tile that is kept for longer than it is needed.",
        ),
        "Make the tile smaller, or give the program more warps (`num_warps=8`).",
    ),
    Code.NARROW_LOADS: _P(
        Kind.NUMBER,
        "A kernel, built for a GPU, loads keys and values in pieces of less than 128 bits.",
        (
            "The innermost index of the load is not the one that is contiguous in memory.",
            "The address is computed so that the compiler cannot see that it is aligned.",
        ),
        "Let the last dimension of a tile be `tl.arange` over the width of a head.",
    ),
    Code.TOO_SLOW: _P(
        Kind.NUMBER,
        "It is right, and the interval of the measured ratio lies below the bar.",
        ("The work that this stage saves is still being done.", "Copies or loops in Python."),
        "Look at the counters first: they say what is computed. Then profile one step.",
    ),
    Code.TOO_GOOD: _P(
        Kind.NUMBER,
        "The figure is better than the machine can be: it measures something else.",
        (
            "An array that fits in the cache.",
            "Bits counted as bytes.",
            "A GPU timed without waiting for it.",
        ),
        "Ask what bytes really moved, and whether the clock stopped after they had.",
    ),
    Code.MISMEASURED: _P(
        Kind.NUMBER,
        "What the solution measured is not what the other side recorded of the same events.",
        (
            "Work between two chunks: what comes meanwhile waits, and is stamped too late.",
            "A chunk counted as one token.",
            "A clock that is read after something else was awaited.",
        ),
        "Stamp a chunk as soon as it is there, and put all other work off until the end.",
        usual=False,
    ),
    Code.TOO_NOISY: _P(
        Kind.NUMBER,
        "The interval still holds the bar after the last look: no verdict, and no blame.",
        ("Something else is running.", "The machine is slowing itself down (heat, battery)."),
        "Close other programs, plug in, and run the check again: slices add up over runs while "
        "the file stays the same.",
    ),
    Code.FORBIDDEN_IMPORT: _P(
        Kind.CONDUCT,
        "The solution imports or opens what a solution may not: a reference of this stage or a "
        "later one, a gate, or the course's own measuring code.",
        (
            "`from reference...`",
            "`from course.check ...`",
            "Opening those files by their path.",
            "Starting another program.",
        ),
        "Use `course.types`, `course.model` and `course.parts` (earlier stages), and any library.",
        usual=False,
    ),
    Code.EXITED: _P(
        Kind.CONDUCT,
        "The process that ran the solution ended in the middle.",
        ("`exit()`, `sys.exit()` or `os._exit()`.", "A crash in native code."),
        "Raise an error instead of leaving. If it crashed, look for an index out of range.",
    ),
    Code.TIMEOUT: _P(
        Kind.CONDUCT,
        "No answer came in the time that a step may take.",
        ("A loop that never ends.", "Waiting for input or for a lock."),
        "Run the function by hand with a tiny prompt, and interrupt it to see where it is.",
    ),
    Code.MEMORY_LIMIT: _P(
        Kind.CONDUCT,
        "The process outgrew its memory limit and was stopped.",
        ("A list or tensor that grows in every step.", "A buffer for the whole context, squared."),
        "Reserve what the chapter's formula says, and no more.",
    ),
    Code.SKIPPED: _P(
        Kind.CONDUCT,
        "The solution called pytest.skip or pytest.xfail. A check that is skipped is not a pass.",
        ("A line left over from an experiment.",),
        "Remove it. What cannot be measured on a machine is the gate's to say.",
    ),
    Code.CLOCK_PATCHED: _P(
        Kind.CONDUCT,
        "The solution replaced a clock or a synchronisation function of its process.",
        ("`time.perf_counter = ...` or a patched `torch.cuda.synchronize`.",),
        "It would not help: the judge times from its own process. Remove the patch.",
    ),
    Code.BACKGROUND_WORK: _P(
        Kind.CONDUCT,
        "The solution's processes were busy while it was the baseline's turn.",
        ("A thread or subprocess that keeps running after a token was yielded.",),
        "Finish the work of a step before you yield its result.",
    ),
    Code.CHANNEL_FORGED: _P(
        Kind.CONDUCT,
        "Something other than the course wrote to the channel that carries results.",
        ("Writing to file descriptors that you did not open.",),
        "Print to standard output instead; it is shown when a check fails.",
    ),
    Code.NOT_MEASURABLE: _P(
        Kind.COURSE,
        "This machine lacks what the check needs. It is not a pass, and not your fault.",
        (
            "No GPU for tier `cuda`.",
            "The model is not fetched.",
            "A library that the stage is about, such as triton, does not exist for this system.",
        ),
        "`course doctor` says what this machine can measure, and what to do about the rest.",
    ),
    Code.BROKEN_GATE: _P(
        Kind.COURSE,
        "The judge itself failed. That is a fault of the course.",
        ("A bug in a gate, or a dependency of another version.",),
        "Please report it with the output of `course doctor`.",
    ),
}

assert set(PAGES) == set(Code), "every code has a page"
