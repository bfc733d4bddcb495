"""The HTTP client: sends prompts to an OpenAI-compatible server, and gives chunks as they come.

It is the `send` of stage 06's loops. It tells what came and reads no clock. A request is tried
once: a retry would hide a failure, and make one request look like a slow one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from course.load.sse import EventStream, EventTooLong
from course.types import Chunk, RequestFailed

APIS = {"chat": "/chat/completions", "completions": "/completions"}
LOCAL = ("localhost", "127.0.0.1", "::1")
NO_DOCUMENT = (ValueError, RecursionError)  # json gives up at some hundred brackets in each other
MOST_TOKENS = 1_000_000  # of an answer; who counts more has miscounted


class Client:
    """One server, one model, one way of asking. An async context manager.

    Args:
        url: of the server, with or without "/v1" or the path of an endpoint.
        model: what to ask for; empty asks the server which it has, on entering.
        api: "chat" or "completions"; an endpoint's path in `url` decides first.
        max_tokens: the most that an answer may have.
        stream: whether the answer is to come in pieces.
        chunk_usage: ask for the number of tokens with every chunk, as vLLM and SGLang offer. A
            server that does not know the option may refuse it.
        count_tokens: counts the tokens of a chunk's text, where the server says nothing.
        api_key: sent as a bearer token.
        timeout: the longest silence, in seconds, before a request has failed.
        connections: how many there may be at once; None: as many as there are requests.

    Raises:
        ValueError: `url` or `api` is none.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api: str = "chat",
        max_tokens: int = 128,
        stream: bool = True,
        chunk_usage: bool = False,
        count_tokens: Callable[[str], int] | None = None,
        api_key: str = "",
        timeout: float = 600.0,
        connections: int | None = None,
    ) -> None:
        if api not in APIS:
            raise ValueError(f"api must be one of {', '.join(APIS)}, got {api!r}")
        self.base, self.api = _endpoint(url, api)
        self.name = _without_password(self.base)
        self.model = model
        self.max_tokens = max_tokens
        self.stream = stream
        self.chunk_usage = chunk_usage
        self.count_tokens = count_tokens
        self.details: dict[str, str] = {}  # what the server said at the first failure of each kind
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"}  # a compressor would hold chunks back
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            timeout=timeout,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=urlsplit(self.base).hostname not in LOCAL,  # no proxy to one's own machine
        )

    async def __aenter__(self) -> Client:
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _first_model(self) -> str:
        """The model that the server names first.

        Raises:
            ValueError: no server answers, or it does not say.
        """
        try:
            reply = await self._http.get(self.base + "/models")
            name = reply.raise_for_status().json()["data"][0]["id"]
            if isinstance(name, str) and name:
                return name
            why = f"{self.name}/models names no model"
        except httpx.HTTPStatusError as error:
            why = f"{self.name}/models answers with HTTP {error.response.status_code}"
        except httpx.HTTPError as error:
            raise ValueError(f"{self.name} does not answer: {_words(error)}") from None
        except (*NO_DOCUMENT, LookupError, TypeError):
            why = f"{self.name}/models names no model"
        raise ValueError(f"{why}; say which to ask for: --model")

    async def send(self, prompt: str) -> AsyncIterator[Chunk]:
        """Ask once, and give the chunks of the answer as they come.

        Raises:
            RequestFailed: there was no answer, or not to its end.
        """
        try:
            async with self._http.stream(
                "POST", self.base + APIS[self.api], json=self._body(prompt)
            ) as reply:
                if reply.status_code != 200:
                    raise self._failed(f"HTTP {reply.status_code}", await reply.aread())
                if self.stream:
                    async for chunk in self._streamed(reply):
                        yield chunk
                else:
                    yield self._whole(await reply.aread())
        except httpx.HTTPError as error:
            raise self._failed(_kind(error), _words(error)) from None

    def _body(self, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            if self.chunk_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        return body

    async def _streamed(self, reply: httpx.Response) -> AsyncIterator[Chunk]:
        counter = _Counter(self.count_tokens)
        events, finished = EventStream(), False
        pieces = reply.aiter_bytes()
        async for piece in pieces:
            try:
                for event in events.feed(piece):
                    if event.strip() == "[DONE]":
                        await _read_on(pieces)
                        return
                    document = _object(json.loads(event))
                    if document.get("error"):
                        raise self._failed("error in the stream", event)
                    finished |= _finish_reason(document) is not None
                    yield counter.chunk(document, self._count(document, counter.told))
            except EventTooLong as error:
                raise self._failed("an event without an end", str(error)) from None
            except (*NO_DOCUMENT, LookupError, TypeError, AttributeError):
                raise self._failed("not an OpenAI stream", piece) from None
        if not finished:
            raise self._failed("closed early", "the stream ended without a finish_reason")

    def _whole(self, body: bytes) -> Chunk:
        """An answer in one piece: how many tokens it has, and nothing on when each was there."""
        try:
            document = _object(json.loads(body))
            if document.get("error"):
                raise self._failed("error in the answer", body)
            _choice(document)["finish_reason"]
        except (*NO_DOCUMENT, LookupError, TypeError, AttributeError):
            raise self._failed("not an OpenAI answer", body) from None
        return Chunk(0, self._count(document, 0))

    def _count(self, document: Mapping[str, Any], least: int) -> int | None:
        """The server's count, if it gives one that can be: no fewer tokens than it told before."""
        usage = _usage(document)
        if usage is not None and not least <= usage <= MOST_TOKENS:
            said = f"{usage} tokens, after {least}" if least else f"{usage} tokens"
            raise self._failed("impossible token count", said)
        return usage

    def _failed(self, kind: str, detail: str | bytes) -> RequestFailed:
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else detail
        self.details.setdefault(kind, " ".join(text.split())[:300])
        return RequestFailed(kind)


async def _read_on(pieces: AsyncIterator[bytes]) -> None:
    """Read to the end, so that the connection can be used again. It should be there already."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            async for _ in pieces:
                pass


class _Counter:
    """How many tokens each chunk of one answer has, as far as anybody says.

    A server that counts with every chunk begins with the first one. A count that only comes with
    the last is that of the whole answer.
    """

    def __init__(self, count_tokens: Callable[[str], int] | None) -> None:
        self.count_tokens = count_tokens
        self.every_chunk = True
        self.shown = 0  # tokens of the chunks so far
        self.told = 0  # the server's last count

    def chunk(self, document: Mapping[str, Any], usage: int | None) -> Chunk:
        """The chunk of a document whose count is `usage`."""
        text = _text(document)
        self.told = self.told if usage is None else usage
        if not text:
            return Chunk(0, usage)
        self.every_chunk &= usage is not None
        if self.every_chunk and usage is not None:
            tokens: int | None = usage - self.shown
            self.shown = usage
        else:
            tokens = self.count_tokens(text) if self.count_tokens else None
        return Chunk(tokens, usage)


# -- the documents -------------------------------------------------------------------------------


def _object(document: Any) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    return document


def _choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice; empty where there is none, as in the chunk that carries the usage."""
    choices = document["choices"]
    return _object(choices[0]) if choices else {}


def _text(document: Mapping[str, Any]) -> str:
    """What a chunk shows: text, reasoning, or the pieces of a tool call."""
    choice = _choice(document)
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), *(delta.get(n) for n in ("content", "reasoning_content"))]
    parts += [delta.get("reasoning"), delta.get("tool_calls") and json.dumps(delta["tool_calls"])]
    return "".join(part for part in parts if part)


