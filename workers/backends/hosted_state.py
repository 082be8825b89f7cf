"""What an optimizer keeps of each parameter, in host memory; on the device while that parameter is stepped.

    host memory   [state of 1] [state of 2] [state of 3] ...        pinned, where there is a GPU
                      │  ▲         │
    device            ▼  │         ▼ the next one, meanwhile
                  step of 1    (step of 2)                          at most two parameters' state at a time

The tensors stay where the optimizer refers to them, and are cut as their parameters are; the memory below them goes and
comes (offload.py). The optimizer's own code steps each parameter on its device, with the numbers that it would have had
there all the time.

Guarantee: results are those of a state that stays on the device, bit for bit; where it lies changes no number.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from corral.workers.backends.host_copies import Blocks
from corral.workers.backends.offload import bytes_of, owned
from corral.workers.backends.sharding import local


class HostedState:
    """The state of one optimizer; scalars, such as AdamW's count of steps, stay on the device."""

    def __init__(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """
        Args:
            state: of the optimizer, by parameter; what it gets there later is found there.
        """
        self._state = state
        self._copies: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        """Host memory as [bytes] uint8, by the tensor whose content it is."""
        self._blocks = Blocks(is_pinned=True)
        self._stream: torch.cuda.Stream | None = None

    def put_away(self, parameter: nn.Parameter) -> None:
        """Move the state of a parameter, which is new, to host memory; waits for the device."""
        state = self._state[parameter]
        for name in [name for name, value in state.items() if _has_rows(value)]:
            state[name] = owned(state[name])
            storage = local(state[name]).untyped_storage()
            is_far = storage.device.type == "cuda"
            size = storage.nbytes()
            copy = self._blocks.take(size) if is_far else torch.empty(size, dtype=torch.uint8)
            self._copies[state[name]] = copy.copy_(bytes_of(storage))
            storage.resize_(0)

    def memory_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor where its content lies: in host memory, if it is of this state and put away."""
        own = local(tensor)
        if tensor not in self._copies:
            return own
        memory = self._copies[tensor].view(own.dtype)
        return memory.as_strided(own.shape, own.stride(), memory.storage_offset() + own.storage_offset())

    def visited(self, parameters: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Each parameter in turn, to be stepped while its state is on its device.

        The state of the next one comes while one is stepped, and goes back afterwards, by one stream of the device:
        what comes later cannot take memory that is still being read. At the end all is in host memory again.
        """
        coming = self._fetch(parameters[0]) if parameters else None
        for number, parameter in enumerate(parameters, start=1):
            arrival = coming
            coming = self._fetch(parameters[number]) if number < len(parameters) else None
            if arrival is not None:
                torch.cuda.current_stream(parameter.device).wait_event(arrival)
            yield parameter
            self._give_back(parameter)
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(self, parameter: nn.Parameter) -> torch.cuda.Event | None:
        """Begin to bring the state of a parameter to its device; on a GPU, what is to be waited for."""
        copies = [(tensor, self._copies[tensor]) for tensor in self._tensors(parameter) if tensor in self._copies]
        if not copies:
            return None  # its first step makes it
        with self._copying(parameter.device):
            for tensor, copy in copies:
                storage = local(tensor).untyped_storage()
                storage.resize_(copy.numel())
                bytes_of(storage).copy_(copy, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def _give_back(self, parameter: nn.Parameter) -> None:
        """Begin to bring the state of a parameter, which was stepped, to host memory."""
        tensors = self._tensors(parameter)
        if any(tensor not in self._copies for tensor in tensors):
            self.put_away(parameter)
            return
        with self._copying(parameter.device):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(parameter.device))
            for tensor in tensors:
                storage = local(tensor).untyped_storage()
                self._copies[tensor].copy_(bytes_of(storage), non_blocking=True)
                storage.resize_(0)

    def _tensors(self, parameter: nn.Parameter) -> list[Tensor]:
        return [value for value in self._state.get(parameter, {}).values() if _has_rows(value)]

    def _copying(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where copies are enqueued: beside the steps, where the device can."""
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
