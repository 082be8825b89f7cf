"""What SLURM is asked beside squeue about a job that waits for something, or that failed.

job --its reason--> nodes:  scontrol show job, sinfo             are all that could run it down?
                    limits: scontrol show job, sacctmgr          does it exceed one, whatever else runs?
    --FAILED------>         scontrol show job                    its exit code
"""

from typing import NamedTuple

from corral.launcher.slurm.accounts import read_accounts
from corral.launcher.slurm.client import SlurmClient, SlurmError, user_name
from corral.launcher.slurm.limits import LimitKind, demand_of_job, excesses, limit_of_reason
from corral.launcher.slurm.parse import QueuedJob
from corral.launcher.slurm.verdict import needs_nodes
from corral.scheduling.slurm_formats import expand_host_list


class JobDetails(NamedTuple):
    """What was found out; nothing where SLURM did not answer."""

    nodes_are_down: bool = False
    """Whether all nodes that could run a pending job are down."""
    exit_code: str = ""
    """Of a failed one."""
    exceeded: str = ""
    """The limit that a pending job exceeds by itself, in words."""


NO_DETAILS = JobDetails()


class JobInquiry:
    """Asks about jobs; about a limit once for each job and reason."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._exceeded: dict[tuple[str, str], str] = {}

    def ask(self, job: QueuedJob | None) -> JobDetails:
        """What a job's state and reason leave open."""
        if job is None:
            return NO_DETAILS
        try:
            if job.state == "FAILED":
                return JobDetails(exit_code=(self._client.job(job.job_id) or {}).get("ExitCode", ""))
            if job.state != "PENDING":
                return NO_DETAILS
            if needs_nodes(job.reason):
                return JobDetails(nodes_are_down=self._are_nodes_down(job))
            if limit_of_reason(job.reason) in (LimitKind.NOTHING, LimitKind.OTHERS):
                return JobDetails(exceeded=self._ask_exceeded(job))
        except SlurmError:
            return NO_DETAILS
        return NO_DETAILS

    def _are_nodes_down(self, job: QueuedJob) -> bool:
        wanted = (self._client.job(job.job_id) or {}).get("ReqNodeList", "(null)")
        names = set(expand_host_list(wanted)) if wanted not in ("", "(null)") else None
        nodes = [node for node in self._client.nodes() if node.partition in job.partition.split(",")]
        able = [node for node in nodes if names is None or node.name in names]
        return bool(able) and not any(node.is_up or node.is_in_maintenance for node in able)

    def _ask_exceeded(self, job: QueuedJob) -> str:
        known = (job.job_id, job.reason)
        if known not in self._exceeded:
            self._exceeded[known] = self._exceeded_by(self._client.job(job.job_id) or {})
        return self._exceeded[known]

    def _exceeded_by(self, values: dict[str, str]) -> str:
        partition = values.get("Partition", "")
        ladder = read_accounts(self._client, user_name()).ladder(
            account=values.get("Account") or None,
            qos=values.get("QOS") or None,
            partition=partition,
            partition_qos=self._client.partitions().get(partition, {}).get("QoS", ""),
        )
        return "; ".join(excess.said for excess in excesses(demand_of_job(values), ladder))
