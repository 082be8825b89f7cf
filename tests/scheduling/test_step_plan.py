"""What a train step does where: goes, routes of keys and weights, and which calls may run at the same time."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.allocation import parse_allocation
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import (
    ModelFunctionCall,
    ModelName,
    PublishWeightsHook,
    PullWeightsHook,
    PushWeightsHook,
)
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.scheduling.step_plan import Route, StepPlan, WeightRoute, describe_shards
from corral.scheduling.worker_information import fold_numbers
from corral.workers.master.step_order import StepState

PROMPT = ("input_ids", "prompt_mask")
SPLIT = "actor,ref=fsdp:d2,critic,reward=fsdp:d2"


def call(name: str, call_type: str = "inference", role: str | ModelName = "actor", **fields: Any) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": call_type, "implementation": "ppo", "n_seqs": 8} | fields
    )


def ppo_calls(*, ema: float | None = None, **inference: Any) -> list[ModelFunctionCall]:
    """The calls of PPO with actor, critic, reference and reward model, and one that evaluates."""
    push = (PushWeightsHook(target=ModelName("ref"), eta=ema),) if ema is not None else ()
    made = ("rewards", "values", "ref_logprobs")
    return [
        call("actor_inf", input_keys=PROMPT, output_keys=("proximal_logprobs",), **inference),
        call("ref_inf", role="ref", input_keys=PROMPT, output_keys=("ref_logprobs",), **inference),
        call("critic_inf", role="critic", input_keys=PROMPT, output_keys=("values",), **inference),
        call("reward_inf", role="reward", input_keys=PROMPT, output_keys=("rewards",), **inference),
        call(
            "actor_train",
            "train_step",
            input_keys=(*PROMPT, "old_logprobs", *made, "proximal_logprobs"),
            post_hooks=(PublishWeightsHook(), *push),
        ),
        call("critic_train", "train_step", role="critic", input_keys=(*PROMPT, *made)),
        call("evaluate", "evaluate"),
    ]


def plan(calls: list[ModelFunctionCall], allocation: str = SPLIT, *, batch_size: int = 8) -> StepPlan:
    meshes = parse_allocation(allocation).meshes([each.role for each in calls])
    names = {each.model_name: meshes[each.role] for each in calls}
    ranks = meshes["actor"].dp_heads
    return StepPlan(graph=build_dataflow(calls), meshes=names, sample_ranks=ranks, batch_size=batch_size)


def test_a_batch_is_taken_in_goes_of_n_seqs() -> None:
    step = plan([call("actor_inf", n_seqs=3, output_keys=("x",)), call("all", n_seqs=99, output_keys=("y",))])
    assert [step.slices(each) for each in step.graph.calls] == [(3, 3, 2), (8,)]


def test_every_key_has_one_route_from_who_makes_it_to_all_who_read_it() -> None:
    step = plan(ppo_calls())
    all_calls = ("actor_inf", "ref_inf", "critic_inf", "reward_inf", "actor_train", "critic_train")
    trains = ("actor_train", "critic_train")
    assert step.routes == (
        Route(producer=None, source=(0, 1), consumers=all_calls, keys=PROMPT),
        Route(producer=None, source=(0, 1), consumers=("actor_train",), keys=("old_logprobs",)),
        Route(producer="actor_inf", source=(0, 1), consumers=("actor_train",), keys=("proximal_logprobs",)),
        Route(producer="ref_inf", source=(0, 1), consumers=trains, keys=("ref_logprobs",)),
        Route(producer="critic_inf", source=(2, 3), consumers=trains, keys=("values",)),
        Route(producer="reward_inf", source=(2, 3), consumers=trains, keys=("rewards",)),
    )


def test_weights_go_where_the_hooks_say() -> None:
    draft = call(
        "draft", "generate", ModelName("actor", 1), output_keys=("drafts",),
        pre_hooks=(PullWeightsHook(source=ModelName("actor")),),
    )  # fmt: skip
    step = plan([*ppo_calls(ema=0.1), draft])
    actor, ref = ModelName("actor"), ModelName("ref")
    assert set(step.weight_routes) == {
        WeightRoute(source=actor, target=ModelName("actor", 1), call="draft", is_before=True, eta=1.0),
        WeightRoute(source=actor, target=None, call="actor_train", is_before=False, eta=1.0),
        WeightRoute(source=actor, target=ref, call="actor_train", is_before=False, eta=0.1),
    }


def test_calls_on_other_ranks_run_beside_each_other_unless_one_needs_the_other() -> None:
    step = plan(ppo_calls())
    assert {each.name: set(step.beside(each.name)) for each in step.graph.step_calls} == {
        "actor_inf": {"critic_inf", "reward_inf", "critic_train"},
        "ref_inf": {"critic_inf", "reward_inf"},
        "critic_inf": {"actor_inf", "ref_inf"},
        "reward_inf": {"actor_inf", "ref_inf"},
        "actor_train": {"critic_train"},
        "critic_train": {"actor_inf", "actor_train"},
    }
    together = plan(ppo_calls(), "fsdp:d4")
    assert not any(together.beside(each.name) for each in together.graph.step_calls)


def test_a_call_that_takes_a_part_of_the_batch_runs_beside_the_one_that_makes_its_keys() -> None:
    def chain(first: int, second: int) -> StepPlan:
        return plan([
            call("reward_inf", role="reward", n_seqs=first, input_keys=PROMPT, output_keys=("rewards",)),
            call("actor_train", "train_step", n_seqs=second, input_keys=("rewards",)),
        ])  # fmt: skip

    assert chain(4, 4).beside("actor_train") == ("reward_inf",)
    assert chain(4, 8).beside("actor_train") == ()
    assert chain(8, 4).beside("actor_train") == ()
    assert chain(6, 6).beside("actor_train") == ("reward_inf",)


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    """Call i makes key i and reads keys of earlier ones; some train; each role has ranks of its own or shares them."""
    count = draw(st.integers(2, 6))
    calls = []
    for number in range(count):
        is_train = draw(st.booleans()) and number > 0
        read = draw(st.sets(st.integers(0, number - 1))) if number else set()
        keys = [f"key{other}" for other in sorted(read) if calls[other].output_keys]
        calls.append(
            call(
                f"call{number}", "train_step" if is_train else "inference",
                role=f"role{number}" if is_train else f"role{draw(st.integers(0, count - 1))}",
                n_seqs=draw(st.integers(1, 5)), input_keys=["ids", *keys],
                output_keys=[] if is_train else [f"key{number}"],
            )
        )  # fmt: skip
    roles = sorted({each.role for each in calls})
    first_by_role = {role: draw(st.integers(0, 3)) for role in roles}
    meshes = {ModelName(role): Mesh(ranks=(first_by_role[role],), dims=ParallelDims()) for role in roles}
    graph = build_dataflow(calls)
    return StepPlan(graph=graph, meshes=meshes, sample_ranks=(0,), batch_size=draw(st.integers(1, 6)))


@given(steps(), st.integers())
def test_what_ever_runs_at_the_same_time_was_said_to(step: StepPlan, seed: int) -> None:
    seen = {frozenset(pair) for pair in _pairs_of_a_random_run(step, random.Random(seed))}
    said = {frozenset((each.name, other)) for each in step.graph.step_calls for other in step.beside(each.name)}
    assert seen <= said
    assert all(name in step.beside(other) for pair in said for name, other in [tuple(pair)])


def _pairs_of_a_random_run(step: StepPlan, chance: random.Random) -> Iterable[tuple[str, str]]:
    """Run the calls of a step as the master does, goes starting and ending in any order."""
    state = StepState(step.graph, [str(number) for number in range(step.batch_size)])
    running: dict[str, list[str]] = {}
    while running or not all(state.is_over(each.name) for each in step.graph.step_calls):
        busy = {rank for name in running for rank in step.mesh(step.graph.call(name)).ranks}
        ready = {
            each.name: uids
            for each in step.graph.step_calls
            if each.name not in running
            and busy.isdisjoint(step.mesh(each).ranks)
            and (uids := state.next_slice(each.name)) is not None
        }
        if ready and (not running or chance.random() < 0.7):
            name = chance.choice(list(ready))
            yield from ((name, other) for other in running)
            running[name] = ready[name]
        else:
            name = chance.choice(list(running))
            state.finish_slice(name, running.pop(name))


_sizes = st.integers(1, 3)


@given(st.builds(ParallelDims, dp=_sizes, tp=_sizes, pp=_sizes, cp=_sizes), st.permutations(range(81)))
def test_shards_are_described_completely_and_in_order(dims: ParallelDims, workers: list[int]) -> None:
    mesh = Mesh(ranks=tuple(workers[: dims.world_size]), dims=dims)
    told = {}
    for part in describe_shards(mesh).split(", "):
        letters, ranks = part.split(" on ")
        spans = {word[0]: _numbers(word[1:]) for word in letters.split()}
        p_d_c_t = [spans["d"] if letter == "d" else spans.get(letter, [0]) for letter in "pdct"]
        told |= dict(zip(itertools.product(*p_d_c_t), _numbers(ranks), strict=True))
    assert told == {
        (at.pp_rank, at.dp_rank, at.cp_rank, at.tp_rank): rank
        for place, rank in enumerate(mesh.ranks)
        for at in [dims.coords(place)]
    }


def test_shards_of_a_large_layout_take_few_words() -> None:
    mesh = Mesh(ranks=tuple(range(512)), dims=ParallelDims(dp=64, tp=4, pp=2))
    assert describe_shards(mesh) == "p0 d0-63 t0-3 on 0-255, p1 d0-63 t0-3 on 256-511"


@given(st.lists(st.integers(0, 99)))
def test_folded_numbers_read_back_in_order(numbers: list[int]) -> None:
    assert (_numbers(fold_numbers(numbers)) if numbers else []) == numbers


@given(st.builds(ParallelDims, dp=st.integers(1, 9), tp=st.integers(1, 9), pp=st.integers(1, 9), cp=st.integers(1, 9)))
def test_the_short_form_of_a_layout_is_the_same_layout(dims: ParallelDims) -> None:
    assert ParallelDims.parse(dims.short) == dims


def _numbers(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]"""
    ends = [run.split("-") for run in text.split(",")]
    return [number for run in ends for number in range(int(run[0]), int(run[-1]) + 1)]
