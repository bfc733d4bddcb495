"""Server-sent events out of bytes that come in any pieces."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.load.sse import MOST, EventStream, EventTooLong


def events(*pieces: bytes) -> list[str]:
    stream = EventStream()
    return [event for piece in pieces for event in stream.feed(piece)]


def test_events() -> None:
    assert events(b"data: one\n\ndata: two\n\n") == ["one", "two"]
    assert events(b"data:one\r\n\r\n") == ["one"]
    assert events(b"data:  two spaces\n\n") == [" two spaces"]
    assert events(b"data: a\ndata: b\n\n") == ["a\nb"]


def test_what_is_not_data_is_left_out() -> None:
    assert events(b": ping\n\nevent: x\nid: 3\nretry: 5\ndata: one\n\n\n\n: ping\n\n") == ["one"]


def test_an_event_that_does_not_end_is_none() -> None:
    assert events(b"data: one\n\ndata: tw") == ["one"]
    assert events(b"data: one\n") == []


def test_line_breaks_of_unicode_break_no_event() -> None:
    text = '{"content": "a\u2028b\x85c\x0bd"}'
    assert events(f"data: {text}\n\n".encode()) == [text]


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        events(b"data: \xff\n\n")


@pytest.mark.parametrize("piece", [b"x" * 1024, b"data: 5678\n", b"data:\n" * 100])
def test_an_event_without_an_end_is_refused_in_linear_time(piece: bytes) -> None:
    stream = EventStream()
    start = time.monotonic()
    with pytest.raises(EventTooLong, match="more than"):
        assert not [event for _ in range(2 * MOST // len(piece)) for event in stream.feed(piece)]
    assert time.monotonic() - start < 20.0


def test_a_long_event_and_many_events_are_taken() -> None:
    line = b"data: " + b"x" * (MOST // 2) + b"\r\n\r\n"
    pieces = [line[i : i + 4096] for i in range(0, len(line), 4096)]
    assert [len(event) for event in events(*pieces * 3)] == [MOST // 2] * 3
    assert events(*[b": ping\r\n" * 1024] * (MOST // 4096), b"data: a\n\n") == ["a"]


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), min_size=1)),
    st.lists(st.integers(0, 400)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_pieces_do_not_matter(texts: list[str], cuts: list[int], end: str) -> None:
    texts = [f"x{text}" for text in texts]  # a space at the beginning belongs to the field
    body = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    assert events(*(body[a:b] for a, b in pairwise(edges))) == texts
