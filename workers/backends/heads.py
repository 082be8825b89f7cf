"""Heads: what a model says of a micro-batch, and in which form.

    lm      hidden [T - n, H] ──► columns [T - n, 2], one entry per shifted token     logprobs, entropy, what is asked
    value   logits [T, 1]     ──► columns [T, 1], one value per token                 values
    scalar  logits [T, 1]     ──► columns [n, 1], one score per answer                scores

for n answers packed into one row of T tokens. Backends make columns, which ranks send each other whatever the head is;
a loss reads `TokenScores` or the one column. Value and scalar models are transformers' token classifiers with one
label. They differ in the columns that are read and in how transformers loads the saved model: `scalar` is the reward
model that the field knows as a sequence classifier, whose weights have the same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from corral.scheduling.keys import KeyLayout
from corral.workers.backends.base import TokenScores
from corral.workers.backends.chunked_head import Question
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.router_replay import tell_routers


@dataclass(frozen=True, slots=True)
class Head:
    """One kind of model, from transformers' class to what losses and callers get.

    A critic says what reward is to be expected after each token; of a reward model's numbers, the last of each answer
    is read. The temperature changes neither.
    """

    model_class: Any
    """transformers' auto class of the model in memory."""
    saved_class: Any
    """transformers' auto class that loads what is saved."""
    names: tuple[str, ...]
    """Of the columns, as a forward pass without a loss gives them."""
    layout: KeyLayout
    """How many entries an answer has."""
    has_score_layer: bool = True
    """Whether a linear layer named `score` makes the logits, which a language model's directory lacks."""

    def columns(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        """[entries, names] float32: one forward pass over the row of a micro-batch."""
        shared = micro_batch.shared
        if self.has_score_layer:
            values = _forward_row(model, micro_batch)[0].float()
            if shared is not None:
                values = values.index_select(0, shared.indices)
            return values[micro_batch.last_tokens] if self.layout is KeyLayout.PER_ANSWER else values
        predicting = micro_batch.predicting if shared is None else shared.predicting
        columns: Tensor = model.get_output_embeddings().ask(
            question_of(micro_batch),
            lambda: _forward_row(model, micro_batch, logits_to_keep=predicting),
        )
        return columns if shared is None else columns.index_select(0, shared.questions)

    def read(self, columns: Tensor) -> Any:
        """What a loss gets of columns [entries, names]: TokenScores of a language model, else [entries]."""
        if self.has_score_layer:
            return columns[:, 0]
        asked = columns[:, 2:] if columns.shape[1] > 2 else None
        return TokenScores(columns[:, 0], columns[:, 1].detach(), asked)

    def num_columns(self, micro_batch: MicroBatch) -> int:
        """How many numbers each entry of a micro-batch has."""
        return 1 if self.has_score_layer else question_of(micro_batch).num_columns


def question_of(micro_batch: MicroBatch) -> Question:
    """The question to a language model about the row of a micro-batch."""
    # What is asked of an answer is not what is asked of another one that begins alike.
    assert micro_batch.shared is None or micro_batch.asked is None, "answers that share tokens are asked for others"
    labels = micro_batch.labels if micro_batch.shared is None else micro_batch.shared.labels
    return Question(labels, micro_batch.asked, micro_batch.top_k, micro_batch.temperature)


def _forward_row(model: Any, micro_batch: MicroBatch, **arguments: Any) -> Tensor:
    """A forward pass over a micro-batch as one packed row: what transformers calls its logits, [1, ...].

    Args:
        arguments: further arguments of the model's forward pass.
    """
    tell_routers(model, micro_batch.routed_experts)
    output: Tensor = model(
        input_ids=micro_batch.input_ids[None],
        position_ids=micro_batch.position_ids[None],
        segment_lengths=micro_batch.segment_lengths,
        cu_seqlens=micro_batch.cu_seqlens,
        prompt_groups=None if micro_batch.shared is None else micro_batch.shared.groups,
        use_cache=False,
        **arguments,
    ).logits
    return output


_TEXT, _TOKENS, _SEQUENCES = AutoModelForCausalLM, AutoModelForTokenClassification, AutoModelForSequenceClassification
HEADS: Mapping[str, Head] = MappingProxyType(
    {
        "lm": Head(_TEXT, _TEXT, ("logprobs", "entropy"), KeyLayout.PER_SHIFTED_TOKEN, has_score_layer=False),
        "value": Head(_TOKENS, _TOKENS, ("values",), KeyLayout.PER_TOKEN),
        "scalar": Head(_TOKENS, _SEQUENCES, ("scores",), KeyLayout.PER_ANSWER),
    }
)
