"""The client against servers that behave, and against servers that do not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from course.load.client import Client
from course.load.fake_server import Answer, FakeServer, Record
from course.parts import load_part
from course.syllabus import load_syllabus
from course.types import Chunk, RequestFailed, Timeline

harness = load_part(load_syllabus().find(6))

STEADY = Answer(0.04, (0.01,) * 5)
NEAR = 0.25  # seconds between what a server records and a client stamps, on a busy machine


def asked(server: FakeServer | str, count: int = 1, **options: Any) -> list[Timeline]:
    """Timelines of `count` requests at once."""
    url = server if isinstance(server, str) else server.url

    async def main() -> list[Timeline]:
        log: list[Timeline] = []
        async with Client(url, **({"model": "fake"} | options)) as client:
            prompts = [f"prompt {i}" for i in range(count)]
            await harness.closed_loop(client.send, prompts, count, log)
        return log

    return asyncio.run(main())


def one(answer: Answer, **options: Any) -> tuple[Timeline, Record]:
    """One request, seen from both ends."""
    with FakeServer(lambda _: answer) as server:
        [timeline] = asked(server, **options)
    return timeline, server.records[0]


def chunks(url: str, **options: Any) -> list[Chunk]:
    """What one request brings. Raises as `send` does."""

    async def main() -> list[Chunk]:
        async with Client(url, **({"model": "fake"} | options)) as client:
            return [chunk async for chunk in client.send("hello")]

    return asyncio.run(main())


# -- servers that behave --------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_steady_server(api: str) -> None:
    timeline, record = one(STEADY, api=api)
    assert timeline.finished
    assert timeline.output_tokens == 6
    text = [chunk for chunk in timeline.chunks if chunk.tokens != 0]
    assert [chunk.tokens for chunk in text] == [None] * 6  # nobody says so; and yet
    times = harness.token_times(timeline)
    assert len(times) == 6
    for (sent, _), came in zip(record.sent, times, strict=True):
        assert 0 <= came - sent < NEAR
    assert record.received - timeline.sent < NEAR
    assert 0.04 <= harness.ttft(timeline) < 0.04 + 2 * NEAR


def test_chunks_of_several_tokens() -> None:
    answer = Answer(0.02, (0.01, 0.01), (2, 1, 4))
    timeline, _ = one(answer)
    assert harness.itl(timeline) is None
    assert harness.tpot(timeline) is not None
    timeline, _ = one(answer, chunk_usage=True)
    assert [c.tokens for c in timeline.chunks if c.tokens] == [2, 1, 4]
    assert [gap == 0 for gap in harness.itl(timeline)] == [True, False, False, True, True, True]


def test_a_tokenizer_counts_where_the_server_does_not() -> None:
    timeline, _ = one(Answer(0.02, (0.01,), (2, 3)), count_tokens=lambda text: len(text.split()))
    assert [c.tokens for c in timeline.chunks if c.tokens] == [2, 3]
    assert len(harness.token_times(timeline)) == 5
    # What it counts is not believed if the server says otherwise.
    timeline, _ = one(Answer(0.02, (0.01,), (2, 3)), count_tokens=len)
    assert harness.token_times(timeline) is None


def test_no_usage() -> None:
    timeline, _ = one(Answer(0.02, (0.01,) * 3, usage=False))
    assert timeline.finished
    assert timeline.output_tokens is None
    assert harness.ttft(timeline) is not None
    assert (harness.itl(timeline), harness.tpot(timeline)) == (None, None)


def test_an_answer_in_one_piece() -> None:
    timeline, _ = one(STEADY, stream=False)
    assert timeline.output_tokens == 6
    assert harness.e2e(timeline) >= 0.09
    figures = [getattr(harness, name)(timeline) for name in ("ttft", "itl", "tpot")]
    assert figures == [None, None, None]
    timeline, _ = one(Answer(0.02, usage=False), stream=False)
    assert (timeline.finished, timeline.output_tokens) == (True, None)


def test_a_server_that_stalls() -> None:
    timeline, _ = one(Answer(0.02, (0.01, 0.4, 0.01)))
    assert abs(max(harness.itl(timeline)) - 0.4) < NEAR


def test_a_server_that_is_slow_to_accept() -> None:
    start = time.monotonic()  # the clock of every event loop on this machine
    with FakeServer(lambda _: STEADY, accept_after=0.4) as server:
        timelines = asked(server, 4)
    for timeline in timelines:
        assert 0.4 < timeline.sent + harness.ttft(timeline) - start < 5.0


def test_requests_share_connections() -> None:
    with FakeServer(lambda _: Answer(0.0)) as server:

        async def main() -> None:
            async with Client(server.url, model="fake", connections=1) as client:
                for _ in range(5):
                    assert [chunk async for chunk in client.send("again")]
                pool: Any = client._http._transport
                assert len(pool._pool.connections) == 1
                assert "Request Count: 5" in repr(pool._pool.connections[0])

        asyncio.run(main())


def test_what_is_asked() -> None:
    with FakeServer(lambda _: STEADY) as server:
        chunks(server.url, max_tokens=7, chunk_usage=True)
        chunks(server.url, api="completions", stream=False, model="")
        chunks(server.url, api_key="secret")
    first, second, _ = server.bodies
    assert first == {
        "model": "fake", "max_tokens": 7, "messages": [{"role": "user", "content": "hello"}],
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    assert second == {"model": "fake", "max_tokens": 128, "prompt": "hello"}
    assert "authorization" not in server.headers[0]
    assert server.headers[2]["authorization"] == "Bearer secret"
    assert {header["accept-encoding"] for header in server.headers} == {"identity"}


@pytest.mark.parametrize(
    ("url", "base", "api"),
    [
        ("http://h:8000", "http://h:8000/v1", "chat"),
        ("http://h:8000/", "http://h:8000/v1", "chat"),
        ("h:8000", "http://h:8000/v1", "chat"),
        ("https://h/v1/", "https://h/v1", "chat"),
        ("https://h/openai/v2", "https://h/openai/v2", "chat"),
        ("https://h/v1/chat/completions", "https://h/v1", "chat"),
        ("https://h/v1/completions", "https://h/v1", "completions"),
    ],
)
def test_addresses(url: str, base: str, api: str) -> None:
    client = Client(url)
    assert (client.base, client.api) == (base, api)
    assert client.name == base


def test_a_password_in_an_address_is_not_shown() -> None:
    client = Client("http://me:secret@h:8000")
    assert client.base == "http://me:secret@h:8000/v1"
    assert client.name == "http://h:8000/v1"


NO_ADDRESSES = [
    "", "ftp://h", "http://", "http:///v1", "http://h:port", "http://h:99999", "http://h:-1",
    "http://h:0", "http://[::1", "http://exa mple", "http://h/v1\n", "h:123456789012",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match="url must be that of an HTTP server") as refused:
        Client(url)
    assert repr(url)[1:] in str(refused.value)
    with pytest.raises(ValueError, match="api must be one of chat, completions"):
        Client("http://h", api="embeddings")


# -- servers that do not --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_refusal(status: int, stream: bool) -> None:
    timeline, _ = one(Answer(0.02, status=status), stream=stream)
    assert timeline.error == f"HTTP {status}"
    assert not timeline.chunks
    assert timeline.ended is not None


def test_what_a_server_says_is_kept_once() -> None:
    async def main(url: str) -> dict[str, str]:
        async with Client(url, model="fake") as client:
            for _ in range(3):
                with pytest.raises(RequestFailed, match=r"^HTTP 429$"):
                    await anext(client.send("hello"))
            return client.details

    with FakeServer(lambda _: Answer(0.0, status=429)) as server:
        [(kind, said)] = asyncio.run(main(server.url)).items()
    assert kind == "HTTP 429"
    assert "as it was planned" in said


@pytest.mark.parametrize("after", [0, 3])
def test_a_server_that_breaks_off(after: int) -> None:
    timeline, record = one(Answer(0.02, (0.01,) * 5, cut_after=after))
    assert timeline.error == "closed early"
    assert len([c for c in timeline.chunks if c.tokens != 0]) == len(record.sent) == after


def test_an_error_in_the_stream() -> None:
    timeline, _ = one(Answer(0.02, (0.01,) * 5, error_after=2))
    assert timeline.error == "error in the stream"


def test_some_requests_fail_and_others_do_not() -> None:
    plans = [STEADY, Answer(0.0, status=429), STEADY, Answer(0.02, (0.01,), cut_after=1)]
    with FakeServer(lambda i: plans[i % 4]) as server:
        timelines = asked(server, 8)
    kinds = sorted(str(t.error) for t in timelines)
    assert kinds == ["HTTP 429"] * 2 + ["None"] * 4 + ["closed early"] * 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_nobody_there() -> None:
    [timeline] = asked(f"http://127.0.0.1:{free_port()}")
    assert timeline.error == "no connection"
    with pytest.raises(ValueError, match="does not answer"):
        asked(f"http://127.0.0.1:{free_port()}", model="")


def test_a_silence_that_is_too_long() -> None:
    timeline, _ = one(Answer(0.02, (0.01, 5.0)), timeout=0.5)
    assert timeline.error == "timeout"
    assert len([c for c in timeline.chunks if c.tokens != 0]) == 2


Handler = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def raw_server(answer: Handler) -> Iterator[str]:
    """A server that sends whatever it is told to."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def sends(body: bytes, status: int = 200) -> Handler:
    """A handler that answers with these bytes and closes the connection."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.end_headers()
        request.wfile.write(body)

    return answer


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def delta(text: str, reason: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": reason}], **more})


NOT_STREAMS = {
    "a web page": b"<html>hello</html>",
    "an error in JSON": b'{"error": {"message": "no"}}',
    "half a document": b'data: {"choices": [\n\n',
    "a list": b"data: [1, 2]\n\n",
    "no choices": b'data: {"text": "hello"}\n\n',
    "choices that are none": b'data: {"choices": 5}\n\n',
    "no UTF-8": b"data: \xff\xfe\n\n",
    "nothing": b"",
}


@pytest.mark.parametrize("body", NOT_STREAMS.values(), ids=NOT_STREAMS.keys())
def test_what_is_no_stream(body: bytes) -> None:
    with raw_server(sends(body)) as url, pytest.raises(RequestFailed) as failed:
        chunks(url)
    assert str(failed.value) in ("not an OpenAI stream", "closed early")


NOT_ANSWERS = [b"", b"<html>", b"[]", b'{"choices": []}', b'{"error": "no"}', b'{"choices": [3]}']


@pytest.mark.parametrize("body", NOT_ANSWERS)
def test_what_is_no_answer(body: bytes) -> None:
    with raw_server(sends(body)) as url, pytest.raises(RequestFailed) as failed:
        chunks(url, stream=False)
    assert str(failed.value) in ("not an OpenAI answer", "error in the answer")


def test_a_stream_that_ends_without_saying_done() -> None:
    with raw_server(sends(delta("a") + delta("", "stop"))) as url:
        assert chunks(url) == [Chunk(None), Chunk(0)]
    with raw_server(sends(delta("a"))) as url, pytest.raises(RequestFailed, match="closed early"):
        chunks(url)


def test_a_count_that_comes_with_the_last_text_is_no_count_of_that_chunk() -> None:
    body = delta("a") + delta("b", "stop", usage={"completion_tokens": 9}) + b"data: [DONE]\n\n"
    with raw_server(sends(body)) as url:
        assert chunks(url) == [Chunk(None), Chunk(None, 9)]


def test_counts_in_every_chunk() -> None:
    body = b"".join(
        delta(text, usage={"completion_tokens": count})
        for text, count in (("", 0), ("a", 1), ("", 2), ("bc", 4), ("d", 4))
    )
    with raw_server(sends(body + b"data: [DONE]\n\n")) as url:
        found = chunks(url)
    # A token without text, as half a character is, comes to sight with the next one.
    assert [c.tokens for c in found] == [0, 1, 0, 3, 0]
    assert [c.output_tokens for c in found] == [0, 1, 2, 4, 4]


IMPOSSIBLE = {
    "negative": [-1],
    "more than a million": [10**18],
    "falling": [3, 2],
    "falling after a count without text": [3, None, 1],
}


@pytest.mark.parametrize("counts", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_counts_that_cannot_be(counts: list[int | None]) -> None:
    told = [{} if n is None else {"usage": {"completion_tokens": n}} for n in counts]
    body = b"".join(delta("a", **more) for more in told) + delta("", "stop") + b"data: [DONE]\n\n"
    with raw_server(sends(body)) as url:
        [timeline] = asked(url)
    assert timeline.error == "impossible token count"
    assert len(timeline.chunks) == len(counts) - 1


def test_a_count_that_cannot_be_of_an_answer_in_one_piece() -> None:
    document = {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 10**18}}
    with raw_server(sends(json.dumps(document).encode())) as url:
        [timeline] = asked(url, stream=False)
    assert timeline.error == "impossible token count"


def test_a_line_that_does_not_end() -> None:
    with raw_server(sends(b"data: " + b"x" * (50 << 20))) as url:
        start = time.monotonic()
        [timeline] = asked(url)
    assert timeline.error == "an event without an end"
    assert time.monotonic() - start < 20.0


def test_the_fake_server_sends_no_more_than_is_asked_for() -> None:
    answer = Answer(0.02, (0.01, 0.01), (2, 1, 4))
    for most, wanted in ((5, [2, 1, 2]), (3, [2, 1]), (1, [1]), (9, [2, 1, 4])):
        timeline, record = one(answer, max_tokens=most, chunk_usage=True)
        assert [c.tokens for c in timeline.chunks if c.tokens] == wanted
        assert timeline.output_tokens == sum(wanted)
        assert [tokens for _, tokens in record.sent] == wanted
    timeline, _ = one(answer, max_tokens=3, stream=False)
    assert timeline.output_tokens == 3


def test_reasoning_and_tool_calls_are_text() -> None:
    shown = ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]})
    body = b"".join(event({"choices": [{"delta": d}]}) for d in (*shown, {"role": "assistant"}))
    with raw_server(sends(body + b"data: [DONE]\n\n")) as url:
        assert [c.tokens for c in chunks(url)] == [None, None, None, 0]


def test_nothing_after_done_counts() -> None:
    body = delta("a", "stop") + b"data: [DONE]\n\n" + delta("b")
    with raw_server(sends(body)) as url:
        assert len(chunks(url)) == 1


NESTED = b"[" * 100_000 + b"]" * 100_000


def test_answers_that_are_nested_deeper_than_json_is_read() -> None:
    with raw_server(sends(b"data: " + NESTED + b"\n\n")) as url:
        assert asked(url)[0].error == "not an OpenAI stream"
    with raw_server(sends(NESTED)) as url:
        assert asked(url, stream=False)[0].error == "not an OpenAI answer"


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"data": []}', b"[]", b"<html>", NESTED, b'{"data": [{"id": null}]}',
     b'{"data": [{"id": 7}]}', b'{"data": [{"id": ""}]}'],
    ids=lambda body: body[:24].decode(),
)  # fmt: skip
def test_a_server_that_names_no_model(body: bytes) -> None:
    with (
        raw_server(sends(body)) as url,
        pytest.raises(ValueError, match=r"names no model.*--model"),
    ):
        chunks(url, model="")


def test_a_server_without_a_list_of_models() -> None:
    with raw_server(sends(b"", 404)) as url, pytest.raises(ValueError, match="HTTP 404; say which"):
        chunks(url, model="")
