"""Lets SGLang be imported where there is no GPU; Python runs this file when an SGLang process starts.

    import torchvision ──► its two compiled operators are declared: the wheel's are built for CUDA and do not load
    import triton      ──► the package if it is installed, else the empty one that SGLang carries for Apple's machines
    import sglang.srt.lora ──► tensors that it wants in pinned memory are in any: torch refuses to pin without a GPU
    import sglang.srt.state_capturer ──► the same of the memory that it keeps routed experts in, which CUDA would pin

Nothing is imported before it is asked for, no file of SGLang is changed, and where there is a GPU this file is not on
the path; see `corral.workers.generation.sglang_command`.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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


class _Constant:
    """`triton.language.constexpr`: kernels that are never compiled annotate their arguments with it."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class EmptyTriton(Loader):
    """Modules in which every name exists, and the few that SGLang and torch look at more closely."""

    def __init__(self) -> None:
        self._stubs = _load_stubs()
        key = self._stubs._triton_key
        self._names: dict[str, dict[str, Any]] = {
            "triton": {
                "__version__": "3.0.0",  # torch asks for at least this
                "cdiv": self._stubs._cdiv,
                "next_power_of_2": self._stubs._next_power_of_2,
                "Config": self._stubs._Config,
            },
            "triton.language": {"constexpr": _Constant},
            "triton.runtime.jit": {"JITFunction": type("JITFunction", (), {})},
            "triton.runtime.autotuner": {
                "OutOfResources": type("OutOfResources", (Exception,), {}),
                "PTXASError": type("PTXASError", (Exception,), {}),
            },
            "triton.runtime.cache": {"triton_key": key},
            "triton.compiler.compiler": {"triton_key": key},
        }

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = self._stubs._MockModule(spec.name)
        for name, value in self._names.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            # Found by attribute before anybody imports them.
            for name in self._names.keys() - {"triton"}:
                importlib.import_module(name)


def _load_stubs() -> Any:
    """SGLang's own stubs, by their path: importing them by name would import SGLang, and so triton, first."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    path = Path(sglang.submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandInFinder(MetaPathFinder):
    """Acts on the first import of torchvision, of triton and of parts of SGLang; all else is found as ever."""

    def __init__(self) -> None:
        self._triton: EmptyTriton | None = None
        self._before: dict[str, Callable[[], None]] = {
            "torchvision": declare_torchvision_operators,
            "sglang.srt.lora": leave_memory_unpinned,
            "sglang.srt.state_capturer": leave_host_pools_unpinned,
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        act = self._before.pop(fullname, None)
        if act is not None and (path is not None or PathFinder.find_spec(fullname) is not None):
            act()
        if fullname == "triton" and self._triton is None and PathFinder.find_spec(fullname) is None:
            self._triton = EmptyTriton()
        if self._triton is not None and fullname.partition(".")[0] == "triton":
            return ModuleSpec(fullname, self._triton, is_package=True)
        return None


sys.meta_path.insert(0, StandInFinder())
