"""CUDA graphs without a GPU: capture and replay on a CPU, under the names of `torch.cuda`.

Code that is handed `graphs` and calls `graphs.CUDAGraph()`, `graphs.graph(...)` and so on runs with
`torch.cuda` on a GPU and with this package anywhere else, unchanged. Here every operation of a
capture is recorded, with the addresses of its tensors, and a replay carries the list out again.

What it has in common with a GPU:

- A capture executes nothing that can be seen from outside, and what it returns is garbage (NaN, or
  -1) until the first replay. No Python runs in a replay.
- A replay reads the addresses that the capture saw. A name that is bound to another tensor later
  means nothing to it.
- Tensors that are made in a capture lie in the graph's pool. Memory of the pool that nobody holds
  is used again: within the capture, and by later captures into the same pool, whose replays then
  overwrite it.
- What must wait for the device raises in a capture: `item`, `tolist`, `bool`, `nonzero`, a boolean
  mask as an index, `numpy`, `cpu`, `to("cpu")`, `tensor_split` by a tensor, a tensor made of a
  list. So does a first use of a library.
- A replay of what was never captured raises, and so does a second capture into one graph.

What differs:

- It is not faster than eager code, rather slower. It says nothing about time.
- Memory that was freed after the capture, by `resize_` too: a GPU reads whatever lies there now.
  Here the replay raises. So does torch, if it is asked to (`check_input_liveness`, in newer
  versions).
- The device is the host. A copy to the host is told by its words, `cpu()` and `to("cpu")`. One with
  a `torch.device`, or into a tensor that was made without `device=`, goes unnoticed; and a number
  such as `torch.tensor(0.0)`, which a GPU takes as an argument, is refused.
- A library counts as used only when the same operation ran inside `stream(...)`. On a GPU it may
  have been set up by any other pass, and the missing warm-up would go unnoticed until a restart.
- Random numbers are refused. On a GPU they are allowed: the generator takes part in the replay.
- Kernels that torch does not know of, such as Triton's, are not recorded.
- Streams keep no order here, since everything runs in order: a missing `wait_stream` is not seen.
- The pool grows by just what is missing. The allocator of a GPU takes megabytes at a time, so bytes
  held in a pool are of the same kind here, and not the same.
- One capture at a time, in one thread.
"""

from course.graphs.capture import CUDAGraph, graph
from course.graphs.pool import graph_pool_handle, reserved_bytes
from course.graphs.streams import Stream, current_stream, stream, synchronize

__all__ = [
    "CUDAGraph",
    "Stream",
    "current_stream",
    "graph",
    "graph_pool_handle",
    "reserved_bytes",
    "stream",
    "synchronize",
]
