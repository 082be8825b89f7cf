"""This user's jobs on a cluster that SLURM runs, in words of our own.

squeue, scontrol, sacct --client, verdict--> Job

    job --PENDING, nodes------>    scontrol show job, sinfo          is any node up that could run it?
        --PENDING, a limit---->    scontrol show job, sacctmgr       does it ask for more, whatever else runs? alone, or
                                                                     with the jobs that it only runs with
        --FAILED-------------->    scontrol show job                 its exit code

One polite poller for all trials and all commands of a user: the cluster's answer is shared through a file.

    rl-status, rl-status -w, rl-logs -f, rl-submit --wait of one machine
         |  look(newer_than)
         v
    CachedQueue --old enough, or older than a submission?--> lock --> jobs --> $XDG_CACHE_HOME/corral/queue-*.json
         |  no: what the file holds
         v
    QueueAnswer: jobs, when the cluster said so, and since when it does not answer any more

After a failure the last known jobs stay, and it is asked again after 5, 10, 20, ... 60 seconds: a controller that
is down or overloaded is not helped by being asked more often. The cache is a convenience: where it cannot be written,
the cluster is asked directly.

A submission, once: a trial has one job, whatever happens between asking for it and hearing that it was taken.

submit --job id--> done
    +--no answer, an odd one--> the queue: a job with our comment is it; none, and the error stands
    +--Ctrl-C, SIGTERM--> the queue: what was taken is cancelled

All of this, the lock of a submission, and the supervisor's lock only spare a second job. Should there be one, each has
an attempt of its own, claimed by link(2) in control/, and the trial log lets only the master of one commit.
"""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec

from corral.experiments.trial.directory import atomic_write
from corral.experiments.trial.flocks import opened
from corral.launcher.files.patience import wait_until
from corral.launcher.slurm.client import (
    SlurmClient,
    SlurmError,
    SlurmUncertainError,
    SubmissionUnknownError,
    answer_or,
    is_installed,
    queue_command,
)
from corral.launcher.slurm.own_jobs import HEAD, JobIndex, OwnJobs
from corral.launcher.slurm.parse import keeps_accounts
from corral.launcher.slurm.verdict import (
    Job,
    LimitKind,
    holder_of_reason,
    job_of_scontrol,
    limit_of_reason,
    needs_nodes,
    state_word,
)
from corral.launcher.trial.lock import LockAnswer, try_lock
from corral.launcher.trial.processes import user_name
from corral.scheduling.restarts import growing_pause
from corral.scheduling.slurm_formats import expand_host_list


