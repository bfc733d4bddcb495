"""A server whose answers are planned to the millisecond, and which notes what it really did.

It speaks as much of the OpenAI API as a load harness needs, and computes nothing. What a harness
measures can be held against the plan and against the server's own record; and it can misbehave as
real servers do: stall, send several tokens at once, refuse, or break off.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn


@dataclass(frozen=True)
class Answer:
    """How one request is answered. Times in seconds."""

    first: float = 0.05  # from the request to the first chunk of text, or to the refusal
    gaps: tuple[float, ...] = ()  # before each later chunk of text
    tokens: tuple[int, ...] = ()  # of each chunk; one each if not said
    usage: bool = True  # whether the number of tokens is told to those who ask for it
    status: int = 200  # any other is a refusal
    cut_after: int | None = None  # the connection breaks off after so many chunks
    error_after: int | None = None  # an error is sent as an event after so many chunks

    @property
    def chunks(self) -> list[tuple[float, int]]:
        """(seconds since the request, tokens) of each chunk."""
        tokens = self.tokens or (1,) * (1 + len(self.gaps))
        times, now = [], 0.0
        for delay in (self.first, *self.gaps):
            now += delay
            times.append(now)
        return list(zip(times, tokens, strict=True))


@dataclass
class Record:
    """What the server did, by the clock of its event loop: `time.monotonic()` on this machine."""

    received: float
    sent: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens) of each chunk
    late: list[float] = field(default_factory=list)  # how much later than planned each was sent
    ended: float | None = None


class FakeServer:
    """Answers the i-th request that comes with `answer(i)`. A context manager.

    An answer ends early where the request asks for fewer tokens than were planned.

    Args:
        answer: plans an answer. Called in the server's own thread.
        accept_after: seconds before the server takes the first connection; until then clients wait.
    """

    model = "fake"

    def __init__(self, answer: Callable[[int], Answer], *, accept_after: float = 0.0) -> None:
        self.answer = answer
        self.accept_after = accept_after
        self.records: list[Record] = []
        self.bodies: list[dict[str, Any]] = []  # what was asked, as it came
        self.headers: list[dict[str, str]] = []
        # asyncio sends without delay only on sockets that say that they are TCP. Others may hold a
        # small chunk back for 40 ms, until the one before it is acknowledged (Nagle's algorithm).
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # broken answers are meant
        config = uvicorn.Config(
            self._app, interface="asgi3", loop="asyncio", http="h11", ws="none", lifespan="off",
            log_config=None, access_log=False, timeout_graceful_shutdown=0,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def _run(self) -> None:
        threading.Event().wait(self.accept_after)
        self._server.run(sockets=[self._socket])

    # -- answering -------------------------------------------------------------------------------

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        received = asyncio.get_running_loop().time()
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"].endswith("/models"):
            await _reply(send, 200, {"object": "list", "data": [{"id": self.model}]})
            return
        if not scope["path"].endswith("/completions"):
            await _reply(send, 404, _error("not_found", f"there is no {scope['path']}"))
            return
        asked = json.loads(body)
        answer = self.answer(len(self.records))
        record = Record(received)
        self.records.append(record)
        self.bodies.append(asked)
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        chat = scope["path"].endswith("/chat/completions")
        await _Answering(record, answer, asked, chat, send).run()
        record.ended = asyncio.get_running_loop().time()


class _Answering:
    """One answer under way."""

    def __init__(
        self, record: Record, answer: Answer, asked: dict[str, Any], chat: bool, send: Any
    ) -> None:
        self.record, self.answer, self.send, self.chat = record, answer, send, chat
        self.chunks = _at_most(asked.get("max_tokens"), answer.chunks)
        self.streams = bool(asked.get("stream"))
        options = asked.get("stream_options") or {}
        self.tells_usage = answer.usage and bool(options.get("include_usage"))
        self.every_chunk = self.tells_usage and bool(options.get("continuous_usage_stats"))

    async def run(self) -> None:
        """Answer as planned."""
        if self.answer.status != 200:
            await self._until(self.answer.first)
            await _reply(self.send, self.answer.status, _error("refused", "as it was planned"))
        elif self.streams:
            await self._stream()
        else:
            await self._whole()

    async def _until(self, seconds: float) -> None:
        """Wait until so long after the request came."""
        due = self.record.received + seconds
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        self.record.late.append(asyncio.get_running_loop().time() - due)

    async def _whole(self) -> None:
        await self._until(self.chunks[-1][0])
        tokens = sum(count for _, count in self.chunks)
        text = "word " * tokens
        choice = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        document: dict[str, Any] = {"choices": [{"index": 0, **choice, "finish_reason": "length"}]}
        if self.answer.usage:
            document["usage"] = _count(tokens)
        self.record.sent.append((asyncio.get_running_loop().time(), tokens))
        await _reply(self.send, 200, document)

    async def _stream(self) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.chat:
            await self._event(self._choice({"role": "assistant", "content": ""}, 0))
        told = 0
        for index, (seconds, tokens) in enumerate(self.chunks):
            if index == self.answer.cut_after:
                return  # without the end that HTTP asks for: the connection is cut
            if index == self.answer.error_after:
                await self._event(_error("overloaded", "as it was planned"))
                break
            await self._until(seconds)
            told += tokens
            content = {"content": "word " * tokens} if self.chat else {"text": "word " * tokens}
            self.record.sent.append((asyncio.get_running_loop().time(), tokens))
            await self._event(self._choice(content, told))
        else:
            await self._event(self._choice({} if self.chat else {"text": ""}, told, "length"))
            if self.tells_usage:
                await self._event({"choices": [], "usage": _count(told)})
        await self.send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _choice(self, content: dict[str, Any], told: int, reason: str | None = None) -> Any:
        choice = {"delta": content} if self.chat else content
        usage = {"usage": _count(told)} if self.every_chunk else {}
        return {"choices": [{"index": 0, **choice, "finish_reason": reason}], **usage}

    async def _event(self, document: Any) -> None:
        body = b"data: " + json.dumps(document).encode() + b"\n\n"
        await self.send({"type": "http.response.body", "body": body, "more_body": True})


def _at_most(tokens: Any, chunks: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The chunks up to so many tokens; all of them if `tokens` is no number above 0."""
    if type(tokens) is not int or tokens < 1:
        return chunks
    kept, left = [], tokens
    for seconds, count in chunks:
        if left > 0:
            kept.append((seconds, min(count, left)))
            left -= count
    return kept


def _count(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


async def _reply(send: Any, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
