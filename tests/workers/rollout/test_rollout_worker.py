"""The rollout worker among real parts: whatever user code does, no prompt waits for ever, nothing ends in silence."""

import asyncio
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.log import TrialLog
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.answer_seed import group_seeds
from corral.workers.delivery.spool import Spool
from corral.workers.manager import gserver_manager
from corral.workers.requests.manager_messages import Allocate, Allocation
from corral.workers.rollout import agents
from corral.workers.rollout.agents import JudgedGroup
from tests.workers.checkpoint.test_committed_ledger import Trainer
from tests.workers.data.tiny_tokenizer import ids_of
from tests.workers.rollout.rollout_rig import FakeGenerationServer, RolloutRig

HERE = __name__
SampleGroup = Callable[..., Awaitable[list[Any]]]


async def raises_for_some(problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any) -> Any:
    """An agent of a user: one row makes it raise, others give back what no train step can use."""
    group = await agents.single_turn(problem, prompt_ids, sample_group, judge)
    match problem["id"]:
        case "1":
            return problem["no such field"]
        case "2":
            raise SystemExit(0)
        case "3":
            raise asyncio.CancelledError
        case "4":
            return None
        case "5":
            return JudgedGroup(prompt_ids=prompt_ids, answers=group.answers, rewards=[math.nan, 1.0])
        case "6":
            group.answers[0].logprobs.pop()
    return group


async def waits_for_some(problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any) -> Any:
    """An agent of a user: what it awaits never comes for two rows, and one of them does not take that for an end."""
    if problem["id"] == "1":
        await asyncio.Event().wait()
    if problem["id"] == "2":
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(60.0)  # longer than anybody waits for it
    return await agents.single_turn(problem, prompt_ids, sample_group, judge)


async def blocks_for_one(problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any) -> Any:
    """An agent of a user that keeps the event loop to itself, in a task of its own, and once more when interrupted."""

    async def block() -> None:
        try:
            time.sleep(600.0)
        finally:
            time.sleep(600.0)

    if problem["id"] == "1":
        await asyncio.gather(block())
    return await agents.single_turn(problem, prompt_ids, sample_group, judge)


async def always_raises(problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any) -> Any:
    return problem["no such field"]


async def asks_long(problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any) -> Any:
    return await agents.single_turn(problem, prompt_ids * int(problem["prompt"]), sample_group, judge)


async def asks_twice_and_fails_at_first(
    problem: Mapping[str, Any], prompt_ids: list[int], sample_group: Any, judge: Any
) -> Any:
    await sample_group(prompt_ids)
    if not first_try_is_over.is_set():
        first_try_is_over.set()
        raise KeyError
    return await agents.single_turn(problem, prompt_ids, sample_group, judge)


first_try_is_over = threading.Event()


def waits_for_the_others(problem: Mapping[str, Any], answer: str) -> float:
    """A reward of a user that takes longer for row 3 than any agent may be at work of its own."""
    if problem["id"] == "3":
        Path(os.environ["OTHERS_ARE_DROPPED"]).open().close()  # a FIFO: until it has a writer
    return 1.0


def fails_for_one(problem: Mapping[str, Any], answer: str) -> float:
    """A reward of a user that knows no end to row 1."""
    return 1.0 / (int(problem["id"]) - 1)


def test_a_prompt_whose_agent_fails_is_tried_again_then_dropped_with_its_cause(tmp_path: Path) -> None:
    rollout = {"agent": f"{HERE}:raises_for_some", "reward_retries": 1}
    with RolloutRig(tmp_path, ["1+2="] * 8, rollout=rollout) as rig:
        rig.run_until(lambda: len(rig.received) == 8, "eight prompts")
        outcomes = rig.outcomes()
        assert outcomes["0"] == outcomes["7"] == "finished"
        assert outcomes["1"].startswith("agent_error: KeyError: 'no such field' (test_rollout_worker.py:")
        assert [outcomes[number].split()[1] for number in ("2", "3")] == ["SystemExit:", "CancelledError"]
        assert outcomes["4"] == "agent_error: ValueError: an agent returns a JudgedGroup, got NoneType"
        assert outcomes["5"].startswith("agent_error: ValueError: a reward must be a finite float32")
        assert outcomes["6"].startswith("agent_error: ValueError")
        assert rig.server.num_requests == 2 * (8 + 6)  # one more try of all that reached the server