class SlurmQueue:
    """This user's jobs, and the questions about limits: all that commands which only look need. It needs no schema.

    Args:
        timeout_s: how long a command may take, of a client made here.

    Raises:
        SlurmError: each method that asks, if SLURM does not answer, unless it says otherwise.
    """

    def __init__(self, client: SlurmClient | None = None, *, timeout_s: float = 20.0) -> None:
        self._client = client or SlurmClient(timeout_s=timeout_s)
        self._exceeded: dict[tuple[str, ...], str] = {}
        """The limits that a job exceeds, asked once for each job and reason."""

    @property
    def identity(self) -> str:
        """Which cluster this machine asks, of several that share a home folder."""
        return "|".join(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))

    @property
    def question(self) -> str:
        """The command that shows people the data of `jobs`."""
        return shlex.join(queue_command())

    def is_here(self) -> bool:
        """Whether SLURM's commands are on this machine."""
        return is_installed("squeue")

    def jobs(self) -> list[Job]:
        """Every job of this user that SLURM still knows, those that have ended too."""
        return self._client.queue()

    def job(self, job_id: str) -> Job | None:
        """One job at this moment, though `jobs` show it no more; None once SLURM has forgotten it."""
        values = self._client.job(job_id)
        return job_of_scontrol(values) if values else None

    def look_closer(self, job: Job, *, has_run: bool) -> Job:
        """The job with what its state and reason leave open; where SLURM does not answer, that stays open.

        Args:
            has_run: whether it has been put back into the queue.
        """
        word, job = state_word(job.word), replace(job, has_run=has_run)
        with suppress(SlurmError):
            if word == "FAILED":
                return replace(job, exit_code=self._values(job).get("ExitCode", ""))
            if word == "PENDING" and needs_nodes(job.reason):
                return replace(job, nodes_are_down=self._are_nodes_down(job))
            if word == "PENDING" and limit_of_reason(job.reason) in (LimitKind.NOTHING, LimitKind.OTHERS):
                return replace(job, exceeded=self._ask_exceeded(job))
        return job

    def why_never(self, job: Job, *, beside: Sequence[str]) -> str:
        """Why a job that waits cannot start while those beside it are there; "" where others may be the cause."""
        if job.is_blocked:
            return job.note
        if limit_of_reason(job.reason) is not LimitKind.OTHERS or not (exceeded := self._ask_exceeded(job, beside)):
            return ""
        field = holder_of_reason(job.reason).field
        return f"{job.reason}: {exceeded}; ask for less, for another launch.{field}, or for launch.layout: packed"

    @cached_property
    def _keeps_accounts(self) -> bool:
        """Asked once and kept: repeated looks do not ask the controller each time."""
        return keeps_accounts(self._client.settings())

    def accounted(self, job_id: str) -> Job | None:
        """The last that is on record of a forgotten job; None where nothing is, or the cluster keeps no records."""
        state = self._client.accounted_state(job_id) if self._keeps_accounts else ""
        return job_of_scontrol({"JobId": job_id, "JobState": state}) if state else None

    def cancel(self, job_id: str) -> None:
        """Ends a job; one that has ended already is no error."""
        self._client.cancel(job_id)

    def failed_nodes(self, hosts: Sequence[str]) -> list[str]:
        """Those of some nodes that have failed; none if SLURM does not say."""
        states = {node.name: node.state for node in answer_or([], self._client.nodes)}
        return [host for host in hosts if states.get(host, "").startswith(("down", "fail"))]

    def _values(self, job: Job) -> Mapping[str, str]:
        return self._client.job(job.job_id) or {}

    def _are_nodes_down(self, job: Job) -> bool:
        values = self._values(job)
        wanted, partition = values.get("ReqNodeList", "(null)"), values.get("Partition", "")
        names = set(expand_host_list(wanted)) if wanted not in ("", "(null)") else None
        able = [node for node in self._client.nodes(partition or None) if names is None or node.name in names]
        return bool(able) and not any(node.is_up or node.is_in_maintenance for node in able)

    def _ask_exceeded(self, job: Job, beside: Sequence[str] = ()) -> str:
        known = (job.job_id, job.reason, *beside)
        if known not in self._exceeded:
            jobs = [self._values(job), *(self._client.job(other) or {} for other in beside)]
            self._exceeded[known] = self._exceeded_by(jobs)
        return self._exceeded[known]

    def _exceeded_by(self, jobs: Sequence[Mapping[str, str]]) -> str:
        """The limits that the first of some jobs exceeds together with the others."""
        # Not at the top: rl-status is to start fast, and few jobs wait for a limit.
        from corral.launcher.slurm.accounts import Charge, demand_of_job, excesses, read_accounts

        config, partitions = answer_or({}, self._client.settings), self._client.partitions()
        accounts = read_accounts(self._client, user_name(), config)

        def charge(values: Mapping[str, str]) -> Charge:
            partition = values.get("Partition", "")
            ladder = accounts.ladder(
                account=values.get("Account") or None,
                qos=values.get("QOS") or None,
                partition=partition,
                partition_qos=partitions.get(partition, {}).get("QoS", ""),
            )
            return demand_of_job(values), ladder

        job, *beside = map(charge, jobs)
        return "; ".join(excess.text for excess in excesses(job, beside))


# One polite poller for all trials and commands of a user: the cluster's answer is shared through a file.


FRESH_S = 5.0
_MAX_PAUSE_S = 60.0
LOOK_TIMEOUT_S = 10.0
"""How long commands that only look wait for a command of SLURM."""
_LOCK_PATIENCE_S = LOOK_TIMEOUT_S + 5.0  # the holder of the lock asks SLURM
_LOCK_POLL_S = 0.05


