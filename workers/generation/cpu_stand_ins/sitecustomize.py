"""Lets SGLang be imported where there is no GPU; Python runs this file when an SGLang process starts.

    import torchvision ──► its two compiled operators are declared: the wheel's are built for CUDA and do not load
    import sglang.srt.utils ──► triton is the package if it is installed, else the empty one that SGLang carries for
                                Apple's machines
    import sglang.srt.lora ──► tensors that it wants in pinned memory are in any: torch refuses to pin without a GPU
    import sglang.srt.state_capturer ──► the same of the memory that it keeps routed experts in, which CUDA would pin

Nothing is imported before it is asked for, no file of SGLang is changed, and where there is a GPU this file is not on
the path; see `corral.workers.generation.sglang`. What SGLang imports, in each of its processes, stays: Python
looks for garbage among it seldom, and they start a sixth faster.
"""

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def declare_torchvision_operators() -> None:
    """What torchvision registers shapes for when it is imported; nothing calls them."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def leave_memory_unpinned() -> None:
    """Pinned memory is for copies to a GPU; SGLang's adapters ask for it on every machine."""
    import torch

    def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
        def unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
            return make(*arguments, **options)

        return unpinned

    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor, *arguments: tensor)  # noqa: B010 - it is a method to mypy


def leave_host_pools_unpinned() -> None:
    """SGLang has another way to pin the pools that it keeps on the host: it registers them with CUDA."""
    pools: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    allocate = pools.alloc_with_host_register

    def unpinned(*arguments: Any, pin_memory: bool, **options: Any) -> Any:
        return allocate(*arguments, pin_memory=False, **options)

    pools.ALLOC_MEMORY_FUNCS["cpu"] = unpinned


def stand_in_for_triton() -> None:
    """SGLang's own empty modules, in which every name exists: it installs them on Apple's machines only."""
    from unittest import mock

    import torch

    stubs: Any = importlib.import_module("sglang._platform_stubs")
    stubs._patch_non_blocking = lambda: None  # that is for Apple's GPU
    is_there = mock.patch.object(torch.backends.mps, "is_available", return_value=True)
    with mock.patch.object(sys, "platform", "darwin"), mock.patch("platform.machine", return_value="arm64"), is_there:
        stubs.install_platform_stubs()


class StandInFinder(MetaPathFinder):
    """Acts on the first import of torchvision and of parts of SGLang; all else is found as ever."""

    def __init__(self) -> None:
        self._before: dict[str, Callable[[], None]] = {
            "torchvision": declare_torchvision_operators,
            "sglang.srt.utils": stand_in_for_triton,
            "sglang.srt.lora": leave_memory_unpinned,
            "sglang.srt.state_capturer": leave_host_pools_unpinned,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        act = self._before.pop(fullname, None)
        if act is not None and (path is not None or PathFinder.find_spec(fullname) is not None):
            act()
        return None


gc.set_threshold(500_000, 20, 20)
sys.meta_path.insert(0, StandInFinder())
