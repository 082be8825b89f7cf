"""Requests of programs to the model endpoint: JSON ──check──► a struct, or ApiError in OpenAI's form.

A field is heeded, passed over on purpose, or refused by its name. Passed over is what keeps books (`user`, `metadata`),
and what says how is sampled (`temperature`, `top_p`, `seed`, penalties), which is the trial's to say. So is a
`tool_choice` that wants a call: a model that learns chooses itself, and programs have to live with one that calls
nothing. Any other field is refused, known or not, unless its value asks for nothing, as None and false do.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from corral.experiments.prompts.messages import ToolSchema, check_tools
from corral.experiments.prompts.row_prompts import is_ids
from corral.workers.episodes.turn_request import EndReason

_PASSED_OVER = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention cache_salt rid"
    " request_id priority prediction temperature top_p top_k min_p seed frequency_penalty presence_penalty"
    " repetition_penalty length_penalty spaces_between_special_tokens stream_reasoning".split()
)
_DONE_ANYWAY: dict[str, Any] = {  # the one value that a field may have, beside None
    "best_of": 1,
    "detokenize": True,
    "include_reasoning": True,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "separate_reasoning": True,
}
_OF_IDS = frozenset({"logprobs", "skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids"})


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
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Bounded(Struct, kw_only=True):
    """How many answers, and how long."""

    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def check(self) -> None:
        """ApiError for what is not done."""
        if self.n not in (None, 1):
            raise ApiError(f"n is {self.n}, and a request has one answer; send it so many times, at the same time")


class Asked(Bounded, kw_only=True):
    """The common fields of OpenAI's two requests."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def says_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise ApiError("stream_options.continuous_usage_stats is not heeded; a stream has its numbers at its end")


class ChatRequest(Asked, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Of the chat template, for this request."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(self.tools or ())

    def check(self) -> None:
        super().check()
        try:
            check_tools(self.schemas)
        except ValueError as error:
            raise ApiError(f"tools {error}") from error
        # The template's renderer goes on with a last message of the assistant, and begins an answer behind any other.
        last = self.messages[-1] if self.messages else {}
        goes_on = last.get("role") == "assistant" and not last.get("tool_calls")
        for name, value, is_done in (
            ("continue_final_message", self.continue_final_message, goes_on),
            ("add_generation_prompt", self.add_generation_prompt, not goes_on),
        ):
            if value not in (None, is_done):
                raise ApiError(
                    f"the field {name} is not heeded; it is always {json.dumps(is_done)} behind a last message of "
                    f"{'the assistant' if goes_on else 'another role'}; leave it out"
                )
        if self.top_logprobs:
            raise ApiError("top_logprobs are not kept; logprobs of the answer's own tokens are")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise ApiError(
                "response_format would sample from other probabilities than those that are trained; say in the prompt "
                "what form you want"
            )


class CompletionRequest(Asked, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.prompt, list) and len(self.prompt) == 1 and not is_ids(self.prompt):
            self.prompt = self.prompt[0]
        if not is_ids(self.prompt) and (not isinstance(self.prompt, str) or not self.prompt):
            raise ApiError("prompt must be text or token ids, of one prompt")
        if self.add_special_tokens is False:
            raise ApiError(
                "add_special_tokens: a prompt of text has the tokens that the tokenizer adds; send token ids"
            )
        if self.echo or self.suffix:
            raise ApiError("an answer goes on behind its prompt, and is all that comes back: no echo, no suffix")


class _SamplingParams(Bounded, kw_only=True):
    own_temperature: float | None = None
    """Of an answer from which nothing is learned, as it is sampled in another way than the trial's; not vLLM's
    `temperature`, which programs send without meaning it."""


class GenerateRequest(Struct, kw_only=True):
    """POST /inference/v1/generate, as vLLM has it."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = None

    @property
    def params(self) -> _SamplingParams:
        """ApiError for what is not done."""
        return _read(self.sampling_params, _SamplingParams, passed_over=_PASSED_OVER | _OF_IDS)

    def check(self) -> None:
        """ApiError for what is not done."""
        if self.stream:
            raise ApiError("an answer in token ids comes as a whole; leave stream out")


R = TypeVar("R", ChatRequest, CompletionRequest, GenerateRequest, _SamplingParams)


def parse(body: bytes, form: type[R]) -> R:
    """
    Raises:
        ApiError: naming the field that is wrong.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is no {form.__name__}: {error}") from error
    return _read(fields, form)


def _read(fields: Mapping[str, Any], form: type[R], *, passed_over: frozenset[str] = _PASSED_OVER) -> R:
    for name in sorted(fields.keys() - passed_over - set(form.__struct_fields__)):
        value, done = fields[name], _DONE_ANYWAY.get(name)
        if value is not None and value != done and (value or done is not None):
            instead = f"; it is always {json.dumps(done)} here" if done is not None else ""
            raise ApiError(f"the field {name} is not heeded{instead}; leave it out")
    try:
        request = msgspec.convert(fields, form)
    except msgspec.ValidationError as error:
        raise ApiError(f"the body is no {form.__name__}: {error}") from error
    request.check()
    return request
