"""rl-stop: the answer is how a trial ended; what is out of sight is not taken for gone; Ctrl-C ends the waiting."""

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.log import TrialLog
from corral.launcher.commands import stop
from corral.launcher.commands.stop import StopRefusedError, cancel_orphan, find_job, is_orphan, reporting, trial_of_job
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.slurm.client import SlurmClient
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.own_jobs import OwnJobs
from corral.launcher.slurm.verdict import Job
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.waits import WaitChain, WaitStep
from corral.launcher.trial.view import TrialFacts, read_facts
from corral.launcher.trial.words import TrialState, WorkerState
from tests.launcher.conftest import MakeTrial
from tests.launcher.jobs import job_of
from tests.launcher.trials import StubTrial, stop_and_wait


class FakeSlurm(SlurmClient):
    """A queue that notes what is cancelled."""

    def __init__(self, *jobs: Job) -> None:
        super().__init__()
        self._jobs = jobs
        self.cancelled: tuple[str, ...] = ()

    def queue(self) -> list[Job]:
        return list(self._jobs)

    def cancel(self, job_or_step: str, *, signal_name: str | None = None) -> None:
        self.cancelled += (job_or_step,)


@pytest.fixture
def trial(tmp_path: Path) -> StubTrial:
    trial = StubTrial(tmp_path, {}, mode="slurm")
    trial.prepare()
    return trial


