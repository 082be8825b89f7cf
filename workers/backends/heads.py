"""Heads: what a model says of a micro-batch, and in which form.

    lm      hidden [T - n, H] ──► TokenScores, one entry per shifted token     {"logprobs", "entropy"}
    value   logits [T, 1]     ──► [T] float32, one value per token             {"values"}
    scalar  logits [T, 1]     ──► [n] float32, one score per answer            {"scores"}

for n answers packed into one row of T tokens. Value and scalar models are transformers' token classifiers with one
label. They differ in what is read off and in how transformers is told to load what is saved: `scalar` is the reward
model that the field knows as a sequence classifier, whose weights have the same names.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from corral.scheduling.keys import KeyLayout
from corral.workers.backends.chunked_head import chunked_head, install_chunked_head
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.router_replay import tell_routers
from corral.workers.backends.token_scores import TokenScores

ScoresT = TypeVar("ScoresT")
Join: TypeAlias = Callable[[Tensor, KeyLayout], Tensor]
"""(scores of a part of a row, their layout) -> scores of the whole row."""


class Head(Protocol[ScoresT]):
    """One kind of model, from transformers' class to what losses and callers get."""

    model_class: Any
    """transformers' auto class of the model in memory."""
    saved_class: Any
    """transformers' auto class that loads what is saved."""
    layouts: Mapping[str, KeyLayout]
    """Names of what `by_name` gives, with the number of values that each answer has."""
    has_score_layer: bool
    """Whether a linear layer named `score` makes the logits, which a language model's directory lacks."""

    def install(self, model: Any) -> None:
        """Make the model one that `scores` can ask; before it is cut over ranks.

        Raises:
            ValueError: if the model is not of the kind that has this head.
        """

    def scores(self, model: Any, micro_batch: MicroBatch, *, temperature: float) -> ScoresT:
        """What a loss gets: one forward pass over the row of a micro-batch."""

    def joined(self, scores: ScoresT, join: Join) -> ScoresT:
        """The scores of a whole row, from those of a part of it."""

    def by_name(self, scores: ScoresT) -> dict[str, Tensor]:
        """What a forward pass without a loss gives."""


class LanguageModelHead:
    """Log-probabilities of the next tokens."""

    model_class = saved_class = AutoModelForCausalLM
    layouts: Mapping[str, KeyLayout] = MappingProxyType(
        {"logprobs": KeyLayout.PER_SHIFTED_TOKEN, "entropy": KeyLayout.PER_SHIFTED_TOKEN}
    )
    has_score_layer = False

    def install(self, model: Any) -> None:
        install_chunked_head(model)

    def scores(self, model: Any, micro_batch: MicroBatch, *, temperature: float) -> TokenScores:
        shared = micro_batch.shared
        row = micro_batch if shared is None else shared
        with chunked_head(model).asked(row.labels, temperature=temperature) as question:
            output = forward_row(model, micro_batch, logits_to_keep=row.predicting)
        scores = question.scores_in(output)
        if shared is None:
            return scores
        return TokenScores(*(part.index_select(0, shared.questions) for part in (scores.logprobs, scores.entropy)))

    def joined(self, scores: TokenScores, join: Join) -> TokenScores:
        layout = KeyLayout.PER_SHIFTED_TOKEN
        return TokenScores(join(scores.logprobs, layout), join(scores.entropy, layout).detach())

    def by_name(self, scores: TokenScores) -> dict[str, Tensor]:
        return {"logprobs": scores.logprobs, "entropy": scores.entropy}


class ScoreHead:
    """A critic, or a reward model: numbers that a layer of its own makes; the temperature changes nothing.

    A critic says what reward is to be expected after each token; of a reward model's, the last of each answer is read.
    """

    model_class = AutoModelForTokenClassification
    has_score_layer = True

    def __init__(self, name: str, layout: KeyLayout, saved_class: Any) -> None:
        self.saved_class = saved_class
        self.layouts: Mapping[str, KeyLayout] = MappingProxyType({name: layout})
        self._name, self._layout = name, layout

    def install(self, model: Any) -> None:
        """`load_model` gave it its score layer."""

    def scores(self, model: Any, micro_batch: MicroBatch, *, temperature: float) -> Tensor:
        """[T] float32 of the answers laid end to end, or [n] of their last tokens."""
        values = forward_row(model, micro_batch)[0, :, 0].float()
        if micro_batch.shared is not None:
            values = values.index_select(0, micro_batch.shared.places)
        return values[micro_batch.last_tokens] if self._layout is KeyLayout.PER_ANSWER else values

    def joined(self, scores: Tensor, join: Join) -> Tensor:
        return join(scores, self._layout)

    def by_name(self, scores: Tensor) -> dict[str, Tensor]:
        return {self._name: scores}


def forward_row(model: Any, micro_batch: MicroBatch, **arguments: Any) -> Tensor:
    """A forward pass over a micro-batch as one packed row: what transformers calls its logits, [1, ...].

    Args:
        arguments: what the model's forward pass is told besides the row itself.
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


HEADS: Mapping[str, Head[Any]] = MappingProxyType(
    {
        "lm": LanguageModelHead(),
        "value": ScoreHead("values", KeyLayout.PER_TOKEN, AutoModelForTokenClassification),
        "scalar": ScoreHead("scores", KeyLayout.PER_ANSWER, AutoModelForSequenceClassification),
    }
)


def head_named(name: str) -> Head[Any]:
    """The head of that name.

    Raises:
        ValueError: if there is none.
    """
    head = HEADS.get(name)
    if head is None:
        raise ValueError(f"unknown head {name!r}; heads are {', '.join(HEADS)}")
    return head
