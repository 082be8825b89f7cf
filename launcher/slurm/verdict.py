"""The meaning of SLURM's job states for a trial. A state that is not known becomes UNKNOWN, never an error.

squeue -o QUEUE_FORMAT --jobs_of_squeue--> Job      `scontrol show job` --job_of_scontrol--> Job
(state, reason, what else is known) --judge_job--> a word of TrialState in trial/words.py, and advice

PENDING     QUEUED | REQUEUED (it has run before) | BLOCKED (it will not start by itself) | HELD
RUNNING     refined by the trial's own records, which see more than SLURM does
over        FAILED, OOM, TIMED_OUT, NODE_FAILED, PREEMPTED, CANCELLED, unless the trial left its own word

Every other module asks here what a word means:

squeue, scontrol, sacct --state_word--> `COMPLETING` --phase_of----------> JobPhase
                                                     --meaning_of--------> a word of TrialState in trial/words.py
      our own job, while it is ended:                --explain_end-------> JobEnd
      a step that could not be made:                 --srun------------------> ExitKind in trial/ends.py

What a word alone leaves open, its reason tells, and a closer look (job_queue.py). Beyond this
folder a word is compared only by what is SLURM's alone: rl-doctor (doctor/look.py) and rl-eval
(evaluation/jobs.py). All others compare ours.

A cluster's jobs in words of our own.

WAITING --gets its nodes--> RUNNING --gives them back--> LEAVING --> ENDED      UNKNOWN: the cluster's word is new to us
   ^                           |
   +-- the cluster puts it back +
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from corral.experiments.trial.attempts import EndState
from corral.launcher.trial.words import TrialState
from corral.scheduling.slurm_formats import expand_host_list


class JobPhase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    """In the queue, or its nodes are being made ready."""
    RUNNING = "running"
    """It has its nodes."""
    LEAVING = "leaving"
    """It gives them back."""
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of this user."""

    job_id: str
    phase: JobPhase
    word: str
    """The cluster's own word for the state, for people."""
    reason: str = ""
    """Why it is so, in the cluster's words."""
    run: str = ""
    """Tells the runs of a job apart that was put back: when the present one started, or will."""
    num_nodes: int | None = None
    nodes: str = ""
    """As the cluster writes them."""
    hosts: tuple[str, ...] = ()
    """The names of its nodes, while it has them."""
    name: str = ""
    tag: Mapping[str, Any] = field(default_factory=dict)
    """corral's tag in its comment; {} if the job is another program's, or the site rewrites comments."""
    part_of: str = ""
    """The job whose later component this is; it comes and goes with it."""
    time_left: str = ""
    line: str = ""
    """All that the cluster said, for people."""
    has_run: bool = False
    """Whether it has been put back into the queue, as far as the trial's records were asked; so with what follows."""
    nodes_are_down: bool = False
    """Whether every node that could run it is down."""
    exceeded: str = ""
    """The limit that it exceeds whatever else runs, in words; "" if none is known."""
    exit_code: str = ""
    """As scontrol prints it, `0:53`; "" if it was not asked."""

    @property
    def state(self) -> TrialState:
        """Its meaning for a trial. RUNNING is refined by the trial's own records."""
        return self._judged[0]

    @property
    def note(self) -> str:
        """The explanation of the state, and the remedy."""
        return judge_exit(self.word, self.exit_code) or self._judged[1]

    @property
    def _judged(self) -> tuple[TrialState, str]:
        return judge_job(
            self.word,
            self.reason,
            start=self.run,
            has_run=self.has_run,
            nodes_are_down=self.nodes_are_down,
            exceeded=self.exceeded,
            job_id=self.job_id,
        )

    @property
    def findings(self) -> tuple[str, ...]:
        """The findings of a closer look, each with its source."""
        source_by_finding = {
            f"sacctmgr says: {self.exceeded}": self.exceeded,
            f"scontrol says ExitCode={self.exit_code}": self.exit_code,
            "sinfo says that no node that could run it is up": self.nodes_are_down,
        }
        return tuple(what for what, is_so in source_by_finding.items() if is_so)

    @property
    def is_staying(self) -> bool:
        """Whether it is there and will be until somebody ends it."""
        return self.phase in (JobPhase.WAITING, JobPhase.RUNNING)

    @property
    def is_active(self) -> bool:
        """Whether it is in the queue or on nodes."""
        return self.is_staying or self.phase is JobPhase.LEAVING

    @property
    def is_blocked(self) -> bool:
        """Whether waiting alone will not start it."""
        return self.state is TrialState.BLOCKED

    @property
    def number(self) -> int:
        """Grows with the order in which jobs were submitted."""
        return int(self.job_id) if self.job_id.isdecimal() else 0