def stop_seeing(
    trial: StubTrial, client: SlurmClient, words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> TrialStatus:
    """rl-stop, while the trial's state goes from word to word."""
    facts = read_facts(trial.directory)
    assert facts is not None
    to_come = iter(words)

    class Reader:
        def __init__(self, *_: Any) -> None:
            pass

        def read(self, _: Any) -> list[TrialStatus]:
            return [
                TrialStatus(
                    experiment="exp", trial="trial", directory=str(trial.directory.path), mode="slurm",
                    state=next(to_come), step=None, total_steps=3, age_s=None, nodes=None, job_id="7", attempt=1,
                    note="",
                )
            ]  # fmt: skip

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return stop_and_wait(facts, SlurmQueue(client), Reader())


def job(job_id: str, state: str, allocation: str, *, uuid: str) -> Job:
    return job_of(job_id, state, tag={"corral": 1, "trial_uuid": uuid, "allocation": allocation})


def test_a_stop_between_two_attempts_waits_until_nothing_is_left(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeSlurm()
    # SLURM shows the attempt before it as completing for some seconds, so that its successor seems to start.
    words = ["QUEUED", "STARTING", "STARTING", "STOPPED"]
    assert stop_seeing(trial, client, words, monkeypatch).state == "STOPPED"
    assert client.cancelled == ("7",)
    found = TrialLog(trial.directory.log_path).read().stop
    assert found is not None and found.reason == "rl-stop"


@pytest.mark.parametrize("words", [["FAILED"], ["LOST", "STOPPED"]])
def test_nodes_that_nobody_uses_are_given_back_and_nothing_is_left_to_start(
    trial: StubTrial, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = trial.plan.trial.uuid
    client = FakeSlurm(
        job("1", "RUNNING", "head", uuid=uuid),  # it draws its report, and ends by itself
        job("2", "RUNNING", "model_worker", uuid=uuid),
        job("3", "FAILED", "generation_server", uuid=uuid),
        job("4", "PENDING", "head", uuid=uuid),
        job("5", "RUNNING", "model_worker", uuid="another"),
    )
    stop_seeing(trial, client, words, monkeypatch)
    assert client.cancelled == ("2", "4")


def tagged(job_id: str, directory: Path) -> Job:
    tag = {"corral": 1, "trial_uuid": "u", "allocation": "head", "directory": str(directory)}
    return job_of(job_id, "RUNNING", tag=tag)


def test_a_trial_whose_folder_is_out_of_sight_is_not_taken_for_gone(tmp_path: Path) -> None:
    client = FakeSlurm(tagged("7", tmp_path / "not-mounted" / "exp" / "trial"))
    with pytest.raises(StopRefusedError, match=r"this machine has no .*not-mounted/exp; .* rl-stop --now 7 to end"):
        is_orphan(_job_7(client), now=False, files=PatientFiles())
    assert client.cancelled == ()
    assert is_orphan(_job_7(client), now=True, files=PatientFiles())


def _job_7(client: FakeSlurm) -> Job:
    job = find_job("7", SlurmQueue(client), Path("/anywhere"))
    assert job is not None
    return job


def test_a_trial_whose_folder_is_gone_from_where_others_are_is_gone(tmp_path: Path) -> None:
    client = FakeSlurm(tagged("7", tmp_path / "trial"))
    orphan = _job_7(client)
    assert is_orphan(orphan, now=False, files=PatientFiles())
    assert cancel_orphan(orphan, SlurmQueue(client)) == ["7"] == [*client.cancelled]


def test_a_trial_whose_folder_is_gone_is_found_by_its_name_or_path_in_its_jobs_comment(tmp_path: Path) -> None:
    gone = tmp_path / "exp" / "gone"
    queue = SlurmQueue(FakeSlurm(tagged("7", gone), tagged("8", tmp_path / "exp" / "other")))
    for name in ("gone", "exp/gone", str(gone)):
        job = find_job(name, queue, tmp_path)
        assert job is not None and job.job_id == "7"
    assert find_job("exp/gone", queue, tmp_path / "exp") is None and find_job("exp/g", queue, tmp_path) is None


def test_a_job_without_our_comment_is_found_by_id_and_name(trial: StubTrial, tmp_path: Path) -> None:
    OwnJobs(trial.directory, trial.plan.trial).note("7", attempt=0)
    rewritten = job_of("7", "RUNNING", comment="site: ok", name="exp.trial")
    found = trial_of_job(_job_7(FakeSlurm(rewritten)), tmp_path, files=PatientFiles())
    assert found is not None and found.directory.path == trial.directory.path
    other = dataclasses.replace(rewritten, name="exp.other")  # job 7 of another cluster with the same home folder
    assert trial_of_job(_job_7(FakeSlurm(other)), tmp_path, files=PatientFiles()) is None
    assert not is_orphan(_job_7(FakeSlurm(rewritten)), now=True, files=PatientFiles())


def test_trials_are_stopped_side_by_side_and_one_that_cannot_be_keeps_none_waiting(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[str]] = []

    class Reader:
        def read(self, trials: Sequence[TrialFacts]) -> list[str]:
            looks.append([facts.trial for facts in trials])
            return [f"look {len(looks)}" for _ in trials]

    def ends_after(num_looks: int) -> Generator[None, Any, Any]:
        for _ in range(num_looks - 1):
            yield
        return (yield)

    def fails() -> Generator[None, Any, Any]:
        yield
        raise TimeoutError("gone")

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    facts = read_facts(trial.directory)
    assert facts is not None
    slow, quick, broken = (dataclasses.replace(facts, trial=name) for name in ("slow", "quick", "broken"))
    ends = stop.see_through({slow: ends_after(3), broken: fails(), quick: ends_after(1)}, Reader())  # type: ignore[arg-type]
    assert looks == [["slow", "broken", "quick"], ["slow"], ["slow"]]  # one look serves all
    assert (ends[slow], ends[quick]) == ("look 3", "look 1") and isinstance(ends[broken], TimeoutError)


def test_a_stop_that_takes_long_says_for_whom_it_waits(
    trial: StubTrial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(worker: str, phase: str, waiting_for: str = "") -> WaitStep:
        return WaitStep(worker=worker, state=WorkerState.UP, phase=phase, since_s=70.0, waiting_for=waiting_for)

    chain = WaitChain(steps=(step("master_worker/0", "train step", "actor_gen"), step("model_worker/0", "generate")))
    status = TrialStatus(experiment="exp", trial="trial", directory="/", mode="local", state="RUNNING", waits=[chain])
    facts = read_facts(trial.directory)
    assert facts is not None

    def ending() -> Generator[None, TrialStatus, TrialStatus]:
        while (seen := (yield)).state != "STOPPED":
            pass
        return seen

    told = reporting(facts, ending(), now=False, requeue=False)
    next(told)
    told.send(status)
    assert capsys.readouterr().out == "stopping exp/trial after a last checkpoint\n"
    told.send(status)
    assert capsys.readouterr().out == ""  # not yet
    monkeypatch.setattr("corral.launcher.commands.stop._TELL_EVERY_S", 0.0)
    told.send(status)
    said = capsys.readouterr().out
    assert said.startswith("exp/trial waits: master_worker/0") and "model_worker/0" in said and "actor_gen" in said
    told.send(dataclasses.replace(status, waits=[]))
    assert capsys.readouterr().out == ""
    with pytest.raises(StopIteration):
        told.send(dataclasses.replace(status, state=TrialState.STOPPED))
    assert capsys.readouterr().out == "exp/trial STOPPED\n"


@pytest.mark.usefixtures("obeys_ctrl_c")
def test_ctrl_c_ends_the_waiting_and_not_the_stop(make_trial: MakeTrial, tmp_path: Path) -> None:
    trial = make_trial({"master_worker/0": ["stubborn"]}, supervision={"stop_grace_s": 600.0})
    trial.start()
    trial.wait_for_workers()
    command = [str(Path(sys.executable).parent / "rl-stop"), str(trial.directory.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        trial.wait_for("stop_requested")
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 130 and "goes on without this command" in out, (out, err)
    assert not trial.events("attempt_ended", then="")
