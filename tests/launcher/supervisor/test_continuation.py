"""What follows an attempt, through programs in the place of SLURM's: which are run, and what a refusal leads to."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corral.experiments.trial.attempts import record_attempt
from corral.experiments.trial.journal import Journal
from corral.launcher.files import patience
from corral.launcher.layout.layout import RunningAllocation
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import OwnJob
from corral.launcher.slurm.verdict import JobEnd
from corral.launcher.supervisor.attempt_end import Continuation
from tests.launcher.trials import StubTrial

OWN = "7"
ENDING = "JobId=7 JobState=COMPLETING Reason={reason} Requeue=1 Restarts={restarts} PreemptTime=None NodeList=n[1-2]"
# Notes its arguments, then prints what a file of its name holds: refuses/scontrol-requeue, else says/scontrol.
PROGRAM = """\
#!/bin/sh
name=$(basename "$0")
echo "$name $*" >> "{folder}/calls"
for key in "$name-$1" "$name"; do
  if [ -e "{folder}/refuses/$key" ]; then cat "{folder}/refuses/$key" >&2; exit 1; fi
  if [ -e "{folder}/says/$key" ]; then cat "{folder}/says/$key"; exit 0; fi
done
"""


class Slurm:
    """SLURM's commands as programs on PATH that a test scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "says", "refuses"):
            (folder / name).mkdir(parents=True)
        for name in ("sbatch", "scancel", "scontrol", "squeue", "sinfo"):
            program = folder / "bin" / name
            program.write_text(PROGRAM.format(folder=folder))
            program.chmod(0o755)
        self.says("sbatch", "101")

    def says(self, command: str, text: str) -> None:
        """Lets a command print something."""
        (self.folder / "refuses" / command).unlink(missing_ok=True)
        (self.folder / "says" / command).write_text(text + "\n")

    def refuses(self, command: str, text: str = "no") -> None:
        """Lets a command fail."""
        (self.folder / "refuses" / command).write_text(text + "\n")

    def calls(self, command: str) -> list[list[str]]:
        """The arguments of each run of a command."""
        path = self.folder / "calls"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [words[1:] for words in lines if words[0] == command]


class Attempt:
    """A trial on SLURM, and what may follow its first attempt."""

    def __init__(self, root: Path, slurm: Slurm, **launch: Any) -> None:
        self.slurm = slurm
        self.trial = StubTrial(root, {}, mode="slurm", model_workers=1, servers=0, launch=launch)
        self.directory = self.trial.directory
        self.events = self.trial.events
        record_attempt(self.directory, attempt=0, resume=False, mode="slurm")
        self.continuation = self.again()

    def again(self, *, job_id: str = OWN, attempt: int = 0, restart_count: int = 0) -> Continuation:
        """As the supervisor of an attempt makes it."""
        journal = Journal(self.directory.journal_path)
        running = RunningAllocation(job_id=job_id, het_group=None, hosts=("n1", "n2"))
        return Continuation(
            cluster=SlurmCluster(timeout_s=5.0),
            trial=self.trial.placed,
            own=OwnJob(job_id=job_id, restart_count=restart_count, host="n1", allocations={0: running}),
            record=lambda event, **fields: journal.append(event, attempt=attempt, **fields),
        )

    def queue(self, *jobs: tuple[str, str], uuid: str = "") -> None:
        """Lets squeue show jobs of this trial, or of another: id and state."""
        comment = f'{{"corral":1,"allocation":"head","trial_uuid":"{uuid or self.trial.plan.trial.uuid}"}}'
        lines = [f"{job.removeprefix('7+')}|{job}|{state}|None|N/A|0:0|1|n1|name|{comment}" for job, state in jobs]
        said = self.slurm.folder / "says" / "squeue"
        before = said.read_text().splitlines() if said.exists() else []
        self.slurm.says("squeue", "\n".join([*before, *lines]))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm.folder / 'bin'}:{os.environ['PATH']}")
    return slurm


@pytest.fixture
def make_attempt(tmp_path: Path, slurm: Slurm) -> Callable[..., Attempt]:
    return lambda **launch: Attempt(tmp_path / "root", slurm, **launch)


@pytest.fixture
def attempt(make_attempt: Callable[..., Attempt]) -> Attempt:
    return make_attempt()


def test_a_successor_is_submitted_once_and_waits_for_the_end_of_our_job(attempt: Attempt) -> None:
    assert [attempt.continuation.arrange() for _ in range(2)] == ["", ""]
    assert attempt.continuation.successor == "101"
    assert attempt.slurm.calls("sbatch") == [
        ["--parsable", f"--dependency=afterany:{OWN}", str(attempt.directory.sbatch_path)]
    ]
    (event,) = attempt.events("successor_submitted")
    assert (event["job_id"], event["after"]) == ("101", OWN)


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        ({}, ["--exclude=n2,n3"]),
        ({"exclude": "n8,n9"}, ["--exclude=n8,n9,n2,n3"]),
    ],
)
def test_a_successor_avoids_the_nodes_that_failed(
    make_attempt: Callable[..., Attempt], launch: dict[str, Any], options: Sequence[str]
) -> None:
    attempt = make_attempt(**launch)
    for node in ("n3", "n2"):
        attempt.directory.note_failed_node(node)
    attempt.continuation.arrange()
    assert attempt.slurm.calls("sbatch")[0][2:-1] == options


