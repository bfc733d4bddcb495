"""CUDA graphs on a CPU: what a capture records, what a replay does, and what raises."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course import graphs
from course.graphs import streams
from course.model import load
from course.parts import PagedAttention, step_batch
from course.types import Request, Sequence


def capture(work: Callable[[], Any], pool: graphs.pool.Handle | None = None) -> Any:
    """A graph of some work, and what the work returned while it was recorded."""
    with graphs.stream(graphs.Stream()):
        work()
    graph = graphs.CUDAGraph()
    with graphs.graph(graph, pool=pool):
        out = work()
    return graph, out


def test_names_are_those_of_torch() -> None:
    for name in graphs.__all__:
        assert name == "reserved_bytes" or hasattr(torch.cuda, name)


def test_a_replay_reads_what_lies_there_now() -> None:
    x = torch.arange(4.0)
    graph, out = capture(lambda: x * 2 + 1)
    graph.replay()
    assert out.tolist() == [1, 3, 5, 7]
    x.fill_(5)
    assert out.tolist() == [1, 3, 5, 7]
    graph.replay()
    assert out.tolist() == [11] * 4


def test_a_capture_computes_nothing() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    graph, (out, ids) = capture(lambda: (y.copy_(x), x * 2, torch.arange(3))[1:])
    y.zero_()
    assert out.isnan().all()
    assert (ids == -1).all()
    graph.replay()
    assert y.tolist() == [1, 1, 1]
    assert out.tolist() == [2, 2, 2]
    assert ids.tolist() == [0, 1, 2]


def test_writing_to_others_waits_for_the_replay() -> None:
    pool, slots = torch.zeros(4, 2), torch.tensor([1, -1])
    new = torch.ones(2, 2)

    def write() -> None:
        pool[slots] = new

    graph, _ = capture(write)
    pool.zero_()
    with graphs.graph(graphs.CUDAGraph()):
        write()
        pool.add_(1)
        torch.add(new, 1, out=pool[:2])
    assert not pool.any()
    graph.replay()
    assert pool.sum(1).tolist() == [0, 2, 0, 2]
    slots.copy_(torch.tensor([0, 2]))
    graph.replay()
    assert pool.sum(1).tolist() == [2, 2, 2, 2]


def test_no_python_runs_in_a_replay() -> None:
    calls = []
    x = torch.ones(2)

    def work() -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    graph, out = capture(work)
    for _ in range(3):
        graph.replay()
    assert len(calls) == 2
    assert out.tolist() == [3, 3]  # a number of Python's is a constant


def test_the_next_replay_overwrites_the_result() -> None:
    x = torch.ones(2)
    graph, out = capture(lambda: x * 3)
    graph.replay()
    kept = out
    x.fill_(2)
    graph.replay()
    assert kept.tolist() == [6, 6]


def test_a_name_bound_anew_means_nothing() -> None:
    box = {"x": torch.ones(2)}
    old = box["x"]
    graph, out = capture(lambda: box["x"] * 2)
    box["x"] = torch.full((2,), 9.0)
    graph.replay()
    assert out.tolist() == [2, 2]
    del old
    with pytest.raises(RuntimeError, match=r"shape \[2\].*freed"):
        graph.replay()


def test_a_tensor_that_has_moved_is_missed() -> None:
    x = torch.ones(3)
    graph, out = capture(lambda: x * 2)
    x.resize_(2).fill_(4)  # there is room: nothing moves
    graph.replay()
    assert out.tolist() == [8, 8, 2]
    x.resize_(100_000)
    with pytest.raises(RuntimeError, match=r"shape \[3\].*freed"):
        graph.replay()


def test_writes_in_place_to_what_the_capture_made() -> None:
    x = torch.tensor([3, 1, 2])

    def work() -> torch.Tensor:
        out = torch.empty(3)
        out[x - 1] = x.float()
        out[0] = 7.0
        return out.neg_()

    graph, out = capture(work)
    graph.replay()
    assert out.tolist() == [-7, -2, -3]
    x.copy_(torch.tensor([1, 2, 3]))
    graph.replay()
    assert out.tolist() == [-7, -2, -3]


def test_a_number_is_written_where_a_mask_says() -> None:
    x = torch.arange(4.0)

    def work() -> torch.Tensor:
        out = x + 1
        out[x > 1] = 0.0
        return out.repeat_interleave(torch.ones_like(x).long(), output_size=4)

    graph, out = capture(work)
    graph.replay()
    assert out.tolist() == [1, 2, 0, 0]
    x.neg_()
    graph.replay()
    assert out.tolist() == [1, 0, -1, -2]


def test_views_are_followed() -> None:
    x = torch.arange(6.0)

    def work() -> tuple[torch.Tensor, ...]:
        left, right = x.view(2, 3).t().contiguous().split(1, dim=1)
        return left.flatten(), right.flatten()

    graph, (left, right) = capture(work)
    x.mul_(10)
    graph.replay()
    assert left.tolist() == [0, 10, 20]
    assert right.tolist() == [30, 40, 50]


X = torch.arange(4.0)
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "bool": lambda: bool(X[0] > 1),
    "int": lambda: int(X[0]),
    "index": lambda: range(X[1].long()),
    "branch": lambda: X if X.sum() > 1 else -X,
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "to, by name": lambda: X.to(device="cpu:0", dtype=torch.float64),
    "split by a tensor": lambda: X.tensor_split(torch.empty(1, dtype=torch.int64)),
    "apply_": lambda: X.apply_(lambda value: value + 1),
    "print": lambda: f"{X}",
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "mask": lambda: X[X > 1],
    "write by mask": lambda: X.__setitem__(X > 1, X[:2]),
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "contains": lambda: 3.0 in X,
    "repeat by a tensor": lambda: X.repeat_interleave(X.long()),
    "tensor of a list": lambda: torch.tensor([1, 2]),
    "tensor of a number": lambda: torch.tensor(1.0),
    "index of a list": lambda: X[[0, 1]],
    "new_tensor": lambda: X.new_tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "synchronize": graphs.synchronize,
    "stream": lambda: graphs.Stream().synchronize(),
    "random": lambda: torch.rand(2),
    "dropout": lambda: torch.nn.functional.dropout(X, 0.5),
    "a capture": lambda: graphs.graph(graphs.CUDAGraph()).__enter__(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_raises(name: str) -> None:
    graph = graphs.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        graphs.graph(graph),
    ):
        WAITS[name]()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert X.tolist() == [0, 1, 2, 3]
    assert X[0].item() == 0  # and outside all is as ever


def test_what_stays_on_the_device_is_let_through() -> None:
    """A device that is no word is the model's, and on a GPU another one."""
    graph, out = capture(
        lambda: torch.as_tensor(X).to(X.device).to(torch.float64).to(X).tensor_split([1, 3])[1] + 1
    )
    graph.replay()
    assert out.tolist() == [2, 3]


