"""The JSON of the generation server: SGLang's request and response bodies, checked at the border.

    body --parse()--> GenerateBody
                 `--> BadRequestError (status 400), naming the field
    RequestOutput --generate_reply()--> {"output_ids": ..., "meta_info": ...}
    message --error_body()--> {"error": {"message": ...}}

What this server would have to ignore (text prompts, grammars, logit biases) is refused by its name, so that no client
believes in it. So are SGLang's lists of prompts: each answer has a request of its own.
"""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from corral.workers.engine.requests import ExpertRows, RequestOutput
from corral.workers.engine.sampling import SamplingParams

_ERRORS_IN_MESSAGE = 3


class BadRequestError(ValueError):
    """The body is not what the endpoint takes; the message is for the client."""


def _check_token_ids(value: list[Any]) -> list[Any]:
    """By hand, so that 100,000 wrong items are one error and not 100,000."""
    if any(type(token_id) is not int for token_id in value):
        raise ValueError("must be a list of integer token ids, of one prompt")
    return value


class GenerateBody(BaseModel):
    """POST /generate."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input_ids: Annotated[list[Any], AfterValidator(_check_token_ids)]
    """One prompt; a request for each answer."""
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    return_original_logprob: bool = False
    """Whether `output_token_original_logprobs` come as well: those of the same tokens at temperature 1. SGLang has no
    such field; its servers that are started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 give only these."""
    logprob_start_len: int = Field(default=-1, ge=-1)
    """First prompt position whose log-probability is returned; -1 returns none."""
    return_routed_experts: bool = False
    """Whether `routed_experts` comes with a finished answer: the experts of each token, see `encode_experts`."""
    routed_experts_start_len: int = Field(default=0, ge=0)
    """First token of prompt and answer whose experts are returned."""
    stream: bool = False
    """Whether the reply is a stream of server-sent events, each with the tokens since the one before."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        """Nothing is asked for that would not come."""
        if self.return_original_logprob and not self.return_logprob:
            raise ValueError("return_original_logprob needs return_logprob: true")
        return self


def parse(body: bytes) -> GenerateBody:
    """Check a JSON body; an empty one stands for {}.

    Raises:
        BadRequestError: naming the fields and what is wrong with them.
    """
    try:
        return GenerateBody.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [_problem(entry) for entry in error.errors(include_url=False)]
        shown = "; ".join(problems[:_ERRORS_IN_MESSAGE])
        more = f"; and {len(problems) - _ERRORS_IN_MESSAGE} more" if len(problems) > _ERRORS_IN_MESSAGE else ""
        raise BadRequestError(shown + more) from error


def _problem(entry: ErrorDetails) -> str:
    where = ".".join(map(str, entry["loc"]))
    return f"{where}: {entry['msg']}, got {reprlib.repr(entry['input'])}" if where else entry["msg"]


def error_body(message: str, *, code: int | None = None) -> dict[str, Any]:
    """What a client gets in place of an answer; code: the status, where a stream has begun with another."""
    return {"error": {"message": message} if code is None else {"message": message, "code": code}}


def _triples(logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[list[float | int | None]]:
    return [[logprob, token_id, None] for logprob, token_id in zip(logprobs, token_ids, strict=True)]


def encode_experts(rows: ExpertRows) -> str:
    """[tokens, layers, top_k] as base64 of int32, row by row: all layers of the model, 0 in those without experts."""
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode("ascii")


def generate_reply(output: RequestOutput, body: GenerateBody, *, text: str | None) -> dict[str, Any]:
    """One answer as SGLang gives it, with a tokenizer or (text: None) without; triples: [logprob, token id, null]."""
    meta_info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": msgspec.to_builtins(output.finish_reason),
        "prompt_tokens": len(output.prompt),
        "completion_tokens": output.start + len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "weight_version": output.weight_version,
        "weight_versions": [span._asdict() for span in output.weight_versions],
        "num_retractions": output.num_retractions,
    }
    if body.return_logprob:
        scored_prompt = output.prompt[body.logprob_start_len :] if output.input_logprobs else ()
        meta_info["input_token_logprobs"] = _triples(output.input_logprobs, scored_prompt)
        meta_info["output_token_logprobs"] = _triples(output.output_logprobs, output.output_ids)
        if body.return_original_logprob:
            meta_info["output_token_original_logprobs"] = _triples(output.original_logprobs, output.output_ids)
        meta_info["output_token_logprobs_length"] = len(output.output_ids)
    if output.experts is not None:
        meta_info["routed_experts"] = encode_experts(output.experts)
    reply = {"output_ids": list(output.output_ids), "meta_info": meta_info}
    return reply if text is None else {"text": text, **reply}
