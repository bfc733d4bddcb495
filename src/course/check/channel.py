"""Messages between the judge and the worker that runs a solution.

A frame is two lengths, a JSON document and a safetensors blob that holds the tensors named in it.
Nothing is pickled: whatever a solution puts on the wire, reading it cannot run code in the judge.
A value that JSON cannot hold arrives as `Foreign`: its type's name and a short repr.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import struct
import time
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct(">QQ")
MAX_FRAME = 1 << 30  # bytes; a solution that sends more is at fault


class ChannelClosed(EOFError):
    """The other side is gone."""


class ChannelTimeout(TimeoutError):
    """No whole frame came in time."""


class BadFrame(ValueError):
    """What came is not a frame: somebody else wrote to the channel."""


@dataclass(frozen=True)
class Foreign:
    """A value of a type that the channel does not carry."""

    type: str
    repr: str


def encode(value: Any) -> bytes:
    """Serialize ints, floats, strings, bytes, bools, None, lists, tuples, dicts and tensors."""
    tensors: dict[str, Any] = {}
    document = json.dumps(_plain(value, tensors)).encode()
    blob = b""
    if tensors:
        from safetensors.torch import save

        blob = save(tensors)
    return HEADER.pack(len(document), len(blob)) + document + blob


def decode(document: bytes, blob: bytes) -> Any:
    """The inverse of `encode`, after the header.

    Raises:
        BadFrame: the bytes are not what `encode` makes.
    """
    try:
        tensors: dict[str, Any] = {}
        if blob:
            from safetensors.torch import load

            tensors = load(blob)
        return _rich(json.loads(document), tensors)
    except Exception as error:
        raise BadFrame(f"not a message: {type(error).__name__}: {error}") from None


def _plain(value: Any, tensors: dict[str, Any]) -> Any:
    # Exact types: a numpy integer or a tensor of one element is not an int, and the judge must see
    # the difference.
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return {"$": "tuple" if kind is tuple else "list", "v": [_plain(x, tensors) for x in value]}
    if kind is dict:
        pairs = [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]
        return {"$": "dict", "v": pairs}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu").clone().contiguous()
        return {"$": "tensor", "v": name}
    if kind is Foreign:
        return {"$": "foreign", "type": value.type, "repr": value.repr}
    return {"$": "foreign", "type": f"{kind.__module__}.{kind.__qualname__}", "repr": short(value)}


def _rich(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    tag = value["$"]
    if tag == "list":
        return [_rich(x, tensors) for x in value["v"]]
    if tag == "tuple":
        return tuple(_rich(x, tensors) for x in value["v"])
    if tag == "dict":
        return {_rich(k, tensors): _rich(v, tensors) for k, v in value["v"]}
    if tag == "bytes":
        return base64.b64decode(value["v"])
    if tag == "tensor":
        return tensors[value["v"]]
    if tag == "foreign":
        return Foreign(str(value["type"]), str(value["repr"]))
    raise ValueError(f"unknown tag {tag!r}")


def short(value: Any, limit: int = 200) -> str:
    """A repr that is safe to take: cut to `limit`, and an error inside it is caught."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "..."


def type_name(value: Any) -> str:
    """How to name a received value's type to a student: `int`, `torch.Tensor`, `numpy.int64`."""
    if isinstance(value, Foreign):
        return value.type
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


class Channel:
    """One end of a pair of pipes that carries whole messages."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd

    def send(self, value: Any) -> None:
        """Raises ChannelClosed if nobody reads any more."""
        data = memoryview(encode(value))
        try:
            while data:
                data = data[os.write(self.write_fd, data) :]
        except (BrokenPipeError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Args:
            timeout: seconds until the whole message must be here; None waits for ever.

        Raises:
            ChannelTimeout, ChannelClosed, BadFrame.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        sizes = HEADER.unpack(self._read(HEADER.size, deadline))
        if sum(sizes) > MAX_FRAME:
            raise BadFrame(f"a message of {sum(sizes)} bytes")
        return decode(self._read(sizes[0], deadline), self._read(sizes[1], deadline))

    def _read(self, size: int, deadline: float | None) -> bytes:
        chunks = []
        while size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.read_fd], [], [], left)[0]:
                    raise ChannelTimeout("no answer in time")
            chunk = os.read(self.read_fd, min(size, 1 << 20))
            if not chunk:
                raise ChannelClosed("the other side closed the channel")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Close both pipes; twice is no harm."""
        for fd in {self.read_fd, self.write_fd}:
            with contextlib.suppress(OSError):  # closed already
                os.close(fd)