def test_a_swallowed_error_ends_the_capture_all_the_same() -> None:
    def work() -> None:
        with graphs.graph(graphs.CUDAGraph()), suppress(RuntimeError):
            X[0].item()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        work()


def test_a_graph_is_captured_once_and_replayed_after_that() -> None:
    graph, _ = capture(lambda: X + 1)
    with pytest.raises(RuntimeError, match="already owns"), graphs.graph(graph):
        pass
    with (
        pytest.raises(RuntimeError, match="not permitted"),
        graphs.graph(graphs.CUDAGraph()),
    ):
        graph.replay()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.pool()


def test_a_library_is_set_up_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WARM", set())
    monkeypatch.setattr("course.graphs.capture.WARM", streams.WARM)
    x = torch.eye(2)
    with pytest.raises(RuntimeError, match="first use of mm"), graphs.graph(graphs.CUDAGraph()):
        x @ x
    graph, out = capture(lambda: x @ x)
    graph.replay()
    assert torch.equal(out, x)


@pytest.mark.parametrize("name", ["dot", "mv", "addmv", "vdot", "bmm", "convolution"])
def test_every_use_of_a_library_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course.graphs.capture.WARM", set())
    square = torch.eye(4)
    calls = {
        "dot": lambda: X @ X,
        "mv": lambda: square @ X,
        "addmv": lambda: torch.addmv(X, square, X),
        "vdot": lambda: torch.vdot(X, X),
        "bmm": lambda: torch.einsum("bij,bjk->bik", square[None], square[None]),
        "convolution": lambda: torch.conv1d(X[None, None], X[None, None]),
    }
    with (
        pytest.raises(RuntimeError, match=f"first use of {name}"),
        graphs.graph(graphs.CUDAGraph()),
    ):
        calls[name]()


def test_streams_are_entered_and_left() -> None:
    before, mine = graphs.current_stream(), graphs.Stream()
    with graphs.stream(mine):
        assert graphs.current_stream() is mine
        mine.wait_stream(before)
        with graphs.stream(None):
            assert graphs.current_stream() is mine
    assert graphs.current_stream() is before
    graphs.synchronize()


def test_memory_of_a_pool_is_used_again() -> None:
    x = torch.ones(1000)
    alone, _ = capture(lambda: (x + 1).mul(2).sub(3))
    assert graphs.reserved_bytes(alone.pool()) == 2 * 4096  # two of three live at a time
    several = graphs.CUDAGraph()
    with graphs.graph(several):
        kept = [x + 1, x + 2, x + 3]
    assert graphs.reserved_bytes(several.pool()) == len(kept) * 4096


