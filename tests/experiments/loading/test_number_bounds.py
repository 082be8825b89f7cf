"""No number of a configuration may be absurd: of each field the smallest, largest and oddest values are tried."""

import math
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.errors import NO_SOURCE, ConfigError, KeyPath
from corral.experiments.loading.schema import alternatives, key_paths
from corral.experiments.loading.validation import validate
from corral.experiments.registry import EXPERIMENTS

NUMBERS = {
    (f"{experiment.__name__}.{'.'.join(map(str, path))}"): field
    for experiment in EXPERIMENTS.values()
    for path, field in key_paths(experiment)
    if {int, float} & set(alternatives(field.annotation))
}
MAY_BE_NEGATIVE = ("correct", "top_k", "weight")


def takes(field: FieldInfo, text: str) -> bool:
    """Whether the type of a field, with its bounds, takes a value of a file."""
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(annotation).validate_json(text, strict=True)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_field_has_a_lower_bound(name: str) -> None:
    assert not takes(NUMBERS[name], "-2") or name.rpartition(".")[2] in MAY_BE_NEGATIVE


@pytest.mark.parametrize(
    "path",
    [path for path, field in key_paths(AsyncPPOExperiment) if {int, float} & set(alternatives(field.annotation))],
    ids=lambda path: ".".join(map(str, path)) if isinstance(path, tuple) else None,
)
def test_a_number_that_no_trial_could_use_is_refused(path: KeyPath) -> None:
    for value in (math.nan, math.inf, 1e30, 10**30, 10**400, 1_000_000_001):
        data: dict[str, Any] = {"experiment": "async_ppo"}
        place = data
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
        with pytest.raises(ConfigError) as refused:
            validate(AsyncPPOExperiment, data, NO_SOURCE)
        assert path in [problem.path for problem in refused.value.problems]
