"""A cluster that is not there: its shape, as somebody types it -> where a trial would run on it, and whether it fits.

    --shape 4x8x80G ──► ClusterShape ──► memory of each GPU ──► plan_layout on such nodes ──► Preflight

Nothing is asked of SLURM, and nothing of this machine. CPUs and host memory of the nodes are those of the
configuration; where it does not say them, there are as many as the workers ask for.
"""

import re
from dataclasses import dataclass, replace

from corral.experiments.errors import ConfigError, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.planner import plan_layout
from corral.launcher.submit.check_memory import check_memory
from corral.launcher.submit.plan_text import count_of
from corral.launcher.submit.preflight import Preflight
from corral.scheduling.scheduling import GIB_MB
from corral.scheduling.slurm_formats import parse_memory_mb

_SHAPE = re.compile(r"([0-9]{1,5})x([0-9]{1,3})x([0-9]{1,6}[MGTmgt])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Nodes that are all alike, as far as GPUs go."""

    num_nodes: int
    gpus_per_node: int
    gpu_memory_mb: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        """'4 nodes with 8 GPUs of 80 GiB'."""
        nodes, gpus = count_of(self.num_nodes, "node"), count_of(self.gpus_per_node, "GPU")
        return f"{nodes} with {gpus} of {self.gpu_memory_mb / GIB_MB:.4g} GiB"

    def in_plan(self, plan: RunPlan) -> RunPlan:
        """The plan with these nodes, which have the CPUs and the memory that workers ask for where nobody says it."""
        cluster, groups = plan.cluster, [group for _, group in plan.scheduling.items()]
        cpus, mem_mb = (sum(one.total_count * getattr(one.scheduling, it) for one in groups) for it in ("cpu", "mem"))
        known = {
            "gpus_per_node": self.gpus_per_node,
            "gpu_memory": self.gpu_memory_mb,
            "max_nodes": min(self.num_nodes, cluster.max_nodes or self.num_nodes),
            "cpus_per_node": cluster.cpus_per_node or cpus + 1,
            "mem_per_node": cluster.mem_per_node or mem_mb + GIB_MB,
        }
        return plan.model_copy(update={"cluster": cluster.model_copy(update=known)})

    @classmethod
    def parse(cls, text: str) -> "ClusterShape":
        """Read NODESxGPUSxMEMORY.

        Raises:
            ConfigError: naming the rule, what was written, and an example.
        """
        match = _SHAPE.fullmatch(text.strip())
        numbers = [int(match[1]), int(match[2]), parse_memory_mb(match[3])] if match else []
        if not numbers or min(numbers) < 1:
            raise ConfigError.of(
                f"a cluster's shape is NODESxGPUSxMEMORY, each at least 1, the memory of one GPU with M, G or T, "
                f"got {text!r}",
                hint="write 4x8x80G for 4 nodes with 8 GPUs of 80 GB each",
                place=f"--shape {text}",
            )
        return cls(num_nodes=numbers[0], gpus_per_node=numbers[1], gpu_memory_mb=numbers[2])


def check_on_shape(plan: RunPlan, shape: ClusterShape) -> Preflight:
    """Plans a trial for a cluster of this shape, which is in the plan.

    Raises:
        ConfigError: if a GPU cannot hold what it would have to.
        UnsatisfiableError: if there are too few GPUs or nodes.
    """
    _check_gpus(plan, shape)
    check_memory(plan, is_estimate_enough=True)
    layout = plan_layout(plan)
    checks = [f"imagined cluster of {shape}, nothing is asked of a real one", "memory of every GPU ok"]
    keys = {"CPUs": "cpus_per_node", "host memory": "mem_per_node"}
    if unknown := [name for name, key in keys.items() if plan.config["cluster"][key] is None]:
        checks.append(f"{' and '.join(unknown)} of its nodes not compared")
    return Preflight(layout=layout, checks=tuple(checks), warnings=())


def _check_gpus(plan: RunPlan, shape: ClusterShape) -> None:
    wanted = {kind: group.count * group.scheduling.gpu for kind, group in plan.scheduling.items()}
    if (total := sum(wanted.values())) <= shape.num_gpus:
        return
    parts = " + ".join(f"{count} of {kind}" for kind, count in wanted.items() if count)
    enough = replace(shape, num_nodes=-(-total // shape.gpus_per_node))
    raise UnsatisfiableError.of(
        f"trial can never start: it needs {total} GPUs ({parts}), and {shape} are {shape.num_gpus}",
        hint=f"{enough} are enough; or lower d in the allocation",
        path=("allocation",),
    )