def test_graphs_of_one_pool_overwrite_what_nobody_holds() -> None:
    x = torch.ones(1000)
    pool = graphs.graph_pool_handle()
    one, held = capture(lambda: x + 1, pool)
    two, lost = capture(lambda: x + 2, pool)
    address = lost.data_ptr()
    del lost
    gc.collect()
    three, last = capture(lambda: x + 3, pool)
    assert last.data_ptr() == address  # where the second graph writes, too
    for graph in (one, three, two):
        graph.replay()
    assert held.unique().tolist() == [2]
    assert last.unique().tolist() == [3]  # the second graph's result
    assert graphs.reserved_bytes(pool) == 2 * 4096
    del one, two, three, held, last, graph
    gc.collect()
    assert graphs.reserved_bytes(pool) == 0


def test_gaps_are_cut_and_joined() -> None:
    x = torch.ones(1024)  # 4,096 bytes
    pool = graphs.graph_pool_handle()
    large, out = capture(lambda: x + 1, pool)
    del out
    half, quarters = x[:512], x[:256]
    small, kept = capture(lambda: [half + 1, quarters + 1, quarters + 2], pool)
    assert graphs.reserved_bytes(pool) == 4096
    del kept
    again, _ = capture(lambda: x + 2, pool)  # into all that it has left
    assert graphs.reserved_bytes(pool) == 4096
    assert large.pool() == small.pool() == again.pool() == pool


def test_a_capture_writes_nothing_to_another_graph() -> None:
    x = torch.ones(3)
    one, out = capture(lambda: x * 2)
    one.replay()
    two = graphs.CUDAGraph()
    with graphs.graph(two):
        out.add_(1)
    assert out.tolist() == [2, 2, 2]
    two.replay()
    assert out.tolist() == [3, 3, 3]


def test_empty_memory_holds_what_was_written_last() -> None:
    box = {}

    def work() -> torch.Tensor:
        box["x"] = torch.empty(3)
        return box["x"] * 2

    graph, out = capture(work)
    assert graph.num_operations == 1
    box["x"].fill_(4)
    graph.replay()
    assert out.tolist() == [8, 8, 8]


def test_a_shape_that_changes_in_place_is_no_operation() -> None:
    x = torch.ones(3)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        row = x + 1
        same = row[:]
        row.unsqueeze_(0)
        return row + torch.ones(2, 3), same + 1

    graph, (grid, line) = capture(work)
    graph.replay()
    assert grid.tolist() == [[3, 3, 3]] * 2
    assert line.tolist() == [3, 3, 3]


def test_a_tensor_of_one_graph_is_read_by_another() -> None:
    x = torch.ones(3)
    one, between = capture(lambda: x * 2)
    two, out = capture(lambda: between + 1)
    one.replay()
    two.replay()
    assert out.tolist() == [3, 3, 3]


class Counted(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and count it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_replay_is_one_call_for_whoever_counts() -> None:
    graph, _ = capture(lambda: X * 2 + 1)
    assert graph.num_operations == 2
    with Counted() as counted:
        graph.replay()
    assert counted.count == 0


def test_a_decode_step_is_replayed_bit_for_bit() -> None:
    """Of nano, with stage 08's attention, whose plan holds for this one step."""
    model = load("nano").model
    attend = PagedAttention(model.config, 8, 16)
    attend.keys.zero_()
    attend.values.zero_()
    texts = [Sequence(Request("r", (0,)), [n] * 9, 8, [n]) for n in (1, 2, 3)]
    batch = step_batch(texts, [1] * 3, 16)
    attend.plan(batch)

    def step() -> torch.Tensor:
        return model.forward(batch.token_ids[None], batch.positions[None], attend, batch.logit_rows)

    graph, logits = capture(step)
    attend.keys.zero_()
    attend.values.zero_()
    graph.replay()
    pool = attend.keys.clone()
    assert torch.equal(logits, step())
    assert torch.equal(pool[:, :8], attend.keys[:, :8])
    batch.token_ids.copy_(torch.tensor([5, 6, 7]))
    graph.replay()
    assert torch.equal(logits, step())
    with torch.inference_mode():
        graph.replay()
    assert torch.equal(logits, step())


def test_inference_mode_hides_no_operation() -> None:
    """There, torch hands out `to` and `reshape` whole, and both may copy or not."""
    x = torch.arange(4).view(2, 2)

    def work() -> torch.Tensor:
        return (x.float() @ torch.eye(2)).t().reshape(4).contiguous()

    with torch.inference_mode():
        graph, out = capture(work)
        x.mul_(10)
        graph.replay()
        assert out.tolist() == [0, 20, 10, 30]
        for waits in (lambda: x[0, 0].item(), lambda: x[x > 1], lambda: torch.where(x > 1)):
            with (
                pytest.raises(RuntimeError, match="not permitted"),
                graphs.graph(graphs.CUDAGraph()),
            ):
                waits()


def test_capture_inside_inference_mode() -> None:
    x = torch.ones(2)
    with torch.inference_mode():
        graph, out = capture(lambda: (x * 2).add_(1))
    graph.replay()
    assert out.tolist() == [3, 3]
