"""Replies that a solution wrote itself are seen for what they are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from check.workers import Workshop
from course.check.channel import BadFrame, Foreign
from course.check.codes import Code
from course.check.failure import GateFailure
from course.check.host import Limits
from course.check.replies import LONGEST, SolutionError, checked

ERROR = {
    "type": "ValueError", "bases": ["ValueError", "Exception"], "message": "no", "where": "",
    "traceback": "",
}  # fmt: skip


def test_what_a_worker_says_is_let_through() -> None:
    for kind, value in (("value", 3), ("started", True), ("loaded", True), ("missing", ["f"])):
        assert checked({"token": "t", kind: value}, "t", kind)[kind] == value
    assert SolutionError(checked({"token": "t", "error": ERROR}, "t", "value")["error"]).bases


FORGED: dict[str, Any] = {
    "no envelope": 5,
    "a list": ["value", 3],
    "a foreign thing": Foreign("dict", "{}"),
    "no token": {"value": 3},
    "another token": {"token": "u", "value": 3},
    "nothing in it": {"token": "t"},
    "two kinds at once": {"token": "t", "value": 3, "error": ERROR},
    "another kind than asked": {"token": "t", "loaded": True},
    "violations that are no list": {"token": "t", "value": 3, "violations": 5},
    "violations of numbers": {"token": "t", "value": 3, "violations": [5]},
    "a clock that is no name": {"token": "t", "value": 3, "patched": [None]},
    "an error that is a number": {"token": "t", "error": 5},
    "an error without a type": {"token": "t", "error": {**ERROR, "type": None}},
    "an error without fields": {"token": "t", "error": {}},
    "bases that are text": {"token": "t", "error": {**ERROR, "bases": "ValueError"}},
    "a message that is foreign": {"token": "t", "error": {**ERROR, "message": Foreign("a", "b")}},
    "too many names": {"token": "t", "value": 3, "violations": ["x"] * 1000},
}


@pytest.mark.parametrize("reply", FORGED.values(), ids=FORGED.keys())
def test_anything_else_is_not(reply: Any) -> None:
    with pytest.raises(BadFrame):
        checked(reply, "t", "value")


def test_long_texts_are_cut() -> None:
    reply = {"token": "t", "error": {**ERROR, "message": "x" * 100_000}}
    assert len(checked(reply, "t", "value")["error"]["message"]) == LONGEST


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["token", "value", "done", "error", "violations", "patched", "missing"]),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.dictionaries(st.sampled_from(list(ERROR)), inner, max_size=5),
            ),
            max_leaves=8,
        ),
    )
)
def test_no_reply_makes_the_judge_stumble(reply: dict[str, Any]) -> None:
    try:
        found = checked(reply | {"token": "t"}, "t", "value")
    except BadFrame:
        return
    if "error" in found:
        SolutionError(found["error"])
    ", ".join(found.get("violations", []) + found.get("patched", []))


# -- from real workers ----------------------------------------------------------------------------

WRITER = """
import os, sys
def write(data):
    for fd in range(3, 60):
        try: os.write(fd, data)
        except OSError: pass
def frame(value):
    from struct import pack
    import json
    document = json.dumps(value).encode()
    return pack(">QQ", len(document), 0) + document
def reply(**fields):
    pairs = [[k, v] for k, v in fields.items()]
    return frame({"$": "dict", "v": pairs})
"""
ATTACKS = {
    "text": "write(b'passed ' * 20)",
    "a few bytes": "write(b'x')",
    "a header and nothing": "write(bytes(7) + b'\\x05' + bytes(8) + b'hell')",
    "a value without an envelope": "write(frame(5))",
    "a reply without a token": "write(reply(value=42))",
    "a reply with a token of its own": "write(reply(value=42, token='x' * 32))",
    "an error of its own": "write(reply(error=5))",
    "a huge claim": "write(b'\\xff' * 16)",
    "a bomb": "write(frame([[]] * 100_000))",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_solution_that_writes_to_the_channel(workshop: Workshop, attack: str) -> None:
    """When it is called; the true reply comes after the forged one."""
    host = workshop.start(f"{WRITER}\ndef f():\n    {attack}\n    return 'true'\n")
    host.limits = Limits(seconds=2.0)
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="f")
    assert caught.value.code is Code.CHANNEL_FORGED
    assert not host.alive


def test_a_solution_that_writes_while_it_is_loaded(workshop: Workshop) -> None:
    source = f"{WRITER}\nwrite(reply(loaded=True))\ndef f(): return 1"
    workshop.failure(source, Code.CHANNEL_FORGED)


def test_a_reply_that_comes_before_its_question(workshop: Workshop) -> None:
    """Left in the pipe by one step, to be taken for the answer of the next."""
    source = f"""{WRITER}
def f():
    import threading, time
    threading.Timer(0.3, lambda: write(reply(value=42))).start()
    return "first"
"""
    host = workshop.start(source)
    assert host.call("call", name="f") == "first"
    import time

    time.sleep(0.6)
    with pytest.raises(GateFailure) as caught:
        host.call("call", name="f")
    assert caught.value.code is Code.CHANNEL_FORGED
