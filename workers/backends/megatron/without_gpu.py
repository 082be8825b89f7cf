"""What Megatron asks of a GPU, answered by the CPU, in a process that has none.

    torch.cuda.current_device, synchronize, random state ──► the CPU's
    tensor.cuda() ──► the tensor itself        tensor.type() ──► the name that Megatron's optimizer looks for
    streams, and copies from GPU to CPU ──► nothing to wait for
    gathering parts of several sizes, which gloo does not ──► parts of one size, cut afterwards
    device="cuda" within modules of Megatron ──► device="cpu"

megatron-core computes with plain tensor operations where its fused kernels are switched off, and its collectives run
over gloo; what keeps it from a CPU are these calls alone. No file of it is changed. With a GPU nothing here is used.
"""

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor

_CPU: Final = torch.device("cpu")
_MODULES_THAT_NAME_CUDA: Final = (
    "distributed.finalize_model_grads",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.schedules",
    "utils",
)
_FACTORIES: Final = ("zeros", "ones", "empty", "full", "tensor", "arange")


def stand_in_for_gpu() -> None:
    """Answer Megatron's calls in this process from now on; again changes nothing.

    For the process of a model worker, whose torch is its own: other libraries in it would see the same answers.

    Raises:
        RuntimeError: if there is a GPU, which would be hidden from everybody.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this process has a GPU, and Megatron computes there; nothing stands in for it")
    if getattr(torch.cuda.current_device, "stands_in", False):
        return
    _answer_for_cuda()
    _answer_for_streams()
    _answer_for_tensors()
    _answer_for_random_states()
    _answer_for_uneven_parts()
    for name in _MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        module.torch = _TorchOnCpu()


def _answer_for_cuda() -> None:
    def current_device() -> torch.device:
        return _CPU

    current_device.stands_in = True  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_device = current_device
    cuda.synchronize = lambda device=None: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _answer_for_streams() -> None:
    """Layers with experts copy the numbers of tokens of each to the host, and wait for that before they are sent."""
    # What is started on a stream is done, and so is whatever comes before one of its events.
    only: Any = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    only.record_event = lambda: only
    cuda: Any = torch.cuda
    cuda.Stream = lambda *arguments, **options: only
    cuda.current_stream = lambda device=None: only
    cuda.stream = lambda stream: contextlib.nullcontext()
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _on_host


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The original makes an array only of what it has moved."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _answer_for_tensors() -> None:
    own_type = torch.Tensor.type

    def type_name(self: Tensor, dtype: Any = None, *arguments: Any, **options: Any) -> Any:
        if dtype is not None:
            return own_type(self, dtype, *arguments, **options)
        return str(own_type(self)).replace("torch.", "torch.cuda.", 1)

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *arguments, **options: self
    tensor.type = type_name


class _TorchOnCpu(ModuleType):
    """`torch` as a module of Megatron sees it: the same, except that what is made on a GPU is made here."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*arguments: Any, **options: Any) -> Tensor:
        if torch.device(options.get("device") or _CPU).type == "cuda":
            options["device"] = _CPU
        return factory(*arguments, **options)

    return make


def _answer_for_random_states() -> None:
    """Layers without dropout draw nothing, and yet save and restore the state that they would draw from."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)


def _answer_for_uneven_parts() -> None:
    """The ranks of an expert's parts exchange as many tokens as each has for it; NCCL takes that, gloo does not."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather_even, scatter_even = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(part: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return cast(Tensor, gather_even(part, group, sizes, use_global_buffer))
        longest = max(sizes)
        gathered = gather_even(_lengthened(part, longest), group).split(longest)
        return torch.cat([padded[:size] for padded, size in zip(gathered, sizes, strict=True)])

    def scatter(whole: Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None or group.size() == 1:
            return cast(Tensor, scatter_even(whole, group, sizes, use_global_buffer))
        padded = torch.cat([_lengthened(part, max(sizes)) for part in torch.split(whole, sizes)])
        return cast(Tensor, scatter_even(padded, group)[: sizes[group.rank()]])

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def _lengthened(part: Tensor, length: int) -> Tensor:
    padded = part.new_zeros(length, *part.shape[1:])
    padded[: len(part)] = part
    return padded
