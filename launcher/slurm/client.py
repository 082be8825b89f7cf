"""SLURM's commands as typed calls: arguments go in as a list, text comes out parsed; no shell, no accounting database.

    sbatch  -> job id          squeue  -> QueuedJob for every job of this user, in one call for all trials
    scancel                    scontrol -> key=value of jobs, nodes, partitions        sinfo -> Node

Parsers are pure functions over the text. What a newer SLURM adds to it is kept or skipped, never an error.
"""

import json
import os
import pwd
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.launcher.slurm.complaints import Complaint, complaint_of
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE

_SLURM_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # how the commands find the cluster at all, and may ask it
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")

# Name and comment last: they may hold anything, the separator included.
_QUEUE_FORMAT = "%A|%i|%T|%r|%S|%e|%L|%M|%D|%N|%V|%P|%j|%k"
_QUEUE_FIELDS = 14
_NODE_FORMAT = "%N|%P|%c|%m|%G|%f|%t|%z"


class SlurmError(RuntimeError):
    """A SLURM command failed; the text is the command and what it said.

    complaint: why, for those who decide.
    said: what it printed, on one line.
    """

    def __init__(self, message: str, *, complaint: Complaint = Complaint.OTHER, said: str = "") -> None:
        super().__init__(message)
        self.complaint = complaint
        self.said = said or message


_NO_SLURM_HINT = "run this where the cluster's commands work, or add --local to run on this machine"


class SlurmUnreachableError(SlurmError):
    """The commands are missing, time out, or find no controller: nothing is known about any job."""


class UncertainSubmissionError(SlurmUnreachableError):
    """sbatch was asked and did not answer as it should: the job may have been taken all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One line of squeue."""

    job_id: str
    state: str
    reason: str
    start: str
    """Start, or the estimate for a pending job; N/A if unknown."""
    end: str
    elapsed: str
    num_nodes: str
    nodes: str
    submitted: str
    name: str
    comment: str
    display_id: str = ""
    """The id that squeue shows: `7`, `7+1` of a heterogeneous job, `7_0` of an array."""
    time_left: str = ""
    partition: str = ""
    line: str = ""
    """The whole line, for those who want to see what SLURM said."""

    @property
    def het_component(self) -> int | None:
        """Which component of a heterogeneous job this is; None if it is none."""
        component = self.display_id.partition("+")[2]
        return int(component) if component.isdigit() else None

    @property
    def tag(self) -> dict[str, Any]:
        """What corral wrote into the comment, or {} if this is another program's job."""
        try:
            content = json.loads(self.comment)
        except ValueError:
            return {}
        return content if isinstance(content, dict) and content.get("corral") == 1 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node in one partition, as sinfo shows it."""

    name: str
    partition: str
    is_default_partition: bool
    cpus: int
    mem_mb: int
    gpus_by_type: Mapping[str, int]
    """GPUs by GRES type; "" where the site names no type."""
    features: tuple[str, ...]
    state: str
    threads_per_core: int = 1
    """How many of its CPUs are one core; 1 where SLURM counts cores only, whatever the hardware has."""

    @property
    def gpus(self) -> int:
        """GPUs of any type."""
        return sum(self.gpus_by_type.values())

    @property
    def is_up(self) -> bool:
        """Whether the node could ever start a job; sinfo marks one that does not answer with `*`."""
        gone = ("down", "drain", "drng", "fail", "inval")
        return not (self.state.startswith(gone) or self.is_in_maintenance or "*" in self.state)

    @property
    def is_in_maintenance(self) -> bool:
        """Whether it comes back by itself, at an hour that the administrators have set."""
        return self.state.startswith("maint")


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what an enclosing job set: sbatch would take it for options of the new job.

    A job that one trial asks for is none of its processes: its supervisor would end it as a leftover.
    """
    source = os.environ if environment is None else environment
    dropped = (*_RANK_VARIABLES, TRIAL_UUID_VARIABLE)
    return {
        name: value
        for name, value in source.items()
        if name in _KEPT or not (name.startswith(_SLURM_PREFIXES) or name in dropped)
    }


