"""What the master makes of its model workers' answers, and of its own death, with a real trial directory and log."""

import asyncio
import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.evaluation import BestVersion
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log import TrialLog
from corral.launcher.trial.view import Finding, TrialView
from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.checkpoint.manifest import verify_manifest
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.master import evaluations
from corral.workers.master import step as master_step
from corral.workers.master.epoch import check_reallocations, standing_alarms
from corral.workers.master.master_worker import MasterWorker
from corral.workers.master.sample_source import BufferedSample
from corral.workers.master.trainer_group import TrainerGroupLostError
from corral.workers.requests.messages import Evaluate, LoadedModel, TrainNotice, TrainReply
from tests.workers.master.trials import (
    FINE,
    NUM_STEPS,
    SHAPE,
    SKIPPED,
    Begin,
    KilledError,
    Trainers,
    lines_of,
    run_master,
    step_by_uid,
    trial_of,
)

DAMAGED = TrainReply(stats={}, num_updates=1, num_nonfinite=0, is_damaged=True)


# --- losses that are not finite -------------------------------------------------------------------------------------


def test_samples_of_a_step_that_was_skipped_are_trained_on_later(begin: Begin) -> None:
    trial, run = begin()
    replies = iter([FINE, SKIPPED])
    trainers = Trainers(train=lambda step: next(replies, FINE))
    assert run(trainers) == WorkerExit.DONE
    skipped = trainers.trained[1]
    assert trainers.trained[-1] == skipped  # after all others: at once, it would be skipped again
    assert len(trainers.trained) == NUM_STEPS + 1
    assert step_by_uid(trial) == {
        uid: step for step, uids in enumerate(trainers.trained[:1] + trainers.trained[2:], 1) for uid in uids
    }
    steps = [(line["step"], line["train/skipped_nonfinite"]) for line in lines_of(trial.metrics_path)]
    assert steps == [(1, 0.0), (2, 1.0), *((step, 0.0) for step in range(3, NUM_STEPS + 1))]


@pytest.mark.parametrize("commit_every_steps", [1, 10])
def test_a_loss_that_stays_not_finite_takes_training_back_and_then_fails_it(
    begin: Begin, commit_every_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_step, "MAX_NONFINITE_STEPS", 2)
    trial, run = begin(f"control.commit_every={commit_every_steps} steps")
    trainers = Trainers(train=lambda step: FINE if step <= 2 else SKIPPED)
    assert run(trainers) == WorkerExit.NOT_FINITE
    state = TrialLog(trial.log_path).read()
    assert not state.is_done and state.epoch == 2  # taken back once
    if commit_every_steps == 1:
        assert len(trainers.trained) == 2 + 2 + 2
        assert {path.parent.name for path in trainers.loaded[1:]} == {Path(state.lineage[-1].commit.directory).name}
        assert sorted(step_by_uid(trial).values()) == [1] * 8 + [2] * 8
        assert sorted(path.name for path in trial.weights_path.iterdir()) == ["v00000001-e1", "v00000002-e1"]
    else:
        assert len(trainers.trained) == 2 * (2 + 2) and state.lineage == ()
        assert trainers.loaded[0] == trainers.loaded[1]
    assert not trial.exports_path.exists()


def test_training_that_goes_on_from_the_last_commit_may_go_back_again(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_step, "MAX_NONFINITE_STEPS", 1)
    trial, run = begin()
    replies = iter([FINE, SKIPPED, FINE, SKIPPED])
    assert run(Trainers(train=lambda step: next(replies, FINE))) == WorkerExit.DONE
    assert TrialLog(trial.log_path).read().epoch == 3
    assert len(step_by_uid(trial)) == 8 * NUM_STEPS


def test_weights_that_are_not_finite_are_neither_committed_nor_written(begin: Begin) -> None:
    trial, run = begin()
    trainers = Trainers(train=lambda step: DAMAGED)
    assert run(trainers) == WorkerExit.NOT_FINITE
    assert len(trainers.trained) == 2
    assert TrialLog(trial.log_path).read().lineage == () and not list(trial.weights_path.iterdir())


# --- what train steps find out --------------------------------------------------------------------------------------


