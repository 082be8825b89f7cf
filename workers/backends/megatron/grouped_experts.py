"""A rank's experts of one layer, whose matrices multiply all their tokens in one call.

    tokens, sorted by expert [T, H] ──► gate and up of each: one call ──► silu(gate) * up * weight
                                                                              └──► down of each: one call ──► [T, H]

Megatron-core 0.16.1 multiplies expert by expert unless Transformer Engine or grouped_gemm is installed; torch has the
same product of its own. Parameters are those of Megatron's sequence of experts, one matrix for each, so that whoever
reads, writes or updates them sees no difference.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

_ROW_BYTES: Final = 16  # torch's grouped product reads rows in such steps


def fits_grouped_product(config: TransformerConfig) -> bool:
    """Whether torch takes matrices of these sizes; if not, Megatron multiplies them one after the other."""
    tensor_ranks = config.expert_tensor_parallel_size or 1
    rows = (config.hidden_size, config.moe_ffn_hidden_size // tensor_ranks)
    return all(row * config.params_dtype.itemsize % _ROW_BYTES == 0 for row in rows)


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


def grouped_product(tokens: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """[T, in] sorted by group, [groups] int32 ends of the groups, a matrix [out, in] for each -> [T, out]."""
    output: Tensor = _GroupedProduct.apply(tokens, ends, *matrices)  # type: ignore[no-untyped-call]
    return output


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *matrices)
        return F.grouped_mm(tokens, as_one(matrices).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *matrices = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_tokens = F.grouped_mm(gradient, as_one(matrices), offs=ends) if ctx.needs_input_grad[0] else None
        of_matrices = F.grouped_mm(gradient.t(), tokens, offs=ends)
        return of_tokens, None, *of_matrices.unbind()


def as_one(matrices: Sequence[Tensor]) -> Tensor:
    """[out, in] each -> [matrices, out, in], without a copy where they stand at equal distances in memory."""
    first = matrices[0].detach()
    offsets = [matrix.storage_offset() for matrix in matrices]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else first.numel()
    are_together = (
        len({matrix.untyped_storage().data_ptr() for matrix in matrices}) == 1
        and offsets == [offsets[0] + place * step for place in range(len(offsets))]
        and step >= first.numel()
        and step * first.element_size() % _ROW_BYTES == 0
        and all(matrix.is_contiguous() for matrix in matrices)
    )
    if not are_together:
        return torch.stack([matrix.detach() for matrix in matrices])
    return first.as_strided((len(matrices), *first.shape), (step, *first.stride()))
