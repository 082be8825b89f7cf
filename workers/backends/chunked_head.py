"""The last layer of a language model, which answers a question in place of giving logits: by `chunked_scores.py`.

    Question ──ask──► forward pass of the model ── hidden [1, T, H] ──► ChunkedHead ──► columns [1, T, c]

It takes the place of a model's last layer, with the same parameters under the same names, so that FSDP2 gathers them as
any others and a weight that is also the embedding's stays one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from corral.workers.backends.chunked_scores import WHOLE_VOCABULARY, VocabularyShare, likeliest_tokens, score_tokens
from corral.workers.backends.low_precision import CastingLinear, products_type
from corral.workers.backends.sharding import local_with_gradient

# What transformers' models call what they do to logits after their last layer.
_TREATMENTS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be said of a row's tokens, and its columns."""

    labels: Tensor
    """[T] int64: the tokens that came next."""
    asked: Tensor | None = None
    """[T, k] int64: others, whose log-probabilities are wanted besides."""
    top_k: int = 0
    """Above 0 the likeliest tokens are wanted, in place of anything else."""
    temperature: float | Tensor = 1.0
    """That logits are divided by: of all, or [T] float32."""

    @property
    def num_columns(self) -> int:
        """Of the answer: log-probability, entropy, those asked for; or ids, and log-probabilities, of the likeliest."""
        return 2 * self.top_k or 2 + (0 if self.asked is None else self.asked.shape[1])

    def answer(self, hidden: Tensor, weight: Tensor, **how: Any) -> Tensor:
        """[T, columns] float32; float32 has every id below 2^24.

        Args:
            how: the rest of what `score_tokens` takes.
        """
        if self.top_k:
            ids, logprobs = likeliest_tokens(hidden, weight, self.top_k, temperature=self.temperature, **how)
            return torch.cat([ids.float(), logprobs], 1)
        scores = score_tokens(hidden, weight, self.labels, asked=self.asked, temperature=self.temperature, **how)
        columns = torch.stack([scores.logprobs, scores.entropy], 1)
        return columns if scores.asked is None else torch.cat([columns, scores.asked], 1)


class ChunkedHead(CastingLinear):
    """The last layer of a language model: answers to a question while it is asked, and logits otherwise."""

    share: VocabularyShare = WHOLE_VOCABULARY
    _question: Question | None = None
    """Of the forward pass that is under way."""
    _answer: Tensor | None = None
    """[1, T, columns] float32."""

    def ask(self, question: Question, forward: Callable[[], Tensor]) -> Tensor:
        """[T, columns]: what a forward pass of the model says, in the place of [1, T, V] logits.

        Raises:
            ValueError: if the model did something to what its last layer gave: scores are no logits.
        """
        self._question = question
        try:
            output = forward()
            if output is not self._answer:
                raise ValueError(
                    "the model changes the logits that its last layer gives, by a scale, a cap or a type of its own, "
                    "and the log-probabilities are made in that layer; train a model that leaves its logits as they are"
                )
            return output[0]
        finally:
            self._question = self._answer = None  # the graph of an answer must not live on in a module

    def forward(self, input: Tensor) -> Tensor:
        """[1, T, H] -> [1, T, columns] while it is asked, else [..., H] -> [..., V]."""
        if self._question is None:
            return super().forward(input)
        columns = self._question.answer(
            input[0],
            local_with_gradient(self.weight),
            bias=None if self.bias is None else local_with_gradient(self.bias),
            dtype=products_type(self.weight),
            share=self.share,
        )
        self._answer = columns[None]
        return self._answer


def install_chunked_head(model: Any) -> None:
    """Let a language model's last layer be a `ChunkedHead`; the parameters stay what and where they are.

    Raises:
        ValueError: if the last layer is no linear layer, or its logits are not those that the model gives.
    """
    treated = [name for name in _TREATMENTS if getattr(model.config, name, None) not in (None, 1.0)]
    if treated:
        raise ValueError(
            f"a {type(model).__name__} with {treated[0]} = {getattr(model.config, treated[0])} changes its logits "
            "after its last layer, in which the log-probabilities are made; train a model that leaves them as they are"
        )
    layer = model.get_output_embeddings()
    if type(layer) not in (nn.Linear, CastingLinear):
        raise ValueError(
            f"the last layer of a {type(model).__name__} is {type(layer).__name__}, and log-probabilities are made in "
            "a plain linear layer; train a model that ends in one"
        )
    layer.__class__ = ChunkedHead
