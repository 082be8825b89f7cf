"""Calls of a step run side by side where their ranks allow it, on a clock that the test drives."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.master.step_order import RankLocks, StepOutcome, StepRunner
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
