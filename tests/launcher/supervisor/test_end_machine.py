"""How an attempt ends: whoever asks, in whatever order, one job at most goes on, and none after a final word."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.trial.attempts import AttemptRefusedError, EndState, WhyNot
from corral.launcher.slurm.verdict import JobEnd
from corral.launcher.supervisor.attempt_end import EndMachine, EndPhase
from corral.launcher.supervisor.units import EndTrial

STOPPED = EndTrial(EndState.STOPPED, "the grace period ended")
FAILED = EndTrial(EndState.FAILED, "model_worker used up its restarts")
COMPLETE = EndTrial(EndState.COMPLETE, "")
NO_PROGRESS = AttemptRefusedError(WhyNot.NO_PROGRESS, "attempts 0 and 1 both ended before their first commit")
SCANCEL = JobEnd(state=EndState.CANCELLED, is_requeued=False)
TIME_LIMIT = JobEnd(state=EndState.TIMED_OUT, is_requeued=False)
REQUEUED = JobEnd(state=EndState.REQUEUED, is_requeued=True)
UNKNOWN = JobEnd(state=EndState.UNKNOWN, is_requeued=False)
JOB_ENDS = [
    JobEnd(state=state, is_requeued=is_requeued)
    for state in (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED)
    for is_requeued in (False, True)
] + [SCANCEL, REQUEUED, UNKNOWN]


class Verdict(NamedTuple):
    """How an attempt has ended."""

    state: EndState
    cause: str
    goes_on: bool

    @classmethod
    def of(cls, end: EndMachine) -> "Verdict":
        return cls(end.state, end.cause, end.goes_on)


@dataclass
class Slurm:
    """A queue that takes and gives up jobs, or does not, and what an attempt's end puts down; in order."""

    has_queue: bool = True
    alive: set[str] = field(default_factory=set)
    takes_jobs: bool = True
    cancels: bool = True
    requeues: bool = True
    num_requeued: int = 0
    actions: list[tuple[Any, ...]] = field(default_factory=list)
    end: EndMachine = field(init=False)

    def __post_init__(self) -> None:
        self.end = EndMachine(self if self.has_queue else None, self)

    @property
    def successor(self) -> str:
        return next(iter(self.alive), "")

    def arrange(self) -> str:
        self.actions.append(("arrange",))
        assert not self.alive, "a second successor was asked for"
        if not self.takes_jobs:
            return "QOSMaxSubmitJobPerUserLimit"
        self.alive.add("101")
        return ""

    def revoke(self) -> None:
        self.actions.append(("revoke",))
        if self.cancels:
            self.alive.clear()

    def requeue(self) -> str:
        self.actions.append(("requeue",))
        self.num_requeued += self.requeues
        return "" if self.requeues else "presently disabled"

    def sweep(self) -> None:
        self.actions.append(("sweep",))
        if self.cancels:
            self.alive.clear()

    def seal(self) -> None:
        self.actions.append(("seal",))

    def record_end(self, state: EndState, cause: str, then: str) -> None:
        self.actions.append(("end", state, cause, then))

    def all(self, kind: str) -> list[Any]:
        """What was done of one kind so far, with what."""
        return [action[1:] for action in self.actions if action[0] == kind]

    @property
    def final(self) -> list[Any]:
        """The ends after which nothing follows."""
        return [end for end in self.all("end") if not end[2]]

    def finish(
        self, end: EndTrial = STOPPED, *, is_done: bool = False, refusal: AttemptRefusedError | None = None
    ) -> Verdict:
        self.end.judge(end, is_done=is_done, refusal=refusal)
        self.end.close()
        return Verdict.of(self.end)


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


def test_a_job_that_is_in_the_queue_again_needs_no_successor(slurm: Slurm) -> None:
    slurm.end.hand_over(EndState.REQUEUED, "SIGTERM to the steps", is_requeued=True)
    slurm.end.hand_over(EndState.NODE_FAILED, "n2 failed")
    assert slurm.actions == [] and slurm.finish().goes_on  # also if SLURM's own word never comes
    assert slurm.actions == [("end", EndState.NODE_FAILED, "n2 failed", "requeue")]


def test_a_successor_is_revoked_once_our_own_job_is_in_the_queue_again(slurm: Slurm) -> None:
    slurm.end.hand_over(EndState.PREEMPTED, "wanted")
    slurm.end.hand_over(EndState.PREEMPTED, "wanted", is_requeued=True)
    assert slurm.finish().goes_on and slurm.alive == set()


HAND_OVERS = [EndState.TIMED_OUT, EndState.REQUEUED, EndState.NODE_FAILED, EndState.PREEMPTED]
EVENTS = st.one_of(
    st.just("stop"),
    st.sampled_from(HAND_OVERS),
    st.sampled_from(JOB_ENDS),
    st.fixed_dictionaries({name: st.booleans() for name in ("takes_jobs", "cancels", "requeues")}),
)


@settings(max_examples=300, deadline=None)
@given(
    has_queue=st.booleans(),
    events=st.lists(EVENTS, max_size=8),
    ends_in=st.sampled_from([STOPPED, FAILED, COMPLETE]),
    refusal=st.sampled_from([None, NO_PROGRESS]),
)
def test_whatever_comes_in_whatever_order_one_job_at_most_goes_on_and_none_after_a_final_word(
    has_queue: bool, events: list[Any], ends_in: EndTrial, refusal: AttemptRefusedError | None
) -> None:
    slurm = Slurm(has_queue=has_queue)
    end, final, job_end = slurm.end, None, None
    for event in events:
        match event:
            case "stop":
                end.stop()
                final = final or EndState.STOPPED
            case EndState():
                end.hand_over(event, "handed over")
            case JobEnd() if has_queue and job_end is None:
                job_end = event
                is_refused = end.phase is not EndPhase.FINAL and event.needs_successor and not slurm.takes_jobs
                end.job_ends(event)
                if not event.state.may_go_on or (is_refused and not slurm.alive):
                    final = final or event.state
            case dict():
                slurm.takes_jobs, slurm.cancels, slurm.requeues = event.values()
        assert len(slurm.alive) <= 1
        assert end.then == ("requeue" if end.phase is EndPhase.HANDING_OVER else "")
        if final is not None:
            assert end.phase is EndPhase.FINAL, "a final word was taken back"
        if job_end is None:
            assert slurm.all("end") == []
    is_done = ends_in is COMPLETE
    verdict = slurm.finish(ends_in, is_done=is_done, refusal=refusal)

    ends = slurm.all("end")
    last_state, _, then = ends[-1]
    assert len({(state, follows) for state, _, follows in ends}) == len(ends)
    assert len(slurm.alive) + slurm.num_requeued <= 1
    before = [*slurm.actions]
    end.close()
    end.stop()
    assert slurm.actions == before and Verdict.of(end) == verdict
    if verdict.goes_on:
        assert final is None and not is_done and refusal is None and slurm.final == []
        assert then == "requeue" or (then == "successor" and slurm.alive)
        is_requeued = job_end is not None and (job_end.is_requeued or job_end is UNKNOWN)
        assert slurm.alive or slurm.num_requeued or is_requeued, "nothing goes on"
        return
    assert last_state is verdict.state and then == ""
    assert bool(slurm.all("seal")) is has_queue
    assert slurm.num_requeued == 0 and (not slurm.alive or not slurm.cancels)
    if is_done:
        assert verdict.state is EndState.COMPLETE
    elif final is not None and ends_in is not FAILED:
        assert verdict.state is final