@pytest.mark.parametrize(
    ("rollout", "train_batch_size"),
    [({"max_concurrent_rollouts": 1}, 256), ({"max_head_offpolicyness": 0}, 1)],
    ids=["another prompt ends", "the trainer steps"],
)
def test_a_worker_asks_once_and_gets_a_prompt_when_the_gate_opens(
    rollout: Mapping[str, Any], train_batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gserver_manager, "_LONGEST_TURN_S", 600.0)
    asked: list[Allocate] = []
    with RolloutRig(tmp_path, ["1+2="] * 3, rollout=rollout, train_batch_size=train_batch_size) as rig:
        allocate = rig.manager._allocate

        async def note(request: Allocate) -> Allocation:
            asked.append(request)
            return await allocate(request)

        rig.manager._allocate = note  # type: ignore[method-assign]

        def all_came() -> bool:
            rig.publish(f"1.{len(rig.received)}")  # a step on what has come
            return len(rig.received) == 3

        rig.run_until(all_came, "three prompts")
    # It is told to report first; then it asks for each prompt, and is told each time what the next one waits for.
    assert 4 <= len(asked) <= 8, asked


def test_an_agent_that_awaits_what_never_comes_is_dropped_and_one_that_awaits_a_slow_reward_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = {"agent": f"{HERE}:waits_for_some", "agent_timeout_s": 0.5, "reward_retries": 1}
    rollout |= {"reward": f"{HERE}:waits_for_the_others", "reward_timeout_s": 600.0}
    os.mkfifo(fifo := tmp_path / "others_are_dropped")
    monkeypatch.setenv("OTHERS_ARE_DROPPED", str(fifo))

    with RolloutRig(tmp_path, ["1+2="] * 4, rollout=rollout) as rig, ExitStack() as stack:

        def all_came() -> bool:
            if {"1", "2"} <= rig.outcomes().keys():
                stack.callback(os.close, os.open(fifo, os.O_RDWR))
            return len(rig.received) == 4

        rig.run_until(all_came, "four prompts")
        outcomes = rig.outcomes()
    assert outcomes["0"] == outcomes["3"] == "finished"
    why = f"agent_error: AgentHangsError: agent {HERE}:waits_for_some waited 0.5 s (rollout.agent_timeout_s) for "
    line = waits_for_some.__code__.co_firstlineno + 3
    assert outcomes["1"].startswith(why) and outcomes["1"].endswith(f", in test_rollout_worker.py:{line}")
    assert outcomes["2"].startswith(why)


def test_an_agent_that_blocks_the_loop_is_interrupted_where_it_stands_and_the_others_go_on(tmp_path: Path) -> None:
    rollout = {"agent": f"{HERE}:blocks_for_one", "agent_timeout_s": 1.0, "reward_retries": 0}
    with RolloutRig(tmp_path, ["1+2="] * 4, rollout=rollout) as rig:
        rig.run_until(lambda: len(rig.received) == 4, "four prompts")
        outcomes = rig.outcomes()
    assert [outcomes[number] for number in ("0", "2", "3")] == ["finished"] * 3
    why = f"agent_error: AgentBlocksError: agent {HERE}:blocks_for_one blocked the event loop for 1 s "
    line = blocks_for_one.__code__.co_firstlineno + 10
    assert outcomes["1"].startswith(why) and outcomes["1"].endswith(f"(test_rollout_worker.py:{line})")


