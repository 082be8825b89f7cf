"""Hugging Face's names and tensors ◄──► Megatron's, for the parameters that this rank has.

    config.json ── mbridge ──► TransformerConfig
    q_proj, k_proj, v_proj   ◄── mbridge ──►  linear_qkv, whole  ◄── cut ──►  this rank's part
    gate_proj, up_proj       ◄── mbridge ──►  linear_fc1, whole  ◄── cut ──►  this rank's part
    experts.3.gate_proj ...  ◄── mbridge ──►  experts.linear_fc1.weight3      if this rank has expert 3

Which tensors belong together, and in which order their rows are, is mbridge's knowledge. Its own loading and saving is
not used: it sends names between ranks as pickles, and takes Megatron's process-wide groups.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from mbridge import AutoBridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.qwen2 import Qwen2Bridge
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from corral.experiments.inputs.decoder_config import MIXTURES, megatron_refusals
from corral.scheduling.parallel import stage_layers
from corral.workers.backends.lora import is_adapter
from corral.workers.backends.megatron.experts import MIXTRAL_NAMES, QWEN_NAMES, expert_settings

_PRE_MLP_NORM: Final = "pre_mlp_layernorm.weight"
_FUSED_NAMES: Final = {
    # Megatron's fused layers hold the norm before them, and mbridge knows those names only.
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    _PRE_MLP_NORM: "mlp.linear_fc1.layer_norm_weight",
}
_LOCAL_EXPERT: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")
_EXPERT: Final = re.compile(r"(.+\.mlp\.experts\.linear_fc[12]\.weight)(\d+)")
OUTPUT: Final = "output_layer.weight"
"""A model's last layer, as Megatron names it."""
_EMBEDDING: Final = "embedding.word_embeddings.weight"
SCORE: Final = "score.weight"
"""The last layer of a critic or a reward model, as directories name it."""
SCORE_BIAS: Final = "score.bias"
"""Its bias, which some directories have."""
_SCORE_LAYER: Final = {OUTPUT: SCORE, "output_layer.bias": SCORE_BIAS}


def _leave(weight: Tensor) -> Tensor:
    return weight


_PLAIN: Final = dict(
    # What is only faster, and needs kernels that torch alone does not have.
    apply_rope_fusion=False,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    persist_layer_norm=False,
    # Weights are read, and nothing is drawn at random; without this step Megatron marks no parameter as cut.
    init_method=_leave,
    output_layer_init_method=_leave,
    embedding_init_method=_leave,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    # A micro-batch gives its part of the mean over the global batch.
    calculate_per_token_loss=True,
    # gloo may still read what a stage sent.
    deallocate_pipeline_outputs=False,
)


