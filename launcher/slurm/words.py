"""SLURM's words for the state of a job, in four groups: every other module asks here what a word means.

squeue, scontrol, sacct --state_word--> RUNNING --> PENDING_WORDS, RUNNING_WORDS, LEAVING_WORDS (active) or ENDED_WORDS
"""

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


def state_word(text: str) -> str:
    """The word alone: squeue prints e.g. `CANCELLED by 1000`, newer versions add flags after a plus sign."""
    return text.split()[0].partition("+")[0].upper() if text.strip() else ""


def is_active(text: str) -> bool:
    """Whether a job in this state is in the queue or on nodes."""
    return state_word(text) in PENDING_WORDS | RUNNING_WORDS | LEAVING_WORDS


def is_staying(text: str) -> bool:
    """Whether it is there and will be until somebody ends it."""
    return state_word(text) in PENDING_WORDS | RUNNING_WORDS
