"""How one attempt ends, as a pure state machine: requests, the cluster's word and the last exit go in, actions out.

             time nearly up, preempted, nodes lost,
             rl-stop --requeue, our job is ended                    nothing runs any more
    OPEN ----------------------------------------> HANDING_OVER ---------------------------> CLOSING
     |                                               |       |                                |   |
     | rl-stop, a signal to the supervisor alone,    |       | the trial is complete, failed, |   | our job is requeued,
     | scancel                                       |       | or no attempt may follow       |   | a successor waits
     +-----------------------------------------------+-------+---> FINAL <--------------------+   v
                                                                     |     no job can be had    CLOSED
                                                                     +--nothing runs any more-----^

FINAL is somebody's word that the trial ends here: nothing that comes later takes it back, and of several the first one
gives state and cause. attempt_ended is recorded for every attempt, once; trial_ended only when nothing follows. While
our job is being ended both are recorded as soon as they are known: we may be killed before the workers have ended.

Whether an attempt may follow is decided by `why_not_another` in experiments/trial/attempts.py: end/shell.py, the shell,
hands its answer to `judge`, and the start of the next job asks it again. Nothing here does I/O. Each method returns
what to do now, in order.
"""

from enum import StrEnum
from typing import Literal

from corral.experiments.trial.attempt_end_record import EndState, Follows
from corral.experiments.trial.attempts import Refusal
from corral.launcher.cluster.own_job import JobEnd
from corral.launcher.supervisor.end.actions import (
    AskForSuccessor,
    EndAction,
    RecordAttemptEnd,
    RecordTrialEnd,
    RequeueOwnJob,
    RevokeSuccessor,
    SealLog,
    SweepQueue,
    Verdict,
)
from corral.launcher.supervisor.units.actions import EndTrial

ADVICE = "continue with rl-submit --resume"
_REFUSED = "no further job could be submitted"


class EndPhase(StrEnum):
    """What is to become of the attempt."""

    OPEN = "open"
    HANDING_OVER = "handing over"
    FINAL = "final"
    CLOSING = "closing"
    CLOSED = "closed"