def _finish_reason(document: Mapping[str, Any]) -> Any:
    return _choice(document).get("finish_reason")


def _usage(document: Mapping[str, Any]) -> int | None:
    usage = document.get("usage")
    count = usage.get("completion_tokens") if usage else None
    return count if type(count) is int else None


# -- addresses and errors ------------------------------------------------------------------------


def _endpoint(url: str, api: str) -> tuple[str, str]:
    """The base, ending in "/v1" or whatever the URL says, and the API that is asked."""
    if "://" not in url:
        url = "http://" + url
    wrong = ValueError(f"url must be that of an HTTP server, got {url!r}")
    try:
        parts = urlsplit(url)
        known = httpx.URL(url).scheme in ("http", "https") and bool(parts.hostname)
        known &= parts.port != 0  # reading it raises a ValueError if it is no port
    except (httpx.InvalidURL, ValueError):
        raise wrong from None
    if not known or any(c.isspace() or not c.isprintable() for c in url):
        raise wrong
    base = url.rstrip("/")
    for name in ("chat", "completions"):
        if base.endswith(APIS[name]):
            return base.removesuffix(APIS[name]), name
    return (base if parts.path.strip("/") else base + "/v1"), api


def _without_password(url: str) -> str:
    """What can be shown and written down of a URL."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _kind(error: httpx.HTTPError) -> str:
    """The kind of a failure: few, so that they can be counted."""
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
        return "closed early"
    return type(error).__name__


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
