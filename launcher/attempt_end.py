"""How an attempt ends, and what of it goes into journal and trial log: signals, requests and the last action go in.

    SIGUSR2, stop request with then=requeue --> successor, checkpoint --> the next attempt goes on     then = requeue
    SIGTERM --SLURM is asked why--> preempted, node failed, time limit, requeued --> the next one      then = requeue
                               +--> scancel --> CANCELLED                                              then = ""
    a stop request without then (rl-stop), whether it comes before or after these, wins --> STOPPED    then = ""

attempt_ended is recorded for every attempt, trial_ended only when nothing goes on by itself.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from corral.experiments.attempt_ends import AttemptEndRecord, Follows, write_end
from corral.experiments.attempts import read_attempts, why_not_another
from corral.experiments.plan import RunPlan
from corral.experiments.trial_directory import StopRequest, TrialDirectory
from corral.experiments.trial_log import LogState, StoppedError, TrialLog
from corral.launcher.continuation import Continuation
from corral.launcher.job_ends import JobEnd
from corral.launcher.unit_actions import EndTrial, Outcome

Then = Literal["", "requeue"]

_ADVICE = "continue with rl-submit --resume"
_TIME_LIMIT = "the time limit is near"
_TIME_LIMIT_NEAR = f"SIGUSR2: {_TIME_LIMIT}"
_LOCAL_MEANING = {
    signal.SIGUSR2: f"{_TIME_LIMIT_NEAR}; {_ADVICE}",
    signal.SIGTERM: "SIGTERM to the supervisor",
    signal.SIGINT: "SIGINT to the supervisor",
}
_NO_ADVICE = ("COMPLETE", "FAILED", "STOPPED", "CANCELLED")
# SLURM has sent SIGTERM to the steps too, and kills after KillWait: whoever has not ended by then will not checkpoint.
_ENDING_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The end of an attempt."""

    state: str
    cause: str
    goes_on: bool
    """Whether the next attempt follows by itself."""