class EndMachine:
    """The decisions about the end of one attempt.

    Args:
        has_queue: whether there is a cluster that another job can be asked of.
        successor: the job that waits to go on, if a supervisor before us has asked for it.
    """

    def __init__(self, *, has_queue: bool, successor: str = "") -> None:
        self._has_queue = has_queue
        self._successor = successor
        self._state = EndState.STOPPED
        self._cause = ""
        self._job_end: JobEnd | None = None
        self._is_in_queue_again = False
        self._is_recorded = False
        self._trial_end: EndState | None = None
        """Of the trial_ended that was recorded last."""
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
        return "requeue" if self.phase in (EndPhase.HANDING_OVER, EndPhase.CLOSING) else ""

    def hand_over(self, state: EndState, cause: str, *, is_requeued: bool = False) -> list[EndAction]:
        """The next attempt is to go on. What ends the trial, or the job already, goes first.

        Args:
            is_requeued: whether the cluster has put our job back into the queue already; its SIGTERM follows.
        """
        if self.is_settled or not self._has_queue:
            return []
        self.phase, self._state, self._cause = EndPhase.HANDING_OVER, state, cause
        self._is_in_queue_again |= is_requeued
        if self._is_in_queue_again:
            return [RevokeSuccessor()] if self._successor else []
        return [] if self._successor else [AskForSuccessor()]

    def stop(self, state: EndState = EndState.STOPPED, cause: str = "") -> list[EndAction]:
        """Somebody wants the trial to end here."""
        if self.phase in (EndPhase.CLOSING, EndPhase.CLOSED):
            return []  # what follows finds the request
        if self.phase is not EndPhase.FINAL:
            self.phase, self._state, self._cause = EndPhase.FINAL, state, cause
        return [RevokeSuccessor()] if self._successor else []

    def job_ends(self, end: JobEnd) -> list[EndAction]:
        """The cluster ends our job, and will not say so again."""
        if self.is_job_ending:
            return []
        self._job_end = end
        actions: list[EndAction] = []
        if not end.state.may_go_on:
            actions = self.stop(end.state, end.cause)
        elif self.phase in (EndPhase.OPEN, EndPhase.HANDING_OVER):
            self.phase, self._state, self._cause = EndPhase.HANDING_OVER, end.state, end.cause
            if end.needs_successor and not self._successor:
                return [AskForSuccessor()]  # and with the answer, at once, the end is recorded
        actions += self._record_at_once()
        if end.is_requeued and self.phase is EndPhase.HANDING_OVER and self._successor:
            # Asked for before it was said: of two jobs that go on, the cluster's is enough. In the grace period of a
            # preemption nobody can know: a job that leaves before it is over is not requeued, one that is slower is.
            actions.append(RevokeSuccessor())
        return actions

    def successor_found(self, job_id: str) -> list[EndAction]:
        """A job waits to go on."""
        self._successor = job_id
        match self.phase:
            case EndPhase.CLOSING:
                return self._close("successor")
            case EndPhase.HANDING_OVER if self.is_job_ending:
                return self._record_at_once()
            case EndPhase.FINAL | EndPhase.CLOSED if not self._goes_on:
                return [RevokeSuccessor()]
        return []

    def successor_refused(self, why: str) -> list[EndAction]:
        """No further job is taken now; the cluster is asked again when nothing runs any more, if there is time."""
        match self.phase:
            case EndPhase.CLOSING if self._job_end is None:
                # Recorded before it is done, because it ends us.
                return [*self._close("requeue"), RequeueOwnJob()]
            case EndPhase.CLOSING:
                return self._give_up(self._state, why)
            case EndPhase.HANDING_OVER if self._job_end is not None and self._job_end.needs_successor:
                self.phase, self._cause = EndPhase.FINAL, f"{self._cause}; {_REFUSED}: {why}"
                return self._record_at_once()
        return []

    def successor_revoked(self) -> list[EndAction]:
        """It is out of the queue."""
        self._successor = ""
        return []

    def requeue_refused(self, why: str) -> list[EndAction]:
        """Neither way is open: a human has to go on."""
        self.phase = EndPhase.CLOSING
        return self._give_up(EndState.STOPPED, why)

    def judge(self, end: EndTrial, *, is_done: bool, refusal: Refusal | None) -> Verdict:
        """Nothing runs any more: what that means.

        Args:
            is_done: whether the trial log holds Done.
            refusal: why no further attempt may follow, whatever is wanted.
        """
        is_ending_by_itself = self.is_job_ending and self.phase is EndPhase.HANDING_OVER
        if is_done:
            self.phase, self._state, self._cause = EndPhase.FINAL, EndState.COMPLETE, ""
        elif end.outcome is EndState.FAILED and not is_ending_by_itself:
            self.phase, self._state, self._cause = EndPhase.FINAL, EndState.FAILED, end.cause
        elif self.phase is not EndPhase.HANDING_OVER:
            self.phase, self._cause = EndPhase.FINAL, self._advised(self._cause or end.cause)
        elif refusal is not None:
            self.phase, self._cause = EndPhase.FINAL, self._advised(f"{self._cause}; {refusal.text}")
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        """The end, as far as it is known."""
        return Verdict(state=self._state, cause=self._cause, goes_on=self._goes_on)

    def close(self) -> list[EndAction]:
        """After `judge`, when everything else has been cleared away: sees to what follows, and records the end."""
        if self.phase is EndPhase.HANDING_OVER:
            self.phase = EndPhase.CLOSING
            if self._is_requeued:
                return self._close("requeue")
            return self._close("successor") if self._successor else [AskForSuccessor()]
        return self._finish() if self.phase is EndPhase.FINAL else []

    @property
    def _goes_on(self) -> bool:
        return self.phase in (EndPhase.HANDING_OVER, EndPhase.CLOSING) or (
            self.phase is EndPhase.CLOSED and self._trial_end is None
        )

    @property
    def _is_requeued(self) -> bool:
        """Whether the cluster starts our job again by itself; if it does not say so, our jobs ask for that."""
        if self._job_end is None:
            return self._is_in_queue_again
        return self._job_end.is_requeued or self._job_end.state is EndState.UNKNOWN

    def _advised(self, cause: str) -> str:
        return f"{cause}; {ADVICE}" if self._state.may_go_on else cause

    def _give_up(self, state: EndState, why: str) -> list[EndAction]:
        self.phase, self._state = EndPhase.FINAL, state
        self._cause = f"{self._cause}; {_REFUSED}: {why}; {ADVICE}"
        return self._finish()

    def _finish(self) -> list[EndAction]:
        """Nothing follows."""
        self.phase = EndPhase.CLOSED
        actions: list[EndAction] = [SealLog()] if self._has_queue else []
        actions += self._record_attempt("")
        actions += self._record_trial(self._cause)
        if self._successor:
            actions.append(RevokeSuccessor())
        if self._has_queue and not self.is_job_ending:
            actions.append(SweepQueue())
        return actions

    def _close(self, then: Follows) -> list[EndAction]:
        self.phase = EndPhase.CLOSED
        return self._record_attempt(then)

    def _record_at_once(self) -> list[EndAction]:
        if self.phase is EndPhase.FINAL:
            return [*self._record_attempt(""), *self._record_trial(self._advised(self._cause))]
        return self._record_attempt("requeue" if self._is_requeued or not self._successor else "successor")

    def _record_attempt(self, then: Follows) -> list[EndAction]:
        if self._is_recorded:
            return []
        self._is_recorded = True
        return [RecordAttemptEnd(self._state, self._cause, then)]

    def _record_trial(self, cause: str) -> list[EndAction]:
        if self._state is self._trial_end:
            return []
        self._trial_end = self._state
        return [RecordTrialEnd(self._state, cause)]
