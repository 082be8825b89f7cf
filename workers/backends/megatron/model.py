"""Megatron's model of a Hugging Face configuration, over packed rows, with one of our heads on its last stage.

    row of T tokens in n segments ──► embedding (first stage) ──► layers of this stage ──► hidden states to the next
                                                 last stage: norm ──► head ──► scores [1, entries, numbers]

Layers are megatron-core's own modules, whose names and numbers are the same with and without a GPU. Attention is
`packed_attention`, the same as that of the fsdp backend, and so are the parts that a row is cut into
(context_parallel.py). Of these Megatron knows nothing: it would cut each sequence into two pieces for each rank, and
take positions to go with them; here it is given those of the tokens that a rank has.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from corral.scheduling.keys import KeyLayout
from corral.workers.backends.chunked_head import WHOLE_VOCABULARY, VocabularyShard
from corral.workers.backends.heads import Head, question_of
from corral.workers.backends.megatron.bridge import Bridge
from corral.workers.backends.megatron.experts import GroupedExperts, Replay, mend_router
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.packed_attention import packed_attention, share_heads


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """The positions of this rank's tokens for Megatron's rotary embedding, and of the whole row for our attention."""

    segment_lengths: tuple[int, ...] = ()
    """Of the whole row, as are these:"""
    cu_seqlens: Tensor = field(kw_only=True)
    """[segments + 1] int32 on the device; Megatron's own, above, say where a rank's tokens begin and end."""
    routed_experts: Tensor | None = None
    """[tokens of this rank's layers, layers with experts, k]: where each token goes in each of them, or negative."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "PackedRow":
        # One stretch of tokens, since `ScoringModel` finds their angles; on the host, as every layer reads it there.
        bounds = torch.tensor([0, len(micro_batch.input_ids)], dtype=torch.int32)
        longest = max(micro_batch.segment_lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            segment_lengths=micro_batch.segment_lengths,
            cu_seqlens=micro_batch.cu_seqlens,
        )


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """What Megatron calls core attention: queries, keys and values of this rank's heads -> what each token takes."""

    def __init__(self, config: TransformerConfig, *arguments: Any, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedRow, **_: Any
    ) -> Tensor:
        """[T, heads, head_dim] each -> [T, heads * head_dim]."""
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        lengths, bounds = packed_seq_params.segment_lengths, packed_seq_params.cu_seqlens
        attended, _weights = packed_attention(
            self, query, key, value, attention_mask, segment_lengths=lengths, cu_seqlens=bounds, scaling=self._scale
        )
        return attended[0].flatten(1)


class ReplayedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer with experts, whose router receives with each row the experts of its tokens.

    The row comes again when a layer is computed a second time in the backward pass: whatever micro-batches are under
    way, tokens go to the same experts both times.
    """

    def forward(self, *arguments: Any, packed_seq_params: PackedRow, **options: Any) -> Any:
        experts = packed_seq_params.routed_experts
        place = sum(self.config.moe_layer_freq[: self.layer_number - 1])  # among the layers with experts
        self.mlp.router.router_replay = None if experts is None else Replay(experts[:, place])
        try:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        finally:
            # The dispatcher would keep them until the next row, and with the probabilities the graph they come from: of
            # a layer that is computed again all that its attention keeps, when its backward pass is long over.
            dispatcher = self.mlp.token_dispatcher
            dispatcher.probs = dispatcher.routing_map = dispatcher.reversed_local_input_permutation_mapping = None


class RowNorm(nn.RMSNorm):
    """RMSNorm whose gradient Megatron adds up over the ranks that have the other tokens of a row.

    Its own wrapper of torch's norm refuses rows that are cut over ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ScoringModel(GPTModel):  # type: ignore[misc]
    """A stage of the model; the last one gives a head's columns in place of logits."""

    def __init__(self, head: Head, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.head = head
        self._micro_batch: MicroBatch | None = None

    def forward_row(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states for the next stage, or the scores of this rank's tokens: [entries, numbers] float32.

        Args:
            micro_batch: the tokens of this rank, as many as the ranks of a layer can share evenly.
        """
        self._micro_batch = micro_batch
        row = PackedRow.of(micro_batch)
        row.routed_experts = self._experts_of_own_tokens(micro_batch.routed_experts)
        output: Tensor = self(
            input_ids=micro_batch.input_ids[None],
            position_ids=micro_batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=row,
        )
        return output

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **arguments: Any) -> tuple[Any, ...]:
        """Megatron's seam before the layers: the angles of all positions become those of the tokens of this rank."""
        embedded, angles, *others = super()._preprocess(input_ids, position_ids, **arguments)
        return embedded, angles[position_ids[0]], *others

    def _experts_of_own_tokens(self, experts: Tensor | None) -> Tensor | None:
        """[tokens of this rank, layers with experts, k] -> of those that it routes: of a cut row a part."""
        if experts is None or self.config.num_moe_experts is None:
            return None
        own = sum(self.config.moe_layer_freq), self.config.moe_router_topk
        if experts.shape[1:] != own:
            raise ValueError(
                f"routed_experts name {experts.shape[2]} experts in each of {experts.shape[1]} layers, and the model "
                f"asks {own[1]} in each of {own[0]}: they were recorded with another model"
            )
        tensor_ranks = self.pg_collection.tp
        parts: tuple[Tensor, ...] = experts.chunk(tensor_ranks.size())
        return parts[int(tensor_ranks.rank())]

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Megatron's seam between layers and output."""
        if not self.post_process:
            return hidden_states
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return self._scores(hidden_states, weight, self.output_layer.bias)

    def _scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[tokens of this rank, 1, hidden] and the rows of the output layer that it has -> [entries, numbers].

        Of a critic the tokens of padding have scores, too, behind the others.
        """
        row, group = self._micro_batch, self.pg_collection.tp
        assert row is not None, "a stage was run without a micro-batch"
        if self.config.sequence_parallel:
            # Each rank's part of the vocabulary gives a part of the gradient; a score layer's is whole on each.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not self.head.has_score_layer, group=group
            )
        hidden = hidden[:, 0]
        if self.head.has_score_layer:
            own = hidden[row.last_tokens] if self.head.layout is KeyLayout.PER_ANSWER else hidden
            return nn.functional.linear(own.float(), weight.float(), None if bias is None else bias.float())
        shard = WHOLE_VOCABULARY
        if group.size() > 1:
            # The gather's own backward pass adds the parts of the gradient up.
            first = group.rank() * self.vocab_size // group.size()
            shard = VocabularyShard(group, first)
        question = question_of(row)
        return question.answer(hidden[row.predicting], weight, dtype=self.config.params_dtype, shard=shard)


def make_model(
    bridge: Bridge,
    groups: ProcessGroupCollection,
    *,
    head: Head,
    has_score_bias: bool = False,
    cp_group: dist.ProcessGroup | None = None,
) -> ScoringModel:
    """This rank's part of the model, its weights not set yet.

    Args:
        has_score_bias: whether the layer that gives scores has a bias.
        cp_group: the ranks that have the other tokens of this rank's rows, and share attention with it.
    """
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    model = ScoringModel(
        head,
        config=bridge.config,
        transformer_layer_spec=_layer_specs(bridge.config, groups),
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=bridge.has_tied_output,
        pg_collection=groups,
        **bridge.model_arguments,
    )
    if model.post_process and head.has_score_layer:
        config = bridge.config
        model.output_layer = nn.Linear(config.hidden_size, 1, bias=has_score_bias, dtype=config.params_dtype)
    if cp_group is not None:
        for layer in model.decoder.layers:
            share_heads(layer.self_attention.core_attention, cp_group)
    return model


def _layer_specs(config: TransformerConfig, groups: ProcessGroupCollection) -> TransformerBlockSubmodules:
    """The layers of this stage, those with experts and those without in their places."""
    stage = groups.pp.rank()
    first = get_transformer_layer_offset(config, vp_stage=None, pp_rank=stage)
    dense = _layer_spec(config, num_experts=None)
    layers = [dense] * get_num_layers_to_build(config, vp_stage=None, pp_rank=stage)
    if config.num_moe_experts is not None:
        mend_router()
        sparse = _layer_spec(config, num_experts=config.num_moe_experts)
        sparse.module = ReplayedLayer
        layers = [sparse if config.moe_layer_freq[first + number] else dense for number in range(len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RowNorm)


def _layer_spec(config: TransformerConfig, *, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    if num_experts is not None:
        parts.mlp.submodules.experts.module = GroupedExperts
    parts.input_layernorm = parts.pre_mlp_layernorm = RowNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RowNorm
    return layer
