"""A user's own code at submission: imported and tried in a process of its own, then kept with the trial."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.commands.submit import main
from corral.launcher.submit import start
from corral.launcher.submit.prepare import Submission, prepare, prepare_resume
from corral.launcher.submit.start import create
from corral.launcher.submit.users_code import look_at_code
from corral.launcher.trial.view import read_facts
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


LOSS = """\
from corral.workers.algorithms.functional.losses import TokenLosses


def score(scores, micro_batch, config):
    return TokenLosses(-scores.logprobs * micro_batch.tensors["{key}"], {{}})
"""


INTERFACE = """\
import numpy as np

from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.base import ModelInterface


class Judge(ModelInterface):
    inputs = {{CallType.INFERENCE: built_in("input_ids")}}
    outputs = {{CallType.INFERENCE: built_in("rewards")}}

    def __init__(self, settings):
        pass

    def inference(self, engine, sample):
        {body}
"""
JUDGED = ("reward_model.path=model", "reward_model.interface=own_judge:Judge")


REWARDS = {
    "missing": ("import nowhere_to_be_found\n" + GOOD, "missing.py:1"),
    "arity": ("def score(problem):\n    return 1.0\n", "arity.py:1: score(problem) cannot be"),
    "late": (
        "\nasync def score(problem, answer):\n    return problem['solution']\n",
        "KeyError: 'solution' (late.py:3)",
    ),
    "group": (
        "def score(problem, answers):\n    return [1.0]\n",
        "group.py:1: score returned a list, and a reward of groups returns one number for each answer",
    ),
    "nothing": ("def score(problem, answer):\n    pass\n", "nothing.py:1: score returned None"),
    "renamed": (GOOD.replace("score", "scored"), "renamed.py has no callable 'score'"),
    # Tried last: it ends the look.
    "hangs": ("def score(problem, answer):\n    while True:\n        pass\n", "took more than 2 s, in hangs.py:"),
}
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What rl-submit says of asynchronous PPO from a folder with these modules; it ends with 2 and writes nothing."""
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    # A model of billions of weights.
    monkeypatch.setattr(start, "start", lambda *_, **__: pytest.fail("it was started"))

    def refused(*overrides: str, arguments: Sequence[str] = (), **modules: str) -> str:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        options = [f"cluster.fileroot={tmp_path / 'trials'}", "rollout.reward_timeout_s=2", *overrides]
        settings = [part for option in options for part in ("-s", option)]
        monkeypatch.setattr(sys, "argv", ["rl-submit", "ppo.yaml", "--local", *arguments, *settings])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert not (tmp_path / "trials").exists()
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize(
    "dry_run", [(), pytest.param(("--dry-run",), marks=pytest.mark.slow)], ids=["started", "dry run"]
)
def test_broken_code_is_refused_with_exit_2_its_line_and_its_key_and_nothing_is_written(
    dry_run: tuple[str, ...], refused: Refused
) -> None:
    own, judge = (
        LOSS.format(key="advantage"),
        INTERFACE.format(body="return {'reward': engine.forward(sample)['scores']}"),
    )
    said = refused("ppo.loss=own:score", *JUDGED, arguments=dry_run, own=own, own_judge=judge)
    assert "KeyError: 'advantage' (own.py:5)" in said and "-s ppo.loss=own:score" in said, said
    assert "inference made reward, and not rewards" in said and "-s reward_model.interface=own_judge:Judge" in said, (
        said
    )


def test_all_that_is_broken_is_said_at_once(refused: Refused) -> None:
    parts = json.dumps({name: {"function": f"{name}:score"} for name in REWARDS})
    said = refused(
        f"rollout.reward={parts}",
        "rollout.agent=waits:score",
        "dataset.sampler=weighs:score",
        waits="def score(task, session):\n    return None\n",
        weighs="def score(rewards):\n    pass\n",
        **{name: module for name, (module, _) in REWARDS.items()},
    )
    for message in ("waits.py:1: score is not an async function", "for [0.0] it is None"):
        assert message in said, said
    for name, (_, message) in REWARDS.items():
        assert message in said and f"rollout.reward.{name}.function" in said, said


