"""What SLURM is asked beside squeue about a job that waits for something, or that failed.

job --its reason--> nodes:  scontrol show job, sinfo             are all that could run it down?
                    limits: scontrol show job, sacctmgr          does it exceed one, whatever else runs? alone, or
                                                                 with the jobs that it only runs with
    --FAILED------>         scontrol show job                    its exit code
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from corral.launcher.cluster.jobs import Job
from corral.launcher.slurm.accounts import Holder, read_accounts
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.limits import (
    Charge,
    LimitKind,
    demand_of_job,
    excesses,
    holder_of_reason,
    limit_of_reason,
)
from corral.launcher.slurm.verdict import judge_exit, judge_job, needs_nodes
from corral.launcher.slurm.words import state_word
from corral.launcher.trial.processes import user_name
from corral.scheduling.slurm_formats import expand_host_list


class JobInquiry:
    """Asks about jobs; about a limit once for each job and reason."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._exceeded: dict[tuple[str, ...], str] = {}

    def look_closer(self, job: Job, *, has_run: bool) -> Job:
        """The job with what its state and reason leave open; where SLURM does not answer, that stays open."""
        word, exit_code, nodes_are_down, exceeded = state_word(job.word), "", False, ""
        with suppress(SlurmError):
            if word == "FAILED":
                exit_code = self._values(job).get("ExitCode", "")
            elif word == "PENDING" and needs_nodes(job.reason):
                nodes_are_down = self._are_nodes_down(job)
            elif word == "PENDING" and limit_of_reason(job.reason) in (LimitKind.NOTHING, LimitKind.OTHERS):
                exceeded = self._ask_exceeded(job)
        verdict = judge_job(
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
        note = judge_exit(job.word, exit_code) or verdict.note
        return replace(job, state=verdict.state, note=note, findings=findings)

    def why_never(self, job: Job, *, beside: Sequence[str]) -> str:
        """Why a job that waits cannot start while those beside it are there; "" where others may be the cause."""
        if job.is_blocked:
            return job.note
        if limit_of_reason(job.reason) is not LimitKind.OTHERS or not (exceeded := self._ask_exceeded(job, beside)):
            return ""
        field = "account" if holder_of_reason(job.reason) is Holder.ACCOUNT else "qos"
        return f"{job.reason}: {exceeded}; ask for less, for another launch.{field}, or for launch.layout: packed"

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
        accounts, partitions = read_accounts(self._client, user_name()), self._client.partitions()

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
