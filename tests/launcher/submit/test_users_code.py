"""A user's own code at submission: imported and tried in a process of its own, then kept with the trial."""

from collections.abc import Callable
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.submit.prepare import Submission, prepare, prepare_resume
from corral.launcher.submit.start import create
from corral.launcher.trial.find import read_facts
from tests.experiments.broken_yaml import VALID_PPO, write_inputs

Submit = Callable[..., Submission]
GOOD = "def score(problem, answer):\n    return 1.0\n"


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """A checked submission of asynchronous PPO from a folder with these modules; nothing is started."""
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    monkeypatch.chdir(tmp_path)

    def submit(*overrides: str, **modules: str) -> Submission:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        options = [f"cluster.fileroot={tmp_path / 'trials'}", "rollout.reward_timeout_s=2", *overrides]
        return prepare(tmp_path / "ppo.yaml", options, trial_name=None, mode="local")

    return submit


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import nowhere_to_be_found\n" + GOOD, "own_reward.py:1"),
        ("def score(problem):\n    return 1.0\n", "own_reward.py:1: score(problem) cannot be called with"),
        ("\nasync def score(problem, answer):\n    return 1.0\n", "own_reward.py:2: score is an async function"),
        ("def score(problem, answer):\n    pass\n", "own_reward.py:1: score returned None"),
        ("def score(problem, answer):\n    return problem['solution']\n", "KeyError: 'solution' (own_reward.py:2)"),
        ("def score(problem, answer):\n    while True:\n        pass\n", "took more than 2 s, in own_reward.py:"),
    ],
    ids=["missing import", "wrong arity", "async", "None", "raises", "hangs"],
)
def test_a_broken_reward_is_refused_with_its_line_and_nothing_is_written(
    submit: Submit, tmp_path: Path, module: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        submit("rollout.reward=own_reward:score", own_reward=module)
    (problem,) = raised.value.problems
    assert message in problem.message
    assert problem.path == ("rollout", "reward") and problem.shown == "own_reward:score"
    assert not (tmp_path / "trials").exists()


def test_a_reward_that_judges_one_of_several_texts_is_taken(submit: Submit) -> None:
    submit(
        "rollout.reward=own_reward:score", own_reward="def score(problem, answer):\n    return float(len(answer[0]))\n"
    )


def test_an_agent_that_is_no_agent_is_refused(submit: Submit) -> None:
    with pytest.raises(ConfigError, match=r"own_agent.py:1: play\(problem, prompt_ids\) cannot be called"):
        submit("rollout.agent=own_agent:play", own_agent="async def play(problem, prompt_ids):\n    return None\n")


def test_code_and_what_it_imports_and_reads_beside_itself_is_kept_and_is_what_a_resume_uses(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "helpers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "count.py").write_text(
        "from pathlib import Path\n\nWORDS = Path(__file__).with_name('words.txt').read_text()\n"
    )
    (package / "later.py").write_text("")
    (package / "words.txt").write_text("one two")
    (tmp_path / "unrelated.py").write_text("")
    reward = "from helpers.count import WORDS\n\n\ndef score(problem, answer):\n    return float(len(WORDS))\n"
    submission = submit("rollout.reward=own_reward:score", own_reward=reward)
    create(submission)
    directory = submission.directory
    kept = {
        path.relative_to(directory.code_path).as_posix() for path in directory.code_path.rglob("*") if path.is_file()
    }
    names = {"own_reward.py", "helpers/__init__.py", "helpers/count.py", "helpers/later.py", "helpers/words.txt"}
    assert kept == names == RunPlan.from_json(directory.plan_path.read_bytes()).code.keys()

    for path in (tmp_path / "own_reward.py", package / "count.py"):
        path.unlink()
    monkeypatch.chdir("/")
    facts = read_facts(directory)
    assert facts is not None
    assert prepare_resume(facts).plan == submission.plan
    (directory.code_path / "own_reward.py").write_text(reward.replace("len(WORDS)", "len(NOTHING)"))
    with pytest.raises(ConfigError, match=r"NameError.*own_reward.py:5"):
        prepare_resume(facts)
    (directory.code_path / "own_reward.py").write_text(GOOD)
    assert prepare_resume(facts).plan.code["own_reward.py"] != submission.plan.code["own_reward.py"]


LOSS = """\
from corral.workers.algorithms.functional.token_losses import TokenLosses


def loss(scores, micro_batch, config):
    return TokenLosses(-scores.logprobs * micro_batch.tensors["{key}"], {{}})
"""


def test_a_loss_that_reads_a_key_which_no_call_gives_is_refused_with_its_line(submit: Submit) -> None:
    submit("ppo.loss=own_loss:loss", own_loss=LOSS.format(key="advantages"))
    with pytest.raises(ConfigError) as raised:
        submit("ppo.loss=own_loss:loss", own_loss=LOSS.format(key="advantage"))
    (problem,) = raised.value.problems
    assert "KeyError: 'advantage' (own_loss.py:5)" in problem.message and problem.path == ("ppo", "loss")


def test_a_trial_without_code_of_ones_own_keeps_none(submit: Submit) -> None:
    assert not submit().plan.code