CLASS = """\
from corral.experiments.config.base import FrozenConfig
from corral.workers.algorithms.functional.losses import TokenLosses


class Score(FrozenConfig):
    scale: float = 1.0

    def __call__(self, scores, micro_batch, config):
        return TokenLosses(-self.scale * micro_batch.tensors["advantages"] * scores.logprobs)
"""


ADVANTAGES = """
from corral.workers.algorithms.advantage import AdvantageEstimator


class Mine(FrozenConfig):
    def __call__(self, batch, config):
        return {'advantages': batch.rewards}


wrapped = AdvantageEstimator(lambda batch, config: {})
"""


def test_settings_of_a_loss_of_ones_own_are_those_of_its_class_and_an_advantage_beside_it_is_blamed_for_its_errors(
    submit: Submit,
) -> None:
    plan = submit("ppo.loss=own:Score", "ppo.loss_settings.scale=0.5", own=CLASS + ADVANTAGES).plan
    assert [role.ppo.loss_settings for role in plan.roles.values() if role.ppo] == [{"scale": 0.5}]
    with pytest.raises(ConfigError) as raised:
        submit("ppo.loss=own:Score", "ppo.advantage=own:Mine")
    (problem,) = raised.value.problems
    assert problem.path == ("ppo", "advantage")
    assert re.search("AttributeError: 'AdvantageBatch' object has no .*own.py:16", problem.message), problem


@pytest.mark.slow  # as the one above, by what it returns
def test_an_advantage_that_returns_no_advantages_is_refused(submit: Submit) -> None:
    with pytest.raises(ConfigError, match="an advantage estimator must return ..advantages.., and returned") as raised:
        submit("ppo.loss=own:Score", "ppo.advantage=own:wrapped", own=CLASS + ADVANTAGES)
    assert raised.value.problems[0].path == ("ppo", "advantage")


REWARD = """\
from corral.experiments.config.base import FrozenConfig


class Near(FrozenConfig):
    scale: float = 1.0

    def __call__(self, problem, answer):
        raise ConnectionRefusedError(f"nobody listens at {self.scale}")
"""


def test_parts_of_a_reward_have_the_settings_of_their_classes_and_one_that_reaches_nobody_is_a_warning(
    submit: Submit,
) -> None:
    parts = "rollout.reward={{right: {{function: 'own:score'}}, near: {{function: 'own:Near', settings: {{{}}}}}}}"
    submission = submit(parts.format("scale: 2.0"), own=f"{REWARD}\n\n{GOOD}")
    (warning,) = [one for one in submission.warnings if "own:Near" in one]
    assert "own:Near was not tried to the end: ConnectionRefusedError: nobody listens at 2.0" in warning
    with pytest.raises(ConfigError, match="near.function: settings: unknown key 'scal' .did you mean 'scale'"):
        submit(parts.format("scal: 2.0"))


def test_a_module_that_is_not_there_is_said_with_where_it_is_looked_for(submit: Submit) -> None:
    with pytest.raises(ConfigError, match="rollout.reward: .*No module named 'nowhere_at_all'") as raised:
        submit("rollout.reward=nowhere_at_all.rewards:score")
    assert "run rl-submit in the folder that holds the module" in raised.value.problems[0].hint
    with pytest.raises(ConfigError, match="exact_mach") as raised:
        submit("rollout.reward=corral.workers.rewards:exact_mach")
    assert raised.value.problems[0].hint == "did you mean 'exact_match'?"


def test_a_reward_that_judges_one_of_several_texts_is_taken(submit: Submit) -> None:
    submit(
        "rollout.reward=own_reward:score", own_reward="def score(problem, answer):\n    return float(len(answer[0]))\n"
    )


