"""Why SLURM ends a job: what scontrol and slurmstepd said on a real cluster, and what we make of it."""

import dataclasses

import pytest

from corral.experiments.trial.attempts import EndState
from corral.launcher.slurm.parse import parse_key_values
from corral.launcher.slurm.verdict import JobEnd, JobProspect, explain_end, look_ahead


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a job that got SIGTERM saw, in SLURM's words; `%` is its id."""

    scontrol: str
    daemon: str = ""

    def explain(self, *, restart_count: int = 0, output_before: str = "", job_id: str = "7") -> JobEnd:
        text = f"{output_before}slurmstepd-n1: error: *** STEP %.0 ON n1 CANCELLED AT 2026-11-21T08:10:57 ***\n"
        text = f"{text}{self.daemon}\n" if self.daemon else output_before
        job = parse_key_values(self.scontrol.replace("%", job_id)) if self.scontrol else None
        return explain_end(job, text.replace("%", job_id), job_id=job_id, restart_count=restart_count)


def said(why: str = "") -> str:
    return f"slurmstepd-n1: error: *** JOB % ON n1 CANCELLED AT 2026-11-21T08:10:57 {why}***"


ENDING = "JobId=% JobName=a b Nice=0 JobState=COMPLETING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1"
REQUEUED = ENDING.replace("Restarts=0", "Restarts=1")
PREEMPTED = f"{ENDING} PreemptEligibleTime=2026-11-21T08:11:26 PreemptTime=2026-11-21T08:11:27"
NODE_FAILURE = said("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ")
NODE_DOWN = ENDING.replace("Reason=None", "Reason=NodeDown").replace("Requeue=1", "Requeue=0")
RUNNING = ENDING.replace("COMPLETING", "RUNNING")
TIME_LIMIT = ENDING.replace("Reason=None", "Reason=TimeLimit")


@pytest.mark.parametrize(
    ("answer", "state", "is_requeued"),
    [
        (Answer(ENDING, said()), "CANCELLED", False),
        (Answer(TIME_LIMIT, said("DUE TO TIME LIMIT ")), "TIMED_OUT", False),
        (Answer(REQUEUED, said("DUE TO PREEMPTION ")), "PREEMPTED", True),
        (Answer(PREEMPTED.replace("Requeue=1", "Requeue=0"), said()), "PREEMPTED", False),
        (Answer(REQUEUED, NODE_FAILURE), "NODE_FAILED", True),
        (Answer(NODE_DOWN, NODE_FAILURE), "NODE_FAILED", False),
        (Answer(REQUEUED, said("DUE TO JOB REQUEUE ")), "REQUEUED", True),
        (Answer(RUNNING, said()), "STOPPED", False),  # scancel --batch --signal=TERM: the job goes on
        (Answer(RUNNING), "STOPPED", False),  # kill
        (Answer(RUNNING.replace("RUNNING", "SIGNALING"), said()), "STOPPED", False),
    ],
)
def test_the_end_of_a_job_is_explained(answer: Answer, state: str, is_requeued: bool) -> None:
    assert answer.explain() == JobEnd(state=EndState(state), is_requeued=is_requeued)


@pytest.mark.parametrize(
    ("scontrol", "state", "is_requeued"),
    [
        (ENDING, "CANCELLED", False),
        (TIME_LIMIT, "TIMED_OUT", False),
        (REQUEUED, "REQUEUED", True),
        (PREEMPTED, "PREEMPTED", False),
        (f"{RUNNING} PreemptTime=2026-11-21T08:11:27", "PREEMPTED", False),
        (f"{RUNNING} PreemptTime=None", "STOPPED", False),
        (NODE_DOWN, "NODE_FAILED", False),
        (ENDING.replace("COMPLETING", "DEADLINE"), "TIMED_OUT", False),
        (ENDING.replace("COMPLETING", "CANCELLED+"), "CANCELLED", False),
        (ENDING.replace("COMPLETING", "NODE_FAIL"), "NODE_FAILED", False),
    ],
)
def test_a_template_that_writes_elsewhere_leaves_scontrol_to_tell(scontrol: str, state: str, is_requeued: bool) -> None:
    assert Answer(scontrol).explain() == JobEnd(state=EndState(state), is_requeued=is_requeued)


@pytest.mark.parametrize(
    ("daemon", "state", "is_requeued"),
    [
        ("", "UNKNOWN", False),
        (said(), "CANCELLED", False),
        (said("DUE TO TIME LIMIT "), "TIMED_OUT", False),
        (said("DUE TO PREEMPTION "), "PREEMPTED", True),
        (NODE_FAILURE, "NODE_FAILED", True),
        (said("DUE TO JOB REQUEUE "), "REQUEUED", True),
    ],
)
def test_without_a_controller_the_line_in_the_jobs_output_tells(daemon: str, state: str, is_requeued: bool) -> None:
    assert Answer("", daemon).explain() == JobEnd(state=EndState(state), is_requeued=is_requeued)


@pytest.mark.parametrize(
    ("scontrol", "is_preempted", "is_requeued", "is_ending"),
    [
        (RUNNING, False, False, False),
        (f"{RUNNING} PreemptTime=2026-11-21T08:11:27", True, False, False),  # in a grace period: what follows is open
        (REQUEUED, False, True, True),
        (PREEMPTED.replace("Restarts=0", "Restarts=1"), True, True, True),
        ("", False, False, False),
    ],
)
def test_what_is_decided_about_a_job_is_known_before_it_is_told(
    scontrol: str, is_preempted: bool, is_requeued: bool, is_ending: bool
) -> None:
    job = parse_key_values(scontrol.replace("%", "7")) if scontrol else None
    prospect = JobProspect(is_preempted=is_preempted, is_requeued=is_requeued, is_ending=is_ending)
    assert look_ahead(job, restart_count=0) == prospect
    assert not look_ahead(job, restart_count=1).is_requeued  # that one was ours


def test_lines_of_earlier_starts_and_of_other_jobs_are_not_ours() -> None:
    before = f"{said('DUE TO PREEMPTION ')}\n{said().replace('%', '70')}\n"
    assert Answer(REQUEUED, said()).explain(restart_count=1, output_before=before).state == "CANCELLED"
    assert Answer("", "").explain(restart_count=1, output_before=before).state == "UNKNOWN"


@pytest.mark.parametrize(
    ("state", "is_requeued", "may_go_on", "needs_successor"),
    [
        ("TIMED_OUT", False, True, True),
        ("PREEMPTED", False, True, True),
        ("PREEMPTED", True, True, False),
        ("NODE_FAILED", True, True, False),
        ("NODE_FAILED", False, True, True),
        ("REQUEUED", True, True, False),
        ("UNKNOWN", False, True, False),
        ("CANCELLED", False, False, False),
        ("STOPPED", False, False, False),
    ],
)
def test_who_sees_to_the_next_attempt(state: str, is_requeued: bool, may_go_on: bool, needs_successor: bool) -> None:
    end = JobEnd(state=EndState(state), is_requeued=is_requeued)
    assert (end.state.may_go_on, end.needs_successor) == (may_go_on, needs_successor)
    assert end.cause