class AttemptEnd:
    """Decides what the end of one attempt means; `continuation` is None where there is no SLURM."""

    def __init__(
        self,
        *,
        directory: TrialDirectory,
        attempt: int,
        plan: RunPlan,
        continuation: Continuation | None,
        record: Callable[..., None],
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._plan = plan
        self._continuation = continuation
        self._record = record
        self._state = Outcome.STOPPED.value
        self._cause = ""
        self._job_end: JobEnd | None = None
        self._own_request: StopRequest | None = None
        self._is_recorded = False
        self._recorded_end = ""
        """State of the trial_ended that was recorded last."""
        self._is_final = False
        """Whether somebody wants the trial to end here; nothing that comes later takes that back."""
        self.then: Then = ""
        """What follows a stop of the trial log that the supervisor itself appends."""

    @property
    def is_job_ending(self) -> bool:
        """Whether SLURM is about to kill us."""
        return self._job_end is not None and self._job_end.state != "STOPPED"

    def signalled(self, number: signal.Signals, *, was_asked: bool) -> StopRequest | None:
        """What a signal asks for; None if it says nothing new.

        Args:
            number: the signal.
            was_asked: whether the trial is being stopped already; a second signal means now.
        """
        grace_s = self._plan.supervision.stop_grace_s
        if self._continuation is not None and number is signal.SIGUSR2:
            if was_asked or self._is_final or self.is_job_ending:
                return None
            self.hand_over("TIMED_OUT", _TIME_LIMIT)
            return self._request(_TIME_LIMIT_NEAR, grace_s=grace_s)
        if self._continuation is not None and number is signal.SIGTERM:
            if self.is_job_ending:
                return None  # SLURM says it more than once
            self._job_end = self._continuation.explain()
            if self.is_job_ending:
                self._job_is_ending(self._continuation, self._job_end)
                # Whoever cancels wants no checkpoint, and SLURM does not wait for workers that ignore SIGTERM.
                is_now = not self._job_end.may_go_on
                return self._request(f"SLURM ({self._job_end.cause})", grace_s=_ENDING_GRACE_S, now=is_now)
        self.stop_for_good()
        is_now = was_asked and number is not signal.SIGUSR2
        return self._request(_LOCAL_MEANING[number], grace_s=grace_s, now=is_now)

    def requested(self, request: StopRequest) -> None:
        """A stop request was found."""
        if request == self._own_request:
            return
        if self._continuation is not None and request.by == _TIME_LIMIT_NEAR:
            self.hand_over("TIMED_OUT", _TIME_LIMIT)  # said by the supervisor before us, which was killed
        elif self._continuation is not None and request.then == "requeue":
            self.hand_over("REQUEUED", f"asked for by {request.by}")
        else:
            self.stop_for_good()

    def hand_over(self, state: str, cause: str) -> None:
        """The next attempt is to go on: asks for its job. What ends the trial, or the job already, goes first.

        Args:
            state: how this attempt ends, as a word of rl-status.
            cause: why.
        """
        if self._continuation is None or self._is_final or self.is_job_ending:
            return
        self._state, self._cause, self.then = state, cause, "requeue"
        self._continuation.arrange()

    def stop_for_good(self, state: str = Outcome.STOPPED.value, cause: str = "") -> None:
        """Somebody wants the trial to end: nothing follows. The first who does gives it its state and cause."""
        if not self._is_final:
            self._state, self._cause, self.then, self._is_final = state, cause, "", True
        if self._continuation is not None:
            self._continuation.revoke()

    def judge(self, end: EndTrial, log: LogState) -> Verdict:
        """What the end means, with what the trial log holds by now."""
        if log.is_done:
            return Verdict(state=Outcome.COMPLETE.value, cause="", goes_on=False)
        is_ending_by_itself = self.is_job_ending and self.then == "requeue"
        if end.outcome is Outcome.FAILED and not is_ending_by_itself:
            return Verdict(state=Outcome.FAILED.value, cause=end.cause, goes_on=False)
        if self.then != "requeue" or self._continuation is None:
            return Verdict(state=self._state, cause=self._advised(self._cause or end.cause), goes_on=False)
        refusal = why_not_another(read_attempts(self._directory), log)
        if refusal is not None:
            return Verdict(state=self._state, cause=self._advised(f"{self._cause}; {refusal.text}"), goes_on=False)
        return Verdict(state=self._state, cause=self._cause or end.cause, goes_on=True)

    def close(self, verdict: Verdict, log: TrialLog) -> Verdict:
        """Sees to what follows, and records the end; returns what it became."""
        continuation = self._continuation
        if continuation is None:
            self._record_end(verdict, "")
            return verdict
        if verdict.goes_on:
            if self._slurm_requeues() or not continuation.arrange():
                self._record_end(verdict, "requeue" if self._slurm_requeues() else "successor")
                return verdict
            if not self.is_job_ending:
                self._record_end(verdict, "requeue")  # before it is done: it ends us
                why_not = continuation.requeue()
                if not why_not:
                    return verdict
                self._record("requeue_refused", cause=why_not)
            cause = f"{verdict.cause}; no further job could be submitted; {_ADVICE}"
            verdict = Verdict(state=verdict.state if self.is_job_ending else "STOPPED", cause=cause, goes_on=False)
        self._seal(log)
        self._record_end(verdict, "")
        continuation.revoke()
        if not self.is_job_ending:
            continuation.sweep()
        return verdict

    def _job_is_ending(self, continuation: Continuation, end: JobEnd) -> None:
        if not end.may_go_on:
            self.stop_for_good(end.state, end.cause)
        elif not self._is_final:
            self._state, self._cause, self.then = end.state, end.cause, "requeue"
            why_not = continuation.arrange() if end.needs_successor else ""
            if why_not:
                self._cause, self.then = f"{end.cause}; {why_not}", ""
        follows: Follows = "successor" if continuation.successor and not end.is_requeued else "requeue"
        # At once: SLURM may kill us before the workers have ended.
        self._record_attempt_end(follows if self.then else "")
        if not self.then:
            self._record_trial_end(self._state, self._advised(self._cause))

    def _slurm_requeues(self) -> bool:
        return self._job_end is not None and (self._job_end.is_requeued or self._job_end.state == "UNKNOWN")

    def _request(self, by: str, *, grace_s: float, now: bool = False) -> StopRequest:
        self._own_request = StopRequest(requested_at=time.time(), by=by, now=now, grace_s=grace_s, then=self.then)
        return self._own_request

    def _advised(self, cause: str) -> str:
        return cause if self._state in _NO_ADVICE else f"{cause}; {_ADVICE}"

    def _seal(self, log: TrialLog) -> None:
        """Nothing follows: the log must not let a job go on that could not be taken out of the queue."""
        log.poll()
        has_successor = self._continuation is not None and bool(self._continuation.successor)
        if log.state.is_handed_over or (has_successor and not log.state.is_stopped):
            try:
                log.request_stop("supervisor", reason="no further attempt follows by itself")
            except StoppedError:
                return

    def _record_end(self, verdict: Verdict, then: Follows) -> None:
        self._state, self._cause = verdict.state, verdict.cause
        self._record_attempt_end(then)
        if not verdict.goes_on:
            self._record_trial_end(verdict.state, verdict.cause)

    def _write_end(self, state: str, cause: str, then: Follows) -> None:
        """What later starts of the trial decide on; the journal is only told."""
        try:
            write_end(self._directory, AttemptEndRecord(attempt=self._attempt, state=state, cause=cause, then=then))
        except OSError as error:
            self._record("end_not_written", cause=str(error))

    def _record_trial_end(self, state: str, cause: str) -> None:
        if state != self._recorded_end:  # again only if it came differently: Done in the last moment
            self._recorded_end = state
            self._write_end(state, cause, "")
            self._record("trial_ended", state=state, cause=cause)

    def _record_attempt_end(self, then: Follows) -> None:
        if self._is_recorded:
            return
        self._is_recorded = True
        self._write_end(self._state, self._cause, then)
        successor = self._continuation.successor if self._continuation is not None else ""
        self._record("attempt_ended", state=self._state, cause=self._cause, then=then, successor=successor)