_CAUSE_BY_STATE = {
    EndState.CANCELLED: "cancelled outside of corral (scancel)",
    EndState.TIMED_OUT: "the time limit was reached",
    EndState.PREEMPTED: "preempted",
    EndState.NODE_FAILED: "a node failed",
    EndState.REQUEUED: "requeued (scontrol requeue)",
    EndState.UNKNOWN: "the cluster ended the job, and could not be asked why",
    EndState.STOPPED: "SIGTERM to the supervisor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of our job, as the cluster decided it."""

    state: EndState
    """STOPPED if the job itself goes on, so that only this script was asked to end."""
    is_requeued: bool
    """Whether the cluster will start the job again by itself."""

    @property
    def cause(self) -> str:
        """For people."""
        return _CAUSE_BY_STATE[self.state]

    @property
    def needs_successor(self) -> bool:
        """Whether the trial should go on, and the cluster will not see to it."""
        is_over = self.state in (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED)
        return is_over and not self.is_requeued


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProspect:
    """The cluster's decision about our job so far, of which the job's script does not know yet."""

    is_preempted: bool
    """Its nodes are wanted for another one, at once or after a grace period."""
    is_requeued: bool
    """It is in the queue again already: a cluster may count the restart before it signals anybody."""
    is_ending: bool
    """It gives its nodes back: all of it is signalled, its script too."""


_MEANINGS_BY_PHASE: dict[JobPhase, dict[str, tuple[TrialState, str]]] = {
    # It waits, or its nodes are being made ready.
    JobPhase.WAITING: {
        "PENDING": (TrialState.QUEUED, ""),  # its reason says more
        "CONFIGURING": (TrialState.STARTING, "nodes are being prepared"),
        "POWER_UP_NODE": (TrialState.STARTING, "nodes are being powered up"),
        "REQUEUED": (TrialState.REQUEUED, ""),
        "REQUEUE_FED": (TrialState.REQUEUED, ""),
        "REQUEUE_HOLD": (TrialState.HELD, "put back into the queue and held; scontrol release it"),
        "SPECIAL_EXIT": (TrialState.HELD, "put back into the queue and held after a special exit; scontrol release it"),
        "RESV_DEL_HOLD": (TrialState.HELD, "held because its reservation was deleted; rl-stop it"),
    },
    # It has its nodes.
    JobPhase.RUNNING: {
        "RUNNING": (TrialState.RUNNING, ""),
        "SUSPENDED": (TrialState.SUSPENDED, "suspended by SLURM; its workers stand still"),
        "STOPPED": (TrialState.SUSPENDED, "stopped by SLURM; its workers stand still"),
        "RESIZING": (TrialState.STARTING, ""),
        "SIGNALING": (TrialState.STOPPING, ""),
    },
    # It gives them back.
    JobPhase.LEAVING: {
        "COMPLETING": (TrialState.STOPPING, ""),
        "STAGE_OUT": (TrialState.STOPPING, ""),
    },
    JobPhase.ENDED: {
        # Asked only when the trial left no record of its own end.
        "COMPLETED": (TrialState.FAILED, "the job ended without finishing the trial"),
        "FAILED": (TrialState.FAILED, "the job failed before the trial could say why; see its logs/slurm-JOB.log"),
        "OUT_OF_MEMORY": (TrialState.OOM, "a step needed more memory than it asked for; raise `mem` of its group"),
        "TIMEOUT": (TrialState.TIMED_OUT, "time limit reached; continue with rl-submit --resume"),
        "DEADLINE": (TrialState.TIMED_OUT, "deadline reached; continue with rl-submit --resume"),
        "NODE_FAIL": (TrialState.NODE_FAILED, "a node failed; continue with rl-submit --resume"),
        "BOOT_FAIL": (TrialState.NODE_FAILED, "a node did not boot; continue with rl-submit --resume"),
        "LAUNCH_FAILED": (TrialState.NODE_FAILED, "a node could not launch it; continue with rl-submit --resume"),
        # With requeueing it is hardly ever seen: squeue shows PENDING at once.
        "PREEMPTED": (TrialState.PREEMPTED, "preempted; continue with rl-submit --resume"),
        "REVOKED": (TrialState.PREEMPTED, "taken by another cluster; continue with rl-submit --resume"),
        "CANCELLED": (TrialState.CANCELLED, "cancelled outside of corral (scancel)"),
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


def meaning_of(text: str) -> tuple[TrialState, str]:
    """The state of a trial whose job is in this state, and what explains it; UNKNOWN for a word of a newer SLURM."""
    unknown = TrialState.UNKNOWN, f"SLURM says {text!r}, which this version of corral does not know"
    return _MEANINGS_BY_PHASE.get(phase_of(text), {}).get(state_word(text), unknown)


_NEVER_STARTS = {
    "PartitionNodeLimit": "it asks for more nodes, or more on a node, than the partition gives",
    "PartitionConfig": "the partition is not for this request",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "BadConstraints": "no nodes can meet its constraints",
    "AccountNotAllowed": "the account may not use this partition",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such QOS",
    "QOSNotAllowed": "the QOS may not be used here",
    "DependencyNeverSatisfied": "the job that it waits for can no longer end as it has to",
    "MaxMemPerLimit": "it asks for more memory than is allowed",
}
# What is before the comma of the one reason that is a sentence: "... are DOWN, DRAINED or reserved for jobs in ..."
_NODES_REQUIRED = "Nodes required for job are DOWN"
_ADVICE_BY_REASON = {
    "Resources": "waits for resources",
    "Priority": "other jobs are before it",
    "Prolog": "the nodes are being prepared",
    "Licenses": "waits for licenses",
    "BeginTime": "not eligible before its begin time",
    "JobHeldUser": "held by you; scontrol release {job}",
    "JobHeldAdmin": "held by an administrator; ask them to release {job}",
    "Dependency": "waits for another job",
    "Reservation": "waits for its reservation",
    "ReqNodeNotAvail": "a node that it asks for is not available now",
    "PartitionDown": "the partition is down; sinfo shows it",
    "PartitionInactive": "the partition is inactive; sinfo shows it",
    "NodeDown": "a node that it asks for is down",
    _NODES_REQUIRED: "or it waits for them; sinfo shows them",
    "FrontEndDown": "the front end is down",
}
_HELD_BY_SOMEBODY = ("JobHeldUser", "JobHeldAdmin")
_HOLDS = ("JobHoldMaxRequeue", "launch failed requeued held", "job requeued in held state", "JobLaunchFailure")
_UNKNOWN_START = ("N/A", "", "Unknown")


class Holder(StrEnum):
    """The owner of a limit."""

    QOS = "QOS"
    PARTITION = "QOS of the partition"
    ACCOUNT = "account"

    @property
    def field(self) -> str:
        """Of `launch`, which chooses it."""
        return self.split()[-1].lower()


class LimitKind(StrEnum):
    """The event that ends a job's wait for a limit."""

    NOTHING = "it never fits"
    """A limit of one job, of a node, or a least amount: others have no part in it."""
    OTHERS = "other jobs end"
    """Or nothing, if the job alone asks for more."""
    RENEWAL = "the site renews the budget"
    """Of CPU minutes and the like."""


# QOSMaxCpuPerJobLimit, QOSMaxGRESPerUser, AssocGrpCPUMinutesLimit, QOSMinCpuNotSatisfied, MaxCpuPerAccount, ...
_REASON = re.compile(
    r"(?P<holder>QOS|Assoc|)(?P<bound>Max|Min|Grp)(?P<what>[A-Z][A-Za-z]*?)(?P<minutes>Minutes|RunMinutes|)"
    r"(?P<scope>Per(?:Job|Node|User|Account)|)(?:Limit|NotSatisfied|)"
)


def limit_of_reason(reason: str) -> LimitKind | None:
    """What cures the waiting that squeue gives this reason for; None if it is about no limit."""
    match = _REASON.fullmatch(reason)
    if match is None or not (match["holder"] or match["scope"]):
        return None
    if match["scope"] in ("PerJob", "PerNode") or match["bound"] == "Min":
        return LimitKind.NOTHING
    is_budget = match["minutes"] == "Minutes" or match["what"] == "Wall"
    return LimitKind.RENEWAL if is_budget else LimitKind.OTHERS


def holder_of_reason(reason: str) -> Holder:
    """Whose limit it is."""
    return Holder.QOS if reason.startswith("QOS") else Holder.ACCOUNT


_QUEUE_COLUMNS = {
    "JobId": "%A",
    "DisplayId": "%i",  # `7`, `7+1` of a heterogeneous job, `7_0` of an array
    "JobState": "%T",
    "Reason": "%r",
    "StartTime": "%S",  # or the estimate for a pending job; N/A if unknown
    "TimeLeft": "%L",
    "NumNodes": "%D",
    "NodeList": "%N",
    # Last: they may hold anything, the separator included.
    "JobName": "%j",
    "Comment": "%k",
}
"""squeue's letter for what scontrol calls so."""
QUEUE_FORMAT = "|".join(_QUEUE_COLUMNS.values())


def jobs_of_squeue(text: str) -> list[Job]:
    """squeue's lines; one with too few fields is skipped."""
    rows = ((line, line.split("|", len(_QUEUE_COLUMNS) - 1)) for line in text.splitlines())
    return [
        _job_of(dict(zip(_QUEUE_COLUMNS, fields, strict=True)), line)
        for line, fields in rows
        if len(fields) == len(_QUEUE_COLUMNS)
    ]


def job_of_scontrol(values: Mapping[str, str]) -> Job:
    """A job from the fields of `scontrol show job`."""
    fields = {name: "" if value == "(null)" else value for name, value in values.items()}
    job = _job_of({**fields, "Reason": fields.get("Reason", "").replace("_", " ")}, "")
    line = f"(from scontrol) {job.job_id} {job.word} {job.reason}"
    return replace(job, hosts=tuple(expand_host_list(job.nodes)), line=line)


def _job_of(values: Mapping[str, str], line: str) -> Job:
    fields = defaultdict(str, values)
    phase = phase_of(fields["JobState"])
    leader, _, component = fields["DisplayId"].partition("+")
    return Job(
        job_id=fields["JobId"],
        phase=phase,
        word=fields["JobState"],
        reason=fields["Reason"],
        run=fields["StartTime"],
        num_nodes=int(fields["NumNodes"]) if fields["NumNodes"].isdecimal() else None,
        nodes=fields["NodeList"],
        hosts=tuple(expand_host_list(fields["NodeList"])) if phase is JobPhase.RUNNING else (),
        name=fields["JobName"],
        tag=_tag_of(fields["Comment"]),
        part_of=leader if component.isdecimal() and int(component) else "",
        time_left=fields["TimeLeft"],
        line=line,
    )


def _tag_of(comment: str) -> dict[str, Any]:
    """corral's tag in a comment, or {} if the comment is another program's."""
    try:
        content = json.loads(comment)
    except ValueError:
        return {}
    return content if isinstance(content, dict) and content.get("corral") == 1 else {}


def needs_nodes(reason: str) -> bool:
    """Whether a job waits for nodes that are not available, which may be down for good."""
    return reason.startswith(("ReqNodeNotAvail", _NODES_REQUIRED))


def judge_job(
    word: str,
    reason: str,
    *,
    start: str = "N/A",
    has_run: bool = False,
    nodes_are_down: bool = False,
    exceeded: str = "",
    job_id: str = "JOB",
) -> tuple[TrialState, str]:
    """A trial's state for SLURM's words, and what explains it; RUNNING is to be refined by the trial's own records.

    Args:
        start: start, or estimated start, as squeue prints it.
        has_run: whether the job has run before: SLURM has put it back then.
        nodes_are_down: whether every node that could run it is down.
        exceeded: the limit that it exceeds whatever else runs, in words; "" if none is known.
        job_id: for the advice.
    """
    if state_word(word) != "PENDING":
        return meaning_of(word)
    if blocked := _why_blocked(reason, nodes_are_down=nodes_are_down, exceeded=exceeded):
        return TrialState.BLOCKED, blocked
    return _judge_waiting(reason, start=start, has_run=has_run, job_id=job_id)


def judge_exit(word: str, exit_code: str) -> str:
    """What a job's exit code adds, as scontrol prints it (`0:53`); "" if nothing."""
    if state_word(word) != "FAILED" or exit_code in ("", "0:0"):
        return ""
    if exit_code.endswith(":53"):
        return "SLURM could not open the job's log: a folder of the trial directory is missing on the node"
    if exit_code == "127:0":
        return (
            "the job's script did not find its program on the node (exit code 127), likely the Python of rl-submit: "
            "install it where nodes see it, too; rl-doctor looks for it, and logs/slurm-JOB.log names what is missing"
        )
    return f"the job failed with exit code {exit_code} before the trial could say why; see its logs/slurm-JOB.log"


def _why_blocked(reason: str, *, nodes_are_down: bool, exceeded: str) -> str:
    """Why a pending job will not start by itself, and what to do; "" if waiting may cure it."""
    # `ReqNodeNotAvail, UnavailableNodes:n[1-2]`: the word is what comes first.
    head = reason.partition(",")[0]
    if head in _NEVER_STARTS:
        return f"{head}: {_NEVER_STARTS[head]}; rl-stop it and ask for less"
    if needs_nodes(reason) and nodes_are_down:
        return f"{reason}: all nodes that could run it are down; sinfo -R says why"
    kind = limit_of_reason(head)
    if kind is LimitKind.NOTHING or (kind is LimitKind.OTHERS and exceeded):
        holder = holder_of_reason(head)
        limit = exceeded or f"a limit of the {holder} for every single job"
        return f"{head}: {limit}; rl-stop it and ask for less, or for another launch.{holder.field}"
    return ""


def _judge_waiting(reason: str, *, start: str, has_run: bool, job_id: str) -> tuple[TrialState, str]:
    head, _, detail = reason.partition(",")
    if reason in _HOLDS or head in _HOLDS or "requeued held" in reason.lower():
        return TrialState.HELD, f"{reason}: it was put back too often; mend the cause, then scontrol release {job_id}"
    if head in _HELD_BY_SOMEBODY:
        return TrialState.HELD, f"{head}: {_advice(head, job_id)}"
    if has_run and head in ("BeginTime", "None", ""):
        return TrialState.REQUEUED, "" if start in _UNKNOWN_START else f"eligible at {start}"
    estimate = "" if start in _UNKNOWN_START else f", est. start {start}"
    state = TrialState.REQUEUED if has_run else TrialState.QUEUED
    if head in ("None", ""):
        return state, estimate.lstrip(", ")
    return state, f"{head}: {_advice(head, job_id)}{detail and f' ({detail.strip()})'}{estimate}"


def _advice(reason: str, job_id: str) -> str:
    advice = _ADVICE_BY_REASON.get(reason)
    kind = limit_of_reason(reason)
    if advice is None and kind is not None:
        holder = holder_of_reason(reason)
        advice = f"a limit of the {holder}; it starts when {kind}, or ask for another launch.{holder.field}"
    return (advice or "see man squeue").format(job=job_id)


# Why SLURM ends our own job, and whether it will start it again. The words were observed on a real cluster.
#
# While the batch script is being ended its job is COMPLETING whatever the cause, so the state alone tells nothing:
#
#                              Restarts    Reason       PreemptTime    slurmstepd: JOB n CANCELLED AT ... DUE TO
#     scancel                  as before   None                        (nothing)
#     time limit               as before   TimeLimit                   TIME LIMIT
#     preempted                + 1         None         set, then gone PREEMPTION
#     preempted, no requeue    as before   None         set            (nothing)
#     node failure             + 1         None                        NODE FAILURE
#     node failure, no requeue as before   NodeDown                    NODE FAILURE
#     scontrol requeue         + 1         None                        JOB REQUEUE
#
# In the grace period of a preemption the job is RUNNING with a PreemptTime: its steps got SIGTERM, its script did not.

_DAEMON_LINE = re.compile(r"\*\*\* JOB (\d+) ON \S+ CANCELLED AT \S+ *(?:DUE TO ([A-Z ]+?))?(?:,[^*]*)? *\*\*\*")
_STATE_BY_DAEMON_WORD = {
    "TIME LIMIT": EndState.TIMED_OUT,
    "PREEMPTION": EndState.PREEMPTED,
    "NODE FAILURE": EndState.NODE_FAILED,
    "JOB REQUEUE": EndState.REQUEUED,
}
_STATE_BY_REASON = {"TimeLimit": EndState.TIMED_OUT, "NodeDown": EndState.NODE_FAILED}
_END_BY_STATE = {
    TrialState(state): state
    for state in (EndState.TIMED_OUT, EndState.PREEMPTED, EndState.NODE_FAILED, EndState.REQUEUED)
}
"""Ends that SLURM's word for a job tells by itself; any other is somebody's scancel."""
_NEVER = ("None", "N/A", "Unknown", "")


def look_ahead(job: Mapping[str, str] | None, *, restart_count: int) -> JobProspect:
    """What becomes of a job, by `scontrol show job`; None, if SLURM could not be asked, says nothing.

    Args:
        restart_count: how often it had been requeued when it started.
    """
    fields = job or {}
    restarts = fields.get("Restarts", "")
    return JobProspect(
        is_preempted=fields.get("PreemptTime", "") not in _NEVER,
        is_requeued=restarts.isdecimal() and int(restarts) > restart_count,
        is_ending=phase_of(fields.get("JobState", "")) in (JobPhase.LEAVING, JobPhase.ENDED),
    )


def explain_end(job: Mapping[str, str] | None, job_output: str, *, job_id: str, restart_count: int) -> JobEnd:
    """Why this job is being ended.

    Args:
        job: fields of `scontrol show job`, or None if SLURM could not be asked.
        job_output: what the batch script's output file holds; slurmstepd writes its line there before it signals.
        restart_count: how often it had been requeued when it started.
    """
    texts = [match[2] for match in _DAEMON_LINE.finditer(job_output) if match[1] == job_id]
    # A line that an earlier start of this job got stays in the file: one for each requeue.
    own_words = texts[restart_count:]
    by_daemon = _STATE_BY_DAEMON_WORD.get(own_words[-1] or "", EndState.CANCELLED) if own_words else None
    if job is None:
        # Our jobs ask to be requeued, so where nothing else is known they are.
        is_requeued = by_daemon in (EndState.REQUEUED, EndState.NODE_FAILED, EndState.PREEMPTED)
        return JobEnd(state=by_daemon or EndState.UNKNOWN, is_requeued=is_requeued)
    prospect = look_ahead(job, restart_count=restart_count)
    if by_daemon not in (None, EndState.CANCELLED):
        return JobEnd(state=by_daemon, is_requeued=prospect.is_requeued)
    if prospect.is_requeued:
        return JobEnd(state=EndState.REQUEUED, is_requeued=True)
    word = state_word(job.get("JobState", ""))
    if prospect.is_preempted:
        state = EndState.PREEMPTED
    elif phase_of(word) is JobPhase.RUNNING:
        state = EndState.STOPPED  # also with a line of slurmstepd, which `scancel --batch --signal=TERM` leaves
    else:
        by_word = _END_BY_STATE.get(meaning_of(word)[0], EndState.CANCELLED)
        state = _STATE_BY_REASON.get(job.get("Reason", ""), by_word)
    return JobEnd(state=state, is_requeued=False)


def why_leaving(job: Mapping[str, str] | None) -> str:
    """Why a job that runs, or ran, will not be there much longer; "" if it stays."""
    if job is None:
        return "SLURM does not know its job any more"
    word = state_word(job.get("JobState", ""))
    if phase_of(word) is not JobPhase.RUNNING:
        return f"its job is {word}"
    return "its job is being preempted" if word == "RUNNING" and look_ahead(job, restart_count=0).is_preempted else ""
