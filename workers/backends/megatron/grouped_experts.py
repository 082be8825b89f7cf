"""A rank's experts of one layer, whose matrices multiply all their tokens in one call.

    tokens, sorted by expert [T, H] ──► gate and up of each: one call ──► silu(gate) * up * weight
                                                                              └──► down of each: one call ──► [T, H]

Megatron-core 0.16.1 multiplies expert by expert unless Transformer Engine or grouped_gemm is installed; torch has the
same product of its own. Parameters are those of Megatron's sequence of experts, one matrix for each, so that whoever
reads, writes or updates them sees no difference.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from corral.workers.backends.grouped_product import grouped_product


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts of a layer, computed together."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        # Megatron lays out parameters from the last to the first: so experts ascend in memory, and are one tensor.
        in_order = dict(self.get_submodule("local_experts").named_children())
        self.local_experts = nn.ModuleDict(dict(reversed(in_order.items())))

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Megatron's interface.

        Args:
            permuted_local_hidden_states: [T, H], sorted by expert.
            tokens_per_expert: [experts] integers, of this rank's experts.
            permuted_probs: [T], how much each token's expert counts.

        Returns:
            ([T, H], no bias).
        """
        hidden = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0).to(device=hidden.device, dtype=torch.int32)
        gate, up = grouped_product(hidden, ends, self.matrices("linear_fc1")).chunk(2, dim=-1)
        weighted = (F.silu(gate) * up * permuted_probs[:, None]).to(hidden.dtype)
        return grouped_product(weighted, ends, self.matrices("linear_fc2")), None

    def matrices(self, name: str) -> list[Tensor]:
        """One of Megatron's two layers of each expert, in their order."""
        experts: Any = self.local_experts
        return [getattr(experts[str(number)], name).weight for number in range(self.num_local_experts)]
