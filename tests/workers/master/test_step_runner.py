"""Calls of a step run side by side where their ranks allow it, on a clock that the test drives."""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.master.step_order import RankLocks, StepOutcome, StepRunner, StepState
from corral.workers.requests.messages import TrainReply

RANKS = {"actor": {0, 1}, "ref": {0, 1}, "critic": {2, 3}, "reward": {2, 3}}


def call(
    name: str,
    call_type: str,
    role: str,
    reads: tuple[str, ...],
    *makes: str,
    n_seqs: int = 4,
    hooks: Sequence[str] = (),
) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": call_type, "implementation": "x", "n_seqs": n_seqs}
        | {"input_keys": reads, "output_keys": makes, "post_hooks": [{"type": hook} for hook in hooks]}
    )


def split_ppo() -> DataflowGraph:
    """actor and ref on some ranks, critic and reward on others."""
    return build_dataflow(
        [
            call("ref_inf", "inference", "ref", ("ids",), "ref_logprobs"),
            call("rew_inf", "inference", "reward", ("ids",), "rewards"),
            call("critic_inf", "inference", "critic", ("ids",), "values"),
            call("actor_train", "train_step", "actor", ("ids", "ref_logprobs", "rewards", "values")),
            call("critic_train", "train_step", "critic", ("ids", "ref_logprobs", "rewards", "values")),
        ],
        ["ids"],
    )


