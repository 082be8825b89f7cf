"""What programs ask of the model endpoint: JSON ──check──► a struct, or ApiError in OpenAI's form.

Fields that change nothing here are passed over, as programs send many: `model`, `user`, `seed`, penalties, and with
them `temperature` and `top_p`, since the trial says how its model is sampled. So is a `tool_choice` that wants a call:
a model that learns chooses itself, and programs have to live with one that calls nothing. What a program relies on in
an answer and would not get, such as a form of it, is refused by its name.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from corral.experiments.prompts.messages import ToolSchema, check_tools
from corral.experiments.prompts.row_prompts import is_ids
from corral.workers.episodes.turn_request import EndReason


class ApiError(Exception):
    """A request that gets no answer, and why. Clients of OpenAI's try none of them again."""

    def __init__(
        self, message: str, *, code: str = "invalid_request", status: int = 400, reason: EndReason = ""
    ) -> None:
        """
        Args:
            reason: the limit that the episode has come to.
        """
        super().__init__(message)
        self.code, self.status, self.reason = code, status, reason

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error | ({"reason": self.reason} if self.reason else {})}


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Bounded(Struct, kw_only=True):
    """How many answers, and how long."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def check(self) -> None:
        """ApiError for what is not done."""
        if self.n not in (None, 1):
            raise ApiError(f"n is {self.n}, and a request has one answer; send it so many times, at the same time")


class _Asked(_Bounded, kw_only=True):
    """What OpenAI's two ways to ask have in common."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def says_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(_Asked, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(self.tools or ())

    @property
    def may_call(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        super().check()
        try:
            check_tools(self.schemas)
        except ValueError as error:
            raise ApiError(f"tools {error}") from error
        if self.top_logprobs:
            raise ApiError("top_logprobs are not kept; logprobs of the answer's own tokens are")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ApiError(
                "response_format would sample from other probabilities than those that are trained; say in the prompt "
                "what form you want"
            )


class CompletionRequest(_Asked, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def check(self) -> None:
        super().check()
        if isinstance(self.prompt, list) and len(self.prompt) == 1 and not is_ids(self.prompt):
            self.prompt = self.prompt[0]
        if not is_ids(self.prompt) and (not isinstance(self.prompt, str) or not self.prompt):
            raise ApiError("prompt must be text or token ids, of one prompt")
        if self.echo or self.suffix:
            raise ApiError("an answer goes on behind its prompt, and is all that comes back: no echo, no suffix")


class _SamplingParams(_Bounded, kw_only=True):
    stop_token_ids: list[int] | None = None
    own_temperature: float | None = None
    """Of an answer from which nothing is learned, as it is sampled in another way than the trial's; not vLLM's
    `temperature`, which programs send without meaning it."""


class GenerateRequest(Struct, kw_only=True):
    """POST /inference/v1/generate, as vLLM has it."""

    token_ids: list[int]
    sampling_params: _SamplingParams = msgspec.field(default_factory=_SamplingParams)
    stream: bool | None = None

    def check(self) -> None:
        """ApiError for what is not done."""
        self.sampling_params.check()
        if self.stream:
            raise ApiError("an answer in token ids comes as a whole; leave stream out")


R = TypeVar("R", ChatRequest, CompletionRequest, GenerateRequest)


def parse(body: bytes, form: type[R]) -> R:
    """
    Raises:
        ApiError: naming the field that is wrong.
    """
    try:
        request = msgspec.json.decode(body, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is no {form.__name__}: {error}") from error
    request.check()
    return request
