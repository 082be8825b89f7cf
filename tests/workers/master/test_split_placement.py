"""Actor and reference beside critic and reward model: the master's code and real ranks, in calls that end on an event.

Each call of PPO's graph waits for others to have begun or ended, so that a step ends only if they do run side by side.
"""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.slow_calls import Interval, Pace, read_intervals, write_paces
from benchmarks.split_placement import SECONDS, Seen, critical_path_s, run_steps, side_by_side, slow_plan
from corral.experiments.plan import RunPlan
from corral.scheduling.dataflow import build_dataflow

NUM_STEPS = 2
SPLIT = "actor,ref=fsdp:d1,critic,reward=fsdp:d1"
PACES = {
    "actor_inf": Pace(until=["rew_inf.ended"]),
    "rew_inf": Pace(until=["actor_inf.begun"]),
    "ref_inf": Pace(until=["critic_inf.ended"]),
    "critic_inf": Pace(until=["ref_inf.begun"]),
    "actor_train": Pace(until=["critic_train.begun"]),
    "critic_train": Pace(until=["actor_train.begun"]),
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    return slow_plan(tmp_path_factory.mktemp("split"), SPLIT, "ppo.kl.place=reward")


@pytest.fixture(scope="module")
def steps(plan: RunPlan) -> list[Seen]:
    folder = plan.trial.directory.parent
    write_paces(folder, PACES)
    return run_steps(plan, folder, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def records(plan: RunPlan, steps: list[Seen]) -> Mapping[tuple[str, int], Interval]:
    """What the ranks have written down, by call and step."""
    found = {(interval.call, interval.number): interval for interval in read_intervals(plan.trial.directory.parent)}
    assert found.keys() == {(name, step) for name in PACES for step in range(NUM_STEPS)}
    return found


def test_inference_and_updates_of_two_meshes_run_side_by_side(records: Mapping[tuple[str, int], Interval]) -> None:
    pairs = {frozenset(pair) for pair in side_by_side(list(records.values()))}
    expected = {("actor_inf", "rew_inf"), ("ref_inf", "critic_inf"), ("actor_train", "critic_train")}
    assert {frozenset(pair) for pair in expected} <= pairs


def test_no_call_begins_before_what_it_waits_for_or_beside_one_on_its_ranks(
    plan: RunPlan, records: Mapping[tuple[str, int], Interval]
) -> None:
    graph = build_dataflow(plan.master.calls)
    ranks = {call.name: set(plan.master.mesh(call.model_name).ranks) for call in graph.step_calls}
    assert {key for key, producer in graph.producer_by_key.items() if producer} == {
        "proximal_logprobs",
        "ref_logprobs",
        "model_rewards",
        "values",
    }
    for step in range(NUM_STEPS):
        for name in ranks:
            interval = records[name, step]
            for other in (*graph.predecessors(name), *graph.must_follow(name)):
                assert records[other, step].ended_s < interval.begun_s
            assert not any(
                records[other, step].overlaps(interval)
                for other in ranks
                if other != name and ranks[other] & ranks[name]
            )


def test_a_rank_in_the_middle_of_a_call_gives_what_a_call_elsewhere_reads(
    records: Mapping[tuple[str, int], Interval], steps: list[Seen]
) -> None:
    """All samples come in at rank 0, which is in actor_inf until rank 1 has got them, and has ended rew_inf."""
    for step, seen in enumerate(steps):
        assert seen.moved_bytes > 0
        busy, served = records["actor_inf", step], records["rew_inf", step]
        assert busy.begun_s < served.ended_s < busy.ended_s
    # ref_logprobs and values cross while the rank that has made them is in the middle of its update, one way or the
    # other: each of the two updates lasts until the other one has begun, with all that it reads.
    assert all(set(seen.result.train_replies) == {"actor_train", "critic_train"} for seen in steps)


# --- the critical path that the benchmark measures against ----------------------------------------------------------


@given(seconds=st.fixed_dictionaries({name: st.integers(1, 9).map(float) for name in SECONDS}))
def test_the_critical_path_is_all_calls_on_one_mesh_and_the_longest_chain_on_two(
    plan: RunPlan, seconds: dict[str, float]
) -> None:
    spec = plan.master
    one_mesh = spec.model_copy(update={"meshes": dict.fromkeys(spec.meshes, spec.meshes["actor/0"])})
    assert critical_path_s(one_mesh, seconds) == sum(seconds.values())
    # Whatever the order on the two ranks, updates begin when all inference of their mesh has ended, and what they read.
    left, right = seconds["actor_inf"] + seconds["ref_inf"], seconds["rew_inf"] + seconds["critic_inf"]
    ref_first = max(right, seconds["ref_inf"])
    expected = max(max(left, right) + seconds["actor_train"], ref_first + seconds["critic_train"])
    assert critical_path_s(spec, seconds) == expected
