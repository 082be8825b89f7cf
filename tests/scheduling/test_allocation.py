"""Allocation strings: every documented form means what it says, and a mistake is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.allocation import Allocation, EngineAllocation, parse_allocation
from corral.scheduling.parallel import ParallelDims


def engine(backend: str, **sizes: int) -> EngineAllocation:
    return EngineAllocation(backend=backend, dims=ParallelDims(**sizes))


@pytest.mark.parametrize(
    ("text", "generation", "training"),
    [
        ("hf:d2+fsdp:d1", engine("hf", dp=2), {"*": engine("fsdp")}),
        ("sglang:d4t2+megatron:d2t2p2", engine("sglang", dp=4, tp=2), {"*": engine("megatron", dp=2, tp=2, pp=2)}),
        ("fsdp:d2", None, {"*": engine("fsdp", dp=2)}),
        ("d2", None, {"*": engine("fsdp", dp=2)}),
        ("hf:d1", engine("hf"), {}),
        ("actor=fsdp:d4t2,critic=fsdp:d4", None, {"actor": engine("fsdp", dp=4, tp=2), "critic": engine("fsdp", dp=4)}),
        (
            "sglang:d2 + actor=d4, *=megatron:t2",
            engine("sglang", dp=2),
            {"actor": engine("fsdp", dp=4), "*": engine("megatron", tp=2)},
        ),
        ("sglang.d4m1p1+d2m2p1", engine("sglang", dp=4), {"*": engine("fsdp", dp=2, tp=2)}),
        ("d2m2p1+sglang.d4m1p1", engine("sglang", dp=4), {"*": engine("fsdp", dp=2, tp=2)}),
    ],
)
def test_each_form_means_what_it_says(
    text: str, generation: EngineAllocation | None, training: dict[str, EngineAllocation]
) -> None:
    assert parse_allocation(text) == Allocation(generation=generation, training=training)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "a layout"),
        ("fsdp:", 5, "a layout"),
        ("fsdp:d4oops", 5, "'d4oops'"),
        ("d4m2p1,typo:d2", 7, "unknown backend 'typo'"),
        ("sglan:d4+fsdp:d1", 0, "did you mean 'sglang'?"),
        ("fsdp:d2+fsdp:d2", 8, "both sides"),
        ("hf:d2+sglang:d2", 6, "both sides"),
        ("hf:d2+fsdp:d1+fsdp:d1", 13, "nothing may follow"),
        ("sglang:d2p2+fsdp:d1", 0, "no pipeline stages"),
        ("hf:d2,fsdp:d1", 6, 'after "+"'),
        ("actor=hf:d2", 0, "cannot train role 'actor'"),
        ("actor=d2,critic=hf:d2", 9, "cannot train role 'critic'"),
        ("actor=d2,d4", 9, "role"),
        ("d2,actor=d4", 0, "role"),
        ("actor=d2,actor=d4", 9, "already"),
        ("fsdp:d2 d4", 8, "nothing may follow"),
        ("fsdp:d2\n", 7, "nothing may follow"),
        ("fsdp:d0", 5, "a size from 1"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, position: int, reason: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_allocation(text)
    message = str(refusal.value)
    assert f"position {position}:" in message
    assert reason in message
    assert "\n  " + " " * position + "^\n" in message
    assert "allocation :=" in message


def test_generation_servers_follow_from_the_layout() -> None:
    allocation = parse_allocation("sglang:d4t2+fsdp:d8")
    assert [allocation.num_generation_servers, parse_allocation("fsdp:d8").num_generation_servers] == [4, 0]


def test_the_star_stands_for_roles_that_are_not_named() -> None:
    allocation = parse_allocation("actor=fsdp:d4,*=megatron:d2")
    assert allocation.training_of("actor") == engine("fsdp", dp=4)
    assert allocation.training_of("critic") == engine("megatron", dp=2)


def test_a_role_without_a_layout_is_named() -> None:
    with pytest.raises(ValueError, match="no layout for role 'critic'; add critic="):
        parse_allocation("actor=fsdp:d4").training_of("critic")


dims = st.builds(ParallelDims, dp=st.integers(1, 64), tp=st.integers(1, 8), pp=st.integers(1, 4))
trainers = st.builds(EngineAllocation, backend=st.sampled_from(["fsdp", "megatron"]), dims=dims)
servers = st.builds(
    EngineAllocation,
    backend=st.sampled_from(["sglang", "hf"]),
    dims=st.builds(ParallelDims, dp=st.integers(1, 64), tp=st.integers(1, 8)),
)
roles = st.sampled_from(["actor", "critic", "ref", "reward_2", "*"])


@given(st.none() | servers, st.dictionaries(roles, trainers, min_size=1))
def test_every_allocation_reads_back_from_its_text(
    generation: EngineAllocation | None, training: dict[str, EngineAllocation]
) -> None:
    allocation = Allocation(generation=generation, training=training)
    assert parse_allocation(str(allocation)) == allocation


@given(st.text(alphabet="dtmp0129:.+,=*hfsglan \n", max_size=20))
def test_any_text_is_understood_or_refused_with_the_grammar(text: str) -> None:
    try:
        allocation = parse_allocation(text)
    except ValueError as refusal:
        assert "allocation :=" in str(refusal)
    else:
        assert parse_allocation(str(allocation)) == allocation