def test_a_refusal_is_told_in_slurms_words_and_asked_again(attempt: Attempt) -> None:
    attempt.slurm.refuses("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    assert "QOSMaxSubmitJobPerUserLimit" in attempt.continuation.arrange()
    assert attempt.continuation.successor == ""
    assert "QOSMaxSubmitJobPerUserLimit" in attempt.events("successor_refused")[0]["cause"]
    attempt.slurm.says("sbatch", "102")
    assert attempt.continuation.arrange() == "" and attempt.continuation.successor == "102"


def test_a_successor_that_sbatch_took_without_saying_so_is_found_in_the_queue(attempt: Attempt) -> None:
    attempt.slurm.says("sbatch", "what?")
    attempt.queue((OWN, "RUNNING"), ("102", "PENDING"))
    assert attempt.continuation.arrange() == "" and attempt.continuation.successor == "102"


def test_a_successor_is_remembered_by_a_new_supervisor_and_by_a_requeued_job(attempt: Attempt) -> None:
    attempt.continuation.arrange()
    attempt.directory.journal_path.unlink()  # the journal is told; what decides is in control/
    for again in (attempt.again(), attempt.again(attempt=1, restart_count=1)):
        assert again.successor == "101"
        assert again.arrange() == ""
    assert attempt.again(job_id="101", attempt=1).successor == ""  # the successor itself has none yet
    assert len(attempt.slurm.calls("sbatch")) == 1


def test_what_is_revoked_is_cancelled_and_forgotten(attempt: Attempt) -> None:
    attempt.continuation.revoke()
    assert attempt.slurm.calls("scancel") == []
    attempt.continuation.arrange()
    attempt.continuation.revoke()
    assert attempt.slurm.calls("scancel") == [["101"]]
    assert attempt.continuation.successor == attempt.again().successor == ""


def test_what_cannot_be_revoked_is_not_forgotten(attempt: Attempt) -> None:
    attempt.continuation.arrange()
    attempt.slurm.refuses("scancel", "scancel: error: Access/permission denied")
    attempt.continuation.revoke()
    assert attempt.continuation.successor == attempt.again().successor == "101"
    assert "denied" in attempt.events("successor_not_cancelled")[0]["cause"]


def test_our_own_job_is_requeued_if_nothing_else_is_left(attempt: Attempt) -> None:
    assert attempt.continuation.requeue() == ""
    assert attempt.slurm.calls("scontrol") == [["requeue", OWN]] and attempt.events("requeued")
    attempt.slurm.refuses("scontrol-requeue", "Requested operation is presently disabled for job 7")
    assert "presently disabled" in attempt.continuation.requeue()
    assert len(attempt.events("requeued")) == 1


def test_the_end_is_explained_by_scontrol_and_the_line_in_the_jobs_output(attempt: Attempt) -> None:
    attempt.slurm.says("scontrol", ENDING.format(reason="None", restarts=1))
    log = attempt.directory.logs_path / f"slurm-{OWN}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("x" * 100_000 + "\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO PREEMPTION ***\n")
    assert attempt.continuation.explain() == JobEnd(state="PREEMPTED", is_requeued=True)
    assert attempt.events("node_failed") == []


def test_where_neither_says_anything_the_cause_is_unknown(attempt: Attempt) -> None:
    attempt.slurm.refuses("scontrol", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert attempt.continuation.explain().state == "UNKNOWN"


def test_the_nodes_of_the_job_that_are_down_are_written_down(attempt: Attempt) -> None:
    attempt.slurm.says("scontrol", ENDING.format(reason="NodeDown", restarts=0))
    nodes = "".join(
        f"{name}|debug*|8|8000|gpu:8|(null)|{state}|inf\n" for name, state in (("n1", "alloc"), ("n2", "down*"))
    )
    attempt.slurm.says("sinfo", f"{nodes}n3|debug*|8|8000|gpu:8|(null)|down|inf")
    assert attempt.continuation.explain().state == "NODE_FAILED"
    assert [event["node"] for event in attempt.events("node_failed")] == attempt.directory.failed_nodes() == ["n2"]


def test_at_the_end_every_other_job_of_the_trial_is_cancelled_and_nobody_elses(attempt: Attempt) -> None:
    attempt.queue((OWN, "RUNNING"), ("8", "PENDING"), ("9", "RUNNING"), ("10", "COMPLETED"), ("11", "RUNNING"))
    attempt.queue(("20", "PENDING"), uuid="0" * 32)
    attempt.continuation.sweep()
    assert attempt.slurm.calls("scancel") == [["8"], ["9"], ["11"]]


def test_the_components_of_our_own_job_end_with_it(attempt: Attempt) -> None:
    attempt.queue((OWN, "RUNNING"), (f"{OWN}+8", "RUNNING"))
    attempt.continuation.sweep()
    assert attempt.slurm.calls("scancel") == []


def test_a_controller_that_is_away_at_the_end_is_waited_for_but_not_for_ever(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)  # time passes in pauses only
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience, "_PAUSE_S", 5.0)
    attempt.slurm.refuses("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    attempt.continuation.sweep()
    assert len(attempt.slurm.calls("squeue")) == 5 and pauses == [5.0] * 4
    assert "Unable to contact" in attempt.events("jobs_left")[0]["cause"]
