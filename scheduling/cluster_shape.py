"""Text for a cluster that is only imagined: "4x8x80G" -> 4 nodes with 8 GPUs of 80 GiB each."""

import re
from dataclasses import dataclass

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
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        gpus = f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''}"
        return f"{nodes} with {gpus} of {self.gpu_memory_mb / GIB_MB:.4g} GiB"

    @classmethod
    def parse(cls, text: str) -> "ClusterShape":
        """Read NODESxGPUSxMEMORY.

        Raises:
            ValueError: naming the rule, what was written, and an example.
        """
        match = _SHAPE.fullmatch(text.strip())
        numbers = [int(match[1]), int(match[2]), parse_memory_mb(match[3])] if match else []
        if not numbers or min(numbers) < 1:
            raise ValueError(
                f"a cluster's shape is NODESxGPUSxMEMORY, each at least 1, the memory of one GPU with M, G or T, "
                f"got {text!r}; write 4x8x80G for 4 nodes with 8 GPUs of 80 GB each"
            )
        return cls(num_nodes=numbers[0], gpus_per_node=numbers[1], gpu_memory_mb=numbers[2])
