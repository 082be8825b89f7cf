"""How one attempt ends: requests, the cluster's answer and the last exit go in; records and the next action come out.

             time nearly up, preempted, nodes lost,                 nothing runs any more:
             rl-stop --requeue, our job is ended                    our job is requeued, a successor waits
    OPEN ----------------------------------------> HANDING_OVER -------------------------------------> CLOSED
     |                                               |       |                                           ^
     | rl-stop, a signal to the supervisor alone,    |       | the trial is complete, failed,            |
     | scancel                                       |       | no attempt may follow, no job can be had  |
     +-----------------------------------------------+-------+---> FINAL --nothing runs any more---------+

FINAL is somebody's word that the trial ends here: nothing that comes later takes it back, and of several the first one
gives state and cause. The end is recorded once, and again only if the state or what follows came differently, as with a
Done in the last moment. While our job is being ended the end is recorded as soon as it is known: we may be killed
before the workers have ended.

Whether an attempt may follow is decided by `why_not_another` in experiments/trial/attempts.py: EndShell hands its
answer to `judge`, and the start of the next job asks it again. EndMachine decides, and does nothing by itself.

    supervisor.py tells EndShell               +--> Continuation: successor, requeue
    SIGUSR2, SIGTERM, SIGINT --+               |
    control/stop.json ---------+--> EndMachine +--EndShell--> control/end-N.json, then the journal
    lost nodes, last exit -----+                        +---> Stop in the trial log

A signal becomes a stop request in control/, because the master has to see it too, and a supervisor that takes over.

What follows an attempt: the cluster starts its job again, or a successor that waits for its end, or a human.

    time limit near (USR2), rl-stop --requeue --arrange--> successor in the queue --> checkpoint --> the job ends --> it
    SIGTERM --explain--> preempted, node lost, time limit: the cluster requeues the job, else --arrange--> successor
                    +--> cancelled: --revoke--> nothing follows
    submissions do not work --requeue--> the cluster starts our own job again

A successor is the same script again, submitted to begin after the end of this job: it waits however long the checkpoint
takes, and also if the cluster starts our job again by itself. Whether it may go on is decided when it starts, by
`why_not_another` in experiments/trial/attempts.py.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Literal

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import (
    ENDED_BY_CLUSTER,
    AttemptEnd,
    AttemptRefusedError,
    EndState,
    Follows,
    read_attempts,
    taken_away,
    why_not_another,
)
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState, StoppedError, TrialLogError
from corral.launcher.files.patience import insist
from corral.launcher.layout.layout import PlacedTrial
from corral.launcher.slurm.client import SlurmError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.job_queue import is_head_of, submit_once
from corral.launcher.slurm.own_jobs import OwnJob, OwnJobs
from corral.launcher.slurm.verdict import Job, JobEnd, JobPhase
from corral.launcher.supervisor.recorder import Recorder, note_failed_node
from corral.launcher.supervisor.units import EndTrial

_SWEEP_TIMEOUT_S = 15.0


@dataclass(slots=True, kw_only=True)
class Continuation:
    """The cluster's part in what follows one attempt."""

    cluster: SlurmCluster
    """With a short timeout, as it may be about to kill us."""
    trial: PlacedTrial
    own: OwnJob
    record: Callable[..., None]
    """Adds a line to the journal."""
    successor: str = field(init=False)
    """Job id of the successor; "" if there is none."""
    _own_jobs: OwnJobs = field(init=False)

    def __post_init__(self) -> None:
        self._own_jobs = OwnJobs(self.trial.directory, self.trial.plan.trial)
        self.successor = self._own_jobs.successor_of(self.own.job_id)

    def explain(self) -> JobEnd:
        """Why the cluster sends SIGTERM; records the nodes that failed, if it is that."""
        end = self.cluster.why_ending(self.own, self.trial.directory)
        if end.state is EndState.NODE_FAILED:
            for node in self.cluster.failed_nodes(self.own.hosts):
                note_failed_node(self.trial.directory, node, self.record)
        return end

    def arrange(self) -> str:
        """Puts a successor into the queue, once; returns why there is none, or ""."""
        if self.successor:
            return ""
        trial, after = self.trial, self.own.job_id
        excluded = trial.directory.failed_nodes()
        submit = partial(self.cluster.submit_successor, trial, after=after, exclude_nodes=excluded)
        try:
            # One look: the cluster may be about to kill us.
            self.successor = submit_once(self.cluster, submit, is_it=self._is_successor, looks=1)
        except SlurmError as error:
            self.record("successor_refused", cause=str(error))
            return str(error)
        self._remember(self.successor, after=after)
        self.record("successor_submitted", job_id=self.successor, after=after, excluded=excluded)
        return ""

    def revoke(self) -> None:
        """Nothing is to follow: takes the successor out of the queue, if the cluster lets it."""
        if not self.successor:
            return
        try:
            self.cluster.cancel(self.successor)
        except SlurmError as error:
            # It will find in the trial log that nothing is to follow, and end.
            self.record("successor_not_cancelled", job_id=self.successor, cause=str(error))
            return
        self.record("successor_cancelled", job_id=self.successor)
        self._remember(self.successor, after="")
        self.successor = ""

    def requeue(self) -> str:
        """Lets the cluster start our own job again, which ends it now; returns why not, or ""."""
        try:
            self.cluster.requeue(self.own.job_id)
        except SlurmError as error:
            self.record("requeue_refused", cause=str(error))
            return str(error)
        self.record("requeued", job_id=self.own.job_id)
        return ""

    def sweep(self) -> None:
        """Cancels every job of this trial but our own: nothing of a trial that has ended stays in the queue."""
        try:
            insist(
                self._cancel_others,
                lambda error: isinstance(error, SlurmError),
                waiting_for="the cluster, to cancel jobs of the trial",
                patience_s=_SWEEP_TIMEOUT_S,
            )
        except SlurmError as error:
            self.record("jobs_left", cause=str(error))

    def _cancel_others(self) -> None:
        for job, _ in self._own_jobs.select(self.cluster.jobs()):
            is_ours = self.own.job_id in (job.job_id, job.part_of)  # a component ends with us
            if job.is_staying and not is_ours:
                self.cluster.cancel(job.job_id)

    def _remember(self, successor: str, *, after: str) -> None:
        """Notes after which job's end it goes on; "" if after none."""
        try:
            # Which attempt it makes is known when it starts.
            self._own_jobs.note(successor, attempt=-1, after=after)
        except OSError as error:
            self.record("successor_not_written", job_id=successor, cause=str(error))

    def _is_successor(self, job: Job) -> bool:
        is_waiting = job.phase is JobPhase.WAITING and job.job_id != self.own.job_id
        return is_waiting and is_head_of(self._own_jobs)(job)


