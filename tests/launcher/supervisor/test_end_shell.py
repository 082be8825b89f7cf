"""An attempt's end with its files, its trial log and a queue in memory: what SLURM is asked for, what is recorded."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.attempts import AttemptEnd, EndState, begin_attempt, read_end, record_attempt, write_end
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.launcher.files.file_thread import FileThread
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import OwnJob
from corral.launcher.slurm.verdict import Job
from corral.launcher.supervisor import attempt_end
from corral.launcher.supervisor.attempt_end import Continuation, EndShell
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.units import EndTrial
from tests.launcher.jobs import job_of
from tests.launcher.supervisor.test_end_machine import Verdict
from tests.launcher.trials import StubTrial

OWN = "7"
STOPPED = EndTrial(EndState.STOPPED, "the grace period ended")
FAILED = EndTrial(EndState.FAILED, "model_worker used up its restarts")
# What scontrol says of our job when SIGTERM arrives.
SCANCEL = {"JobState": "COMPLETING", "Restarts": "0", "Reason": "None"}
TIME_LIMIT = SCANCEL | {"Reason": "TimeLimit"}
REQUEUED = SCANCEL | {"Restarts": "1"}
PREEMPTED = SCANCEL | {"PreemptTime": "2026-11-21T08:11:27"}
KILLED = SCANCEL | {"JobState": "RUNNING"}
STOP = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=5.0)
REQUEUE = StopRequest(requested_at=0.0, by="me@here", now=False, grace_s=5.0, then="requeue")


class Slurm(SlurmClient):
    """A queue in memory: what is alive in it, and which commands are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: set[str] = set()
        self.answer: dict[str, str] | None = KILLED
        self.refused: set[str] = set()
        self.options: list[Sequence[str]] = []
        self.uuid = ""
        self.requeues = 0

    def submit(self, options: Sequence[str], script: Path) -> str:
        self._may("sbatch")
        self.options.append(options)
        job_id = str(100 + len(self.options))
        self.alive.add(job_id)
        return job_id

    def job(self, job_id: str) -> dict[str, str] | None:
        if self.answer is None:
            raise SlurmUnreachableError("scontrol did not answer within 5 s")
        return self.answer if job_id == OWN else {"JobId": job_id}

    def cancel(self, job_or_step: str, *, signal_name: str | None = None) -> None:
        self._may("scancel")
        self.alive.discard(job_or_step)

    def requeue(self, job_id: str) -> None:
        assert job_id == OWN
        self._may("requeue")
        self.requeues += 1

    def queue(self) -> list[Job]:
        return [job_of(job_id, tag={"corral": 1, "trial_uuid": self.uuid}) for job_id in (OWN, *sorted(self.alive))]

    def nodes(self, partitions: str | None = None, *, in_detail: bool = False) -> list[Any]:
        return []

    def _may(self, command: str) -> None:
        if command in self.refused:
            raise SlurmError(f"{command} failed with exit 1: no")


