"""SLURM's commands as typed calls: arguments go in as a list, text comes out parsed by `parse`; no shell.

sbatch  -> job id          squeue  -> Job for every job of this user, in one call for all trials
scancel                    scontrol -> key=value of jobs, nodes, partitions, reservations, the configuration
sinfo   -> Node            sacct, sacctmgr, where there is accounting -> states of old jobs, rows of its tables
stderr of any, where it refuses --complaint_of--> Complaint: SLURM's sentences are compared here and nowhere else
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import ParamSpec, TypeVar

from corral.experiments.exit_codes import CommandExit, UserError
from corral.experiments.own_python import python_path
from corral.launcher.files.patience import PATIENCE_S, insist
from corral.launcher.slurm.parse import (
    NODE_FORMAT,
    Node,
    memory_rules,
    parse_key_values,
    parse_nodes,
    parse_records,
    parse_rows,
    parse_settings,
    parse_steps,
)
from corral.launcher.slurm.verdict import QUEUE_FORMAT, Job, jobs_of_squeue
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE, user_name
from corral.scheduling.slurm_formats import SLURM_PREFIXES, MemoryRules


class Complaint(StrEnum):
    """Why a command failed: by what it prints on stderr then. The first that matches counts.

    Most are slurm_strerror's sentences, which have been the same since version 20.
    """

    NO_ANSWER = r"socket timed out|did not answer within"
    """The controller did not answer in time; it may have done what it was asked for."""
    UNREACHABLE = r"unable to contact|connection refused|configuration source"
    NO_SUCH_JOB = r"invalid job id|not found"
    HAS_ENDED = r"already"
    """The job or step has ended before."""
    LIMIT = r"accounting/qos policy|usage threshold|submit limit"
    """Of the QOS or the account."""
    TIME_LIMIT = r"requested time limit|--time(-min)?\b|time-min"
    TIME = r"invalid time specified"
    """The moment of the start."""
    NODE_NAMES = r"invalid node name|--nodelist|number of nodes|node count"
    """A node that there is not."""
    RESERVATION = r"reservation"
    NODES = r"node configuration is not available|nodes are busy|node not available"
    """No nodes at present that could run it: too few, too small, down, drained, SLURM has one sentence for all."""
    PARTITION = r"partition name|partition not available|not in this partition"
    ACCOUNT = r"invalid account"
    QOS = r"\bqos\b"
    FEATURE = r"feature|constraint"
    OTHER = ""
    """Whatever else it says."""


def complaint_of(output: str) -> Complaint:
    """The value of what a command printed on stderr."""
    return next(complaint for complaint in Complaint if re.search(complaint, output, re.IGNORECASE))


P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

_END_STEPS_PAUSE_S = 0.2

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
"""What trials cannot do without; sacct and sacctmgr are asked only where there is accounting."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # how the commands find the cluster at all, and may ask it
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class SlurmError(UserError):
    """SLURM was asked, and refused; the text is the command and its output.

        SlurmUnreachableError       nothing is known about any job
            SlurmUncertainError     SLURM may have taken the job
            SubmissionUnknownError  nobody can say whether it has

    complaint: why, for those who decide.
    output: what the command printed, on one line.
    """

    exit_code = CommandExit.REFUSED

    def __init__(self, message: str, *, complaint: Complaint = Complaint.OTHER, output: str = "") -> None:
        super().__init__(message)
        self.complaint = complaint
        self.output = output or message


class SlurmUnreachableError(SlurmError):
    """Its commands are missing, time out, or find no controller: nothing is known about any job."""

    exit_code = CommandExit.UNREACHABLE


class SlurmUncertainError(SlurmUnreachableError):
    """sbatch was asked to take a job and did not answer as it should: SLURM may have taken it all the same."""


class SubmissionUnknownError(SlurmUnreachableError):
    """It is not known whether the job exists now."""