def write_rows(path: Path, answer: object, **fields: object) -> None:
    rows = ({"id": str(number), "prompt": "1+1=", "answer": answer, **fields} for number in range(8))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


HELD_OUT = "evaluation.dataset.path=held_out.jsonl"


def test_a_reward_is_tried_on_the_first_row_of_each_set_of_held_out_problems(submit: Submit, tmp_path: Path) -> None:
    reads = "def score(problem, answer):\n    return float(answer == problem['result'])\n"
    write_rows(tmp_path / "train.jsonl", "2", result="2")
    write_rows(tmp_path / "held_out.jsonl", "2", result="2")
    write_rows(tmp_path / "more.jsonl", "2")
    assert not submit("rollout.reward=own_reward:score", HELD_OUT, own_reward=reads).warnings
    with pytest.raises(
        ConfigError, match="judged no answer to the first row of evaluation.more.aime, .*own_reward.py:2"
    ):
        submit("rollout.reward=own_reward:score", HELD_OUT, "evaluation.more={aime: more.jsonl}")


COSTLY = """\
def right(problem, answer):
    return float(answer.strip() == problem["answer"])


def score(problem, answer):
    return right(problem, answer) - 0.01 * len(answer)
"""


def test_a_reward_by_which_no_answer_is_right_is_told_where_accuracy_is_measured(
    submit: Submit, tmp_path: Path
) -> None:
    for name in ("train", "held_out"):
        write_rows(tmp_path / f"{name}.jsonl", "2")
    both = "rollout.reward={right: {function: 'own_reward:right'}, all: {function: 'own_reward:score', weight: 0.0}}"
    (warning,) = submit("rollout.reward=own_reward:score", HELD_OUT, own_reward=COSTLY).warnings
    assert warning.startswith("own_reward:score gives the own answer '2' of the first row of the data set at most 0.99")
    assert "let evaluation.correct name the part" in warning
    assert not submit("rollout.reward=own_reward:score", HELD_OUT, "evaluation.correct=0.9").warnings
    assert not submit(both, HELD_OUT, "evaluation.correct=right").warnings
    with pytest.raises(ConfigError, match="evaluation.correct 'wrong' is no part of rollout.reward, .*: right, all"):
        submit(both, HELD_OUT, "evaluation.correct=wrong")


def test_a_row_whose_own_answer_is_not_right_by_a_reward_that_ships_is_told(submit: Submit, tmp_path: Path) -> None:
    math = "rollout.reward=corral.workers.rewards:math"
    write_rows(tmp_path / "train.jsonl", "1331 and 1728")
    assert not submit(math).warnings
    write_rows(tmp_path / "train.jsonl", "no solution")
    with pytest.raises(ConfigError, match="reads no mathematics in the row's answer 'no solution'"):
        submit(math)
    write_rows(tmp_path / "train.jsonl", "B")
    parts = {"form": {"function": "corral.workers.rewards:Format", "settings": {"pattern": "#+ Answer: .*"}}}
    (warning,) = submit(f"rollout.reward={json.dumps(parts)}").warnings
    assert "rewards:Format gives 0 to the own answer 'B' of the first row of the data set" in warning
    assert not submit("rollout.reward=corral.workers.rewards:Format").warnings


def test_a_reward_that_fails_on_what_a_model_may_say_is_told(submit: Submit) -> None:
    fails = "def score(problem, answer):\n    return float(answer.partition('####')[2].replace(',', '') or '0')\n"
    (warning,) = submit("rollout.reward=own_reward:score", own_reward=fails).warnings
    assert "own_reward:score fails on an answer such as" in warning and "own_reward.py:2" in warning