def test_what_a_train_step_finds_out_is_logged_and_recorded_once(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    trial, run = begin()
    notice = TrainNotice(topic="t", is_alarm=True, text="they differ", details="by 2", causes=["rounding", "none"])
    found = msgspec.structs.replace(FINE, notices=[notice])
    with caplog.at_level(logging.INFO):
        run(Trainers(train=lambda step: found if step == 2 else FINE))
    told = [record for record in caplog.records if "they differ" in record.message]
    assert [(one.levelname, one.message) for one in told] == [("WARNING", "they differ; by 2; rounding; none")]
    view = TrialView(read_journal(trial.journal_path), attempt=0)
    assert view.findings() == (
        Finding(topic="t", is_alarm=True, text="they differ", details="by 2", causes=("rounding", "none"), step=2),
    )


def test_a_trial_of_which_all_prompts_are_dropped_fails_and_says_why(
    begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    trial, run = begin()

    class AllDropped(Trainers):
        async def load_rows(self, uids: Sequence[str]) -> list[BufferedSample]:
            samples = await super().load_rows(uids)
            return [msgspec.structs.replace(sample, dropped_because="bad_row: it has no answer") for sample in samples]

    assert run(AllDropped()) == WorkerExit.CANNOT_CONTINUE
    assert "nothing was trained: 40 prompts dropped since the last train step, bad_row: it has no answer" in caplog.text
    assert not TrialLog(trial.log_path).read().is_done and not trial.exports_path.exists()


def test_an_alarm_about_dropped_prompts_stands_until_a_step_is_trained(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, run = begin()
    real_source, standing = MasterWorker._source, list[set[str]]()

    def make(worker: MasterWorker, *parts: Any) -> Any:
        source, drops = real_source(worker, *parts), parts[4]
        poll = source.poll

        async def drop_first(**arguments: int) -> list[str] | None:
            if not standing:
                drops.since_step["filtered: the rewards of all 8 answers are 0"] += 40
            standing.append(standing_alarms(trial, attempt=0))
            return await poll(**arguments) if len(standing) > 1 else None

        monkeypatch.setattr(type(source), "poll", lambda self, **arguments: drop_first(**arguments))
        return source

    monkeypatch.setattr(MasterWorker, "_source", make)
    assert run(Trainers()) == WorkerExit.DONE
    assert standing[:3] == [set(), {"dropped prompts"}, set()]
    told = [event["text"] for event in read_journal(trial.journal_path) if event["event"] == "train_notice"]
    assert "40 prompts dropped since the last train step, filtered: the rewards of all 8 answers are 0" in told


def test_held_out_answers_that_training_ranks_cannot_judge_are_an_alarm_until_all_have_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(
        tmp_path,
        "evaluation.every=2 steps",
        "evaluation.sampling.max_new_tokens=8",
        f"evaluation.dataset.path={tmp_path / 'heldout.jsonl'}",
        "evaluation.dataset.max_prompt_tokens=16",
    )
    cause = "reward_error: KeyError: 'x' (my_reward.py:3)"
    failed = f"1 of 1 held-out problems have no reward: {cause}"
    failures, found = iter([{"": cause}, {"": cause}, {}, {}]), list[tuple[bool, str]]()
    assert run_master(plan, trial, Trainers(failures=lambda: next(failures)), monkeypatch) == WorkerExit.DONE
    for event in read_journal(trial.journal_path):
        if event["event"] == "train_notice":
            assert event["topic"] == "held-out problems without reward"
            found.append((event["is_alarm"], event["text"]))
    assert found == [(True, failed), (True, failed), (False, "all held-out answers have a reward")]


# --- waiting for a batch --------------------------------------------------------------------------------------------


class NeverReady:
    """Samples that do not come; `at_poll` is told of each look for them."""

    def __init__(self, at_poll: Callable[[int], None]) -> None:
        self.num_polls = 0
        self._at_poll = at_poll

    async def poll(self, *, version: int, remaining: int) -> list[str] | None:
        self.num_polls += 1
        self._at_poll(self.num_polls)
        return None

    def waiting_for(self) -> str:
        return "samples that never come"

    def waits_for(self) -> tuple[str, ...]:
        return ()


def test_a_stop_request_ends_the_wait_for_a_batch(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, run = begin()
    request = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=60.0)
    source = NeverReady(at_poll=lambda _: trial.write_stop_request(request))
    monkeypatch.setattr(MasterWorker, "_source", lambda *_: source)
    assert run(Trainers()) == WorkerExit.DONE
    assert TrialLog(trial.log_path).read().is_stopped
    assert source.num_polls == 1  # it looked again only when something had happened


def test_an_arrival_and_a_death_end_the_wait_for_a_batch(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = begin("supervision.max_restarts=0")
    trainers = Trainers()

    def look(number: int) -> None:
        if number == 1:
            asyncio.get_running_loop().call_soon(trainers.news.set)  # while it waits
        else:
            monkeypatch.setattr(trainers, "check_alive", lost)
            asyncio.get_running_loop().call_soon(trainers.news.set)

    def lost() -> None:
        raise TrainerGroupLostError("model_worker/0 died")

    source = NeverReady(look)
    monkeypatch.setattr(MasterWorker, "_source", lambda *_: source)
    assert run(trainers) == WorkerExit.CANNOT_CONTINUE
    assert source.num_polls == 2


# --- publication and commit ------------------------------------------------------------------------------------------


def test_weights_are_published_before_the_commit_that_covers_them(begin: Begin) -> None:
    trial, run = begin("control.commit_every=1 step")
    seen: list[tuple[str, int]] = []

    def look(name: str) -> None:
        if name == "begin_save":
            seen.append((trainers.published(), len(TrialLog(trial.log_path).read().lineage)))

    trainers = Trainers(at_call=look)
    assert run(trainers) == WorkerExit.DONE
    assert seen == [(f"1.{step}", step - 1) for step in range(1, NUM_STEPS + 1)]


def test_what_is_published_and_lost_before_its_commit_gets_another_version(begin: Begin) -> None:
    trial, run = begin("control.commit_every=1 step")

    def die(name: str) -> None:
        if name == "begin_save" and lost.published() == "1.3":
            raise KilledError(name)

    lost, next_one = Trainers(at_call=die), Trainers()
    with pytest.raises(KilledError):
        run(lost)
    versions: list[str] = []
    next_one.at_call = lambda name: versions.append(next_one.published()) if name != "initialize" else None
    assert run(next_one) == WorkerExit.DONE
    assert list(dict.fromkeys(versions)) == ["1.2", "2.3", "2.4", "2.5"]
    assert lost.trained[2] == next_one.trained[0]  # the batch of the lost step, once
    assert len(step_by_uid(trial)) == 8 * NUM_STEPS
    assert "v00000003-e1" not in {path.name for path in trial.weights_path.iterdir()}


def test_the_digest_of_their_manifest_is_published_with_the_weights(begin: Begin) -> None:
    _, run = begin("control.commit_every=1 step")
    seen: list[tuple[str, str, str | None]] = []

    def look(name: str) -> None:
        if name == "train_step" and len(trainers.trained) < NUM_STEPS:
            published = trainers.published_weights()
            manifest = published.directory / "manifest.json"
            if manifest.exists():
                digest = blake3(manifest.read_bytes()).hexdigest()
                assert published.digest == digest, published
            else:
                assert published.digest is None
            seen.append((published.version, published.directory.parent.name, published.digest))
        if name == "begin_save" and len(seen) == 3:
            raise KilledError(name)  # the commit before is settled

    trainers = Trainers(at_call=look)
    with pytest.raises(KilledError):
        run(trainers)
    trainers = Trainers(at_call=look)
    assert run(trainers) == WorkerExit.DONE
    assert [version for version, _, _ in seen] == ["0.0", "1.1", "1.2", "1.2", "2.3", "2.4"]
    assert seen[3][1].startswith("step-") and seen[3][2] == seen[2][2]  # a commit's second name of the same manifest


@pytest.mark.parametrize("writes_deltas", [True, False])
def test_deltas_lead_from_what_the_weights_were_trained_from_and_never_from_an_orphan(
    writes_deltas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(tmp_path, "control.commit_every=2 steps")
    workers = [
        worker.model_copy(update={"writes_deltas": writes_deltas}) if worker.kind == "master_worker" else worker
        for worker in plan.workers
    ]
    plan = plan.model_copy(update={"workers": workers})

    def die(name: str) -> None:
        if name == "begin_save" and len(lost.trained) == 4:
            raise KilledError

    lost, next_one = Trainers(at_call=die), Trainers()
    with pytest.raises(KilledError):
        run_master(plan, trial, lost, monkeypatch)
    assert "v00000003-e1" in {path.name for path in trial.weights_path.iterdir()}
    assert run_master(plan, trial, next_one, monkeypatch) == WorkerExit.DONE
    names = [base and base.relative_to(trial.path).as_posix() for base in (*lost.bases, *next_one.bases)]
    if not writes_deltas:
        assert set(names) == {None}
        return
    of_epoch_1 = [f"weights/v0000000{step}-e1" for step in (1, 2, 3)]
    assert names[:4] == [None, *of_epoch_1]  # the trial's own weights have none
    commit = next_one.loaded[0].relative_to(trial.path).as_posix()
    assert names[4:] == [commit, "weights/v00000003-e2", "weights/v00000004-e2"]
    assert list(trial.weights_path.glob("*/*.delta"))
    kept = [*trial.checkpoints_path.glob("step-*/weights"), *trial.exports_path.iterdir()]
    assert len(kept) == 3 and not [path for folder in kept for path in folder.rglob("*.delta")]
    for folder in kept:
        verify_manifest(folder, None)


def test_what_no_directory_has_is_written_as_version_0_by_each_epoch_until_something_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(tmp_path, "control.commit_every=1 step")
    workers = [
        worker.model_copy(update={"writes_first_version": True}) if worker.kind == "master_worker" else worker
        for worker in plan.workers
    ]
    plan = plan.model_copy(update={"workers": workers})
    starts: list[tuple[str, str]] = []
    for dies_after in (0, 0, 1, NUM_STEPS):
        trainers = Trainers()

        def look(name: str, trainers: Trainers = trainers, dies_after: int = dies_after) -> None:
            if name == "train_step" and not trainers.trained:
                now = trainers.published_weights()
                starts.append((now.version, now.directory.relative_to(trial.path).as_posix().partition("-e")[0]))
                assert now.digest == blake3((now.directory / "manifest.json").read_bytes()).hexdigest()
            if name == "begin_save" and len(trainers.trained) == dies_after + 1:
                raise KilledError(name)  # the commit before is settled

        trainers.at_call = look
        if dies_after < NUM_STEPS:
            with pytest.raises(KilledError):
                run_master(plan, trial, trainers, monkeypatch)
        else:
            assert run_master(plan, trial, trainers, monkeypatch) == WorkerExit.DONE
    first = ("0.0", "weights/v00000000")
    assert starts == [first, first, first, ("3.1", "checkpoints/step-00000001")]


def test_a_master_that_was_replaced_publishes_nothing(begin: Begin) -> None:
    trial, run = begin()

    def replace(name: str) -> None:
        if name == "save_weights":
            TrialLog(trial.log_path).claim("its successor")

    trainers = Trainers(at_call=replace)
    assert run(trainers) == WorkerExit.SUPERSEDED
    assert trainers.published() == "0.0"
    assert not list(trial.weights_path.glob("*/manifest.json"))


# --- lines of metrics and samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("commit_every_steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_trained_step_and_sample_has_one_line_wherever_the_master_dies(
    commit_every_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(
        tmp_path,
        f"control.commit_every={commit_every_steps} steps",
        "evaluation.every=2 steps",
        f"evaluation.dataset.path={tmp_path / 'heldout.jsonl'}",
        "evaluation.dataset.max_prompt_tokens=16",
        "evaluation.sampling.max_new_tokens=8",
    )
    starts = _run_with_deaths(lambda trainers: run_master(plan, trial, trainers, monkeypatch))
    assert starts > 10
    metrics = lines_of(trial.metrics_path)
    trained = [line["step"] for line in metrics if "time/train_s" in line]
    assert trained == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in metrics if "eval/accuracy" in line] == [0, 2, 4, NUM_STEPS]
    assert [line["data/samples_trained"] for line in metrics if "time/train_s" in line] == [8, 16, 24, 32, 40]
    lines = lines_of(trial.trajectories_path)
    assert Counter((line["uid"], line["step"]) for line in lines) == Counter(step_by_uid(trial).items())


def test_commits_exports_and_evaluations_follow_passes_if_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = trial_of(
        tmp_path,
        "control.total_train_epochs=4",
        "control.commit_every=2 epochs",
        "control.save_every=3 epochs",
        "evaluation.every=3 epochs",
        "evaluation.batch_size=6",
        "evaluation.sampling.max_new_tokens=8",
        f"evaluation.dataset.path={tmp_path / 'heldout.jsonl'}",
        "evaluation.dataset.max_prompt_tokens=16",
    )
    trainers = Trainers(
        evaluate=lambda request: {"loss": float(len(request.uids))} if request.uids else {"accuracy": 0.25}
    )
    assert run_master(plan, trial, trainers, monkeypatch) == WorkerExit.DONE
    commits = [logged.commit.step for logged in TrialLog(trial.log_path).read().lineage]
    assert commits == [2 * NUM_STEPS, 4 * NUM_STEPS]
    assert sorted(path.name for path in trial.exports_path.iterdir()) == ["final", f"step-{3 * NUM_STEPS:08d}"]
    lines = lines_of(trial.metrics_path)
    evaluated = [0, 3 * NUM_STEPS, 4 * NUM_STEPS]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == evaluated
    # Ten held-out rows in slices of six and four.
    assert [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line] == [
        (step, (6 * 6 + 4 * 4) / 10) for step in evaluated
    ]


def _run_with_deaths(run: Callable[[Trainers], int]) -> int:
    """Kill the master at its first call of the model workers, the next one at its second, and so on; the starts."""
    for deadly in range(1, 1000):
        calls = 0

        def die(name: str) -> None:
            nonlocal calls
            calls += 1
            if calls == deadly:  # noqa: B023 - called within this turn of the loop
                raise KilledError(name)

        try:
            assert run(Trainers(at_call=die)) == WorkerExit.DONE
            return deadly
        except KilledError:
            pass
    raise AssertionError("the trial did not end")


# --- the event loop -------------------------------------------------------------------------------------------------

_WATCHED: list[tuple[str, Callable[[str, str], None]]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHED and event in ("open", "os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
        root, note = _WATCHED[-1]
        if isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(root):
            note(event, str(arguments[0]))


def test_no_file_of_the_trial_is_touched_in_the_event_loop_while_it_trains(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, run = begin("control.save_every=2 steps")
    touched: list[tuple[str, str]] = []
    elsewhere: list[str] = []
    loop_thread = threading.get_ident()
    is_training = threading.Event()

    def note(event: str, path: str) -> None:
        if is_training.is_set():
            if threading.get_ident() == loop_thread:
                touched.append((event, path))
            else:
                elsewhere.append(event)

    def at_call(name: str) -> None:
        if name == "initialize":
            is_training.set()

    sys.addaudithook(_hook)  # there is no way to take it off again; without a watch it does nothing
    _WATCHED.append((str(trial.path), note))
    try:
        # The trial's log is written once more after the epoch, by whoever looks at it then.
        monkeypatch.setattr(Trainers, "__aexit__", _leave(is_training))
        assert run(Trainers(at_call=at_call)) == WorkerExit.DONE
    finally:
        _WATCHED.clear()
    assert touched == []
    assert {"open", "os.link", "os.mkdir", "os.rename", "os.rmdir"} <= set(elsewhere)


def _leave(is_training: threading.Event) -> Callable[..., Any]:
    async def leave(*exception: object) -> None:
        is_training.clear()

    return leave


# --- exports/best ---------------------------------------------------------------------------------------------------

VALUES = (0.1, 0.4, 0.8, 0.6, 0.8, 0.2)  # after so many steps


def best_trial(folder: Path, metric: str, *more: str) -> tuple[RunPlan, TrialDirectory]:
    return trial_of(
        folder,
        "evaluation.every=1 step",
        "evaluation.sampling.max_new_tokens=8",
        f"evaluation.dataset.path={folder / 'heldout.jsonl'}",
        "evaluation.dataset.max_prompt_tokens=16",
        f"evaluation.best={metric}",
        *more,
    )


def trainers_of_values() -> Trainers:
    def evaluate(request: Evaluate) -> dict[str, float]:
        return {"loss" if request.uids else "accuracy": VALUES[len(trainers.trained)]}

    trainers = Trainers(evaluate=evaluate)
    return trainers


@pytest.mark.parametrize(("metric", "step"), [("accuracy", 2), ("loss", 0)])
def test_the_best_weights_stay_whatever_comes_after(
    metric: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, metric)
    assert run_master(plan, trial, trainers_of_values(), monkeypatch) == WorkerExit.DONE
    kept = BestVersion.read(trial.exports_path / "best")
    assert kept is not None and kept.version.endswith(f".{step}") and kept.value == VALUES[step]
    assert (trial.exports_path / "best" / "model.safetensors").exists()
    assert sorted(path.name for path in trial.exports_path.iterdir()) == ["best", "final"]


def test_it_is_there_again_if_the_master_dies_between_taking_the_old_away_and_naming_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, "accuracy")
    remove = evaluations.Remover.remove

    def removes_and_dies(self: evaluations.Remover, path: Path) -> bool:
        removed = remove(self, path)
        if path.name == "best" and BestVersion.read(path.with_name(".evaluated")).value == 0.8:  # type: ignore[union-attr]
            raise KilledError
        return removed

    with monkeypatch.context() as patched:
        patched.setattr(evaluations.Remover, "remove", removes_and_dies)
        with pytest.raises(KilledError):
            run_master(plan, trial, trainers_of_values(), monkeypatch)
    assert not (trial.exports_path / "best").exists()
    worse = Trainers(evaluate=lambda request: {} if request.uids else {"accuracy": 0.3})
    assert run_master(plan, trial, worse, monkeypatch) == WorkerExit.DONE
    kept = BestVersion.read(trial.exports_path / "best")
    assert kept is not None and kept.value == 0.8


def test_a_number_that_no_evaluation_has_is_an_alarm_that_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, trial = best_trial(tmp_path, "acuracy")
    assert run_master(plan, trial, trainers_of_values(), monkeypatch) == WorkerExit.DONE
    assert not (trial.exports_path / "best").exists()
    (finding,) = TrialView(read_journal(trial.journal_path), attempt=0).findings()
    assert finding.is_alarm and "'acuracy'" in finding.text
    assert finding.details.startswith("there are accuracy, count, loss, ")


# --- what ranks have loaded -----------------------------------------------------------------------------------------


def graph_of(*hooks: dict[str, object]) -> DataflowGraph:
    call = {"name": "actor_train", "model_name": "actor", "call_type": "train_step", "implementation": "x"}
    return build_dataflow(
        [ModelFunctionCall.model_validate(call | {"n_seqs": 1, "input_keys": ["ids"], "post_hooks": hooks})], ["ids"]
    )


def test_models_that_give_each_other_weights_must_be_alike() -> None:
    other = LoadedModel(architecture="qwen2", num_parameters=90, num_layers=1, hidden_size=8, vocab_size=14)
    models = {"actor/0": SHAPE, "ref/0": other}
    check_reallocations(graph_of(), models)
    pushing = graph_of({"type": "push_weights", "target": "ref"})
    check_reallocations(pushing, models | {"ref/0": SHAPE})
    with pytest.raises(BadConfigurationError, match=r"'actor_train' .* actor/0 \(.* 2 layers.*ref/0 \(.* 1 layers"):
        check_reallocations(pushing, models)


def test_the_journal_says_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trial = trial_of(tmp_path)
    assert run_master(plan, trial, Trainers(), monkeypatch) == WorkerExit.DONE
    events = [json.loads(line) for line in trial.journal_path.read_text().splitlines()]
    (loaded,) = (event for event in events if event["event"] == "models_loaded")
    assert loaded["models"]["actor/0"]["num_parameters"] == SHAPE.num_parameters