ADVICE = "continue with rl-submit --resume"
_REFUSED = "no further job could be submitted"
_CAUSE_OF_HAND_OVER = {
    EndState.TIMED_OUT: "the time limit is near",
    EndState.PREEMPTED: "its nodes are wanted for another job",
}
_LOCAL_MEANING = {
    signal.SIGUSR2: f"SIGUSR2: {_CAUSE_OF_HAND_OVER[EndState.TIMED_OUT]}; {ADVICE}",
    signal.SIGTERM: "SIGTERM to the supervisor",
    signal.SIGINT: "SIGINT to the supervisor",
}
# SLURM has sent SIGTERM to the steps too, and kills after KillWait: a step that has not ended by then will not
# checkpoint.
_ENDING_GRACE_S = 1.0


class EndPhase(StrEnum):
    """The phases of the end of an attempt."""

    OPEN = "open"
    HANDING_OVER = "handing over"
    FINAL = "final"
    CLOSED = "closed"


class EndMachine:
    """The decisions about the end of one attempt.

    Args:
        queue: of the cluster that another job can be asked of; None if there is none.
        shell: puts down what is decided.
    """

    def __init__(self, queue: Continuation | None, shell: "EndShell") -> None:
        self._queue = queue
        self._shell = shell
        self.state = EndState.STOPPED
        self.cause = ""
        """For people."""
        self._job_end: JobEnd | None = None
        self._is_in_queue_again = False
        self._recorded: tuple[EndState, Follows] | None = None
        """The end that was recorded last, and what follows it."""
        self.phase = EndPhase.OPEN

    @property
    def is_job_ending(self) -> bool:
        """Whether the cluster is about to kill us."""
        return self._job_end is not None

    @property
    def is_settled(self) -> bool:
        """Whether a wish to hand over comes too late."""
        return self.phase in (EndPhase.FINAL, EndPhase.CLOSED) or self.is_job_ending

    @property
    def then(self) -> Literal["", "requeue"]:
        """What a stop of the trial log that the supervisor itself appends says about what follows."""
        return "requeue" if self.phase is EndPhase.HANDING_OVER else ""

    def hand_over(self, state: EndState, cause: str, *, is_requeued: bool = False) -> None:
        """The next attempt is to go on. What ends the trial, or the job already, goes first.

        Args:
            is_requeued: whether the cluster has put our job back into the queue already; its SIGTERM follows.
        """
        if self.is_settled or self._queue is None:
            return
        self.phase, self.state, self.cause = EndPhase.HANDING_OVER, state, cause
        self._is_in_queue_again |= is_requeued
        if self._is_in_queue_again:
            self._revoke()
        else:
            self._arrange()  # if it is refused, the cluster is asked again when nothing runs any more

    def stop(self, state: EndState = EndState.STOPPED, cause: str = "") -> None:
        """Somebody wants the trial to end here."""
        if self.phase is EndPhase.CLOSED:
            return  # what follows finds the request
        if self.phase is not EndPhase.FINAL:
            self.phase, self.state, self.cause = EndPhase.FINAL, state, cause
        self._revoke()

    def job_ends(self, end: JobEnd) -> None:
        """The cluster ends our job, and will not say so again."""
        if self.is_job_ending:
            return
        self._job_end = end
        if not end.state.may_go_on:
            self.stop(end.state, end.cause)
        elif self.phase in (EndPhase.OPEN, EndPhase.HANDING_OVER):
            self.phase, self.state, self.cause = EndPhase.HANDING_OVER, end.state, end.cause
            if end.needs_successor and (why_not := self._arrange()):
                self.phase, self.cause = EndPhase.FINAL, f"{self.cause}; {_REFUSED}: {why_not}"
        if self.phase is EndPhase.FINAL:
            self._record("")
        else:
            self._record("requeue" if self._is_requeued or not self.successor else "successor")
        if end.is_requeued and self.phase is EndPhase.HANDING_OVER:
            # Asked for before it was said: of two jobs that go on, the cluster's is enough. In the grace period of a
            # preemption nobody can know: a job that leaves before it is over is not requeued, one that is slower is.
            self._revoke()

    def judge(self, end: EndTrial, *, is_done: bool, refusal: AttemptRefusedError | None) -> None:
        """Nothing runs any more: what that means.

        Args:
            is_done: whether the trial log holds Done.
            refusal: why no further attempt may follow, whatever is wanted.
        """
        is_ending_by_itself = self.is_job_ending and self.phase is EndPhase.HANDING_OVER
        if is_done:
            self.phase, self.state, self.cause = EndPhase.FINAL, EndState.COMPLETE, ""
        elif end.outcome.is_failure and not is_ending_by_itself:
            self.phase, self.state, self.cause = EndPhase.FINAL, end.outcome, end.cause
        elif self.phase is not EndPhase.HANDING_OVER:
            self.phase, self.cause = EndPhase.FINAL, self.cause or end.cause
        elif refusal is not None:
            self.phase, self.cause = EndPhase.FINAL, f"{self.cause}; {refusal}"

    @property
    def goes_on(self) -> bool:
        """Whether the next attempt follows by itself, as far as it is known."""
        is_handed_over = self.phase is EndPhase.CLOSED and self._recorded is not None and bool(self._recorded[1])
        return is_handed_over or self.phase is EndPhase.HANDING_OVER

    def close(self) -> None:
        """After `judge`, when everything else has been cleared away: sees to what follows, and records the end."""
        if self.phase is EndPhase.FINAL:
            self._finish()
        elif self.phase is EndPhase.HANDING_OVER:
            self._see_to_next()

    def _see_to_next(self) -> None:
        if self._is_requeued:
            self._close("requeue")
        elif not (why_not := self._arrange()):
            self._close("successor")
        elif self.is_job_ending:
            self._give_up(self.state, why_not)
        else:
            self._close("requeue")  # recorded before it is done, because it ends us
            if why_not := self._queue.requeue() if self._queue is not None else "":
                self._give_up(EndState.STOPPED, why_not)  # neither way is open: a human has to go on

    @property
    def _is_requeued(self) -> bool:
        """Whether the cluster starts our job again by itself; if it does not say so, our jobs ask for that."""
        if self._job_end is None:
            return self._is_in_queue_again
        return self._job_end.is_requeued or self._job_end.state is EndState.UNKNOWN

    @property
    def successor(self) -> str:
        """The job that waits to go on; "" if there is none."""
        return self._queue.successor if self._queue is not None else ""

    def _arrange(self) -> str:
        return "" if self._queue is None or self.successor else self._queue.arrange()

    def _revoke(self) -> None:
        if self._queue is not None and self.successor:
            self._queue.revoke()

    def _give_up(self, state: EndState, why: str) -> None:
        self.state, self.cause = state, f"{self.cause}; {_REFUSED}: {why}"
        self._finish(needs_advice=True)

    def _finish(self, *, needs_advice: bool = False) -> None:
        """Nothing follows."""
        self.phase = EndPhase.CLOSED
        if self._queue is not None:
            self._shell.seal()
        self._record("", needs_advice=needs_advice)
        self._revoke()
        if self._queue is not None and not self.is_job_ending:
            self._queue.sweep()

    def _close(self, then: Follows) -> None:
        self.phase = EndPhase.CLOSED
        self._record(then)

    def _record(self, then: Follows, *, needs_advice: bool = False) -> None:
        if (self.state, then) == self._recorded:
            return
        self._recorded = self.state, then
        is_advised = not then and (needs_advice or self.state.may_go_on)
        self._shell.record_end(self.state, f"{self.cause}; {ADVICE}" if is_advised else self.cause, then)


