"""The channel: what goes in comes out, and whatever else comes in harms nobody."""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from course.check import channel as channel_module
from course.check.channel import (
    DTYPES,
    HEADER,
    MAX_BLOB,
    MAX_DOCUMENT,
    BadFrame,
    Channel,
    ChannelClosed,
    ChannelTimeout,
    Foreign,
    TooLarge,
    decode,
    encode,
    short,
    type_name,
)

quickly = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


def through(value: Any) -> Any:
    """Encoded and decoded."""
    frame = encode(value)
    document, blob = HEADER.unpack(frame[: HEADER.size])
    body = frame[HEADER.size :]
    assert len(body) == document + blob
    return decode(body[:document], body[document:])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN is equal to itself, and 0.0 is not -0.0."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Equal in value and in exact type, all the way down; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(k, m) and same(v, w)
            for (k, v), (m, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(bits(one), bits(other))
    return bool(one == other)


keys = st.one_of(st.text(), st.booleans(), st.none(), st.integers(-(1 << 59), 1 << 59))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=40),
    st.just(torch.tensor([[1.5, math.nan], [math.inf, -0.0]])), st.just(torch.zeros(0, 3)),
    st.just(torch.tensor(5)), st.just(Foreign("a.B", "<B>")),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


@quickly
@given(values)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(value, through(value))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_of_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    sent = (torch.randn(shape) * 3).to(getattr(torch, name))
    got = through({"logits": sent, "again": [sent]})
    assert same(sent, got["logits"])
    assert same(sent, got["again"][0])


def test_tensors_that_do_not_lie_in_order() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    for view in (whole.T, whole[:, 1], whole[::2], whole.expand(2, 3, 4), whole[1:], whole.conj()):
        assert same(view, through(view))
    needs_grad = torch.ones(2, requires_grad=True)
    assert not through(needs_grad).requires_grad
    both = through([whole, whole[0]])  # they share memory: each is sent whole
    assert same(both, [whole, whole[0]])


class Tokens(int):
    """A subclass that could compare equal to anything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Text(str):
    __slots__ = ()


class Layer(torch.Tensor):
    pass


class TakenForATensor:
    """A class that says it is torch's."""

    __module__ = "torch"

    def detach(self) -> Any:
        raise AssertionError("nothing of it is called")


TakenForATensor.__name__ = TakenForATensor.__qualname__ = "Tensor"

FOREIGN = {
    "numpy.int64": numpy.int64(3), "numpy.float64": numpy.float64(3),
    "numpy.ndarray": numpy.zeros(2), "numpy.bool": numpy.bool_(True),
    "check.test_channel.Tokens": Tokens(3), "check.test_channel.Text": Text("x"),
    "torch.nn.parameter.Parameter": torch.nn.Parameter(torch.zeros(1)),
    "check.test_channel.Layer": torch.zeros(1).as_subclass(Layer),
    "torch.Tensor": TakenForATensor(), "builtins.set": {1}, "builtins.complex": 1j,
    "builtins.range": range(3), "builtins.bytearray": bytearray(b"x"),
    "builtins.type": int, "builtins.generator": (x for x in "a"), "torch.dtype": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_types_arrive_as_what_they_are(kind: str) -> None:
    """A numpy number or a subclass is not the plain thing, and the judge must see that."""
    got = through([FOREIGN[kind]])[0]
    assert isinstance(got, Foreign)
    assert got.type.removeprefix("tests.") == kind
    assert len(got.repr) <= 203


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.complex128),
    ],
    ids=["sparse", "without data", "complex128"],
)  # fmt: skip
def test_tensors_that_no_frame_holds(value: torch.Tensor) -> None:
    got = through(value)
    assert isinstance(got, Foreign)
    assert got.type.startswith("torch.Tensor (")


def test_types_are_told_apart() -> None:
    assert [type_name(x) for x in (1, True, 1.0, "", None, [], ())] == [
        "int", "bool", "float", "str", "NoneType", "list", "tuple",
    ]  # fmt: skip
    assert type_name(torch.zeros(1)) == "torch.Tensor"
    assert type_name(through(numpy.int64(1))) == "numpy.int64"
    assert type(through(True)) is bool
    assert type(through(1.0)) is float


def test_dicts_keep_their_order_and_their_keys() -> None:
    value = {"b": 1, "a": 2, 3: "x", None: 4, "3": "y", False: 5}
    assert list(through(value).items()) == list(value.items())
    for odd in ({(1, 2): 3}, {1 << 60: 1}, {1.5: 2}, {torch.float32: 1}):
        assert isinstance(through(odd), Foreign)


