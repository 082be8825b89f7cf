"""The rollout worker among real parts: whatever user code does, no prompt waits for ever, nothing ends in silence."""

import asyncio
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.worker_record import WorkerRecord
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.checkpoint import LedgerNews
from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.delivery.messages import VerdictKind
from corral.workers.delivery.spool import Spool
from corral.workers.manager import gserver_manager
from corral.workers.manager.servers import ServerState
from corral.workers.requests.manager_messages import Allocate, Allocation
from corral.workers.rollout import generation_client
from tests.workers.checkpoint.test_committed_ledger import Trainer
from tests.workers.data.tiny_tokenizer import ids_of
from tests.workers.rollout import some_rewards
from tests.workers.rollout.rollout_rig import EOS, FakeGenerationServer, RolloutRig

HERE = some_rewards.__name__


def test_a_reward_that_holds_everything_up_is_a_phase_of_its_own(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "2+2="], rollout={"reward": f"{HERE}:takes_long"}) as rig:
        seen: list[WorkerRecord] = []

        def is_judging() -> bool:
            seen[:] = [rig.record()]
            return seen[0].phase == "judge"

        rig.run_until(is_judging, "the reward to hold up all groups")
        assert seen[0].waiting_for.endswith("groups wait for their reward")
        assert seen[0].waits_for == () and seen[0].works_with == ()


def test_a_reward_that_says_that_it_cannot_be_loaded_ends_the_trial(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1="], rollout={"reward": "no_such_module:score"}) as rig:
        assert rig.run_to_its_end() == WorkerExit.USER_CODE


@pytest.mark.parametrize(
    ("rollout", "train_batch_size"),
    [({"max_concurrent_rollouts": 1}, 256), ({"max_head_offpolicyness": 0}, 1)],
    ids=["another prompt ends", "the trainer steps"],
)
def test_a_worker_asks_once_and_gets_a_prompt_when_the_gate_opens(
    rollout: Mapping[str, Any], train_batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gserver_manager, "LONGEST_TURN_S", 600.0)
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


def test_prompts_are_asked_as_text_as_messages_and_as_token_ids(tmp_path: Path) -> None:
    asked: list[list[int]] = []
    prompts: list[Any] = ["1+1=", [{"role": "user", "content": "1+1"}], ids_of("1+1=")]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}{{ sign }}")

    def look(prompt: list[int]) -> int:
        asked.append(prompt)
        return 200

    arguments = {"chat_template_kwargs": {"sign": "="}}
    with RolloutRig(tmp_path, prompts, rollout={}, dataset=arguments) as rig:
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


def test_rows_that_cannot_be_asked_are_dropped_as_broken_however_many_come_in_a_row(tmp_path: Path) -> None:
    """As nobody may have looked at them before: messages without a template, and prompts that are too long."""
    prompts: list[Any] = [[{"role": "user", "content": "1+1"}], "1+" * 9]
    with RolloutRig(tmp_path, ["1+1=", *prompts * 9], rollout={}) as rig:
        rig.run_until(lambda: len(rig.received) == 19, "all prompts")
        first, *others = (outcome for _, outcome in sorted(rig.outcomes().items(), key=lambda each: int(each[0])))
    assert first == "finished" and all(outcome.startswith("bad_row: ") for outcome in others)
    assert "chat template" in others[0] and "the prompt has 18 tokens" in others[1]


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
        assert sorted(rig.server.seeds) == sorted(AnswerSeeds(rig.plan.seed, "0:0", 0).of_group(2) * 2)
        assert rig.num_retried() == 0, "nothing was wrong with the server"


def test_a_prompt_that_no_server_can_answer_is_dropped_and_counted_and_benches_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_client, "_PAUSES_S", (0.02,))
    with RolloutRig(tmp_path, ["1+1=", "9", "2+2="], rollout={}) as rig:
        rig.server.refuse = lambda prompt: 500 if len(prompt) == 1 else 200
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        outcomes = rig.outcomes()
        assert outcomes["0"] == outcomes["2"] == "finished"
        assert outcomes["1"].startswith("server_error: ") and "it answered 500" in outcomes["1"]
        assert {server.state for server in rig.manager._table.servers.values()} == {ServerState.READY}


def test_a_prompt_that_a_server_fails_at_is_asked_again(tmp_path: Path) -> None:
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


def test_what_no_commit_covers_outlives_the_worker(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "2+2="], rollout={}) as rig:
        rig.run_until(lambda: len(rig.received) == 2, "both prompts")
        rig.receiver.start_session("two")  # which knows nothing of them
        rig.run_until(lambda: len(rig.received) == 4, "both again")
        assert rig.server.num_requests == 4 and rig.outcomes() == {"0": "finished", "1": "finished"}
        assert list(rig.trial.spool_path(0).glob("record-*"))