class Calls:
    """Runs nothing: a call ends when the test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[str, tuple[str, ...], bool]] = []
        self._ends: dict[str, asyncio.Future[None]] = {}
        self.drops: dict[str, dict[str, str]] = {}
        self.num_published = 0
        self.waits_for: Mapping[str, Sequence[str]] = {}

    def note_progress(self, running: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> None:
        self.waits_for = waits_for

    def ranks_of(self, call: ModelFunctionCall) -> set[int]:
        return RANKS[call.role]

    async def run_call(
        self, call: ModelFunctionCall, uids: Sequence[str], *, version: int, is_last_slice: bool
    ) -> tuple[TrainReply | None, Mapping[str, str]]:
        self.started.append((call.name, tuple(uids), is_last_slice))
        self._ends[call.name] = asyncio.get_running_loop().create_future()
        await self._ends[call.name]
        is_train = call.call_type == "train_step"
        trained = TrainReply(stats={"version": float(version)}, num_updates=1, num_nonfinite=0)
        return trained if is_train else None, self.drops.pop(call.name, {})

    async def publish(self) -> None:
        self.num_published += 1

    @property
    def running(self) -> set[str]:
        return {name for name, end in self._ends.items() if not end.done()}

    async def end(self, name: str, error: BaseException | None = None) -> None:
        if error is None:
            self._ends[name].set_result(None)
        else:
            self._ends[name].set_exception(error)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def start(graph: DataflowGraph, calls: Calls) -> "asyncio.Task[StepOutcome]":
    batch = ["a", "b", "c", "d"]
    step = StepRunner(graph, cast(Any, calls), batch, version=7, publish=calls.publish, on_progress=calls.note_progress)
    return asyncio.create_task(step.run())


def test_calls_on_other_ranks_run_side_by_side_and_none_waits_for_a_level() -> None:
    async def scenario() -> StepOutcome:
        calls = Calls()
        step = start(split_ppo(), calls)
        await settle()
        assert calls.running == {"ref_inf", "rew_inf"}  # critic_inf waits for the ranks of rew_inf
        assert calls.waits_for["critic_inf"] == ["rew_inf"]
        assert calls.waits_for["actor_train"] == ["ref_inf", "rew_inf", "critic_inf"]
        await calls.end("rew_inf")
        assert calls.running == {"ref_inf", "critic_inf"}
        await calls.end("critic_inf")
        assert calls.running == {"ref_inf"}
        await calls.end("ref_inf")
        assert calls.running == {"actor_train", "critic_train"}
        await calls.end("critic_train")
        await calls.end("actor_train")
        return await step

    result = asyncio.run(scenario())
    assert {name: len(replies) for name, replies in result.train_replies.items()} == {
        "actor_train": 1,
        "critic_train": 1,
    }
    waited_for = {name for name in result.seconds if name.startswith("time/actor_train/for_")}
    assert waited_for == {f"time/actor_train/for_{other}_s" for other in ("ref_inf", "rew_inf", "critic_inf")}


def test_a_call_of_fewer_samples_feeds_the_next_one_before_it_is_over() -> None:
    graph = build_dataflow(
        [
            call("ref_inf", "inference", "ref", ("ids",), "ref_logprobs", n_seqs=2),
            call("critic_inf", "inference", "critic", ("ref_logprobs",), "values", n_seqs=2),
        ],
        ["ids"],
    )

    async def scenario() -> list[tuple[str, tuple[str, ...], bool]]:
        calls = Calls()
        step = start(graph, calls)
        await settle()
        await calls.end("ref_inf")
        assert calls.running == {"ref_inf", "critic_inf"}
        for name in ("critic_inf", "ref_inf", "critic_inf"):
            await calls.end(name)
        await step
        return calls.started

    assert asyncio.run(scenario()) == [
        ("ref_inf", ("a", "b"), False),
        ("ref_inf", ("c", "d"), True),
        ("critic_inf", ("a", "b"), False),
        ("critic_inf", ("c", "d"), True),
    ]


def test_a_step_goes_on_without_samples_that_were_given_up() -> None:
    graph = build_dataflow(
        [
            call("actor_gen", "generate", "actor", (), "ids"),
            call("critic_inf", "inference", "critic", ("ids",), "values", n_seqs=3),
            call("actor_train", "train_step", "actor", ("ids", "values")),
        ],
        [],
    )

    async def scenario(dropped: str) -> tuple[StepOutcome, list[str]]:
        calls = Calls()
        calls.drops["actor_gen"] = dict.fromkeys(dropped, "reward_error")
        step = start(graph, calls)
        await settle()
        while calls.running:
            await calls.end(calls.running.pop())
        return await step, [f"{name} {''.join(uids)}" for name, uids, _ in calls.started]

    result, started = asyncio.run(scenario("b"))
    assert started == ["actor_gen abcd", "critic_inf acd", "actor_train acd"]
    assert result.dropped == {"b": "reward_error"}
    result, started = asyncio.run(scenario("abcd"))
    assert (started, result.train_replies) == (["actor_gen abcd"], {})


def test_the_first_error_ends_the_step() -> None:
    async def scenario() -> None:
        calls = Calls()
        step = start(split_ppo(), calls)
        await settle()
        await calls.end("rew_inf", OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await step

    asyncio.run(scenario())


def test_ranks_are_granted_in_order_and_others_are_not_held_up() -> None:
    async def scenario() -> list[str]:
        locks, order, ends = RankLocks(), list[str](), dict[str, asyncio.Event]()

        async def hold(name: str, ranks: set[int]) -> None:
            ends[name] = asyncio.Event()
            async with locks.hold(name, ranks):
                order.append(name)
                await ends[name].wait()

        tasks = []
        for name, ranks in (("left", {0, 1}), ("all", {0, 1, 2}), ("late", {2}), ("apart", {3})):
            tasks.append(asyncio.create_task(hold(name, ranks)))
            await settle()
        assert order == ["left", "apart"]  # "late" does not overtake "all", which asked for rank 2 before it
        assert locks.holders({1, 2, 3}) == ["apart", "left"]
        ends["left"].set()
        await settle()
        assert order == ["left", "apart", "all"]
        tasks[2].cancel()  # who gives up waiting is no longer in the way
        await settle()
        for event in ends.values():
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert locks.holders(range(4)) == []
        return order

    assert asyncio.run(scenario()) == ["left", "apart", "all"]


@pytest.mark.parametrize(("call_type", "num_published"), [("train_step", 1), ("inference", 0)])
def test_what_follows_a_call_follows_it_also_if_the_samples_of_its_last_go_were_dropped(
    call_type: str, num_published: int
) -> None:
    makes, hooks = ((), ("publish_weights",)) if call_type == "train_step" else (("values",), ())
    graph = build_dataflow(
        [
            call("actor_gen", "generate", "actor", (), "ids", n_seqs=2),
            call("critic_call", call_type, "critic", ("ids",), *makes, n_seqs=2, hooks=hooks),
        ],
        [],
    )

    async def scenario() -> Calls:
        calls = Calls()
        step = start(graph, calls)
        await settle()
        await calls.end("actor_gen")
        calls.drops["actor_gen"] = {"c": "reward_error", "d": "reward_error"}
        await calls.end("critic_call")
        while calls.running:
            await calls.end(calls.running.pop())
        await step
        return calls

    calls = asyncio.run(scenario())
    assert calls.num_published == num_published
    slices = [("".join(uids), is_last) for name, uids, is_last in calls.started if name == "critic_call"]
    assert slices == [("ab", False), ("", True)]


# --- how far each call of a step has come ---------------------------------------------------------------------------


def call_of(
    name: str, call_type: str = "inference", role: str = "actor", n_seqs: int = 4, **keys: tuple[str, ...]
) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": call_type, "implementation": "x", "n_seqs": n_seqs} | keys
    )


def graph_of(*calls: ModelFunctionCall) -> DataflowGraph:
    return build_dataflow(calls, ["ids"])


BATCH = ["a", "b", "c", "d"]


def test_a_call_waits_for_its_own_keys_and_takes_as_many_as_it_says() -> None:
    graph = graph_of(
        call_of("ref_inf", role="ref", n_seqs=2, input_keys=("ids",), output_keys=("ref",)),
        call_of("reader", role="critic", n_seqs=3, input_keys=("ref",), output_keys=("read",)),
    )
    state = StepState(graph, BATCH)
    assert (state.next_slice("ref_inf"), state.next_slice("reader"), state.waits_for("reader")) == (
        ["a", "b"],
        None,
        ["ref_inf"],
    )
    state.finish_slice("ref_inf", ["a", "b"])
    assert (state.next_slice("ref_inf"), state.next_slice("reader")) == (["c", "d"], None)
    state.finish_slice("ref_inf", ["c", "d"])
    assert (state.is_over("ref_inf"), state.next_slice("ref_inf"), state.next_slice("reader")) == (
        True,
        None,
        ["a", "b", "c"],
    )
    assert not state.is_last_slice("reader", ["a", "b", "c"])
    state.finish_slice("reader", ["a", "b", "c"])
    assert (state.next_slice("reader"), state.is_last_slice("reader", ["d"]), state.is_over("reader")) == (
        ["d"],
        True,
        False,
    )
    state.finish_slice("reader", ["d"])
    assert state.is_over("reader")


def test_a_train_step_begins_when_all_calls_on_its_model_have_seen_the_weights_before_it() -> None:
    graph = graph_of(
        call_of("actor_inf", n_seqs=2, input_keys=("ids",), output_keys=("proximal",)),
        call_of("probe", input_keys=("ids",), output_keys=("probed",)),
        call_of("actor_train", "train_step", n_seqs=2, input_keys=("proximal",)),
        call_of("critic_train", "train_step", role="critic", n_seqs=2, input_keys=("proximal",)),
    )
    state = StepState(graph, BATCH)
    state.finish_slice("actor_inf", ["a", "b"])
    assert state.next_slice("critic_train") == ["a", "b"]
    assert (state.next_slice("actor_train"), state.waits_for("actor_train")) == (None, ["actor_inf", "probe"])
    state.finish_slice("actor_inf", ["c", "d"])
    assert state.waits_for("actor_train") == ["probe"]
    state.finish_slice("probe", BATCH)
    assert state.next_slice("actor_train") == ["a", "b"]


@st.composite
def graphs(draw: st.DrawFn) -> DataflowGraph:
    """Call i makes key i and reads keys of earlier ones; some train; roles and numbers of samples vary."""
    calls, made = [], ["ids"]
    for number in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
        role, n_seqs = draw(st.sampled_from(["actor", "ref", "critic"])), draw(st.integers(1, 5))
        calls.append(
            call_of(f"call{number}", role=role, n_seqs=n_seqs, input_keys=tuple(reads), output_keys=(f"key{number}",))
        )
        made.append(f"key{number}")
    for role in draw(st.sets(st.sampled_from(["actor", "critic"]))):
        reads = draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
        calls.append(
            call_of(f"{role}_train", "train_step", role=role, n_seqs=draw(st.integers(1, 5)), input_keys=tuple(reads))
        )
    return build_dataflow(calls, ["ids"])


@given(graphs(), st.integers(1, 7), st.randoms(use_true_random=False))
def test_in_whatever_order_calls_end_each_takes_each_sample_once_after_its_producers(
    graph: DataflowGraph, size: int, random: Random
) -> None:
    batch = [f"s{number}" for number in range(size)]
    state = StepState(graph, batch)
    running: dict[str, list[str]] = {}
    taken: dict[str, list[str]] = {call_of.name: [] for call_of in graph.calls}
    while not all(state.is_over(call_.name) for call_ in graph.calls):
        for call_ in graph.calls:
            if call_.name not in running and (uids := state.next_slice(call_.name)) is not None:
                for producer in graph.predecessors(call_.name):
                    assert set(uids) <= set(taken[producer])
                running[call_.name] = uids
        assert running, "some call can always go on"
        name = random.choice(sorted(running))
        state.finish_slice(name, running[name])
        taken[name] += running.pop(name)
    assert all(sorted(uids) == sorted(batch) for uids in taken.values())