def test_an_agent_that_always_fails_ends_the_worker_with_its_file_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What rl-logs --errors shows are the last lines of the worker's log."""
    rollout = {"agent": f"{HERE}:always_raises", "reward_retries": 0}
    with RolloutRig(tmp_path, ["1+2="] * 20, rollout=rollout) as rig, caplog.at_level(logging.INFO):
        assert rig.run_to_its_end() == WorkerExit.USER_CODE
    last_line = caplog.records[-1].getMessage().splitlines()[-1]
    line = always_raises.__code__.co_firstlineno + 1
    assert f"KeyError: 'no such field' (test_rollout_worker.py:{line})" in last_line
    assert f"{HERE}:always_raises" in last_line


def test_a_prompt_that_an_agent_makes_too_long_is_dropped_and_counted(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1", "9", "3"], rollout={"agent": f"{HERE}:asks_long"}, max_prompt_tokens=8) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        assert rig.outcomes() == {
            "0": "finished",
            "1": "prompt_too_long: the prompt has 9 tokens, more than dataset.max_prompt_tokens 8",
            "2": "finished",
        }


def test_prompts_are_asked_as_text_as_messages_and_as_token_ids(tmp_path: Path) -> None:
    asked: list[list[int]] = []
    prompts: list[Any] = ["1+1=", [{"role": "user", "content": "1+1"}], ids_of("1+1=")]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}=")

    def look(prompt: list[int]) -> int:
        asked.append(prompt)
        return 200

    with RolloutRig(tmp_path, prompts, rollout={}) as rig:
        rig.server.refuse = look
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        assert set(rig.outcomes().values()) == {"finished"}
    assert len(asked) >= 6 and all(prompt[:4] == ids_of("1+1=") for prompt in asked)


def test_a_request_that_a_server_refuses_fails_its_prompt_and_nothing_else(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "9", "2+2="], rollout={}) as rig:
        rig.server.refuse = lambda prompt: 400 if len(prompt) == 1 else 200
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        outcomes = rig.outcomes()
        assert outcomes["0"] == outcomes["2"] == "finished"
        assert outcomes["1"].startswith("request_refused: https://") and "/generate answered 400" in outcomes["1"]
        assert rig.num_retried() == 0, "nothing was wrong with the server"


def test_a_busy_server_is_asked_again_and_answers_keep_their_tokens(tmp_path: Path) -> None:
    """One request in two is turned away for want of room, in the middle of an answer too."""
    asked: list[int] = []

    def has_no_room(prompt: list[int]) -> int:
        asked.append(len(prompt))
        return 503 if asked.count(len(prompt)) <= 2 else 200

    with RolloutRig(tmp_path, ["1+1="], rollout={}) as rig:
        rig.server.refuse, rig.server.most_tokens = has_no_room, 1
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
        assert rig.outcomes() == {"0": "finished"}
        assert asked.count(4) == asked.count(5) == 4, "each answer twice for each token"
        assert sorted(rig.server.seeds) == sorted(group_seeds(rig.plan.seed, order=0, group_size=2) * 2)
        assert rig.num_retried() == 0, "nothing was wrong with the server"


def test_a_server_that_fails_is_brought_back_before_it_is_asked_again(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1="], rollout={}) as rig:
        rig.server.refuse = lambda prompt: 500 if rig.server.num_requests <= 2 else 200
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
        assert rig.outcomes() == {"0": "finished"}
        assert rig.num_retried() == 1, "told again, it would be benched again when it has come back"


def test_a_server_that_cannot_be_brought_to_the_weights_is_asked_again(tmp_path: Path) -> None:
    """A server whose update was lost sight of would stand aside for ever."""
    server = FakeGenerationServer()
    server.broken_updates = [409, 500, 404]
    with RolloutRig(tmp_path, ["1+1="], rollout={}, server=server) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
        assert server.broken_updates == []


def test_what_a_commit_covered_while_the_worker_was_away_is_forgotten_dropped_prompts_too(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "9", "2+2="], rollout={"reward": f"{HERE}:fails_for_one"}) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        ledger = Ledger(numbers_of(["0", "1", "2"]))
        Trainer(rig.trial, TrialLog(rig.trial.log_path).claim("a"), ledger).commit(1, "0:0", dropped=("0:1",))
        rig.run_until(lambda: rig.phase() == "wait for the trainer", "the worker to have nothing left to do")
        with Spool(rig.trial.spool_path(0)) as spool:
            assert spool.uids() == ["0:2"]


