"""What a torch without CUDA lacks of `torch.cuda`, for the one device that device.cpp keeps in host memory.

Streams are done with what they are given at once, except copies to pinned memory: the host sees these when it has
waited for an event, a stream or the device after them. Each wait of the host is counted by its reason and the line that
caused it; where a graph is captured, or `torch.cuda.set_sync_debug_mode("error")` was said, it is an error.
"""

import collections
import ctypes
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

waits: collections.Counter[str] = collections.Counter()
"""How often the host waited, by "reason, file:line" of the project."""

_OPS: Any = torch.ops.pretended
_ROOT = Path(__file__).parents[2]
_OWN = (Path(__file__), Path(__file__).with_name("kernels.py"))
_MODES = ("default", "warn", "error")
_MEMORY_BYTES = 80 * 2**30


class _State:
    sync_debug_mode = 0
    is_capturing = False
    num_graphs = 0


def _cause() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path not in _OWN and ".venv" not in path.parts:
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of the project"


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
def _on_wait(reason: bytes) -> int:
    waits[f"{reason.decode()}, {_cause()}"] += 1
    return int(_State.is_capturing or _MODES[_State.sync_debug_mode] == "error")


class Stream:
    """The only one, under as many names as are asked for."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type, self.stream_id, self.cuda_stream, self.priority = 0, 1, 0, 0, priority

    def wait_stream(self, stream: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _OPS.wait("a stream")
        _OPS.arrive(_OPS.departed())

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """A point between copies."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._departed: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._departed = _OPS.departed()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._departed is not None:
            _OPS.wait("an event")
            _OPS.arrive(self._departed)


class CUDAGraph:
    """What was launched while it was captured, to be launched again."""

    all: "weakref.WeakSet[CUDAGraph]" = weakref.WeakSet()

    def __init__(self, keep_graph: bool = False) -> None:
        _State.num_graphs += 1
        self.number = _State.num_graphs
        self.pool = (0, 0)
        self.all.add(self)

    def replay(self) -> None:
        _OPS.replay(self.number)

    def reset(self) -> None:
        _OPS.forget_graph(self.number)


class graph:  # noqa: N801
    """The context of a capture."""

    def __init__(self, cuda_graph: CUDAGraph, pool: tuple[int, int] = (0, 0), **_: Any) -> None:
        self._graph = cuda_graph
        cuda_graph.pool = pool

    def __enter__(self) -> None:
        _OPS.begin_capture(self._graph.number)
        _State.is_capturing = True

    def __exit__(self, *_: Any) -> None:
        _State.is_capturing = False
        _OPS.end_capture()


class device:  # noqa: N801
    """The context of a device, of which there is one."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def device_count() -> int:
    """As many as the process may see; each process has one of its own."""
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))


def synchronize(device: Any = None) -> None:
    _OPS.wait("the device")
    _OPS.arrive(_OPS.departed())


def set_sync_debug_mode(mode: int | str) -> None:
    _State.sync_debug_mode = _MODES.index(mode) if isinstance(mode, str) else mode


def memory_allocated(device: Any = None) -> int:
    return int(_OPS.bytes_in_use())


def max_memory_allocated(device: Any = None) -> int:
    return int(_OPS.peak_bytes())


def reset_peak_memory_stats(device: Any = None) -> None:
    _OPS.reset_peak()


def memory_snapshot(*_: Any) -> list[dict[str, Any]]:
    """The memory of graphs alone."""
    return [{"segment_pool_id": g.pool, "total_size": _OPS.bytes_of_graph(g.number)} for g in CUDAGraph.all]


def memory_stats(device: Any = None) -> dict[str, int]:
    of_allocator = {"current": memory_allocated(), "peak": max_memory_allocated()}
    return collections.defaultdict(int, {f"allocated_bytes.all.{name}": n for name, n in of_allocator.items()})


def _resize(storage: torch.UntypedStorage, size: int, *, on_host: Any = torch.UntypedStorage.resize_) -> Any:
    if storage.device.type != "cuda":
        return on_host(storage, size)
    _OPS.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (0,), (1,)), size)  # type: ignore[call-overload]
    return storage


class HostCollectives(dist.ProcessGroupGloo):
    """Named like what GPUs have; the operations of device.cpp give their tensors to the group of the CPU."""

    class Options(SimpleNamespace):
        """Of NCCL."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)


_STREAM = Stream()
_PROPERTIES = SimpleNamespace(
    name="a pretended GPU", major=9, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=132, warp_size=32
)
_NAMES: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": lambda: False,
    "device": device,
    "device_of": device,
    "device_count": device_count,
    "set_device": lambda _: None,
    "get_device_capability": lambda _=None: (9, 0),
    "get_device_name": lambda _=None: _PROPERTIES.name,
    "get_device_properties": lambda _=None: _PROPERTIES,
    "mem_get_info": lambda _=None: (_MEMORY_BYTES - memory_allocated(), _MEMORY_BYTES),
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "memory_snapshot": memory_snapshot,
    "memory_stats": memory_stats,
    "empty_cache": lambda: None,
    "synchronize": synchronize,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": lambda: _State.sync_debug_mode,
    "Stream": Stream,
    "Event": Event,
    "stream": lambda stream: stream or _STREAM,
    "StreamContext": lambda stream: stream or _STREAM,
    "current_stream": lambda _=None: _STREAM,
    "default_stream": lambda _=None: _STREAM,
    "set_stream": lambda _: None,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: _State.is_capturing,
    "default_generators": (torch.default_generator,),
}


def install(built: ctypes.CDLL) -> None:
    """Have torch believe in the device of this library; for the whole life of the process."""
    built.watch_waits(_on_wait)
    for name, value in _NAMES.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    torch.cuda.nccl.version = lambda: (2, 0, 0)  # type: ignore[assignment]
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    dist.distributed_c10d.ProcessGroupNCCL = HostCollectives  # type: ignore[misc, assignment]
    dist.distributed_c10d._NCCL_AVAILABLE = True
