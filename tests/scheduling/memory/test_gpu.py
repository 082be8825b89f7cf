"""The worst moment of a GPU that several models share, and what is usable of one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.memory.gpu import GIB, CallOnGpu, ModelOnGpu, gpu_bytes_for, peak_of, usable_bytes

ACTOR = ModelOnGpu(
    name="actor",
    held={"parameters": 10, "optimizer": 20},
    working={"actor_inf": {"activations": 5}, "actor_train": {"gradients": 10, "activations": 30}},
)
REF = ModelOnGpu(name="ref", held={"parameters": 10}, working={"ref_inf": {"activations": 60}})


def step(*, offloads: str = "") -> list[CallOnGpu]:
    names = {"ref_inf": "ref", "actor_inf": "actor", "actor_train": "actor"}
    return [CallOnGpu(name=name, model=model, offloads=name == offloads) for name, model in names.items()]


def test_models_of_a_gpu_add_up_at_the_worst_moment() -> None:
    peak = peak_of([ACTOR, REF], step())
    assert peak.call == "ref_inf" and peak.total == 10 + 60 + 10 + 20
    assert peak.parts_by_model["ref"] == {"parameters": 10, "activations": 60}
    assert peak.largest == ("ref", "activations") and peak.certain == 40


def test_a_model_that_left_counts_no_more_until_its_next_call() -> None:
    leaves = peak_of([ACTOR, REF], [*step(offloads="ref_inf")])
    # On resuming all is loaded, so the first ref_inf meets the actor's state.
    assert (leaves.call, leaves.total) == ("ref_inf", 100)
    small = ModelOnGpu(name="ref", held={"parameters": 10}, working={"ref_inf": {"activations": 1}})
    assert peak_of([ACTOR, small], step(offloads="ref_inf")).total == 10 + 20 + 10 + 30
    assert peak_of([ACTOR, small], step()).total == 10 + 20 + 10 + 30 + 10
    # The actor comes back for its inference, and stays until it was trained.
    assert peak_of([ACTOR, REF], step(offloads="actor_train")).total == 100


def test_a_gpu_without_calls_has_no_worst_moment() -> None:
    with pytest.raises(ValueError, match="no call runs on ref"):
        peak_of([REF], [CallOnGpu(name="actor_inf", model="actor")])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4), st.data())
def test_the_peak_lies_between_one_model_alone_and_all_at_their_worst(held: list[int], data: st.DataObject) -> None:
    work = [data.draw(st.integers(0, 100)) for _ in held]
    models = [
        ModelOnGpu(name=str(i), held={"parameters": held[i]}, working={str(i): {"activations": work[i]}})
        for i in range(len(held))
    ]
    order = data.draw(st.permutations(range(len(held))))
    offloads = [data.draw(st.booleans()) for _ in held]
    calls = [CallOnGpu(name=str(i), model=str(i), offloads=offloads[i]) for i in order]
    peak = peak_of(models, calls)
    assert max(h + w for h, w in zip(held, work, strict=True)) <= peak.total <= sum(held) + max(work)
    if not any(offloads):
        assert peak.total == sum(held) + max(work)


@given(st.integers(0, 10**13))
def test_a_gpu_for_so_many_bytes_is_the_smallest_that_holds_them(needed: int) -> None:
    size = gpu_bytes_for(needed)
    assert usable_bytes(size) >= needed
    assert usable_bytes(size - 2) < needed or needed == 0


def test_the_reserve_is_stated() -> None:
    assert usable_bytes(80 * GIB) == 74 * GIB
    assert usable_bytes(GIB) == 0
