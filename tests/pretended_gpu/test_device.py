"""What would be wrong on a GPU is seen to be wrong on the pretended one."""

import pytest
import torch

from tests.pretended_gpu import cuda

pytestmark = pytest.mark.gpu


def test_tensors_of_two_devices_are_refused_but_for_single_numbers() -> None:
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert (there + torch.tensor(1.0)).tolist() == [2.0] * 3
    for operation in (torch.add, torch.dot, lambda a, b: torch.cat([a, b])):
        with pytest.raises(RuntimeError, match="same device"):
            operation(there, here)


def test_memory_that_nobody_wrote_is_not_a_number() -> None:
    fresh = torch.empty(4, device="cuda", dtype=torch.bfloat16)
    assert torch.isnan(fresh.cpu()).all()
    storage = torch.ones(4, device="cuda").untyped_storage()
    storage.resize_(0)
    storage.resize_(16)
    assert torch.isnan(torch.empty(0, device="cuda").set_(storage, 0, (4,), (1,)).cpu()).all()  # type: ignore[call-overload]


def test_a_copy_to_pinned_memory_is_seen_after_a_wait_for_what_came_after_it() -> None:
    there = torch.arange(3.0, device="cuda")
    here, later = (torch.empty(3, pin_memory=True) for _ in range(2))
    here.copy_(there, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    later.copy_(there, non_blocking=True)
    there.fill_(7.0)
    assert torch.isnan(here).all() and torch.isnan(later).all()
    event.synchronize()
    assert here.tolist() == [0.0, 1.0, 2.0] and torch.isnan(later).all()
    torch.cuda.synchronize()
    assert later.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.nonzero(),
        lambda tensor: torch.tensor([1.0], device="cuda"),
        lambda tensor: torch.cuda.synchronize(),
    ],
)
def test_whatever_the_device_must_have_done_before_the_host_goes_on_is_a_wait(ask: object) -> None:
    assert callable(ask)
    tensor = torch.ones(3, device="cuda")
    cuda.waits.clear()
    ask(tensor)
    [(reason, count)] = cuda.waits.items()
    assert count == 1 and "tests/pretended_gpu/test_device.py" in reason
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="may not wait"):
            ask(tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="may not wait"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ask(tensor)


def test_what_needs_no_wait_is_none() -> None:
    tensor, pinned = torch.ones(3, device="cuda"), torch.ones(3).pin_memory()
    cuda.waits.clear()
    tensor.copy_(pinned, non_blocking=True)
    tensor[tensor > 0] = 2.0
    (tensor.masked_fill(tensor > 1, 0.0) @ tensor).sqrt()
    assert not cuda.waits


def test_a_graph_computes_when_it_is_replayed_and_not_before() -> None:
    given, taken = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = given * 2
        taken.copy_(between + 1)
    assert torch.isnan(between.cpu()).all()
    for number in (4.0, 5.0):
        given.fill_(number)
        graph.replay()
        assert taken.tolist() == [2 * number + 1] * 3


def test_the_norm_of_a_gpu_and_its_gradients_are_those_of_a_cpu_and_keep_its_input_alone() -> None:
    values, weight, found = torch.randn(5, 8), torch.randn(8), []
    for device in ("cpu", "cuda"):
        given, scale = (tensor.clone().to(device).requires_grad_() for tensor in (values, weight))
        kept: list[int] = []

        def note(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            normalized = torch.nn.functional.rms_norm(given, (8,), scale, 1e-6)
        normalized.square().sum().backward()
        assert given.grad is not None and scale.grad is not None
        found.append([tensor.detach().cpu() for tensor in (normalized, given.grad, scale.grad)])
    for of_cpu, of_device in zip(*found, strict=True):
        torch.testing.assert_close(of_device, of_cpu)
    assert sorted(kept) == [5, 8, 40]  # a scale of each row, weights, input