def test_a_worker_that_has_nothing_to_ask_for_does_not_keep_the_gate_closed_when_training_goes_back(
    tmp_path: Path,
) -> None:
    with RolloutRig(tmp_path, ["1+1="], rollout={}) as rig:
        rig.publish("0.1")
        admission = rig.manager._admission
        has_gone_back = threading.Event()

        def is_open_again() -> bool:
            if not has_gone_back.is_set() and rig.received and rig.phase() == "wait for the trainer":
                rig.publish("1.0")
                has_gone_back.set()
            return admission._version == PolicyVersion(1, 0) and admission.waiting_for() == "prompts"

        rig.run_until(is_open_again, "the gate")


def test_a_disk_that_fails_once_ends_the_worker_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    force, failures = os.fsync, [OSError(errno.EIO, "the disk is broken")]

    def force_or_fail(descriptor: int) -> None:
        if failures and "/record-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise failures.pop()
        force(descriptor)

    monkeypatch.setattr(os, "fsync", force_or_fail)
    with RolloutRig(tmp_path, ["1+1="], rollout={}) as rig:
        assert rig.run_to_its_end() == WorkerExit.ERROR
        assert caplog.records[-1].getMessage().rstrip().endswith("OSError: [Errno 5] the disk is broken")
        rig.received.clear()
        rig.run_until(lambda: rig.outcomes() == {"0": "finished"}, "the prompt")


def test_a_record_that_is_rejected_is_made_again(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "2+2="], rollout={}) as rig:

        def has_second_copy() -> bool:
            names = [header.uid for header in rig.received]
            if len(names) == 2:
                rig.receiver.verdict(names[0], "stale")
            return len(names) == 3

        rig.run_until(has_second_copy, "the third record")
        first, *_, last = rig.received
        assert last.uid != first.uid and last.uid.partition("#")[0] == first.uid.partition("#")[0]
        expected = [seed for order in range(3) for seed in group_seeds(rig.plan.seed, order=order, group_size=2)]
        assert sorted(rig.server.seeds[:4]) == sorted(expected[:4])
        assert sorted(rig.server.seeds[4:]) == sorted(expected[4:]), "the same answers might be rejected for ever"


def test_each_time_that_an_agent_asks_it_gets_other_answers_after_a_failure_too(tmp_path: Path) -> None:
    first_try_is_over.clear()
    rollout = {"agent": f"{HERE}:asks_twice_and_fails_at_first", "reward_retries": 1}
    with RolloutRig(tmp_path, ["1+1="], rollout=rollout) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
        expected = [seed for call in range(3) for seed in group_seeds(rig.plan.seed, order=0, group_size=2, call=call)]
        assert sorted(rig.server.seeds) == sorted(expected)


def test_spare_answers_are_asked_for_and_a_group_has_as_many_as_ever(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+2="], rollout={"spare_answers": 3}, group_size=2) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "a prompt")
    assert len(rig.server.seeds) == 5
    assert rig.received[0].num_answers == len(rig.received[0].version_spans) == 2


def test_prompts_whose_answers_teach_nothing_are_dropped_and_no_failures(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+2="] * 20, rollout={"drop_uniform_groups": True}, group_size=2) as rig:
        rig.run_until(lambda: len(rig.received) == 20, "more prompts than may fail in a row")
    assert set(rig.outcomes().values()) == {"filtered: the rewards of all 2 answers are 1"}