class Bridge:
    """One model's two sets of names."""

    def __init__(self, config: Any, groups: ProcessGroupCollection, *, head: str, dtype: torch.dtype) -> None:
        refused = list(megatron_refusals(config.to_dict()))  # mbridge takes it without a word and computes otherwise
        assert not refused, f"{refused} is refused at submission"
        config = copy.deepcopy(config)
        config.rope_theta = config.rope_parameters["rope_theta"]  # where mbridge looks for it
        if getattr(config, "head_dim", 0) is None:  # a Mixtral may leave it open, and mbridge computes with it
            config.head_dim = config.hidden_size // config.num_attention_heads
        self._head = head
        self.expert_names = MIXTRAL_NAMES if config.model_type == "mixtral" else QWEN_NAMES
        self.has_tied_output = bool(config.tie_word_embeddings) and head == "lm"
        self.tensor_rank, self._tensor_ranks = int(groups.tp.rank()), int(groups.tp.size())
        self._expert_rank, self._expert_ranks = int(groups.ep.rank()), int(groups.ep.size())
        self.num_experts: int = config.num_experts if config.model_type in MIXTURES else 0
        self._bridge: Any = AutoBridge.from_config(
            config,
            dtype=dtype,
            parallel_states=ParallelStates(
                tp_size=groups.tp.size(),
                tp_rank=groups.tp.rank(),
                pp_size=groups.pp.size(),
                pp_rank=groups.pp.rank(),
                vpp_size=None,
                ep_size=groups.ep.size(),
                etp_size=groups.expt_tp.size(),
                tp_group=groups.tp,
                pp_group=groups.pp,
            ),
        )
        stages = stage_layers(config.num_hidden_layers, groups.pp.size())
        ends = {"first": stages[0], "last": stages[-1]} if len({*map(len, stages)}) > 1 else {}
        of_ends = {f"num_layers_in_{end}_pipeline_stage": len(layers) for end, layers in ends.items()}
        self._bridge.set_extra_args(**_PLAIN, **expert_settings(config), **of_ends)
        if self.num_experts:  # mbridge's mixtures know no layers without experts; these are named as in dense models
            self._bridge._MLP_MAPPING = Qwen2Bridge._MLP_MAPPING | self._bridge._MLP_MAPPING
        self.config: TransformerConfig = self._bridge.config
        self._bridge.dtype = None  # to which it would round what a moving average is given
        self.model_arguments: dict[str, Any] = self._bridge._get_gptmodel_args()

    def names(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of this stage by their names within the whole model.

        An output that is tied to the embedding is a second copy of it where the last stage is not the first, and has
        the embedding's name.
        """
        named: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parts = name.split(".", 3)
            if name == OUTPUT and self.has_tied_output:
                name = _EMBEDDING
            elif name.startswith("decoder.layers."):
                layer: Any = model.get_submodule(".".join(parts[:3]))
                name = f"decoder.layers.{layer.layer_number - 1}.{self._in_any_layer(parts[3])}"
            named[name] = parameter
        return named

    def _in_any_layer(self, name: str) -> str:
        """A parameter's name within its layer, as mbridge knows it, with its expert's number in the whole model."""
        if expert := _LOCAL_EXPERT.fullmatch(name):
            number = self._expert_rank * (self.num_experts // self._expert_ranks) + int(expert[1])
            return f"mlp.experts.{expert[2]}{number}"
        if self.num_experts and name == _PRE_MLP_NORM:
            return name
        return _FUSED_NAMES.get(name, name)

    def counterparts(self, name: str) -> list[tuple[str, int | None]]:
        """What the expert-parallel ranks of a stage have in a parameter's place: names, and which rank has each.

        None stands for all of them: of what belongs to no expert every rank has the same.
        """
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return [(name, None)]
        per_rank = self.num_experts // self._expert_ranks
        place = int(expert[2]) % per_rank
        return [(f"{expert[1]}{rank * per_rank + place}", rank) for rank in range(self._expert_ranks)]

    def is_score_layer(self, name: str) -> bool:
        """Whether a parameter is of the layer that gives the scores of a critic or a reward model."""
        return self._head != "lm" and name in _SCORE_LAYER

    def stored_names(self, name: str) -> list[str]:
        """The tensors of a Hugging Face directory that a parameter of the whole model is made of.

        Adapters have the same names and shapes on both sides.
        """
        if self.is_score_layer(name):
            return [_SCORE_LAYER[name]]
        if is_adapter(name):
            return [name]
        stored: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(name)
        return stored

    def to_stored(self, name: str, whole: Tensor) -> list[tuple[str, Tensor]]:
        """A parameter of the whole model as the tensors of a directory."""
        if name in _SCORE_LAYER or is_adapter(name):
            return [(self.stored_names(name)[0], whole)]
        names, tensors = self._bridge._weight_to_hf_format(name, whole)
        return list(zip(names, tensors, strict=True))

    def from_stored(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `to_stored`, for the tensors in the order of `stored_names`."""
        if name in _SCORE_LAYER or is_adapter(name):
            return tensors[0]
        whole: Tensor = self._bridge._weight_to_mcore_format(name, list(tensors))
        return whole

    def join(self, name: str, parts: Sequence[Tensor], parameter: nn.Parameter) -> Tensor:
        """The parts of all tensor-parallel ranks, of a parameter that is cut, as one."""
        columns = zip(*(_halves(name, part) for part in parts), strict=True)
        return torch.cat([torch.cat(column, dim=cut_dimension(parameter)) for column in columns])

    def own_part(self, name: str, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """What this rank has of a parameter of the whole model: the inverse of `join`."""
        if not is_cut(parameter):
            return whole
        rank, ranks = self.tensor_rank, self._tensor_ranks
        return torch.cat([half.chunk(ranks, dim=cut_dimension(parameter))[rank] for half in _halves(name, whole)])


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether each tensor-parallel rank has a part of it, and not the whole."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _halves(name: str, tensor: Tensor) -> Sequence[Tensor]:
    """Gate and up projection, each of which is cut over the ranks; of other parameters the whole."""
    return tensor.chunk(2) if ".linear_fc1." in name and not name.endswith("layer_norm_weight") else (tensor,)


def cut_dimension(parameter: nn.Parameter) -> int:
    """Along which tensor-parallel ranks have their parts of a parameter that is cut."""
    dimension: int = getattr(parameter, "partition_dim")  # noqa: B009 - Megatron sets it, nn.Parameter has none
    return dimension