def test_what_is_too_deep_or_too_long_is_described() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    got = through(nested)
    for _ in range(channel_module.MAX_DEPTH):
        got = got[0]
    assert isinstance(got, Foreign)
    assert through(10**6000) == Foreign("builtins.int", "10**6000 or so")
    assert through(-(10**6000)) == Foreign("builtins.int", "-10**6000 or so")
    assert through(-(10**4000)) == -(10**4000)


def test_what_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_BLOB", 1000)
    with pytest.raises(TooLarge, match="the channel carries"):
        encode(torch.zeros(500))
    with pytest.raises(TooLarge):
        encode("x" * (MAX_DOCUMENT + 1))


class BadRepr:
    def __init__(self, action: Any) -> None:
        self.action = action

    def __repr__(self) -> str:
        return self.action()  # type: ignore[no-any-return]


def raises(error: BaseException) -> Any:
    def action() -> Any:
        raise error

    return action


@pytest.mark.parametrize(
    "action",
    [
        raises(ValueError("no")), raises(SystemExit(0)), raises(KeyboardInterrupt()),
        raises(RecursionError()), lambda: 7, lambda: None, lambda: Text("x" * 1000),
    ],
)  # fmt: skip
def test_a_repr_is_safe_to_take(action: Any) -> None:
    text = short(BadRepr(action))
    assert type(text) is str
    assert len(text) <= 203
    assert isinstance(through(BadRepr(action)), Foreign)


# -- whatever else may come ------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[Channel, int]]:
    """A channel to read from, and the descriptor that writes to it."""
    read_fd, write_fd = os.pipe()
    channel = Channel(read_fd, write_fd)
    yield channel, write_fd
    channel.close()


def feed(fd: int, data: bytes) -> threading.Thread:
    """Write in the background: a pipe holds 64 kB only."""

    def write() -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            pass  # the reader has had enough

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@quickly
@given(st.binary(max_size=200))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    read_fd, write_fd = os.pipe()
    channel = Channel(read_fd, write_fd)
    try:
        os.write(write_fd, data)
        with pytest.raises((BadFrame, ChannelTimeout)):
            channel.receive(timeout=0.001)
    finally:
        channel.close()


@quickly
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_random_bodies_are_no_message(document: bytes, blob: bytes) -> None:
    try:
        json.loads(document)
    except (ValueError, RecursionError):
        with pytest.raises(BadFrame):
            decode(document, blob)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "type", "repr", "x"]), inner, max_size=4),
        st.fixed_dictionaries(
            {
                "$": st.one_of(
                    st.sampled_from(["list", "tuple", "dict", "bytes", "tensor", "foreign"]), inner
                ),
                "v": inner,
            }
        ),
    ),
    max_leaves=15,
)


@settings(quickly, max_examples=300)
@given(json_values)
def test_forged_tags_are_refused_or_harmless(value: Any) -> None:
    """Any JSON at all: either a plain value, or BadFrame."""
    try:
        got = decode(json.dumps(value).encode(), save({"0": torch.zeros(1)}))
    except BadFrame:
        return
    assert type(got) in (
        type(None), bool, int, float, str, list, tuple, dict, bytes, Foreign, torch.Tensor,
    )  # fmt: skip


FORGED = {
    "a list without a tag": [1, 2],
    "an unknown tag": {"$": "pickle", "v": "gASV"},
    "a long unknown tag": {"$": "x" * 100_000, "v": []},
    "no tag": {"v": [1]},
    "no content": {"$": "list"},
    "text as a list": {"$": "list", "v": "abc"},
    "a list of bytes": {"$": "bytes", "v": [1]},
    "bytes that are not base64": {"$": "bytes", "v": "*" * 8},
    "pairs of three": {"$": "dict", "v": [[1, 2, 3]]},
    "a key that cannot be one": {"$": "dict", "v": [[{"$": "list", "v": []}, 1]]},
    "a key that is a tuple": {"$": "dict", "v": [[{"$": "tuple", "v": [1, 2]}, 1]]},
    "a key that is too large": {"$": "dict", "v": [[1 << 61, 1]]},
    "a tensor that is not there": {"$": "tensor", "v": "7"},
    "a tensor by another type": {"$": "tensor", "v": 0},
    "a foreign value without a type": {"$": "foreign", "repr": ""},
    "a foreign value of numbers": {"$": "foreign", "type": 1, "repr": 2},
    "a tag that is a list": {"$": ["list"], "v": []},
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED.keys())
def test_forged_values(value: Any) -> None:
    with pytest.raises(BadFrame) as caught:
        decode(json.dumps(value).encode(), b"")
    assert len(str(caught.value)) < 400


