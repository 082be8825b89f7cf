"""The request to a model for one turn of an episode, and the errors of such requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

EndReason = Literal["", "length", "turns", "time", "closed"]


class EpisodeEndedError(RuntimeError):
    """The episode has come to one of its limits: nothing more is generated for it."""

    def __init__(self, reason: EndReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


SERVER_ERROR: Final = "server_error"


class RequestRefusedError(RuntimeError):
    """No server answers this request."""

    def __init__(self, text: str, *, kind: str = "request_refused") -> None:
        super().__init__(text)
        self.kind = kind
        """request_refused: a server says that it is wrong. server_error: servers have failed at it, one after the
        other. not_finite: the model's logits are not."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """How one turn is to be sampled; None is what the trial's `sampling` says. From an answer that is sampled otherwise
    than the trial or the row says nothing is learned: the trainer's probabilities are those of that sampling."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    stop: Sequence[str] = ()
    """Texts that end the answer; the token that completes one is its last."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, beside those that do anyway."""