class Attempt:
    """The end of an attempt, and all that it touches."""

    def __init__(self, root: Path, *, is_on_slurm: bool = True) -> None:
        self.trial = StubTrial(root, {}, model_workers=1, servers=0)
        self.directory: TrialDirectory = self.trial.directory
        record_attempt(self.directory, attempt=0, resume=False, mode="slurm")
        self.log = TrialLog(self.directory.log_path)
        self.master = self.log.claim("master")
        self.slurm = Slurm()
        self.slurm.uuid = self.trial.plan.trial.uuid
        self.events = self.trial.events
        self.is_on_slurm = is_on_slurm
        self.begin()

    def begin(self) -> None:
        """As each supervisor of the attempt does."""
        recorder = Recorder(FileThread("records"), Journal(self.directory.journal_path), attempt=0)
        slurm = Continuation(
            cluster=SlurmCluster(self.slurm),
            trial=self.trial.placed,
            own=OwnJob(job_id=OWN, restart_count=0, host="n1", allocations={}),
            record=recorder.event,
        )
        self.end = EndShell(
            directory=self.directory,
            plan=self.trial.plan,
            log=self.log,
            continuation=slurm if self.is_on_slurm else None,
            recorder=recorder,
        )

    def term(self, answer: dict[str, str] | None) -> StopRequest | None:
        self.slurm.answer = answer
        return self.end.signalled(signal.SIGTERM, was_asked=False)

    def usr2(self, *, was_asked: bool = False) -> StopRequest | None:
        return self.end.signalled(signal.SIGUSR2, was_asked=was_asked)

    def finish(self, end: EndTrial = STOPPED) -> Verdict:
        """As the supervisor does it: the stop goes into the log, then the end is judged and closed."""
        state = self.log.read()
        if end.outcome is EndState.STOPPED and not state.is_stopped and not state.is_done:
            self.log.request_stop("supervisor", then=self.end.machine.then)
        self.log.read()
        self.end.judge(end, self.log.state)
        self.end.machine.close()
        end = read_end(self.directory, 0)
        assert end is not None
        return Verdict(state=end.state, cause=end.cause, goes_on=self.end.machine.goes_on)

    def recorded(self) -> tuple[str, str]:
        end = read_end(self.directory, 0)
        assert end is not None
        return end.state, end.then

    def has_ended(self) -> bool:
        end = read_end(self.directory, 0)
        return end is not None and end.is_final


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def no_patience() -> Iterator[None]:
    """What scancel refuses is not tried for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt_end, "_SWEEP_TIMEOUT_S", 0.0)
        yield


def test_near_its_time_limit_an_attempt_hands_over_to_one_successor(attempt: Attempt) -> None:
    request = attempt.usr2()
    assert request is not None and request.then == "requeue"
    assert attempt.usr2(was_asked=True) is None
    assert attempt.finish() == Verdict(state=EndState.TIMED_OUT, cause="the time limit is near", goes_on=True)
    assert attempt.recorded() == ("TIMED_OUT", "successor") and not attempt.has_ended()
    assert attempt.slurm.alive == {"101"} and attempt.slurm.options == [[f"--dependency=afterany:{OWN}"]]
    assert attempt.log.read().is_handed_over


@pytest.mark.parametrize(
    ("answer", "state", "then", "has_successor"),
    [
        (REQUEUED, "REQUEUED", "requeue", False),
        (TIME_LIMIT, "TIMED_OUT", "successor", True),
        (PREEMPTED, "PREEMPTED", "successor", True),
        (None, "UNKNOWN", "requeue", False),
    ],
)
def test_what_slurm_ends_goes_on(
    attempt: Attempt, answer: dict[str, str] | None, state: str, then: str, has_successor: bool
) -> None:
    request = attempt.term(answer)
    assert request is not None and request.then == "requeue" and attempt.end.machine.is_job_ending
    assert attempt.recorded() == (state, then)  # before the workers have ended: SLURM may kill us
    assert attempt.finish().goes_on and not attempt.has_ended()
    assert bool(attempt.slurm.alive) is has_successor


def test_scancel_is_final_and_takes_the_successor_along(attempt: Attempt) -> None:
    attempt.usr2()
    request = attempt.term(SCANCEL)
    assert request is not None and request.now and attempt.slurm.alive == set()
    assert attempt.has_ended()  # before the workers have ended: SLURM may kill us
    verdict = attempt.finish()
    assert (verdict.state, verdict.goes_on) == ("CANCELLED", False)
    assert attempt.recorded() == ("CANCELLED", "") and len(attempt.events("attempt_ended", then="")) == 1


def test_a_trial_that_is_done_while_it_is_cancelled_is_complete(attempt: Attempt) -> None:
    attempt.term(SCANCEL)
    attempt.master.done()
    assert attempt.finish().state == "COMPLETE"
    assert attempt.recorded() == ("COMPLETE", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_alone_stops_the_trial_and_a_second_one_at_once(
    attempt: Attempt, number: signal.Signals
) -> None:
    first, second = (attempt.end.signalled(number, was_asked=was_asked) for was_asked in (False, True))
    assert first is not None and second is not None
    assert (first.then, first.now, second.now) == ("", False, True) and number.name in first.by
    assert attempt.finish() == Verdict(state=EndState.STOPPED, cause=STOPPED.cause, goes_on=False)


def test_a_stop_after_the_hand_over_began_wins(attempt: Attempt) -> None:
    attempt.usr2()
    attempt.log.request_stop("supervisor", then="requeue")  # the master has checkpointed already
    attempt.end.requested(STOP)
    verdict = attempt.finish()
    assert (verdict.state, verdict.goes_on) == ("STOPPED", False) and attempt.slurm.alive == set()
    assert not attempt.log.read().is_handed_over


@pytest.mark.parametrize("answer", [REQUEUED, TIME_LIMIT, PREEMPTED, None, SCANCEL])
def test_a_stop_stays_a_stop_if_slurm_ends_the_job_meanwhile(attempt: Attempt, answer: dict[str, str] | None) -> None:
    attempt.end.requested(STOP)
    request = attempt.term(answer)
    assert request is not None and request.then == ""
    verdict = attempt.finish()
    assert (verdict.state, verdict.goes_on) == ("STOPPED", False) and attempt.slurm.alive == set()
    assert attempt.recorded() == ("STOPPED", "") and not attempt.log.read().is_handed_over


def test_a_stop_while_slurm_ends_the_job_is_heeded(attempt: Attempt) -> None:
    attempt.term(TIME_LIMIT)
    attempt.end.requested(STOP)
    assert attempt.finish().state == "STOPPED" and attempt.slurm.alive == set() and attempt.has_ended()


def test_a_lost_node_does_not_revive_a_trial_that_is_being_stopped(attempt: Attempt) -> None:
    attempt.end.requested(STOP)
    attempt.end.machine.hand_over(EndState.NODE_FAILED, "node n2 failed")
    assert attempt.finish().state == "STOPPED" and attempt.slurm.options == []


def test_a_request_to_requeue_does_not_revive_a_cancelled_job(attempt: Attempt) -> None:
    attempt.term(SCANCEL)
    attempt.end.requested(REQUEUE)
    assert attempt.usr2() is None
    assert attempt.finish().state == "CANCELLED" and attempt.slurm.options == []


def test_our_own_request_is_nobody_elses(attempt: Attempt) -> None:
    request = attempt.usr2()
    assert request is not None
    attempt.directory.write_stop_request(request)
    found = attempt.directory.read_stop_request()
    assert found is not None
    attempt.end.requested(found)
    assert attempt.finish().state == "TIMED_OUT"


def test_a_supervisor_that_takes_over_goes_on_with_what_the_one_before_it_was_told(attempt: Attempt) -> None:
    request = attempt.usr2()
    assert request is not None
    attempt.begin()
    attempt.directory.write_stop_request(request)
    found = attempt.directory.read_stop_request()
    assert found is not None and found.state == "TIMED_OUT"
    attempt.end.requested(found)
    assert attempt.finish() == Verdict(state=EndState.TIMED_OUT, cause="the time limit is near", goes_on=True)
    assert attempt.slurm.alive == {"101"} and len(attempt.slurm.options) == 1


def test_a_supervisor_that_takes_over_a_cancelled_job_ends_it_as_cancelled(attempt: Attempt) -> None:
    request = attempt.term(SCANCEL)
    assert request is not None
    attempt.begin()
    attempt.end.requested(request)
    assert attempt.finish().state == "CANCELLED"


def test_a_later_word_on_the_end_replaces_an_earlier_one(attempt: Attempt) -> None:
    attempt.term(TIME_LIMIT)
    end = read_end(attempt.directory, 0)
    assert end is not None
    assert (end.state, end.cause, end.then) == ("TIMED_OUT", "the time limit was reached", "successor")
    attempt.end.requested(STOP)
    attempt.finish()
    end = read_end(attempt.directory, 0)
    assert end is not None and (end.state, end.is_final) == ("STOPPED", True)


def test_if_sbatch_fails_slurm_requeues_and_if_that_fails_too_a_human_is_told(attempt: Attempt) -> None:
    attempt.slurm.refused = {"sbatch"}
    attempt.end.requested(REQUEUE)
    assert attempt.finish().goes_on
    assert attempt.recorded() == ("REQUEUED", "requeue") and attempt.slurm.requeues == 1


def test_if_nothing_can_be_submitted_a_human_is_told(attempt: Attempt) -> None:
    attempt.slurm.refused = {"sbatch", "requeue"}
    attempt.end.requested(REQUEUE)
    verdict = attempt.finish()
    assert not verdict.goes_on and "no further job could be submitted: requeue failed" in verdict.cause
    assert verdict.cause.endswith("continue with rl-submit --resume")
    assert attempt.has_ended() and not attempt.log.read().is_handed_over


def test_at_the_time_limit_a_refusal_leaves_no_second_way(attempt: Attempt) -> None:
    attempt.slurm.refused = {"sbatch"}
    request = attempt.term(TIME_LIMIT)
    assert request is not None and request.then == ""
    verdict = attempt.finish()
    assert (verdict.state, verdict.goes_on, attempt.slurm.requeues) == ("TIMED_OUT", False, 0)
    assert "sbatch failed" in verdict.cause and "--resume" in verdict.cause


def test_the_last_attempt_of_a_chain_stops_with_advice(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    begin_attempt(attempt.directory, job_id="6", restart_count=0, mode="slurm")
    begin_attempt(attempt.directory, job_id=OWN, restart_count=0, mode="slurm")
    for number in range(2):
        write_end(attempt.directory, AttemptEnd(attempt=number, state=EndState.TIMED_OUT, cause="", then="successor"))
    attempt.usr2()
    verdict = attempt.finish()
    assert not verdict.goes_on and "before their first commit" in verdict.cause and "--resume" in verdict.cause
    assert attempt.slurm.alive == set() and attempt.has_ended()


def test_a_failure_is_final_whoever_waits_to_go_on(attempt: Attempt) -> None:
    attempt.usr2()
    assert attempt.finish(FAILED) == Verdict(state=EndState.FAILED, cause=FAILED.cause, goes_on=False)
    assert attempt.slurm.alive == set() and attempt.recorded() == ("FAILED", "")


def test_a_failure_while_slurm_ends_the_job_is_slurms_doing(attempt: Attempt) -> None:
    attempt.term(REQUEUED)
    assert attempt.finish(FAILED).goes_on


def test_a_trial_that_is_done_is_complete_whatever_was_asked(attempt: Attempt) -> None:
    attempt.usr2()
    attempt.term(REQUEUED)
    attempt.master.done()
    assert attempt.finish() == Verdict(state=EndState.COMPLETE, cause="", goes_on=False)
    assert attempt.slurm.alive == set() and attempt.has_ended()


def test_a_successor_that_cannot_be_cancelled_finds_a_stop(attempt: Attempt) -> None:
    attempt.usr2()
    attempt.slurm.refused = {"scancel"}
    attempt.finish(FAILED)
    assert attempt.slurm.alive == {"101"}
    stop = attempt.log.read().stop
    assert stop is not None and stop.then == ""


def test_on_this_machine_every_signal_stops_the_trial_with_advice(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, is_on_slurm=False)
    request = attempt.usr2()
    assert request is not None and "time limit" in request.by and "--resume" in request.by
    attempt.end.requested(REQUEUE)  # there is no queue
    assert attempt.finish().state == "STOPPED"
    assert attempt.recorded() == ("STOPPED", "") and attempt.has_ended()


NOTICE = StopRequest(
    requested_at=0.0, by="SLURM (SIGTERM to the steps)", now=False, grace_s=5.0, then="requeue", is_notice=True
)


@pytest.mark.parametrize(
    ("answer", "state"), [(KILLED | {"PreemptTime": "2026-11-21T08:11:27"}, "PREEMPTED"), (KILLED, "REQUEUED")]
)
def test_a_notice_to_the_steps_is_explained_by_slurm_and_hands_over(
    attempt: Attempt, answer: dict[str, str], state: str
) -> None:
    attempt.slurm.answer = answer
    attempt.end.requested(NOTICE)
    assert attempt.end.machine.then == "requeue" and not attempt.end.machine.is_job_ending
    assert attempt.finish().goes_on and attempt.recorded() == (state, "successor")


def test_a_notice_that_is_heard_before_slurms_own_word_asks_for_no_job_beside_a_requeued_one(attempt: Attempt) -> None:
    attempt.slurm.answer = REQUEUED
    attempt.end.requested(NOTICE)
    attempt.term(REQUEUED)
    assert attempt.finish().goes_on and attempt.recorded() == ("REQUEUED", "requeue")
    assert attempt.slurm.options == []


def test_the_signal_that_a_site_sends_before_a_preemption_is_no_time_limit(attempt: Attempt) -> None:
    attempt.slurm.answer = KILLED | {"PreemptTime": "2026-11-21T08:11:27"}
    request = attempt.usr2()
    assert request is not None and request.state == "PREEMPTED"
    assert attempt.finish().state == "PREEMPTED"


@pytest.mark.parametrize(
    ("answer", "state", "num_jobs"),
    [(SCANCEL, "CANCELLED", 0), (TIME_LIMIT, "TIMED_OUT", 1), (PREEMPTED, "PREEMPTED", 1)],
)
def test_of_a_job_that_slurm_ends_its_steps_words_decide_nothing(
    attempt: Attempt, answer: dict[str, str], state: str, num_jobs: int
) -> None:
    attempt.slurm.answer = answer
    attempt.end.requested(NOTICE)
    assert attempt.slurm.options == []
    attempt.term(answer)
    assert attempt.finish().state == state and len(attempt.slurm.options) == num_jobs


def test_a_notice_and_then_scancel_is_cancelled(attempt: Attempt) -> None:
    attempt.end.requested(NOTICE)
    attempt.term(SCANCEL)
    assert attempt.finish().state == "CANCELLED" and attempt.slurm.alive == set()
