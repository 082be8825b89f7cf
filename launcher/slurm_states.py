"""What SLURM's words for a job mean for a trial. Each has an answer: an unknown one becomes UNKNOWN, never an error."""

from dataclasses import dataclass

# Words of a job that runs: the trial's own records say how well.
RUNNING_WORDS = frozenset({"RUNNING"})

_STATE_BY_WORD = {
    "CONFIGURING": "STARTING",
    "POWER_UP_NODE": "STARTING",
    "RESIZING": "STARTING",
    "SUSPENDED": "SUSPENDED",
    "STOPPED": "SUSPENDED",
    "COMPLETING": "STOPPING",
    "SIGNALING": "STOPPING",
    "STAGE_OUT": "STOPPING",
    "REQUEUED": "REQUEUED",
    "REQUEUE_FED": "REQUEUED",
    "REQUEUE_HOLD": "HELD",
    "SPECIAL_EXIT": "HELD",
    "RESV_DEL_HOLD": "HELD",
    "COMPLETED": "FAILED",  # asked only when the trial left no record of its own end
    "FAILED": "FAILED",
    "OUT_OF_MEMORY": "OOM",
    "TIMEOUT": "TIMED_OUT",
    "DEADLINE": "TIMED_OUT",
    "NODE_FAIL": "NODE_FAILED",
    "BOOT_FAIL": "NODE_FAILED",
    "LAUNCH_FAILED": "NODE_FAILED",
    "PREEMPTED": "PREEMPTED",
    "REVOKED": "PREEMPTED",
    "CANCELLED": "CANCELLED",
}
_NOTE_BY_WORD = {
    "COMPLETED": "the job ended without finishing the trial",
    "TIMEOUT": "time limit reached; continue with rl-submit --resume",
    "DEADLINE": "deadline reached; continue with rl-submit --resume",
    "OUT_OF_MEMORY": "a step needed more memory than it asked for; raise `mem` of its group",
    "PREEMPTED": "preempted; continue with rl-submit --resume",
    "NODE_FAIL": "a node failed; continue with rl-submit --resume",
    "CANCELLED": "cancelled outside of corral (scancel)",
}
_NEVER_STARTS = frozenset(
    {
        "PartitionNodeLimit",
        "PartitionConfig",
        "PartitionTimeLimit",
        "BadConstraints",
        "AccountNotAllowed",
        "InvalidAccount",
        "InvalidQOS",
        "QOSNotAllowed",
        "DependencyNeverSatisfied",
        "MaxMemPerLimit",
    }
)
_ADVICE_BY_REASON = {
    "Resources": "waiting for resources",
    "Priority": "other jobs are before it",
    "BeginTime": "not eligible before its begin time",
    "JobHeldUser": "held: scontrol release it",
    "JobHeldAdmin": "held by an administrator",
    "Dependency": "waits for another job",
    "Reservation": "waits for its reservation",
    "ReqNodeNotAvail": "a node that it asks for is not available",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
}


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """A trial's state as far as SLURM can tell."""

    state: str
    note: str = ""


def judge_job(word: str, reason: str, *, start: str = "N/A") -> JobVerdict:
    """The state for SLURM's (state, reason); RUNNING is to be refined by the trial's own records."""
    # squeue prints e.g. `CANCELLED by 1000`, newer versions add flags after a plus sign.
    head = word.split()[0].partition("+")[0].upper() if word.strip() else ""
    if head in RUNNING_WORDS:
        return JobVerdict("RUNNING")
    if head == "PENDING":
        return _judge_pending(reason, start)
    if head in _STATE_BY_WORD:
        return JobVerdict(_STATE_BY_WORD[head], _NOTE_BY_WORD.get(head, ""))
    return JobVerdict("UNKNOWN", f"SLURM says {word!r}, which this version of corral does not know")


def _judge_pending(reason: str, start: str) -> JobVerdict:
    if reason in _NEVER_STARTS:
        return JobVerdict("BLOCKED", f"{reason}: it will not start by itself; rl-stop it and ask for less")
    if reason == "JobHoldMaxRequeue" or "held" in reason.lower():
        return JobVerdict("HELD", _ADVICE_BY_REASON.get(reason, reason))
    estimate = "" if start in ("N/A", "") else f", est. start {start}"
    if reason in ("None", ""):
        return JobVerdict("QUEUED", estimate.lstrip(", "))
    return JobVerdict("QUEUED", f"{reason}: {_ADVICE_BY_REASON.get(reason, 'see man squeue')}{estimate}")
