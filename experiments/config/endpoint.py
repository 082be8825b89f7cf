"""Servers outside of the trial that speak OpenAI's API: where they are, and what they are asked with."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from corral.experiments.config.base import FrozenConfig


class EndpointConfig(FrozenConfig):
    """A model behind a URL."""

    url: str = Field(pattern=r"^https?://[^/@\s]+(/|$)")
    """Of the API: https://host/v1. It appears in logs: no password."""
    model: str
    """As the endpoint calls it."""
    key_variable: str = ""
    """Name of the environment variable with the endpoint's key; "": none."""
    key_file: Path | None = None
    """The file with the key, readable by its owner alone; None: none."""
    tries: int = Field(default=4, ge=1)
    """Of a request: where the endpoint is down or busy it is asked again, after 1 s, 2 s, 4 s up to 30 s, or when it says."""  # noqa: E501
    request_timeout_s: float = Field(default=60.0, gt=0.0)
    """Deadline of one try."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.key_variable and self.key_file is not None:
            raise ValueError("key_variable and key_file both say where the key is; remove one")
        return self
