"""SLURM's words for the state of a job: every other module asks here what a word means.

squeue, scontrol, sacct --state_word--> `COMPLETING` --phase_of--------------> JobPhase in cluster/jobs.py
                                                     --meaning_of, verdict---> a word of TrialState in status/words.py
      our own job, while it is ended:                --job_end.explain_end---> JobEnd in cluster/own_job.py
      a step that could not be made:                 --srun_task-------------> ExitKind in trial/exits.py

What a word alone leaves open, its reason tells (verdict.py, of limits limits.py), and a closer look (job_details.py).
Beyond this folder a word is compared only by what is SLURM's alone: rl-doctor (doctor/probe.py, doctor/judge_nodes.py)
and rl-eval (evaluation/watcher.py). All others compare ours.
"""

from corral.launcher.cluster.jobs import JobPhase

_MEANINGS_BY_PHASE = {
    # It waits, or its nodes are being made ready.
    JobPhase.WAITING: {
        "PENDING": ("QUEUED", ""),  # its reason says more
        "CONFIGURING": ("STARTING", "nodes are being prepared"),
        "POWER_UP_NODE": ("STARTING", "nodes are being powered up"),
        "REQUEUED": ("REQUEUED", ""),
        "REQUEUE_FED": ("REQUEUED", ""),
        "REQUEUE_HOLD": ("HELD", "put back into the queue and held; scontrol release it"),
        "SPECIAL_EXIT": ("HELD", "put back into the queue and held after a special exit; scontrol release it"),
        "RESV_DEL_HOLD": ("HELD", "held because its reservation was deleted; rl-stop it"),
    },
    # It has its nodes.
    JobPhase.RUNNING: {
        "RUNNING": ("RUNNING", ""),
        "SUSPENDED": ("SUSPENDED", "suspended by SLURM; its workers stand still"),
        "STOPPED": ("SUSPENDED", "stopped by SLURM; its workers stand still"),
        "RESIZING": ("STARTING", ""),
        "SIGNALING": ("STOPPING", ""),
    },
    # It gives them back.
    JobPhase.LEAVING: {
        "COMPLETING": ("STOPPING", ""),
        "STAGE_OUT": ("STOPPING", ""),
    },
    JobPhase.ENDED: {
        # Asked only when the trial left no record of its own end.
        "COMPLETED": ("FAILED", "the job ended without finishing the trial"),
        "FAILED": ("FAILED", "the job failed before the trial could say why; see its logs/slurm-JOB.log"),
        "OUT_OF_MEMORY": ("OOM", "a step needed more memory than it asked for; raise `mem` of its group"),
        "TIMEOUT": ("TIMED_OUT", "time limit reached; continue with rl-submit --resume"),
        "DEADLINE": ("TIMED_OUT", "deadline reached; continue with rl-submit --resume"),
        "NODE_FAIL": ("NODE_FAILED", "a node failed; continue with rl-submit --resume"),
        "BOOT_FAIL": ("NODE_FAILED", "a node did not boot; continue with rl-submit --resume"),
        "LAUNCH_FAILED": ("NODE_FAILED", "a node could not launch it; continue with rl-submit --resume"),
        # With requeueing it is hardly ever seen: squeue shows PENDING at once.
        "PREEMPTED": ("PREEMPTED", "preempted; continue with rl-submit --resume"),
        "REVOKED": ("PREEMPTED", "taken by another cluster; continue with rl-submit --resume"),
        "CANCELLED": ("CANCELLED", "cancelled outside of corral (scancel)"),
    },
}
"""For each word the state of a trial whose job it is, and what explains it."""


def state_word(text: str) -> str:
    """The word alone: squeue prints e.g. `CANCELLED by 1000`, newer versions add flags after a plus sign."""
    return text.split()[0].partition("+")[0].upper() if text.strip() else ""


def phase_of(text: str) -> JobPhase:
    """Where a job in this state stands; UNKNOWN for a word of a newer SLURM."""
    word = state_word(text)
    return next((phase for phase, words in _MEANINGS_BY_PHASE.items() if word in words), JobPhase.UNKNOWN)


def meaning_of(text: str) -> tuple[str, str]:
    """The state of a trial whose job is in this state, and what explains it; UNKNOWN for a word of a newer SLURM."""
    unknown = "UNKNOWN", f"SLURM says {text!r}, which this version of corral does not know"
    return _MEANINGS_BY_PHASE.get(phase_of(text), {}).get(state_word(text), unknown)