def answer_or(otherwise: D, ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
    """What SLURM answers, where an answer is not needed; `otherwise` if it gives none."""
    try:
        return ask(*args, **kwargs)
    except SlurmError:
        return otherwise


_NO_SLURM_HINT = "run this where the cluster's commands work, or add --local to run on this machine"


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what an enclosing job set: sbatch would take it for options of the new job.

    A job that one trial asks for is none of its processes: its supervisor would end it as a leftover.
    """
    source = os.environ if environment is None else environment
    dropped = (*_RANK_VARIABLES, TRIAL_UUID_VARIABLE)
    return {
        name: value
        for name, value in source.items()
        if name in _KEPT or not (name.startswith(SLURM_PREFIXES) or name in dropped)
    } | python_path(source)


class SlurmClient:
    """Runs SLURM's commands, each with a deadline."""

    def __init__(self, *, timeout_s: float = 20.0) -> None:
        self._timeout_s = timeout_s

    def submit(self, options: Sequence[str], script: Path) -> str:
        """Hands a batch script over; returns the job id.

        Raises:
            SlurmUncertainError: if SLURM may have taken it without saying so.
            SlurmError: if it has not.
        """
        try:
            answer = self._run(["sbatch", "--parsable", *options, str(script)])
        except SlurmUnreachableError as error:
            if error.complaint is Complaint.NO_ANSWER:
                raise SlurmUncertainError(str(error), complaint=error.complaint, output=error.output) from error
            raise
        return parse_job_id(answer)

    def test_submission(self, options: Sequence[str], script: Path) -> str:
        """What `sbatch --test-only` says about the job; SlurmError if it can never start."""
        return self._complete(["sbatch", "--test-only", *options, str(script)]).stderr.strip()

    def queue(self) -> list[Job]:
        """Every job of this user that SLURM still knows, finished ones too."""
        return jobs_of_squeue(self._run(queue_command()))

    def states(self) -> dict[str, tuple[str, str]]:
        """State and reason of this user's jobs, by the id that squeue shows: `7`, or `7_0` for an array's element."""
        lines = self._run(["squeue", "-h", "-r", "-t", "all", "-u", user_name(), "-o", "%i|%T|%r"]).splitlines()
        rows = (line.split("|", 2) for line in lines if line.count("|") >= 2)
        return {job_id: (state, reason) for job_id, state, reason in rows}

    def job(self, job_id: str) -> dict[str, str] | None:
        """The output of scontrol about a job; None once SLURM has forgotten it."""
        try:
            return parse_key_values(self._run(["scontrol", "show", "job", "-d", "-o", job_id]))
        except SlurmError as error:
            if error.complaint is Complaint.NO_SUCH_JOB:
                return None
            raise

    def requeue(self, job_id: str) -> None:
        """Puts a job that runs back into the queue, which ends it now."""
        self._run(["scontrol", "requeue", job_id])

    def settings(self) -> dict[str, str]:
        """The cluster's configuration."""
        return parse_settings(self._run(["scontrol", "show", "config"]))

    def memory_rules(self, partition: str | None) -> MemoryRules:
        """How a partition gives out memory: of a list its first, None is the default one."""
        partitions = self.partitions()
        default = next((name for name, settings in partitions.items() if settings.get("Default") == "YES"), "")
        return memory_rules(self.settings(), partitions.get((partition or default).partition(",")[0], {}))

    def accounting_rows(self, what: Sequence[str], fields: Sequence[str]) -> list[dict[str, str]]:
        """Rows of accounting's tables; `what` is as after `sacctmgr show`."""
        return parse_rows(self._run(["sacctmgr", "-n", "-P", "show", *what, f"format={','.join(fields)}"]), fields)

    def accounted_state(self, job_id: str) -> str:
        """The last state that accounting knows of a job, "" if none; ask only where there is accounting."""
        return self._run(["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State"]).partition("\n")[0].strip()

    def steps(self, *job_ids: str) -> dict[str, list[str]]:
        """Step ids of running jobs by step name."""
        return parse_steps(self._run(["squeue", "-h", "-s", "-j", ",".join(job_ids), "-o", "%i|%j"]))

    def cancel(self, job_id: str) -> None:
        """Ends a job; one that has ended already is no error."""
        self._cancel([job_id])

    def cancel_steps(self, steps: Sequence[str], *, signal_name: str) -> None:
        """Sends a signal to many steps at once; those that have ended already are no error."""
        self._cancel([f"--signal={signal_name}", *steps])

    def end_steps(self, *job_ids: str, timeout_s: float) -> list[str]:
        """Ends what runs in jobs, and not the jobs; steps that are there all the same after so long."""
        deadline = time.monotonic() + timeout_s
        while steps := [step for ids in self.steps(*job_ids).values() for step in ids]:
            if time.monotonic() > deadline:
                break
            self.cancel_steps(steps, signal_name="KILL")
            time.sleep(_END_STEPS_PAUSE_S)
        return steps

    def nodes(self, partitions: str | None = None, *, in_detail: bool = False) -> list[Node]:
        """The nodes of these partitions, separated by commas, or all; once for each partition they are in.

        Args:
            in_detail: without what the site keeps of each for the system, which is a second question.
        """
        details = self._run(["scontrol", "show", "node", "-o"]) if in_detail else ""
        return parse_nodes(self._run(nodes_command(partitions)), details)

    def partitions(self, *, with_hidden: bool = False) -> dict[str, dict[str, str]]:
        """Settings of every partition, by its name; those that this user may not see only if they are asked for."""
        command = ["scontrol", *(["-a"] if with_hidden else []), "show", "partition", "-o"]
        return parse_records(self._run(command), key="PartitionName")

    def reservations(self) -> dict[str, dict[str, str]]:
        """Every reservation, by its name."""
        return parse_records(self._run(["scontrol", "show", "reservation", "-o"]), key="ReservationName")

    def node_address(self, node: str) -> str:
        """Where the cluster reaches a node: an address or a host name."""
        return parse_key_values(self._run(["scontrol", "show", "node", "-o", node])).get("NodeAddr", node)

    def _cancel(self, arguments: Sequence[str]) -> None:
        try:
            self._run(["scancel", *arguments])
        except SlurmError as error:
            if error.complaint not in (Complaint.NO_SUCH_JOB, Complaint.HAS_ENDED):
                raise

    def _run(self, command: Sequence[str]) -> str:
        return self._complete(command).stdout

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
        if completed.returncode == 0:
            return completed
        complaint = complaint_of(completed.stderr)
        output = " ".join((completed.stderr or completed.stdout).split()) or "nothing"
        message = f"{command[0]} failed with exit {completed.returncode}: {output}"
        if complaint in (Complaint.NO_ANSWER, Complaint.UNREACHABLE):
            raise SlurmUnreachableError(f"{message}\n  hint: {_NO_SLURM_HINT}", complaint=complaint, output=output)
        raise SlurmError(message, complaint=complaint, output=output)


def patiently(ask: Callable[[], T], what: str, *, patience_s: float = PATIENCE_S) -> T:
    """What SLURM answers; one that does not answer at the moment is asked again for a long time.

    Args:
        what: is asked for, for people.

    Raises:
        SlurmUnreachableError: if it was away for longer.
        SlurmError: whatever else SLURM says.
    """
    return insist(ask, lambda error: isinstance(error, SlurmUnreachableError), waiting_for=what, patience_s=patience_s)


def queue_command() -> list[str]:
    """The one squeue call that serves all trials. Never `-j`: it hides ids that SLURM has forgotten.

    And never `-r`: no job of a trial is an array, and others' may have a hundred thousand elements that wait.
    """
    return ["squeue", "-h", "-t", "all", "-u", user_name(), "-o", QUEUE_FORMAT]


def hostnames_command(host_list: str) -> list[str]:
    """How people see which nodes a list names."""
    return ["scontrol", "show", "hostnames", host_list]


def nodes_command(partition: str | None = None) -> list[str]:
    """The one sinfo call about nodes; people see the same lines."""
    return ["sinfo", "-h", "-N", *(["-p", partition] if partition else []), "-o", NODE_FORMAT]


def parse_job_id(answer: str) -> str:
    """`184223` or `184223;cluster` -> `184223`."""
    job_id = answer.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmUncertainError(f"sbatch answered {answer!r}, which is no job id; look for the job with squeue --me")
    return job_id


def missing_commands() -> list[str]:
    """Which of SLURM's commands are not on the PATH."""
    return [command for command in COMMANDS if shutil.which(command) is None]


def is_installed(*commands: str) -> bool:
    """Whether all of these are on the PATH."""
    return not set(commands) & set(missing_commands())
