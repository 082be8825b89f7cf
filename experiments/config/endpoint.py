"""Models that are asked by OpenAI's API: behind a URL, outside of the trial, or the trial's own judge."""

from pathlib import Path
from typing import TypeVar

from pydantic import Field

from corral.experiments.config.base import FrozenConfig
from corral.scheduling.errors import RuleError

Named = TypeVar("Named")


def checked_teacher_names(teachers: dict[str, Named]) -> dict[str, Named]:
    """The teachers of sources; ValueError if one is called as no role or key of samples can be."""
    if others := [name for name in teachers if not f"teacher_{name}".isidentifier()]:
        raise RuleError(
            f"{others[0]!r} cannot be part of a role's name, teacher_...", "call the source by letters, digits and _"
        )
    return teachers


class EndpointConfig(FrozenConfig):
    """A model behind a URL."""

    url: str = Field(pattern=r"^https?://[^/@\s]+(/|$)")
    """Of the API: https://host/v1. It appears in logs: no password."""
    model: str
    """As the endpoint calls it."""
    key: str = Field(default="", pattern=r"^(|\$[A-Za-z_]\w*|[/~].*)$")
    """Where the endpoint's key is, never the key itself: $NAME, an environment variable, or a file, by a path from / or ~, that its owner alone can read. "": the endpoint wants none."""  # noqa: E501
    tries: int = Field(default=4, ge=1)
    """Of a request: where the endpoint is down or busy it is asked again, after 1 s, 2 s, 4 s up to 30 s, or when it says."""  # noqa: E501
    request_timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of one try."""


class TeacherEndpointConfig(EndpointConfig):
    """A teacher outside of the trial, which says how likely given tokens are: /completions as SGLang and vLLM serve it."""  # noqa: E501

    path: Path | None = None
    """Directory of its model, where that can be read at submission: its tokens are compared with the actor's. None compares nothing."""  # noqa: E501
    tries: int = Field(default=64, ge=1)
    """Of the request for a group: 64 are half an hour of a teacher that is down, in which its groups wait. Then the rollout worker is started again, and no prompt is lost."""  # noqa: E501
    request_timeout_s: float = Field(default=600.0, gt=0.0)
    """Deadline of one try."""


TRIAL = "trial"
"""In the place of an endpoint's URL in the settings of a reward: the trial's own judge."""


class JudgeConfig(FrozenConfig):
    """A frozen model that rewards may ask, served by generation servers of the trial."""

    path: Path
    """Directory of the model in Hugging Face's format, with a chat template."""
    servers: int = Field(default=1, ge=1, le=100_000)
    """How many of the allocation's generation servers serve it, the last ones; the others answer for the policy."""