class QueueAnswer(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The cluster's last answer, and whether it still answers; as the file holds it."""

    jobs: tuple[Job, ...] = ()
    asked_at: float | None = None
    """When it gave these jobs (Unix time); None if it has never answered."""
    tried_at: float = 0.0
    failures: int = 0
    """In a row."""
    unreachable_since: float | None = None
    error: str = ""
    """Why it did not answer, one line."""
    question: str = ""
    """The command that shows people the same."""

    @cached_property
    def index(self) -> JobIndex:
        """The jobs by trial."""
        return JobIndex.of(self.jobs)

    def after_asking(self, cluster: SlurmQueue, clock: Callable[[], float]) -> "QueueAnswer":
        """The state after the cluster was asked; if it gave no answer, its last answer stays."""
        try:
            jobs, now = tuple(cluster.jobs()), clock()
        except SlurmError as error:
            return msgspec.structs.replace(
                self,
                question=cluster.question,
                tried_at=(now := clock()),
                failures=self.failures + 1,
                unreachable_since=now if self.unreachable_since is None else self.unreachable_since,
                error=str(error).partition("\n")[0],
            )
        return QueueAnswer(jobs=jobs, asked_at=now, tried_at=now, question=cluster.question)

    def is_due(self, now: float, newer_than: float) -> bool:
        """Whether the cluster is to be asked. Pure."""
        if self.tried_at > now:  # the clock was set back
            return True
        if self.failures:
            return now - self.tried_at >= pause_after(self.failures)
        if self.asked_at is None or now - self.asked_at >= FRESH_S:
            return True
        # A moment in the future is another machine's clock; asking would not make the answer newer than it.
        return self.asked_at < newer_than <= now


def pause_after(failures: int) -> float:
    """Seconds before it is asked again after so many failures in a row."""
    return growing_pause(failures, first_s=FRESH_S, longest_s=_MAX_PAUSE_S)


class CachedQueue:
    """Asks at most every five seconds, whatever the number of commands that look."""

    def __init__(
        self, cluster: SlurmQueue, *, path: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._cluster = cluster
        self._path = path or cache_path(cluster)
        self._clock = clock

    def look(self, *, newer_than: float = 0.0) -> QueueAnswer:
        memory = self._read()
        if not memory.is_due(self._clock(), newer_than):
            return memory
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with opened(self._path.with_suffix(".lock")) as descriptor:
                # Where there are no locks, each asks for itself; after a while without it, what is known has to do.
                may_ask = wait_until(
                    lambda: try_lock(descriptor) is not LockAnswer.BUSY,
                    timeout_s=_LOCK_PATIENCE_S,
                    pause_s=_LOCK_POLL_S,
                )
                memory = self._read()  # the last holder of the lock may have asked already
                if may_ask and memory.is_due(self._clock(), newer_than):
                    memory = memory.after_asking(self._cluster, self._clock)
                    said = msgspec.json.encode(memory)
                    atomic_write(self._path, said, is_durable=False)  # it need not survive a crash
        except OSError:
            memory = memory.after_asking(self._cluster, self._clock)
        return memory

    def _read(self) -> QueueAnswer:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=QueueAnswer)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return QueueAnswer()


def cache_path(cluster: SlurmQueue) -> Path:
    """The file of this user on this machine, and of the cluster that it asks.

    Several clusters may share a home folder, and each numbers its jobs. A machine asks one of them, unless its
    environment names another; and the times in the file are those of one clock.
    """
    asked = f"{os.uname().nodename}|{cluster.identity}"
    name = hashlib.sha256(asked.encode(errors="surrogateescape")).hexdigest()[:12]
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "corral" / f"queue-{name}.json"


_LOOK_PAUSE_S = 2.0


def submit_once(queue: SlurmQueue, submit: Callable[[], str], *, is_it: Callable[[Job], bool], looks: int = 2) -> str:
    """Hands a job over; returns its id, from the queue if the submission did not say it.

    Args:
        is_it: tells the job, if it was taken, from all others of this user.
        looks: how often the queue is asked; a cluster that is slow to answer may be slow to take the job, too.

    Raises:
        SlurmError: if there is no job.
        SubmissionUnknownError: if there may be one.
    """
    try:
        return submit()
    except SlurmUncertainError as error:
        if job_id := _look(queue, is_it, error, looks):
            return job_id
        raise
    except Exception:
        raise
    except BaseException:  # not wanted any more: the command has got the same Ctrl-C, or was too fast
        _take_back(queue, is_it)
        raise


def is_head_of(own: OwnJobs) -> Callable[[Job], bool]:
    """Tells a trial's own job that waits or runs from its components, from its extra jobs and from all others."""

    def is_it(job: Job) -> bool:
        # A cluster may copy the comment of the first component to all of them.
        note = own.identify(job) if job.is_active and not job.part_of else None
        return note is not None and note.allocation == HEAD

    return is_it


def _look(queue: SlurmQueue, is_it: Callable[[Job], bool], cause: SlurmError, looks: int) -> str:
    """The job that the submission did not name, "" if there is none."""
    for number in range(looks):
        if number:
            time.sleep(_LOOK_PAUSE_S)
        try:
            found = [job for job in queue.jobs() if is_it(job)]
        except SlurmError as error:
            if number == looks - 1:
                raise SubmissionUnknownError(
                    f"nobody can say whether the cluster has taken the job: {cause}; then {error}"
                ) from error
            continue
        if found:
            return max(found, key=lambda job: job.number).job_id
    return ""


def _take_back(queue: SlurmQueue, is_it: Callable[[Job], bool]) -> None:
    try:
        for job in queue.jobs():
            if is_it(job):
                queue.cancel(job.job_id)
    except SlurmError:
        return  # without its trial directory the job ends as soon as it starts
