"""Train steps as they are named on a command line."""

import pytest

from corral.experiments.errors import ConfigError
from corral.launcher.trial.view import chosen_steps


@pytest.mark.parametrize(
    ("wanted", "steps"), [("latest", [9]), ("all", [3, 7, 9]), ("7", [7]), ("4:8", [7]), (":7", [3, 7])]
)
def test_steps_are_chosen_by_number_span_or_word(wanted: str, steps: list[int]) -> None:
    assert chosen_steps(wanted, [3, 7, 9], option="--step", limit="x.keep") == steps


@pytest.mark.parametrize("wanted", ["\u00b2", "7:\u00b3", "1.5", "-1", "x"])
def test_what_is_no_number_is_refused_in_words(wanted: str) -> None:
    with pytest.raises(ConfigError, match="is no train step"):
        chosen_steps(wanted, [3, 7, 9], option="--step", limit="x.keep")
