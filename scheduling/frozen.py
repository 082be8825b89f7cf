"""Base class of every value that is read from a file or written to one: frozen, closed, documented by its fields."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A value: never changed after it was checked; an unknown field is an error, not a typo that stays silent."""

    model_config = ConfigDict(frozen=True, extra="forbid")