@dataclass(slots=True, kw_only=True)
class EndShell:
    """Sees the end of one attempt through: passes signals and requests to EndMachine, and carries out its decisions."""

    directory: TrialDirectory
    plan: RunPlan
    log: TrialLog
    """Of the thread that looks, until all has ended."""
    continuation: Continuation | None
    """None where there are no jobs."""
    recorder: Recorder
    machine: EndMachine = field(init=False)
    _own_request: StopRequest | None = None
    _caused_by: str = ""
    """The task whose end ends the trial."""

    def __post_init__(self) -> None:
        self.machine = EndMachine(self.continuation, self)

    def signalled(self, number: signal.Signals, *, was_asked: bool) -> StopRequest | None:
        """What a signal asks for; None if it says nothing new.

        Args:
            was_asked: whether the trial is being stopped already; a second signal means now.
        """
        continuation = self.continuation
        if continuation is not None and number is signal.SIGUSR2:
            # Sites may let the cluster send the same signal at the beginning of a preemption's grace period.
            if was_asked or self.machine.is_settled:
                return None
            prospect = continuation.cluster.prospect(continuation.own)
            state = EndState.PREEMPTED if prospect.is_preempted else EndState.TIMED_OUT
            self.machine.hand_over(state, _CAUSE_OF_HAND_OVER[state], is_requeued=prospect.is_requeued)
            by = f"{number.name}: {_CAUSE_OF_HAND_OVER[state]}"
            return self._request(by, grace_s=self.plan.supervision.stop_grace_s, state=state)
        if continuation is not None and number is signal.SIGTERM:
            if self.machine.is_job_ending:
                return None  # it is said more than once
            job_end = continuation.explain()
            if job_end.state is not EndState.STOPPED:
                self.machine.job_ends(job_end)
                # A cancelled job needs no checkpoint, and SLURM does not wait for workers that ignore SIGTERM.
                is_now = not job_end.state.may_go_on
                return self._request(
                    f"SLURM ({job_end.cause})", grace_s=_ENDING_GRACE_S, state=job_end.state, now=is_now
                )
        self.machine.stop()
        is_now = was_asked and number is not signal.SIGUSR2
        return self._request(_LOCAL_MEANING[number], grace_s=self.plan.supervision.stop_grace_s, now=is_now)

    def requested(self, request: StopRequest) -> None:
        """A stop request was found."""
        if request == self._own_request:
            return
        if request.is_notice and self.continuation is not None:
            # In the grace period of a preemption the cluster asks the steps to leave, and not us.
            # Where there is none it asks all of us at once, and what the steps say may be heard first.
            prospect = self.continuation.cluster.prospect(self.continuation.own)
            if prospect.is_ending and not prospect.is_requeued:
                return  # our own SIGTERM comes too, and only then it can be said why: of scancel nothing follows
            why = EndState.PREEMPTED if prospect.is_preempted else EndState.REQUEUED
            self.machine.hand_over(why, _CAUSE_OF_HAND_OVER.get(why, request.by), is_requeued=prospect.is_requeued)
            return
        # Set if the supervisor before us, which was killed, has asked for its job's sake.
        state = EndState(request.state) if request.state in tuple(EndState) else None
        if self.continuation is None or not request.then:
            self.machine.stop(state or EndState.STOPPED, request.by if state else "")
        else:
            cause = _CAUSE_OF_HAND_OVER.get(state, request.by) if state else f"asked for by {request.by}"
            self.machine.hand_over(state or EndState.REQUEUED, cause)

    def judge(self, end: EndTrial, log: LogState) -> None:
        """Finds out what the end means, with what the trial log holds by now."""
        attempts = read_attempts(self.directory)
        taken = taken_away(self.directory, [record for record in attempts if record.attempt != self.recorder.attempt])
        if self.machine.state in ENDED_BY_CLUSTER:  # which may not be written down yet
            taken.add(self.recorder.attempt)
        refusal = why_not_another(attempts, log, taken)
        self._caused_by = end.failed
        self.machine.judge(end, is_done=log.is_done, refusal=refusal)

    def _request(self, by: str, *, grace_s: float, state: EndState | None = None, now: bool = False) -> StopRequest:
        self._own_request = StopRequest(
            requested_at=time.time(), by=by, now=now, grace_s=grace_s, then=self.machine.then, state=state or ""
        )
        return self._own_request

    def seal(self) -> None:
        try:
            state = self.log.read()
            if state.is_handed_over or (self.machine.successor and not state.is_stopped):
                self.log.request_stop("supervisor", reason="no further attempt follows by itself")
        except StoppedError:
            return
        except (OSError, TrialLogError) as error:  # control/end-N.json says the same, where it can be written
            self.recorder.event("log_not_sealed", cause=str(error))

    def record_end(self, state: EndState, cause: str, then: Follows) -> None:
        caused_by = self._caused_by if state.is_failure else ""
        end = AttemptEnd(attempt=self.recorder.attempt, state=state, cause=cause, then=then, caused_by=caused_by)
        self.recorder.end(self.directory, end)