def test_code_that_fails_is_to_be_corrected_and_only_a_cluster_can_do_without_the_check(submit: Submit) -> None:
    with pytest.raises(ConfigError) as refused:
        submit("rollout.reward=own_reward:score", own_reward="def score(problem, answer):\n    return answer.no\n")
    (problem,) = refused.value.problems
    assert problem.hint == "correct it there and submit again; on a cluster, --no-checks submits without this check"


UNIT_TESTS = "rollout.reward=corral.workers.rewards:unit_tests"


def test_a_reward_that_runs_programs_wants_rows_with_tests_and_a_sandbox(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="rollout.reward: .*a row of programs has a list of `tests`"):
        submit(UNIT_TESTS)
    row = {"id": "1", "prompt": "1+1=", "answer": "2", "tests": [{"input": "", "output": "2"}]}
    for name in ("train", "heldout"):
        rows = (json.dumps(row | {"id": str(number)}) for number in range(8))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    submission = submit(UNIT_TESTS)
    assert submission.checks[0] == "sandbox ok" and not submission.code.contents
    on_slurm = submission.plan.model_copy(update={"mode": "slurm"})
    assert look_at_code(on_slurm).checks == ("sandbox ok on this machine, nodes not asked",)

    monkeypatch.setenv("PATH", str(tmp_path))  # without bwrap
    with pytest.raises(ConfigError, match="rollout.reward: it runs in a sandbox, .* no bwrap in the PATH; install"):
        submit(UNIT_TESTS)
    with pytest.raises(ConfigError) as raised:
        look_at_code(on_slurm)
    assert raised.value.problems[0].hint == "rl-doctor looks at the nodes; if they can make sandboxes, add --no-checks"
    assert look_at_code(on_slurm, tries=False).checks == ()


def test_a_reward_of_ones_own_that_is_marked_wants_a_sandbox_too(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = "from corral.workers.sandbox.base import needs_sandbox\n\n\n@needs_sandbox\n" + GOOD
    assert submit("rollout.reward=marked:score", marked=marked).checks[0] == "sandbox ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="it runs in a sandbox"):
        submit("rollout.reward=marked:score", marked=marked)
    submit("rollout.reward=unmarked:score", unmarked=GOOD)


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


@pytest.mark.slow  # what is broken is refused above; these are more ways to be so
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'rewards': engine.forward(sample)['score']}", "KeyError: 'score' (own_judge.py:16)"),
        ("return {'rewards': np.zeros(3, np.float32)}", "rewards"),
        ("return {'rewards': sample.data['values']}", "KeyError: 'values' (own_judge.py:16)"),
    ],
)
def test_an_interface_is_tried_on_made_up_answers(submit: Submit, body: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        submit(*JUDGED, own_judge=INTERFACE.format(body=body))
    (problem,) = raised.value.problems
    assert message in problem.message and problem.path == ("reward_model", "interface")


def test_an_interface_that_needs_a_real_model_is_taken_and_it_is_said(submit: Submit) -> None:
    submission = submit(*JUDGED, own_judge=INTERFACE.format(body="return {'rewards': engine.model(sample)}"))
    (warning,) = submission.warnings
    assert warning.startswith("own_judge:Judge was not tried to the end: it asks its engine for 'model'")


UNREAD = """\
from corral.experiments.async_ppo import AsyncPPOExperiment


class Mine(AsyncPPOExperiment):
    def training_calls(self):
        unread = self.inference_call(
            "old_inf", "actor", "ppo_actor", input_keys=("input_ids", "prompt_mask"), outputs={"logprobs": "older"}
        )
        return [unread, *super().training_calls()]
"""


def test_a_call_whose_output_nobody_reads_is_warned_about(submit: Submit) -> None:
    submission = submit("experiment=unread_mine:Mine", unread_mine=UNREAD)
    (warning,) = submission.warnings
    assert warning.startswith("call old_inf makes older, and no call reads that; leave the call out")


def test_a_trial_without_code_of_ones_own_keeps_none(submit: Submit) -> None:
    assert not submit().plan.code
