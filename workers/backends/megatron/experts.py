"""Mixtures of experts: where a token goes, and experts' matrices in the pieces that others hold them in.

    MicroBatch.routed_experts ──► row ──► Replay of each layer ──► its router: those experts, weighed as of now
    a directory's matrices, one for each expert  ◄── stack_experts, unstack_experts ──►  a module's, stacked

A token goes to the experts that were recorded when it was generated ("rollout routing replay", Ma et al. 2025,
https://arxiv.org/abs/2510.11370): generator and trainer compute a little differently, and a router near a tie would
choose others, whose log-probability of the token is another one altogether. How much each of them counts follows from
the router's present logits, so that the router learns.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

_STORED: Final = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")
_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


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
        if self._experts.shape != (len(scores), topk):
            raise ValueError(
                f"routed_experts of a row are {tuple(self._experts.shape)}, and its router sends {len(scores)} tokens "
                f"to {topk} experts each: they were recorded with another model"
            )
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


def stack_experts(weights: Iterable[tuple[str, Tensor]], *, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Weights as a directory has them -> as transformers' modules do: the matrices of a layer's experts in two tensors.

    Holds one layer's matrices at a time, if weights come layer by layer. Others pass as they are.
    """
    waiting: defaultdict[str, dict[tuple[str, int], Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        stored = _STORED.fullmatch(name)
        if stored is None:
            yield name, tensor
            continue
        matrices = waiting[stored["layer"]]
        matrices[stored["kind"], int(stored["expert"])] = tensor
        if len(matrices) == 3 * num_experts:
            experts = range(num_experts)
            gates_and_ups = [torch.cat([matrices["gate", expert], matrices["up", expert]]) for expert in experts]
            yield f"{stored['layer']}.gate_up_proj", torch.stack(gates_and_ups)
            yield f"{stored['layer']}.down_proj", torch.stack([matrices["down", expert] for expert in experts])
            del waiting[stored["layer"]], matrices


def unstack_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `stack_experts`."""
    for name, tensor in weights:
        if name.endswith(_GATE_UP):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                yield f"{name.removesuffix('gate_up_proj')}{expert}.gate_proj.weight", gate
                yield f"{name.removesuffix('gate_up_proj')}{expert}.up_proj.weight", up
        elif name.endswith(_DOWN):
            for expert, matrix in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", matrix
        else:
            yield name, tensor


def place_in_module(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A directory's tensor -> the module's tensor that `stack_experts` puts it in, and where it begins there."""
    stored = _STORED.fullmatch(name)
    if stored is None:
        return name, (0,) * len(shape)
    expert = int(stored["expert"])
    if stored["kind"] == "down":
        return f"{stored['layer']}.down_proj", (expert, 0, 0)
    return f"{stored['layer']}.gate_up_proj", (expert, shape[0] if stored["kind"] == "up" else 0, 0)


def expert_settings(config: Any) -> dict[str, Any]:
    """What of Megatron's configuration follows from a model's config.json besides what mbridge says; none if dense."""
    if not has_experts(config):
        return {}
    return {
        # One matrix for each expert: the grouped product needs a kernel that torch alone does not have.
        "moe_grouped_gemm": False,
        # Whether the shares of a token's experts add up to 1.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def has_experts(config: Any) -> bool:
    """Whether the layers of a model have experts."""
    return bool(config.model_type == "qwen3_moe")