def test_what_a_commit_covered_while_the_worker_was_away_is_forgotten_dropped_prompts_too(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+1=", "9", "2+2="], rollout={"reward": f"{HERE}:fails_for_one"}) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
        ledger = Ledger(numbers_of(["0", "1", "2"]))
        Trainer(rig.trial, TrialLog(rig.trial.log_path).claim("a"), ledger).commit(1, "0:0", dropped=("0:1",))
        rig.run_until(lambda: rig.record().phase == "wait for the trainer", "the worker to have nothing left to do")
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
            if not has_gone_back.is_set() and rig.received and rig.record().phase == "wait for the trainer":
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


@pytest.mark.parametrize(("verdict", "tries"), [("stale", 0), ("not_finite", 1)])
def test_a_record_that_is_rejected_is_made_again(tmp_path: Path, verdict: VerdictKind, tries: int) -> None:
    with RolloutRig(tmp_path, ["1+1=", "2+2="], rollout={}) as rig:

        def has_second_copy() -> bool:
            names = [header.uid for header in rig.received]
            if len(names) == 2:
                rig.receiver.verdict(names[0], verdict)
            return len(names) == 3

        rig.run_until(has_second_copy, "the third record")
        first, *_, last = rig.received
        uid = first.uid.partition("#")[0]
        assert last.uid != first.uid and last.uid.partition("#")[0] == uid
        of_each = {each: AnswerSeeds(rig.plan.seed, each, 0).of_group(2) for each in ("0:0", "0:1")}
        assert sorted(rig.server.seeds[:4]) == sorted(sum(of_each.values(), []))
        assert sorted(rig.server.seeds[4:]) == sorted(AnswerSeeds(rig.plan.seed, uid, 0, tries).of_group(2)), (
            "for the same step"
        )


def test_a_record_that_is_rejected_while_its_report_is_on_its_way_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutRig(tmp_path, ["1+1=", "2+2="], rollout={}) as rig:
        rig.publish("0.1")
        look, is_reported, is_rejected = rig.manager._committed.look, threading.Event(), threading.Event()

        async def look_slowly() -> LedgerNews:
            if rig.manager._admission.waiting_for() == "reports" and not is_rejected.is_set():
                is_reported.set()
                await asyncio.to_thread(is_rejected.wait, 60.0)
                await asyncio.sleep(0.5)  # what the worker says of the rejection comes now, if it is said too early
            return await look()

        def has_third_record() -> bool:
            names = [header.uid for header in rig.received]
            if len(names) == 2 and rig.manager._admission._version == PolicyVersion(0, 1):
                monkeypatch.setattr(rig.manager._committed, "look", look_slowly)
                rig.publish("1.0")
            if is_reported.is_set() and not is_rejected.is_set():
                rig.receiver.verdict(names[0], "stale")
                is_rejected.set()
            return len(names) == 3

        rig.run_until(has_third_record, "the third record")


def test_an_answer_of_the_row_stands_in_the_group_for_one_that_is_made(tmp_path: Path) -> None:
    fields = [{"shown": 3}, {}, {"shown": "12345"}]  # the last one is longer than an answer may be
    rollout = {"demonstrations": "shown"}
    with RolloutRig(tmp_path, ["1+2=", "1+3=", "1+4="], rollout=rollout, group_size=3, fields=fields) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
    assert len(rig.server.seeds) == 8
    first, *others = (
        each for _, each in sorted(zip((header.uid for header in rig.received), rig.tensors, strict=True))
    )
    assert first["input_ids"][-2:].tolist() == [*ids_of("3"), EOS] and not first["prompt_mask"][-2:].any()
    assert first["versions"][-2:].tolist() == [-1, -1] and first["old_logprobs"][-2:].tolist() == [0.0, 0.0]
    not_made = [int((~each["prompt_mask"]).sum() - (each["versions"] >= 0).sum()) for each in (first, *others)]
    assert not_made == [2, 0, 0]


def test_nothing_is_shown_where_nobody_asks_for_it_though_a_column_has_no_name(tmp_path: Path) -> None:
    """As the first one of what pandas writes as CSV."""
    with RolloutRig(tmp_path, ["1+2="], rollout={}, fields=[{"": "3"}]) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "a prompt")
    assert len(rig.server.seeds) == 2


@pytest.mark.parametrize("agent", [{}, {"agent": "tests.workers.rollout.some_agents:asks_twice"}], ids=["", "agent"])
def test_answers_are_sampled_at_the_temperature_of_their_row_and_say_so(agent: dict[str, str], tmp_path: Path) -> None:
    rollout = {"sampling": {"max_new_tokens": 4, "temperature": 0.8}, **agent}
    fields, columns = [{"warmth": 0.5}, {}, {"warmth": 2}, {"warmth": "hot"}], {"temperature": "warmth"}
    prompts = [f"1+{number}=" for number in range(4)]
    with RolloutRig(tmp_path, prompts, rollout=rollout, fields=fields, dataset={"columns": columns}) as rig:
        rig.run_until(lambda: len(rig.received) == 4, "four prompts")
    assert "'warmth' must be a temperature" in rig.outcomes()["3"]
    told = {
        header.uid.partition("#")[0]: (tensors["temperatures"].tolist(), (~tensors["prompt_mask"]).any())
        for header, tensors in zip(rig.received, rig.tensors, strict=True)
        if tensors
    }
    wanted = {"0:0": 0.5, "0:1": 0.8, "0:2": 2.0}
    assert told == {uid: ([pytest.approx(value)] * 2, True) for uid, value in wanted.items()}
    each = len(rig.server.temperatures) // 3
    assert sorted(rig.server.temperatures) == [0.5] * each + [0.8] * each + [2.0] * each


def test_spare_answers_are_asked_for_and_a_group_has_as_many_as_ever(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+2="], rollout={"spare_answers": 3}, group_size=2) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "a prompt")
    assert len(rig.server.seeds) == 5
    assert rig.received[0].num_answers == len(rig.received[0].version_spans) == 2


def test_prompts_whose_answers_teach_nothing_are_dropped_and_no_failures(tmp_path: Path) -> None:
    with RolloutRig(tmp_path, ["1+2="] * 20, rollout={"drop_uniform_groups": True}, group_size=2) as rig:
        rig.run_until(lambda: len(rig.received) == 20, "more prompts than may fail in a row")
    assert set(rig.outcomes().values()) == {"filtered: the rewards of all 2 answers are 1"}
