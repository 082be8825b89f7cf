"""Allocation strings: every documented form means what it says, and a mistake is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.allocation import Allocation, EngineAllocation, RoleGroup, parse_allocation
from corral.scheduling.parallel import ParallelDims


def engine(backend: str, **sizes: int) -> EngineAllocation:
    return EngineAllocation(backend=backend, dims=ParallelDims(**sizes))


def share(roles: str, backend: str, first_rank: int | None = None, **sizes: int) -> RoleGroup:
    return RoleGroup(roles=tuple(roles.split()), engine=engine(backend, **sizes), first_rank=first_rank)


@pytest.mark.parametrize(
    ("text", "generation", "training"),
    [
        ("hf:d2+fsdp:d1", engine("hf", dp=2), [share("*", "fsdp")]),
        ("sglang:d4t2+megatron:d2t2p2", engine("sglang", dp=4, tp=2), [share("*", "megatron", dp=2, tp=2, pp=2)]),
        ("fsdp:d2", None, [share("*", "fsdp", dp=2)]),
        ("fsdp:d2t2c4", None, [share("*", "fsdp", dp=2, tp=2, cp=4)]),
        ("d2", None, [share("*", "fsdp", dp=2)]),
        ("hf:d1", engine("hf"), []),
        ("actor=fsdp:d4t2,critic=fsdp:d4", None, [share("actor", "fsdp", dp=4, tp=2), share("critic", "fsdp", dp=4)]),
        ("actor, ref=d2 , critic,reward =d1", None, [share("actor ref", "fsdp", dp=2), share("critic reward", "fsdp")]),
        ("actor=d2,critic=d2@1", None, [share("actor", "fsdp", dp=2), share("critic", "fsdp", 1, dp=2)]),
        (
            "sglang:d2 + actor=d4, *=megatron:t2",
            engine("sglang", dp=2),
            [share("actor", "fsdp", dp=4), share("*", "megatron", tp=2)],
        ),
        ("sglang.d4m1p1+d2m2p1", engine("sglang", dp=4), [share("*", "fsdp", dp=2, tp=2)]),
        ("d2m2p1+sglang.d4m1p1", engine("sglang", dp=4), [share("*", "fsdp", dp=2, tp=2)]),
    ],
)
def test_each_form_means_what_it_says(
    text: str, generation: EngineAllocation | None, training: list[RoleGroup]
) -> None:
    assert parse_allocation(text) == Allocation(generation=generation, training=tuple(training))


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
        ("sglang:d2c2+fsdp:d1", 0, "no context-parallel ranks"),
        ("sglang:d2e2+fsdp:d1", 0, "no expert-parallel ranks"),
        ("megatron:d3e2", 9, "e2 does not divide the 3 ranks of d3 x c1"),
        ("hf:d2,fsdp:d1", 6, 'after "+"'),
        ("actor=hf:d2", 0, "cannot train role 'actor'"),
        ("actor=d2,critic=hf:d2", 9, "cannot train role 'critic'"),
        ("actor=d2,d4", 9, "role"),
        ("actor=d2,actor=d4", 9, "already"),
        ("actor,actor=d2", 0, "already"),
        ("actor=d2@x", 8, "nothing may follow"),
        ("hf:d2@1+fsdp:d1", 0, "generation servers have none"),
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
    assert message.endswith("\n  " + " " * position + "^")


def test_generation_servers_follow_from_the_layout() -> None:
    allocation = parse_allocation("sglang:d4t2+fsdp:d8")
    assert [allocation.num_generation_servers, parse_allocation("fsdp:d8").num_generation_servers] == [4, 0]


def test_a_server_has_as_many_gpus_as_share_its_layers() -> None:
    assert parse_allocation("sglang:d4t2+fsdp:d8").gpus_per_server == 2
    assert parse_allocation("hf:d4+fsdp:d8t2").gpus_per_server == parse_allocation("fsdp:d8t2").gpus_per_server == 1


def test_the_star_stands_for_roles_that_are_not_named() -> None:
    allocation = parse_allocation("actor=fsdp:d4,*=megatron:d2")
    assert allocation.training_of("actor") == engine("fsdp", dp=4)
    assert allocation.training_of("critic") == engine("megatron", dp=2)


def test_a_role_without_a_layout_is_named() -> None:
    with pytest.raises(ValueError, match="no layout for role 'critic'; add critic="):
        parse_allocation("actor=fsdp:d4").training_of("critic")


@pytest.mark.parametrize(
    ("text", "actor", "ref", "critic"),
    [
        ("fsdp:d2", (0, 1), (0, 1), (0, 1)),
        ("actor,ref=d2,critic=d1", (0, 1), (0, 1), (2,)),
        ("actor=d1,ref=d1,critic=d2", (0,), (1,), (2, 3)),
        ("actor=d2,*=d2@1", (0, 1), (1, 2), (1, 2)),
        ("critic=d2,actor,ref=d1@0", (0,), (0,), (0, 1)),
    ],
)
def test_roles_of_one_share_sit_together_and_shares_apart_unless_they_say_where(
    text: str, actor: tuple[int, ...], ref: tuple[int, ...], critic: tuple[int, ...]
) -> None:
    meshes = parse_allocation(text).meshes(("actor", "ref", "critic"))
    assert {role: mesh.ranks for role, mesh in meshes.items()} == {"actor": actor, "ref": ref, "critic": critic}


def test_a_rank_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves model_worker/1 without a role; start a role at rank 1 with @1"):
        parse_allocation("actor=d1,critic=d1@2").meshes(("actor", "critic"))


dims = st.builds(ParallelDims, dp=st.integers(1, 64), tp=st.integers(1, 8), pp=st.integers(1, 4))
trainers = st.builds(EngineAllocation, backend=st.sampled_from(["fsdp", "megatron"]), dims=dims)
servers = st.builds(
    EngineAllocation,
    backend=st.sampled_from(["sglang", "hf"]),
    dims=st.builds(ParallelDims, dp=st.integers(1, 64), tp=st.integers(1, 8)),
)
role_lists = st.permutations(["actor", "critic", "ref", "reward_2", "*"])


@st.composite
def shares(draw: st.DrawFn) -> tuple[RoleGroup, ...]:
    names, made = list(draw(role_lists)), []
    while names and (not made or draw(st.booleans())):
        count = draw(st.integers(1, len(names)))
        roles, names = names[:count], names[count:]
        made.append(
            RoleGroup(roles=tuple(roles), engine=draw(trainers), first_rank=draw(st.none() | st.integers(0, 99)))
        )
    return tuple(made)


@given(st.none() | servers, shares())
def test_every_allocation_reads_back_from_its_text(
    generation: EngineAllocation | None, training: tuple[RoleGroup, ...]
) -> None:
    allocation = Allocation(generation=generation, training=training)
    assert parse_allocation(str(allocation)) == allocation


@given(st.text(alphabet="dtmp0129:.+,=@*hfsglan \n", max_size=20))
def test_any_text_is_understood_or_refused_with_its_place(text: str) -> None:
    try:
        allocation = parse_allocation(text)
    except ValueError as refusal:
        assert str(refusal).endswith("^")
    else:
        assert parse_allocation(str(allocation)) == allocation
