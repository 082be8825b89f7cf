"""SLURM's words for the state of a job, in four groups: every other module asks here what a word means.

squeue, scontrol, sacct --state_word--> `COMPLETING` --phase_of----------------> JobPhase in cluster/jobs.py
                                                     --verdict.judge_job-------> a word of TrialState in status/words.py
      our own job, while it is ended:                --job_end.explain_end-----> JobEnd in cluster/own_job.py

Beyond this folder a word is compared only by what is SLURM's alone: rl-doctor and rl-eval. All others compare ours.
"""

from corral.launcher.cluster.jobs import JobPhase

PENDING_WORDS = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "POWER_UP_NODE",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    }
)
"""It waits, or its nodes are being made ready."""
RUNNING_WORDS = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"})
"""It has its nodes."""
LEAVING_WORDS = frozenset({"COMPLETING", "STAGE_OUT"})
"""It gives them back."""
ENDED_WORDS = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",  # with requeueing it is hardly ever seen: squeue shows PENDING at once
        "REVOKED",
        "TIMEOUT",
    }
)
_WORDS_BY_PHASE = {
    JobPhase.WAITING: PENDING_WORDS,
    JobPhase.RUNNING: RUNNING_WORDS,
    JobPhase.LEAVING: LEAVING_WORDS,
    JobPhase.ENDED: ENDED_WORDS,
}


def state_word(text: str) -> str:
    """The word alone: squeue prints e.g. `CANCELLED by 1000`, newer versions add flags after a plus sign."""
    return text.split()[0].partition("+")[0].upper() if text.strip() else ""


def phase_of(text: str) -> JobPhase:
    """Where a job in this state stands; UNKNOWN for a word of a newer SLURM."""
    word = state_word(text)
    return next((phase for phase, words in _WORDS_BY_PHASE.items() if word in words), JobPhase.UNKNOWN)
