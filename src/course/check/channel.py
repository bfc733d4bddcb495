"""Messages between the judge and the worker that runs a solution.

A frame is two lengths, a JSON document and a safetensors blob that holds the tensors named in it.
Nothing is pickled: whatever a solution puts on the wire, reading it cannot run code in the judge,
and cannot make the judge allocate more than the bytes that really came.
A value that a frame cannot hold arrives as `Foreign`: its type's name and a short repr.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

HEADER = struct.Struct(">QQ")
MAX_DOCUMENT = 16 << 20  # bytes of JSON; as Python objects they take up to 20 times that
MAX_BLOB = 256 << 20  # bytes of tensors
MAX_DEPTH = 100  # lists in lists
MAX_INT_BITS = 14_000  # Python refuses to read longer numbers from text
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip


class ChannelClosed(EOFError):
    """The other side is gone."""


class ChannelTimeout(TimeoutError):
    """No whole frame came in time, or none could be sent."""


class BadFrame(ValueError):
    """What came is not a frame: somebody else wrote to the channel."""


class TooLarge(ValueError):
    """A value is larger than the channel carries."""


@dataclass(frozen=True)
class Foreign:
    """A value of a type that the channel does not carry."""

    type: str
    repr: str


def encode(value: Any) -> bytes:
    """Serialize ints, floats, strings, bytes, bools, None, lists, tuples, dicts and tensors.

    Raises:
        TooLarge: the value takes more than MAX_DOCUMENT or MAX_BLOB bytes.
    """
    tensors: dict[str, Any] = {}
    document = json.dumps(_plain(value, tensors, MAX_DEPTH)).encode()
    blob = b""
    if tensors:
        from safetensors.torch import save

        blob = save(tensors)
    _within_limits(len(document), len(blob), TooLarge)
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
        raise BadFrame(f"not a message: {type(error).__name__}: {str(error)[:200]}") from None


def _within_limits(document: int, blob: int, error: type[ValueError]) -> None:
    if document > MAX_DOCUMENT or blob > MAX_BLOB:
        raise error(
            f"a message of {document + blob:,} bytes; the channel carries {MAX_DOCUMENT:,} of "
            f"plain values and {MAX_BLOB:,} of tensors"
        )


# The receiver builds the keys of a dict into a hash table. Keys of these types, integers of this
# size, cannot be chosen so that building it takes quadratic time.
_KEYS = (str, int, bool, type(None))
_MAX_KEY = 1 << 60


def _is_key(value: Any) -> bool:
    kind = type(value)
    return kind in _KEYS and (kind is not int or abs(value) < _MAX_KEY)


def _plain(value: Any, tensors: dict[str, Any], depth: int) -> Any:
    # Exact types: a numpy integer or a tensor of one element is not an int, and the judge must see
    # the difference.
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int and value.bit_length() <= MAX_INT_BITS:
        return value
    if kind in (list, tuple) and depth:
        tag = "tuple" if kind is tuple else "list"
        return {"$": tag, "v": [_plain(x, tensors, depth - 1) for x in value]}
    if kind is dict and depth and all(map(_is_key, value)):
        return {"$": "dict", "v": [[k, _plain(v, tensors, depth - 1)] for k, v in value.items()]}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}
    if kind is Foreign:
        return {"$": "foreign", "type": value.type, "repr": value.repr}
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is not None and kind is torch.Tensor:
        return _tensor(value, tensors)
    return {"$": "foreign", "type": _name(kind), "repr": short(value)}


def _tensor(value: Any, tensors: dict[str, Any]) -> Any:
    """A tensor's name in the blob, or a foreign value if safetensors cannot hold it."""
    try:
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(value.dtype)
        plain = value.detach().to("cpu").clone().contiguous()
    except Exception:  # sparse, quantized, on the meta device
        kind = f"torch.Tensor ({value.dtype}, {value.layout}, {value.device})"
        return {"$": "foreign", "type": kind, "repr": short(value)}
    name = str(len(tensors))
    tensors[name] = plain
    return {"$": "tensor", "v": name}


def _rich(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without a tag")
        return value
    tag = value["$"]
    if tag == "foreign":
        return Foreign(_text(value["type"]), _text(value["repr"]))
    content = value["v"]
    kind = str if tag in ("bytes", "tensor") else list
    if type(content).__name__ != kind.__name__:  # JSON brings no classes but Python's own
        raise ValueError(f"{short(tag, 40)} holds {type(content).__name__}")
    if tag == "list":
        return [_rich(x, tensors) for x in content]
    if tag == "tuple":
        return tuple(_rich(x, tensors) for x in content)
    if tag == "dict":
        if not all(_is_key(k) for k, _ in content):
            raise ValueError("a key of another type")
        return {k: _rich(v, tensors) for k, v in content}
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "tensor":
        return tensors[content]
    raise ValueError(f"unknown tag {short(tag, 40)}")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"text was expected, got {type(value).__name__}")
    return value[:300]


def short(value: Any, limit: int = 200) -> str:
    """A repr that is safe to take: cut to `limit`, and an error inside it is caught."""
    if type(value) is int and value.bit_length() > MAX_INT_BITS:  # Python refuses to write it out
        return f"{'-' if value < 0 else ''}10**{(value.bit_length() - 1) * math.log10(2):.0f} or so"
    try:
        text = str.__str__(repr(value))  # of a subclass of str: its plain text
    except BaseException as error:
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "..."


def _name(kind: type) -> str:
    try:
        return f"{kind.__module__}.{kind.__qualname__}"[:200]
    except BaseException:  # a metaclass of its own
        return "a type without a name"


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

    def send(self, value: Any, timeout: float | None = None) -> None:
        """Send one message.

        Args:
            timeout: seconds until the other side must have taken it; None waits for ever. It takes
                a write end that does not block (`os.set_blocking`).

        Raises:
            ChannelClosed: nobody reads any more.
            ChannelTimeout: they do not read in time.
            TooLarge: nothing was sent.
        """
        data = memoryview(encode(value))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while data:
                if deadline is not None:
                    self._wait(self.write_fd, select.POLLOUT, deadline)
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self.write_fd, data) :]
        except OSError as error:
            if isinstance(error, ChannelTimeout):
                raise
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Args:
            timeout: seconds until the whole message must be here; None waits for ever.

        Raises:
            ChannelTimeout, ChannelClosed, BadFrame.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        document, blob = HEADER.unpack(self._read(HEADER.size, deadline))
        _within_limits(document, blob, BadFrame)
        return decode(self._read(document, deadline), self._read(blob, deadline))

    def _read(self, size: int, deadline: float | None) -> bytes:
        data = bytearray()  # grows with what comes: the length is only a claim
        while len(data) < size:
            if deadline is not None:
                self._wait(self.read_fd, select.POLLIN, deadline)
            try:
                chunk = os.read(self.read_fd, min(size - len(data), 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not chunk:
                raise ChannelClosed("the other side closed the channel")
            data += chunk
        return bytes(data)

    @staticmethod
    def _wait(fd: int, event: int, deadline: float) -> None:
        """Return when `fd` is ready (or broken, as the next call on it will tell)."""
        if fd < 0:
            raise ChannelClosed("this side closed the channel")
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(math.ceil(1000 * left)):
            raise ChannelTimeout("no answer in time")

    def close(self) -> None:
        """Close both pipes; twice is no harm."""
        for fd in {self.read_fd, self.write_fd}:
            with contextlib.suppress(OSError):  # closed already
                os.close(fd)
        self.read_fd = self.write_fd = -1  # the numbers may soon be those of other files
