"""The experts of one answer of a mixture, put together from what generation servers say at the end of its requests.

    request 1: base64 of int32 [tokens, layers, k] ─┐ layers with experts only
    request 2: from where these have ended ─────────┴──► AnswerExperts ──► [tokens of prompt and answer, layers, k]
                                                                           int16, -1 where nobody has said it

Row t belongs to the token after t, as its log-probability does: it says who computed what that token was drawn from.
So a row stays as it came first, by the weights that made that token; a later request reads the tokens before it again,
by newer weights, and is asked for the rows behind those only. The last token has no row: nobody has read it.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from corral.experiments.worker_specs import RoutedExpertsSpec

Rows = npt.NDArray[np.int16]
_UNKNOWN: Final = -1
_WIRE_DTYPE: Final = np.dtype("<i4")


class AnswerExperts:
    """Grows with the answer to one prompt."""

    def __init__(self, spec: RoutedExpertsSpec, prompt_ids: Sequence[int]) -> None:
        self._spec = spec
        self._prompt_ids = list(prompt_ids)
        self._pieces: list[Rows] = []
        self.num_rows = 0
        """Tokens of prompt and answer whose experts are known: all before this one."""

    def before(self, prompt_ids: Sequence[int]) -> "AnswerExperts":
        """Those of another answer, to a prompt that begins with these tokens: the rows that are known stay."""
        later = AnswerExperts(self._spec, prompt_ids)
        later._pieces, later.num_rows = list(self._pieces), self.num_rows
        return later

    def rows_in(self, text: str, *, num_tokens: int) -> Rows:
        """The rows of a server's text, which follow those that are known; nothing is taken in.

        Args:
            text: `routed_experts` of a reply that was asked for those from `num_rows` on.
            num_tokens: of the answer so far.

        Raises:
            ValueError: if it is something else than one row for each token, but for the last.
        """
        spec, expected = self._spec, max(0, len(self._prompt_ids) + num_tokens - 1 - self.num_rows)
        try:
            values = np.frombuffer(base64.b64decode(text, validate=True), _WIRE_DTYPE)
        except (binascii.Error, ValueError, TypeError) as error:
            raise ValueError(f"routed_experts is no base64 of int32: {error}") from error
        if values.size != expected * spec.num_layers * spec.top_k:
            raise ValueError(
                f"routed_experts has {values.size} numbers; {expected} tokens x {spec.num_layers} layers x "
                f"{spec.top_k} experts were to come"
            )
        rows = values.reshape(expected, spec.num_layers, spec.top_k)[:, list(spec.expert_layers)]
        if rows.size and not 0 <= rows.min() <= rows.max() < spec.num_experts:
            raise ValueError(
                f"routed_experts names experts {rows.min()} to {rows.max()}; a layer has {spec.num_experts}, from 0"
            )
        return rows.astype(np.int16)

    def append(self, rows: Rows) -> None:
        """Take in the rows after those that are known."""
        self._pieces.append(rows)
        self.num_rows += len(rows)

    def rows(self, *, num_tokens: int) -> Rows:
        """[num_tokens, layers with experts, top_k] of prompt and answer; what is unknown lets the trainer choose."""
        spec = self._spec
        rows = np.full((num_tokens, len(spec.expert_layers), spec.top_k), _UNKNOWN, np.int16)
        if self._pieces:
            known = np.concatenate(self._pieces)[:num_tokens]  # the answer may have been cut
            rows[: len(known)] = known
        return rows
