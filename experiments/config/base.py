"""The base of every configuration class: frozen, strict about keys, documented under each field."""

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """A configuration that is checked once, before submission, and never changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
