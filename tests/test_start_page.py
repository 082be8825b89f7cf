"""docs/start.md: its file of rewards as it stands there, and its table beside the folder of examples."""

import re
import runpy
from pathlib import Path
from types import ModuleType

from benchmarks.run_recipes import all_recipes

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


def test_the_example_of_gsm8k_reads_numbers_as_models_write_them_and_never_fails() -> None:
    gsm8k = runpy.run_path(str(ROOT / "examples" / "gsm8k.py"))
    right = ["**72**", r"\boxed{72}", r"$\boxed{72}$", r"\$72", "$72", "72.", "72.0", "(72)", "72 apples", "\n72"]
    wrong = [",", "-,", "-$72", "\u221272", "-72", "72/5", "7.2", "", ".", "none", "7 2", "1" * 5000, "\ud800"]
    judged = {said: gsm8k["score"]({"answer": "72"}, f"so\n#### {said}") for said in (*right, *wrong)}
    assert judged == {**dict.fromkeys(right, 1.0), **dict.fromkeys(wrong, 0.0)}
    below_zero = ["-1,234.5", "-$1234.5", "\u22121,234.50", "**-1234.5**"]
    assert [gsm8k["number_of"](f"#### {said}") for said in (".5", "1,000")] == [".5", "1000"]
    assert [gsm8k["score"]({"answer": "-1234.5"}, f"#### {said}") for said in below_zero] == [1.0] * 4
    assert gsm8k["problem"]({"question": "q", "answer": "no number\n#### ,"}) is None
