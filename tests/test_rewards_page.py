"""The files of docs/rewards.md, run as they stand there, and its settings, read as an experiment's are."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from corral.experiments.config.rollout import RewardPart, RolloutConfig
from corral.experiments.inputs.users_code import TriedRow
from corral.workers.user_code.checks import Judged, UnfitError, UntriedError, checked_rewards, try_reward
from corral.workers.user_code.loading import configured, load_callable

DOCUMENT = Path(__file__).parents[1] / "docs" / "rewards.md"
FILES = {name: text for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)}
SETTINGS = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
ROW = {"question": "What is 6 times 7?", "answer": "42"}
TRIED = TriedRow(place="a row", problem=ROW, right=("42",), others=())


@pytest.fixture(autouse=True)
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder that a user submits from, with the files of the document."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


def parts() -> dict[str, RewardPart]:
    """Of all blocks of settings, read strictly."""
    found: dict[str, RewardPart] = {}
    for text in SETTINGS:
        rollout = json.dumps(yaml.safe_load(text)["rollout"])
        found |= RolloutConfig.model_validate_json(rollout, strict=True).reward
    return found


def test_every_reward_of_the_page_is_found_and_takes_its_settings() -> None:
    assert FILES.keys() == {"brief", "near", "printed"}
    made = {name: configured(load_callable(part.function), part.settings, key=name) for name, part in parts().items()}
    assert made.keys() == {"score", "right", "form", "words", "near", "good"}
    assert made["right"](ROW, "it is 42") == 1.0
    assert made["form"](ROW, "<think>6 * 7</think> <answer>42</answer>") == 1.0
    assert made["words"](ROW, "word " * 400) == -0.5
    assert made["near"](ROW, "52") == 0.5 and made["near"](ROW, "many") == 0.0
    assert ROW["question"] in made["good"].prompt.format(problem=ROW, answer="42")


def test_a_reward_may_return_other_numbers_besides() -> None:
    score = load_callable("brief:score")
    assert checked_rewards(score, score(ROW, "it is 42"), 1) == [Judged(1.0, {"words": 3.0})]
    for wrong in ((1.0, {"words": "three"}), (1.0, [3]), (1.0, {}, {}), ("one", {})):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            checked_rewards(score, wrong, 1)
    try_reward(score, TRIED)
    with pytest.raises(UnfitError, match="a reward is a finite float32 number"):
        try_reward(lambda problem, answer: (1.0, [3]), TRIED)


def test_a_reward_that_reaches_nobody_from_here_was_not_tried() -> None:
    def asks(problem: object, answer: object) -> float:
        raise ConnectionRefusedError("nobody listens at judge.example")

    with pytest.raises(UntriedError, match="ConnectionRefusedError: nobody listens at judge.example"):
        try_reward(asks, TRIED)
