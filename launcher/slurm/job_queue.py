"""This user's jobs on a cluster that SLURM runs, in words of our own.

squeue, scontrol, sacct --client, verdict--> Job

    job --PENDING, nodes------>    scontrol show job, sinfo          is any node up that could run it?
        --PENDING, a limit---->    scontrol show job, sacctmgr       does it ask for more, whatever else runs? alone, or
                                                                     with the jobs that it only runs with
        --FAILED-------------->    scontrol show job                 its exit code
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from corral.launcher.cluster.errors import answer_or
from corral.launcher.cluster.jobs import Job
from corral.launcher.slurm.client import SlurmClient, SlurmError, is_installed, queue_command
from corral.launcher.slurm.parse import keeps_accounts
from corral.launcher.slurm.verdict import (
    LimitKind,
    holder_of_reason,
    job_of_scontrol,
    judge_exit,
    judge_job,
    limit_of_reason,
    needs_nodes,
    state_word,
)
from corral.launcher.trial.processes import user_name
from corral.scheduling.slurm_formats import expand_host_list


class SlurmQueue:
    """This user's jobs, and the questions about limits: all that commands which only look need. It needs no schema.

    Args:
        timeout_s: how long a command may take, of a client made here.

    Raises:
        ClusterError: each method that asks, if SLURM does not answer, unless it says otherwise.
    """

    def __init__(self, client: SlurmClient | None = None, *, timeout_s: float = 20.0) -> None:
        self._client = client or SlurmClient(timeout_s=timeout_s)
        self._exceeded: dict[tuple[str, ...], str] = {}
        """What a job exceeds, asked once for each job and reason."""

    @property
    def identity(self) -> str:
        """Which cluster this machine asks, of several that share a home folder."""
        return "|".join(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))

    @property
    def question(self) -> str:
        """What people type to see what `jobs` saw."""
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
        word, exit_code, nodes_are_down, exceeded = state_word(job.word), "", False, ""
        with suppress(SlurmError):
            if word == "FAILED":
                exit_code = self._values(job).get("ExitCode", "")
            elif word == "PENDING" and needs_nodes(job.reason):
                nodes_are_down = self._are_nodes_down(job)
            elif word == "PENDING" and limit_of_reason(job.reason) in (LimitKind.NOTHING, LimitKind.OTHERS):
                exceeded = self._ask_exceeded(job)
        state, note = judge_job(
            job.word,
            job.reason,
            start=job.run,
            has_run=has_run,
            nodes_are_down=nodes_are_down,
            exceeded=exceeded,
            job_id=job.job_id,
        )
        findings = (
            *([f"sacctmgr says: {exceeded}"] if exceeded else []),
            *([f"scontrol says ExitCode={exit_code}"] if exit_code else []),
            *(["sinfo says that no node that could run it is up"] if nodes_are_down else []),
        )
        return replace(job, state=state, note=judge_exit(job.word, exit_code) or note, findings=findings)

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
        """Asked once: whoever looks again and again does not ask the controller each time."""
        return keeps_accounts(self._client.settings())

    def accounted(self, job_id: str) -> Job | None:
        """The last that is on record of a forgotten job; None where nothing is, or the cluster keeps no records."""
        state = self._client.accounted_state(job_id) if self._keeps_accounts else ""
        if not state:
            return None
        return replace(job_of_scontrol({"JobId": job_id, "JobState": state}), findings=(f"sacct says {state}",))

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
        """What the first of some jobs exceeds together with the others."""
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
        return "; ".join(excess.said for excess in excesses(job, beside))