def user_name() -> str:
    """This user as SLURM knows it: by the process's id, whatever $USER says; by number where it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class SlurmClient:
    """Runs SLURM's commands, each with a deadline."""

    def __init__(self, *, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s

    def submit(self, options: Sequence[str], script: Path) -> str:
        """Hands a batch script over; returns the job id.

        Raises:
            UncertainSubmissionError: if SLURM may have taken it without saying so.
            SlurmError: if it has not.
        """
        try:
            answer = self._run(["sbatch", "--parsable", *options, str(script)])
        except SlurmUnreachableError as error:
            if error.complaint is Complaint.NO_ANSWER:
                raise UncertainSubmissionError(str(error), complaint=error.complaint, said=error.said) from error
            raise
        return parse_job_id(answer)

    def test_submission(self, options: Sequence[str], script: Path) -> str:
        """What `sbatch --test-only` says about the job; SlurmError if it can never start."""
        command = ["sbatch", "--test-only", *options, str(script)]
        completed = self._complete(command)
        if completed.returncode != 0:
            raise _failure(command, completed)
        return completed.stderr.strip()

    def queue(self) -> list[QueuedJob]:
        """Every job of this user that SLURM still knows, finished ones too."""
        return parse_queue(self.queue_text())

    def queue_text(self) -> str:
        """What squeue prints about them; `parse_queue` reads it."""
        return self._run(queue_command())

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of this user's jobs, by the id that squeue shows: `7`, or `7_0` for an array's element."""
        lines = self._run(["squeue", "-h", "-r", "-t", "all", "-u", user_name(), "-o", "%i|%T|%r"]).splitlines()
        rows = (line.split("|", 2) for line in lines if line.count("|") >= 2)
        return {job_id: (state, reason) for job_id, state, reason in rows}

    def job(self, job_id: str) -> dict[str, str] | None:
        """What scontrol knows about a job; None once SLURM has forgotten it."""
        command = ["scontrol", "show", "job", "-d", "-o", job_id]
        completed = self._complete(command)
        if completed.returncode != 0:
            failure = _failure(command, completed)
            if failure.complaint is Complaint.NO_SUCH_JOB:
                return None
            raise failure
        return parse_key_values(completed.stdout)

    def accounting_storage(self) -> str:
        """Where the site keeps its accounting; `accounting_storage/none` if nowhere, "" if it does not say."""
        return parse_settings(self._run(["scontrol", "show", "config"])).get("AccountingStorageType", "")

    def accounted_state(self, job_id: str) -> str:
        """The last state that accounting knows of a job, "" if none; ask only where there is accounting."""
        lines = self._run(["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State"]).split("\n")
        return lines[0].strip()

    def steps(self, *job_ids: str) -> dict[str, list[str]]:
        """Step ids of running jobs by step name."""
        return parse_steps(self._run(["squeue", "-h", "-s", "-j", ",".join(job_ids), "-o", "%i|%j"]))

    def cancel(self, job_or_step: str, *, signal_name: str | None = None) -> None:
        """Ends a job or a step, or sends it a signal; one that has ended already is no error."""
        self._cancel([*([f"--signal={signal_name}"] if signal_name else []), job_or_step])

    def cancel_steps(self, steps: Sequence[str], *, signal_name: str) -> None:
        """Sends a signal to many steps at once; those that have ended already are no error."""
        self._cancel([f"--signal={signal_name}", *steps])

    def nodes(self) -> list[Node]:
        """All nodes, once for each partition they are in."""
        return parse_nodes(self._run(nodes_command()))

    def partitions(self) -> dict[str, dict[str, str]]:
        """Settings of every partition, by its name."""
        return parse_records(self._run(["scontrol", "show", "partition", "-o"]), key="PartitionName")

    def node_address(self, node: str) -> str:
        """Where the cluster reaches a node: an address or a host name."""
        return parse_key_values(self._run(["scontrol", "show", "node", "-o", node])).get("NodeAddr", node)

    def ask(self, command: Sequence[str]) -> str:
        """What any other command of SLURM prints; SlurmError if it fails."""
        return self._run(command)

    def _cancel(self, arguments: Sequence[str]) -> None:
        command = ["scancel", *arguments]
        completed = self._complete(command)
        if completed.returncode != 0:
            failure = _failure(command, completed)
            if failure.complaint not in (Complaint.NO_SUCH_JOB, Complaint.HAS_ENDED):
                raise failure

    def _run(self, command: Sequence[str]) -> str:
        completed = self._complete(command)
        if completed.returncode != 0:
            raise _failure(command, completed)
        return completed.stdout

    def _complete(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            completed = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                # A user's SQUEUE_PARTITION would hide jobs, a SCANCEL_STATE spare them, a SLURM_TIME_FORMAT say "now".
                env=clean_environment(),
                check=False,
            )
        except FileNotFoundError as error:
            raise SlurmUnreachableError(
                f"{command[0]} was not found on PATH; log in to a machine of the cluster, or use rl-submit --local"
            ) from error
        except OSError as error:  # no process or memory left at the moment, which ends no trial
            raise SlurmUnreachableError(f"{command[0]} could not be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            message = f"{command[0]} did not answer within {self._timeout_s:.0f} s"
            raise SlurmUnreachableError(message, complaint=Complaint.NO_ANSWER) from error
        if completed.returncode != 0:
            failure = _failure(command, completed)
            if failure.complaint in (Complaint.NO_ANSWER, Complaint.UNREACHABLE):
                message = f"{failure}\n  hint: {_NO_SLURM_HINT}"
                raise SlurmUnreachableError(message, complaint=failure.complaint, said=failure.said)
        return completed


def queue_command() -> list[str]:
    """The one squeue call that serves all trials. Never `-j`: it hides ids that SLURM has forgotten.

    And never `-r`: no job of a trial is an array, and others' may have a hundred thousand elements that wait.
    """
    return ["squeue", "-h", "-t", "all", "-u", user_name(), "-o", _QUEUE_FORMAT]


def nodes_command(partition: str | None = None) -> list[str]:
    """The one sinfo call about nodes; people see the same lines."""
    return ["sinfo", "-h", "-N", *(["-p", partition] if partition else []), "-o", _NODE_FORMAT]


def parse_job_id(answer: str) -> str:
    """`184223` or `184223;cluster` -> `184223`."""
    job_id = answer.strip().partition(";")[0]
    if not job_id.isdigit():
        raise UncertainSubmissionError(
            f"sbatch answered {answer!r}, which is no job id; look for the job with squeue --me"
        )
    return job_id


def parse_queue(text: str) -> list[QueuedJob]:
    """squeue's lines; one with too few fields is skipped."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", _QUEUE_FIELDS - 1)
        if len(fields) < _QUEUE_FIELDS:
            continue
        job_id, display_id, state, reason, start, end, left, elapsed, num_nodes, nodes, submitted, partition = fields[
            :12
        ]
        jobs.append(
            QueuedJob(
                job_id=job_id,
                state=state,
                reason=reason,
                start=start,
                end=end,
                elapsed=elapsed,
                num_nodes=num_nodes,
                nodes=nodes,
                submitted=submitted,
                name=fields[12],
                comment=fields[13],
                display_id=display_id,
                time_left=left,
                partition=partition,
                line=line,
            )
        )
    return jobs


def parse_steps(text: str) -> dict[str, list[str]]:
    """Numbered steps only: the batch step is the supervisor itself."""
    steps: dict[str, list[str]] = {}
    for line in text.splitlines():
        step_id, _, name = line.strip().partition("|")
        if re.fullmatch(r"\d+\.\d+", step_id):
            steps.setdefault(name, []).append(step_id)
    return steps


def parse_key_values(text: str) -> dict[str, str]:
    """One `-o` line of scontrol: `JobId=7 JobName=a b Comment={"x": 1}` with values that may hold spaces."""
    matches = list(re.finditer(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/-]*)=", text))
    values: dict[str, str] = {}
    ends = [*(following.start() for following in matches[1:]), len(text)]
    for match, end in zip(matches, ends, strict=False):
        values.setdefault(match[1], text[match.end() : end].strip())
    return values


def parse_records(text: str, *, key: str) -> dict[str, dict[str, str]]:
    """The lines of `scontrol show ... -o` by one of their values; a line without it is skipped."""
    records = (parse_key_values(line) for line in text.splitlines() if line.strip())
    return {record[key]: record for record in records if key in record}


def parse_settings(text: str) -> dict[str, str]:
    """`scontrol show config`: one `Name = value` a line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_nodes(text: str) -> list[Node]:
    """sinfo's lines; numbers may end in `+` where nodes differ."""
    nodes = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 8:
            continue
        name, partition, cpus, mem_mb, gres, features, state, cores = fields
        nodes.append(
            Node(
                name=name,
                partition=partition.rstrip("*"),
                is_default_partition=partition.endswith("*"),
                cpus=_leading_int(cpus),
                mem_mb=_leading_int(mem_mb),
                gpus_by_type=parse_gpus(gres),
                features=tuple(feature for feature in features.split(",") if feature and feature != "(null)"),
                state=state,
                threads_per_core=_threads_per_core(_leading_int(cpus), cores),
            )
        )
    return nodes


def _threads_per_core(cpus: int, cores: str) -> int:
    """CPUs of a core, of sinfo's `sockets:cores:threads`; a site may count cores only as CPUs, or hide some."""
    numbers = [_leading_int(part) for part in cores.split(":")]
    if len(numbers) != 3 or 0 in numbers:
        return 1
    sockets, cores_per_socket, threads = numbers
    return 1 if cpus <= sockets * cores_per_socket else threads


def parse_gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:8(S:0-1),nvme:1` -> {"a100": 8}; `gpu:8` -> {"": 8}."""
    gpus: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.split(":")
        if parts[0] != "gpu":
            continue
        kind = parts[1] if len(parts) > 2 or (len(parts) == 2 and not parts[1].isdigit()) else ""
        count = int(parts[-1]) if parts[-1].isdigit() else 1
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _leading_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def _failure(command: Sequence[str], completed: subprocess.CompletedProcess[str]) -> SlurmError:
    said = " ".join((completed.stderr or completed.stdout).split()) or "nothing"
    message = f"{command[0]} failed with exit {completed.returncode}: {said}"
    return SlurmError(message, complaint=complaint_of(completed.stderr), said=said)
