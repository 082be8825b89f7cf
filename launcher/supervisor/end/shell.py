"""The hands of an attempt's end: signals and requests become events of EndMachine, its actions calls and records.

    supervisor.py tells                                                  +--> continuation.py: successor, requeue
    SIGUSR2, SIGTERM, SIGINT --+                                         +--> control/end-N.json, then the journal
    control/stop.json ---------+--> machine.py (pure) --EndAction--> ----+--> Stop in the trial log
    lost nodes, last exit -----+           ^                             |
                                           +---- the cluster's answer ---+

A signal becomes a stop request in control/, because the master has to see it too, and a supervisor that takes over.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempt_end_record import AttemptEndRecord, EndState, Follows, write_end
from corral.experiments.trial.attempts import ENDED_BY_CLUSTER, read_attempts, taken_away, why_not_another
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import LogState, StoppedError, TrialLogError
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
from corral.launcher.supervisor.end.continuation import Continuation
from corral.launcher.supervisor.end.machine import ADVICE, EndMachine
from corral.launcher.supervisor.units.actions import EndTrial

_CAUSE_BY_STATE = {
    EndState.TIMED_OUT: "the time limit is near",
    EndState.PREEMPTED: "its nodes are wanted for another job",
}
_LOCAL_MEANING = {
    signal.SIGUSR2: f"SIGUSR2: {_CAUSE_BY_STATE[EndState.TIMED_OUT]}; {ADVICE}",
    signal.SIGTERM: "SIGTERM to the supervisor",
    signal.SIGINT: "SIGINT to the supervisor",
}
# SLURM has sent SIGTERM to the steps too, and kills after KillWait: whoever has not ended by then will not checkpoint.
_ENDING_GRACE_S = 1.0


@dataclass(slots=True, kw_only=True)
class EndShell:
    """Sees the end of one attempt through."""

    directory: TrialDirectory
    attempt: int
    plan: RunPlan
    continuation: Continuation | None
    """None where there are no jobs."""
    record: Callable[..., None]
    """Adds a line to the journal."""
    _end: EndMachine = field(init=False)
    _own_request: StopRequest | None = None

    def __post_init__(self) -> None:
        self._end = EndMachine(has_queue=self.continuation is not None, successor=self._successor)

    @property
    def _successor(self) -> str:
        return self.continuation.successor if self.continuation is not None else ""

    @property
    def is_job_ending(self) -> bool:
        """Whether the cluster is about to kill us."""
        return self._end.is_job_ending

    @property
    def then(self) -> Literal["", "requeue"]:
        """What follows a stop of the trial log that the supervisor itself appends."""
        return self._end.then

    def signalled(self, number: signal.Signals, *, was_asked: bool) -> StopRequest | None:
        """What a signal asks for; None if it says nothing new.

        Args:
            was_asked: whether the trial is being stopped already; a second signal means now.
        """
        continuation = self.continuation
        if continuation is not None and number is signal.SIGUSR2:
            # Sites may let the cluster send the same signal at the beginning of a preemption's grace period.
            if was_asked or self._end.is_settled:
                return None
            prospect = continuation.look_ahead()
            state = EndState.PREEMPTED if prospect.is_preempted else EndState.TIMED_OUT
            self._do(self._end.hand_over(state, _CAUSE_BY_STATE[state], is_requeued=prospect.is_requeued))
            by = f"{number.name}: {_CAUSE_BY_STATE[state]}"
            return self._request(by, grace_s=self.plan.supervision.stop_grace_s, state=state)
        if continuation is not None and number is signal.SIGTERM:
            if self.is_job_ending:
                return None  # it is said more than once
            job_end = continuation.explain()
            if job_end.state is not EndState.STOPPED:
                self._do(self._end.job_ends(job_end))
                # Whoever cancels wants no checkpoint, and SLURM does not wait for workers that ignore SIGTERM.
                is_now = not job_end.state.may_go_on
                return self._request(
                    f"SLURM ({job_end.cause})", grace_s=_ENDING_GRACE_S, state=job_end.state, now=is_now
                )
        self._do(self._end.stop())
        is_now = was_asked and number is not signal.SIGUSR2
        return self._request(_LOCAL_MEANING[number], grace_s=self.plan.supervision.stop_grace_s, now=is_now)

    def requested(self, request: StopRequest) -> None:
        """A stop request was found."""
        if request == self._own_request:
            return
        if request.is_notice and self.continuation is not None:
            # In the grace period of a preemption the cluster asks the steps to leave, and not us.
            # Where there is none it asks all of us at once, and what the steps say may be heard first.
            prospect = self.continuation.look_ahead()
            if prospect.is_ending and not prospect.is_requeued:
                return  # our own SIGTERM comes too, and only then it can be said why: of scancel nothing follows
            why = EndState.PREEMPTED if prospect.is_preempted else EndState.REQUEUED
            cause = _CAUSE_BY_STATE.get(why, request.by)
            self._do(self._end.hand_over(why, cause, is_requeued=prospect.is_requeued))
            return
        # Set if the supervisor before us, which was killed, has asked for its job's sake.
        state = EndState(request.state) if request.state in tuple(EndState) else None
        if self.continuation is None or not request.then:
            self._do(self._end.stop(state or EndState.STOPPED, request.by if state else ""))
        else:
            cause = _CAUSE_BY_STATE.get(state, request.by) if state else f"asked for by {request.by}"
            self._do(self._end.hand_over(state or EndState.REQUEUED, cause))

    def nodes_lost(self, cause: str) -> None:
        """The allocation is not what it was: the next attempt gets all of its nodes again."""
        self._do(self._end.hand_over(EndState.NODE_FAILED, cause))

    def judge(self, end: EndTrial, log: LogState) -> Verdict:
        """What the end means, with what the trial log holds by now."""
        attempts = read_attempts(self.directory)
        taken = taken_away(self.directory, [record for record in attempts if record.attempt != self.attempt])
        if self._end.verdict.state in ENDED_BY_CLUSTER:  # which may not be written down yet
            taken.add(self.attempt)
        refusal = why_not_another(attempts, log, taken)
        return self._end.judge(end, is_done=log.is_done, refusal=refusal)

    def close(self, log: TrialLog) -> Verdict:
        """Sees to what follows, and records the end; returns what it became."""
        self._do(self._end.close(), log)
        return self._end.verdict

    def _request(self, by: str, *, grace_s: float, state: EndState | None = None, now: bool = False) -> StopRequest:
        self._own_request = StopRequest(
            requested_at=time.time(), by=by, now=now, grace_s=grace_s, then=self._end.then, state=state or ""
        )
        return self._own_request

    def _do(self, actions: Sequence[EndAction], log: TrialLog | None = None) -> None:
        pending = [*actions]
        while pending:
            pending += self._carry_out(pending.pop(0), log)

    def _carry_out(self, action: EndAction, log: TrialLog | None) -> list[EndAction]:
        """Does it; what the answer leads to comes back."""
        match action:
            case RecordAttemptEnd(state, cause, then):
                self._write_end(state, cause, then)
                self.record("attempt_ended", state=state, cause=cause, then=then, successor=self._successor)
            case RecordTrialEnd(state, cause):
                self._write_end(state, cause, "")
                self.record("trial_ended", state=state, cause=cause)
            case SealLog() if log is not None:
                self._seal(log)
            case _ if self.continuation is not None:
                return self._ask_cluster(action, self.continuation)
        return []

    def _ask_cluster(self, action: EndAction, continuation: Continuation) -> list[EndAction]:
        match action:
            case AskForSuccessor():
                why_not = continuation.arrange()
                if why_not:
                    return self._end.successor_refused(why_not)
                return self._end.successor_found(continuation.successor)
            case RevokeSuccessor():
                return self._end.successor_revoked() if continuation.revoke() else []
            case RequeueOwnJob():
                why_not = continuation.requeue()
                if why_not:
                    self.record("requeue_refused", cause=why_not)
                    return self._end.requeue_refused(why_not)
            case SweepQueue():
                continuation.sweep()
        return []

    def _seal(self, log: TrialLog) -> None:
        try:
            state = log.read()
            if state.is_handed_over or (self._successor and not state.is_stopped):
                log.request_stop("supervisor", reason="no further attempt follows by itself")
        except StoppedError:
            return
        except (OSError, TrialLogError) as error:  # control/end-N.json says the same, where it can be written
            self.record("log_not_sealed", cause=str(error))

    def _write_end(self, state: EndState, cause: str, then: Follows) -> None:
        """What later starts of the trial decide on; the journal is only told."""
        end = AttemptEndRecord(attempt=self.attempt, state=state, cause=cause, then=then)
        try:
            write_end(self.directory, end)
        except OSError as error:
            self.record("end_not_written", cause=str(error))
