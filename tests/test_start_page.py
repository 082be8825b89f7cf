"""docs/start.md: its file of rewards as it stands there, and its table beside the folder of examples."""

import re
from pathlib import Path
from types import ModuleType

from corral.experiments.recipes.run_all import all_recipes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "start.md").read_text()


def test_rewards_of_others_judge_as_they_do_there() -> None:
    (text,) = re.findall(r"```python\n# rewards_of_others\.py\n(.*?)```", PAGE, re.DOTALL)
    rewards = ModuleType("rewards_of_others")
    exec(compile(text, "rewards_of_others.py", "exec"), rewards.__dict__)
    problem = {"prompt": "12+34=", "answer": "46"}
    assert rewards.from_trl(problem, [" 46", "45"]) == [1.0, 0.0]
    assert [rewards.from_verl(problem, answer) for answer in ("46 ", "64")] == [1.0, 0.0]


def test_every_example_has_its_row_and_every_twin_is_a_recipe() -> None:
    shown = set(re.findall(r"`examples/(\w+\.yaml)`", PAGE))
    assert shown == {path.name for path in (ROOT / "examples").glob("*.yaml")}
    twins = re.findall(r"\| `(\w+)` \|$", PAGE.partition("## The same job")[0], re.MULTILINE)
    assert len(twins) == 6
    assert all(any(twin in recipe.name for recipe in all_recipes()) for twin in twins)