def test_a_foreign_value_is_cut_when_it_is_received() -> None:
    document = {"$": "foreign", "type": "t" * 100_000, "repr": "r" * 100_000}
    got = decode(json.dumps(document).encode(), b"")
    assert len(got.type) + len(got.repr) <= 600


def safetensors_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], offsets: tuple[int, int]) -> dict[str, Any]:
    return {"0": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


BLOBS = {
    "nothing but a length": (1 << 63).to_bytes(8, "little"),
    "a header longer than the blob": (100).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": safetensors_of(b"{" * 50),
    "offsets past the end": safetensors_of(entry("F32", [4], (0, 16))),
    "offsets that go back": safetensors_of(entry("F32", [4], (16, 0)), b"\0" * 16),
    "a shape of another size": safetensors_of(entry("F32", [5], (0, 16)), b"\0" * 16),
    "a shape that overflows": safetensors_of(entry("F32", [1 << 40, 1 << 40], (0, 16)), b"\0" * 16),
    "a dtype that does not exist": safetensors_of(entry("F31", [4], (0, 16)), b"\0" * 16),
    "a dtype that torch cannot hold": safetensors_of(entry("F4", [4], (0, 2)), b"\0" * 2),
    "deep nesting": safetensors_of(b"[" * 100_000),
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94",
}


@pytest.mark.parametrize("blob", BLOBS.values(), ids=BLOBS.keys())
def test_forged_tensors(blob: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(b'{"$": "tensor", "v": "0"}', blob)


@quickly
@given(st.data())
def test_one_flipped_byte(data: st.DataObject) -> None:
    """Of a real frame: it is refused, or is another value; nothing else happens."""
    frame = bytearray(encode({"token": "t", "value": [1, torch.ones(3), b"abc"]}))
    where = data.draw(st.integers(0, len(frame) - 1))
    frame[where] ^= 1 << data.draw(st.integers(0, 7))
    read_fd, write_fd = os.pipe()
    channel = Channel(read_fd, write_fd)
    try:
        os.write(write_fd, frame)
        channel.receive(timeout=0.01)
    except (BadFrame, ChannelTimeout):
        pass
    finally:
        channel.close()


def test_truncated_frames(pipe: tuple[Channel, int]) -> None:
    channel, fd = pipe
    frame = encode([1, torch.ones(3)])
    for cut in (0, 1, HEADER.size - 1, HEADER.size, HEADER.size + 3, len(frame) - 1):
        os.write(fd, frame[:cut])
        with pytest.raises(ChannelTimeout):
            channel.receive(timeout=0.02)


@pytest.mark.parametrize("cut", [0, 5, HEADER.size + 3])
def test_the_other_side_goes_in_the_middle(cut: int) -> None:
    read_fd, write_fd = os.pipe()
    os.write(write_fd, encode("hello")[:cut])
    os.close(write_fd)
    channel = Channel(read_fd, -1)
    with pytest.raises(ChannelClosed):
        channel.receive(timeout=5)
    channel.close()
    with pytest.raises(ChannelClosed):  # its own end is closed, too
        channel.receive(timeout=5)


def test_two_messages_in_one_piece(pipe: tuple[Channel, int]) -> None:
    channel, fd = pipe
    os.write(fd, encode("one") + encode(["two"]))
    assert channel.receive(timeout=1) == "one"
    assert channel.receive(timeout=1) == ["two"]


def test_a_frame_that_drips_does_not_reset_the_clock(pipe: tuple[Channel, int]) -> None:
    channel, fd = pipe
    stop = threading.Event()

    def drip() -> None:
        for byte in encode("x" * 1000):
            if stop.wait(0.01):
                return
            os.write(fd, bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(ChannelTimeout):
        channel.receive(timeout=0.3)
    assert time.monotonic() - begin < 5
    stop.set()
    thread.join()


def test_sending_ends_in_time_when_nobody_reads() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    channel = Channel(read_fd, write_fd)
    with pytest.raises(ChannelTimeout):
        channel.send("x" * 1_000_000, timeout=0.2)
    os.close(read_fd)
    with pytest.raises(ChannelClosed):
        channel.send("x", timeout=0.2)
    channel.close()


def test_a_large_message_passes(pipe: tuple[Channel, int]) -> None:
    channel, fd = pipe
    sent = torch.randn(3_000_000)
    feed(fd, encode(sent))
    assert torch.equal(channel.receive(timeout=30), sent)


def test_descriptors_above_a_thousand(pipe: tuple[Channel, int]) -> None:
    """select() would refuse them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1400:
        pytest.skip("this process may not have that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1400), hard))
    channel, fd = pipe
    high = os.dup2(channel.read_fd, 1300)
    os.write(fd, encode(1))
    assert Channel(high, -1).receive(timeout=1) == 1
    os.close(high)


HUGE = [
    HEADER.pack(1 << 63, 1 << 63), HEADER.pack(0, (1 << 64) - 1), HEADER.pack(MAX_DOCUMENT + 1, 0),
    HEADER.pack(0, MAX_BLOB + 1), b"\xff" * 64,
]  # fmt: skip


@pytest.mark.parametrize("data", HUGE)
def test_huge_lengths_are_refused(pipe: tuple[Channel, int], data: bytes) -> None:
    channel, fd = pipe
    os.write(fd, data)
    with pytest.raises(BadFrame, match="the channel carries"):
        channel.receive(timeout=1)


BOMBS = """
import json, os, resource, sys, time
from course.check.channel import *
from course.check import channel as c
import torch, safetensors.torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

documents = {
    "claimed and not sent": None,
    "brackets": b"[" * MAX_DOCUMENT,
    "empty lists": b'{"$":"list","v":[' + b",".join([b'{"$":"list","v":[]}'] * 120_000) + b"]}",
    "an untagged list": b"[" + b"[]," * 300_000 + b"[]]",
    "a long number": b"1" * MAX_DOCUMENT,
    "an exponent": b"1e" + b"9" * 1_000_000,
    "keys that collide": b'{"$":"dict","v":[' + b",".join(
        b"[%d,1]" % (i * ((1 << 61) - 1)) for i in range(1, 100_000)) + b"]}",
    "keys with equal low bits": b'{"$":"dict","v":[' + b",".join(
        b"[%d,1]" % (i << 40) for i in range(1, 100_000)) + b"]}",
    "nested tags": b'{"$":"list","v":[' * 500_000,
}
for name, document in documents.items():
    read_fd, write_fd = os.pipe()
    if document is None:
        os.write(write_fd, HEADER.pack(MAX_DOCUMENT, MAX_BLOB) + b"x" * 1000)
        begin, before = time.monotonic(), resident()
        try:
            Channel(read_fd, write_fd).receive(0.1)
            kind = "value"
        except (BadFrame, ChannelTimeout) as error:
            kind = type(error).__name__
    else:
        begin, before = time.monotonic(), resident()
        try:
            decode(document, b"")
            kind = "value"
        except (BadFrame, ChannelTimeout) as error:
            kind = type(error).__name__
    print(json.dumps([name, kind, time.monotonic() - begin, resident() - before]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps(["peak", "", 0, peak]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_bombs_cost_little_and_end_soon() -> None:
    """In a process of its own, so that its peak memory is theirs."""
    done = subprocess.run(
        [sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=300, check=True
    )
    found = {row[0]: row[1:] for row in map(json.loads, done.stdout.splitlines())}
    assert found["claimed and not sent"][0] == "ChannelTimeout"
    for name, (kind, seconds, _) in found.items():
        assert seconds < 60, name  # quadratic ones would take hours
        assert kind in ("BadFrame", "ChannelTimeout", "value", ""), name
    assert found["keys that collide"][0] == "BadFrame"
    assert found["peak"][2] < 1600 << 20  # torch alone is a quarter of that


def test_reading_runs_no_code(tmp_path: Any) -> None:
    """A pickle that would write a file, as everything that a frame could hold."""
    target = tmp_path / "ran"
    code = f"cos\nsystem\n(S'touch {target}'\ntR.".encode()
    for document, blob in (
        (code, b""), (b"{}", code), (json.dumps({"$": "pickle", "v": code.decode()}).encode(), b""),
        (json.dumps({"$": "bytes", "v": base64.b64encode(code).decode()}).encode(), b""),
        (b'{"$": "tensor", "v": "0"}', code),
    ):  # fmt: skip
        try:
            decode(document, blob)
        except BadFrame:
            continue
    assert not target.exists()
