"""Where a trial runs and how it is kept alive: shared folder, network, Redis, SLURM layout, restart budgets."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.placement import NodeShape
from corral.scheduling.scheduling import AskedLayout, JobOptions, OptionalMemoryMb, Scheduling
from corral.scheduling.slurm_formats import COUNTED_MEMORY, MemoryRules

ASSUMED_NODE = NodeShape(cpus=64, gpus=8, mem_mb=480 * 1024)
"""A node of a cluster that was neither described nor asked."""


class ClusterConfig(FrozenConfig):
    """Facts of the site."""

    fileroot: Path | None = None
    """Folder for all trials, on a file system that every node sees; None is $CORRAL_FILEROOT, else ~/corral."""
    bind_address: str = Field(default="auto", pattern=r"^(auto|[0-9A-Za-z_.:-]+)$")
    """Interface that servers listen on: an IP address, or `auto`: 127.0.0.1 with --local, the node's own address on SLURM."""  # noqa: E501
    gpus_per_node: int | None = Field(default=None, ge=0)
    """GPUs of one node that a trial may use; None is what most nodes of the partition have."""
    cpus_per_node: int | None = Field(default=None, ge=1)
    """CPUs of one node that a trial may use, as SLURM counts them; None is what most nodes of the partition have."""
    mem_per_node: OptionalMemoryMb = Field(default=None, ge=1)
    """Memory of one node that a trial may use, in MB or with a suffix K, M, G or T; None is what most nodes of the partition have."""  # noqa: E501
    gpu_memory: OptionalMemoryMb = Field(default=None, ge=1024)
    """Memory of one GPU, in MB or with a suffix M, G or T (80G); with it every role is compared with its GPU before submission. SLURM does not know it; None compares nothing."""  # noqa: E501
    max_nodes: int | None = Field(default=None, ge=1)
    """Nodes that a trial may use; None is as many as its groups need."""
    gpu_request: Literal["gres", "gpus", "none"] = "gres"
    """How this site gives out GPUs: `--gres=gpu:N`, `--gpus-per-node=N`, or not at all (nodes come with all of theirs)."""  # noqa: E501
    mem_request: Literal["node", "cpu"] = "node"
    """How this site gives out memory: `--mem` per node, or `--mem-per-cpu`, where that is all that jobs may ask for."""
    container_runtime: Literal["apptainer", "singularity", "pyxis"] | None = None
    """The container runtime for a group's container_image; None if no group has an image."""
    container_python: str = "python3"
    """Python inside the containers, with corral installed in it."""

    def node_shape(self, found: NodeShape | None = None) -> NodeShape:
        """Shape of a node to plan with: what is set here, else what was found on the cluster, else an assumption."""
        other = found or ASSUMED_NODE
        return replace(
            other,
            cpus=other.cpus if self.cpus_per_node is None else self.cpus_per_node,
            gpus=other.gpus if self.gpus_per_node is None else self.gpus_per_node,
            mem_mb=other.mem_mb if self.mem_per_node is None else self.mem_per_node,
        )

    def memory_option(self, *, mem_mb: int, cpus: int, rules: MemoryRules = COUNTED_MEMORY) -> dict[str, str]:
        """The option of sbatch that asks for memory beside so many CPUs on each node, with its value.

        Args:
            rules: where memory is not counted there is no option, or the one that undoes a default.
        """
        if not rules.is_counted:
            return {"mem": "0"} if rules.has_default else {}
        if self.mem_request == "cpu":
            return {"mem-per-cpu": f"{-(-mem_mb // cpus)}M"}
        return {"mem": f"{mem_mb}M"}

    def gpu_option(self, gpus: int, gpu_type: str | None) -> tuple[str, str | None]:
        """The option of sbatch that asks for so many GPUs of each node, and its value, if it has one."""
        amount = f"{gpu_type}:{gpus}" if gpu_type else str(gpus)
        match self.gpu_request:
            case "gres":
                return "gres", f"gpu:{amount}"
            case "gpus":
                return "gpus-per-node", amount
            case "none":
                # Nobody counts the GPUs there: jobs on the same node would share them too.
                return "exclusive", None


class LaunchConfig(JobOptions, FrozenConfig):
    """How the trial is submitted to SLURM."""

    layout: AskedLayout = "auto"
    """`packed` is one allocation for all groups, `hetjob` one component per kind of node, `jobs` one job per group; `auto` takes `packed` where all groups may share an allocation, else `hetjob`."""  # noqa: E501
    signal_before_end_s: int = Field(default=180, ge=5)
    """Seconds before the time limit at which the trial checkpoints and hands over to its next attempt; SLURM may be up to a minute early."""  # noqa: E501
    gang_timeout_s: float = Field(default=600.0, gt=0.0)
    """Layout `jobs`: seconds from the first running job to the last; after it all are given back and asked for again."""  # noqa: E501
    sbatch_template: Path | None = None
    """A Jinja template to use instead of the shipped trial.sbatch.j2."""


class SupervisionConfig(FrozenConfig):
    """Restart budgets and deadlines."""

    max_restarts: int = Field(default=20, ge=0)
    """Restarts of one unit before the trial fails; also the trainer epochs in a row that may end without a commit."""
    healthy_after_s: float = Field(default=600.0, gt=0.0)
    """A unit that ran this long gets its whole budget back."""
    silence_timeout_s: float = Field(default=60.0, ge=1.0)
    """Longest time that a worker may give no sign of life while Redis answers; it is then killed and started again. While it becomes ready, `setup_timeout_s` holds."""  # noqa: E501
    setup_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest time without progress while a worker becomes ready, or verifies the checkpoint to continue from."""
    step_timeout_s: float = Field(default=3600.0, gt=0.0)
    """Longest time without progress in one model function call, in loading the model, or in writing a checkpoint."""
    stop_grace_s: float = Field(default=120.0, gt=0.0)
    """Time that rl-stop gives a trial to checkpoint."""


class WorkersConfig(FrozenConfig):
    """How many workers there are, and what each asks for."""

    count: int | None = Field(default=None, ge=1, le=100_000)
    """Number of workers; None follows from the allocation (rollout workers: one per training rank)."""
    scheduling: Scheduling | None = None
    """Resources of one worker; in an experiment file, keys that are left out keep the default of the kind, or, of
    elastic workers, what the group has."""


class ElasticConfig(WorkersConfig):
    """Further workers of a group, each a job of its own that may come and go while the trial runs."""

    count: int = Field(ge=1, le=100_000)
    """Number of such workers, beside the group's count."""


class GroupConfig(WorkersConfig):
    """Overrides for one group of workers."""

    elastic: ElasticConfig | None = None
    """Workers on nodes that may be taken away, such as a preemptible partition; for generation servers and rollout workers."""  # noqa: E501

    def given_schedulings(self) -> Iterator[tuple[tuple[str, ...], Scheduling]]:
        """The resources that are given, of all its workers or of elastic ones, each by its key below the group's."""
        elastic = self.elastic.scheduling if self.elastic else None
        for key, scheduling in ((("scheduling",), self.scheduling), (("elastic", "scheduling"), elastic)):
            if scheduling is not None:
                yield key, scheduling
