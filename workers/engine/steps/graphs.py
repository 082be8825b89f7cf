"""Launches of a device, captured once and replayed in one call: launch() --Graphs.capture--> replay().

GPU   CudaGraphs    thousands of launches become one; they read and write the memory that they did when captured
CPU   NoGraphs      launched anew: what a GPU replays is computed by the same function here
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

Launch = Callable[[], None]
"""Computes on tensors that stay where they are, may do so twice with the same outcome, and asks the device nothing."""


class Graphs(Protocol):
    """What was captured, and the memory that it shares."""

    @property
    def size_bytes(self) -> int:
        """Of the device, beside the tensors that the launches are given."""

    def capture(self, launch: Launch) -> Callable[[], None]:
        """What does as `launch` does now, until `close`; what it allocates may be overwritten by the next replay."""

    def close(self) -> None:
        """Give the memory back, when the device has done what was replayed; nothing is captured or replayed after."""


def graphs_of(device: torch.device) -> Callable[[], Graphs]:
    """Makes what captures on this device."""
    return NoGraphs if device.type == "cpu" else partial(CudaGraphs, device)


class NoGraphs:
    """A CPU has no launches to save."""

    size_bytes = 0

    def capture(self, launch: Launch) -> Callable[[], None]:
        return launch

    def close(self) -> None:
        pass


class CudaGraphs:
    """CUDA graphs that share one pool, since no two of them run at a time. It has not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: list[torch.cuda.CUDAGraph] = []

    @property
    def size_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == self._pool)

    def capture(self, launch: Launch) -> Callable[[], None]:
        """Compute it once outside, since libraries make workspaces with their first call; then capture it."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                launch()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may build new weights on the device meanwhile, which is no part of the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                launch()
        self._captured.append(graph)
        return graph.replay

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for graph in self._captured:
            graph.reset()
        self._captured.clear()
