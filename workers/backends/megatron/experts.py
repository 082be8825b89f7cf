"""Mixtures of experts: where a token goes, and experts' matrices in the pieces that others hold them in.

    MicroBatch.routed_experts ──► row ──► Replay of each layer ──► its router: those experts, weighed as of now
    a directory's matrices, one for each expert ──► stack_experts ──► a module's, stacked        (back: `as_stored`)

A token goes to the experts that were recorded when it was generated ("rollout routing replay", Ma et al. 2025,
https://arxiv.org/abs/2510.11370): generator and trainer compute a little differently, and a router near a tie would
choose others, whose log-probability of the token is another one altogether. How much each of them counts follows from
the router's present logits, so that the router learns.

The matrices of a rank's experts of one layer multiply all their tokens in one call.

    tokens, sorted by expert [T, H] ──► gate and up of each: one call ──► silu(gate) * up * weight
                                                                              └──► down of each: one call ──► [T, H]

Megatron-core 0.16.1 multiplies expert by expert unless Transformer Engine or grouped_gemm is installed; torch has the
same product of its own. Parameters are those of Megatron's sequence of experts, one matrix for each, so that code that
reads, writes or updates them sees no difference.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from corral.experiments.inputs.decoder_config import MIXTURES, sparse_layers
from corral.workers.backends.grouped_product import grouped_product

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How a kind of mixture names in its files what transformers' modules call `mlp`, and the matrices of an expert."""

    block: str
    gate: str
    up: str
    down: str

    def of_expert(self, name: str) -> re.Match[str] | None:
        """Layer, expert and matrix of a stored name, if it is an expert's."""
        return re.fullmatch(
            rf"(?P<layer>.+)\.{self.block}\.experts\.(?P<expert>\d+)\.(?P<matrix>{self.gate}|{self.up}|{self.down})\.weight",
            name,
        )


QWEN_NAMES: Final = StoredNames("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES: Final = StoredNames("block_sparse_moe", "w1", "w3", "w2")


class Replay:
    """The experts of the tokens of one row in one layer, asked by a router of Megatron in place of choosing some.

    Megatron's own `RouterReplay` has one target for all micro-batches, in a list of the whole process.
    """

    def __init__(self, experts: Tensor) -> None:
        """
        Args:
            experts: [tokens, k] integers; a token with a negative one goes where the router sends it.
        """
        self._experts = experts.long()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[tokens, experts] -> the scores of the k experts of each token, and which they are; Megatron's interface."""
        assert default_compute_topk is not None, "Megatron's router passes its own choice"
        _, own_choice = default_compute_topk(scores, topk, num_groups, group_topk)
        is_unknown = (self._experts < 0).any(dim=1, keepdim=True)
        chosen = torch.where(is_unknown, own_choice, self._experts)
        return scores.gather(1, chosen), chosen


def mend_router() -> None:
    """Let routers of megatron-core 0.16.1 compute without Transformer Engine, on a GPU as well; again changes nothing.

    They ask whether this function of it is None, of a name that exists with Transformer Engine only.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def stack_experts(
    weights: Iterable[tuple[str, Tensor]], names: StoredNames, *, num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Weights as a directory has them -> as transformers' modules do: the matrices of a layer's experts in two tensors.

    Holds the matrices of one such tensor at a time, if weights come layer by layer. Others pass as they are.
    """
    waiting: defaultdict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        home, start = place_in_module(name, tuple(tensor.shape), names)
        if len(start) == tensor.ndim:
            yield home, tensor
            continue
        matrices = waiting[home]
        matrices[start] = tensor
        if len(matrices) == num_experts * (2 if home.endswith(_GATE_UP) else 1):
            rows = torch.cat([matrices[place] for place in sorted(matrices)])  # of each expert gate before up
            yield home, rows.view(num_experts, -1, rows.shape[1])
            del waiting[home], matrices, rows


def place_in_module(name: str, shape: tuple[int, ...], names: StoredNames) -> tuple[str, tuple[int, ...]]:
    """A directory's tensor -> the module's tensor that `stack_experts` puts it in, and where it begins there."""
    stored = names.of_expert(name)
    if stored is None:
        return name.replace(f".{names.block}.", ".mlp."), (0,) * len(shape)
    expert = int(stored["expert"])
    if stored["matrix"] == names.down:
        return f"{stored['layer']}{_DOWN}", (expert, 0, 0)
    return f"{stored['layer']}{_GATE_UP}", (expert, shape[0] if stored["matrix"] == names.up else 0, 0)


def expert_settings(config: Any) -> dict[str, Any]:
    """What of Megatron's configuration follows from a model's config.json besides what mbridge says; none if dense."""
    if config.model_type not in MIXTURES:
        return {}
    sparse = sparse_layers(config.to_dict())
    settings: dict[str, Any] = {
        # One matrix for each expert: Megatron's own grouped product is Transformer Engine's (GroupedExperts).
        "moe_grouped_gemm": False,
        # Whether the weights of a token's experts add up to 1; those of a Mixtral always do.
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_layer_freq": [int(layer in sparse) for layer in range(config.num_hidden_layers)],
    }
    if config.model_type == "qwen2_moe":
        settings |= {
            "add_qkv_bias": config.qkv_bias,
            "moe_shared_expert_gate": True,
            # Beside the exchange of tokens it would run on a stream of its own, in pieces of Transformer Engine.
            "moe_shared_expert_overlap": False,
        }
    return settings


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
