"""`experiment: module:Class`: a class of the user's own is imported at submission, or what is wrong with it is said."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.specs import check_publication
from corral.launcher.submit.prepare import prepare
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PublishWeightsHook
from tests.experiments.broken_yaml import VALID_PPO, VALID_SFT, write_inputs

MINE = """\
from corral.experiments.row_experiment import SFTExperiment


class Mine(SFTExperiment):
    halves: bool = False

    def calls(self):
        call, = super().calls()
        change = {"n_seqs": self.train_batch_size // 2 if self.halves else self.train_batch_size}
        return [call.model_copy(update=change)]
"""
Submit = Callable[..., RunPlan]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    """The plan of a file that names `users_mine:Mine`, with this text for the module."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    path_before = list(sys.path)

    def submit(module: str, *overrides: str, name: str = "users_mine:Mine") -> RunPlan:
        (tmp_path / "users_mine.py").write_text(module)
        (tmp_path / "mine.yaml").write_text(VALID_SFT.replace("experiment: sft", f"experiment: {name}"))
        options = [f"cluster.fileroot={tmp_path / 'trials'}", *overrides]
        return prepare(tmp_path / "mine.yaml", options, trial_name=None, mode="local").plan

    yield submit
    sys.modules.pop("users_mine", None)
    assert sys.path == path_before


def test_fields_and_calls_of_ones_own_are_in_the_plan(submit: Submit) -> None:
    assert [call.n_seqs for call in submit(MINE).master.calls] == [8]
    plan = submit(MINE, "halves=true")
    assert [call.n_seqs for call in plan.master.calls] == [4]
    assert (plan.config["experiment"], plan.config["halves"]) == ("users_mine:Mine", True)


def test_a_plan_is_read_without_the_users_module(submit: Submit, tmp_path: Path) -> None:
    text = submit(MINE).to_json()
    sys.modules.pop("users_mine")
    (tmp_path / "users_mine.py").unlink()
    assert RunPlan.from_json(text).to_json() == text
    assert "users_mine" not in sys.modules


def changing(change: str) -> str:
    """The module with a call that is changed otherwise."""
    head, _, tail = MINE.partition('        change = {"n_seqs"')
    return f"{head}        change = {change}\n{tail.partition(chr(10))[2]}"


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (MINE, "users_mine:mine.Mine", "must look like package.module:name"),
        (MINE, "users_other:Mine", "there is no module 'users_other'"),
        (MINE, "users_mine:Yours", "users_mine.py defines no 'Yours'"),
        ("class Mine: pass\n", "users_mine:Mine", "Mine is a class of another kind, and has to be derived from"),
        ("def Mine(): pass\n", "users_mine:Mine", "Mine is no class, and has to be derived from"),
        ("import users_missing\nMine = 1\n", "users_mine:Mine", "users_mine.py:1: ModuleNotFoundError"),
        ("raise SystemExit(3)\nMine = 1\n", "users_mine:Mine", "users_mine.py:1: SystemExit"),
        (
            "from corral.experiments.experiment import Experiment\n\nclass Mine(Experiment):\n    pass\n",
            "users_mine:Mine",
            "users_mine.py:3: Mine does not define",
        ),
        (changing("self.nobody"), "users_mine:Mine", "users_mine.py:9: AttributeError"),
        (changing("{'input_keys': ('x',)}"), "users_mine:Mine", "reads key 'x', which nobody makes"),
        (
            changing("{'model_name': type(call.model_name)('judge')}"),
            "users_mine:Mine",
            "call 'actor_train' runs on judge/0, and the models are actor/0",
        ),
        (changing("{'post_hooks': ()}"), "users_mine:Mine", "call 'actor_train' trains actor/0, and no call publishes"),
    ],
)
def test_what_is_wrong_is_said_with_the_line_that_names_it(
    submit: Submit, module: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        submit(module, name=name)
    (problem,) = raised.value.problems
    assert message in problem.message
    assert (problem.place, problem.path, problem.shown) == ("mine.yaml:1", ("experiment",), name)


TAUGHT = """\
from corral.experiments.config.model import ModelConfig
from corral.experiments.row_experiment import ROW_KEYS, SFTExperiment


class Mine(SFTExperiment):
    teacher: ModelConfig

    @property
    def models(self):
        return {"actor": self.model, "teacher": self.teacher}

    def calls(self):
        teacher = self.inference_call(
            "teacher_inf", "teacher", "ppo_actor", input_keys=ROW_KEYS, outputs={"logprobs": "ref_logprobs"}
        )
        return [teacher, self.train_call("dpo", input_keys=(*ROW_KEYS, "ref_logprobs"))]
"""


def test_a_graph_of_ones_own_is_models_and_calls(submit: Submit) -> None:
    plan = submit(TAUGHT, "teacher.path=model", "allocation=actor=fsdp:d1,teacher=fsdp:d1")
    teacher, train = plan.master.calls
    assert teacher.output_keys == ("ref_logprobs",)
    assert (train.name, [hook.type for hook in train.post_hooks]) == ("actor_train", ["publish_weights"])
    assert plan.master.initial_weights.keys() == {"actor"}
    assert {name: mesh.ranks for name, mesh in plan.master.meshes.items()} == {"actor/0": (0,), "teacher/0": (1,)}


def test_what_is_wrong_with_a_model_of_ones_own_is_said_under_its_field(submit: Submit) -> None:
    with pytest.raises(ConfigError) as raised:
        submit(TAUGHT, "teacher.path=nowhere")
    (problem,) = raised.value.problems
    assert (problem.place, problem.path) == ("-s teacher.path=nowhere", ("teacher", "path"))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TAUGHT.replace('"dpo"', '"dpp"'), "implemented by 'dpp', and there is no such interface"),
        (TAUGHT.replace("return [teacher, ", "return ["), "reads key 'ref_logprobs', which nobody makes"),
        (TAUGHT.replace("return [teacher, self", "return [] and [self"), "at least one call"),
        (
            TAUGHT.replace("[teacher, self", "[self").replace('(*ROW_KEYS, "ref_logprobs")', "ROW_KEYS"),
            "no call runs on teacher/0",
        ),
        (TAUGHT.replace('{"actor": self.model, ', '{"actor": self.teacher, '), "nothing trains it"),
    ],
)
def test_models_and_calls_that_do_not_fit_are_refused(submit: Submit, module: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(module, "teacher.path=model")


def test_only_the_first_model_is_published() -> None:
    def trained(role: str, *hooks: PublishWeightsHook) -> ModelFunctionCall:
        return ModelFunctionCall(
            name=f"{role}_train",
            model_name=ModelName(role),
            call_type=CallType.TRAIN_STEP,
            implementation="sft",
            n_seqs=8,
            post_hooks=hooks,
        )

    hook = PublishWeightsHook()
    check_publication(build_dataflow([trained("actor", hook), trained("critic")], ()), ModelName("actor"))
    with pytest.raises(ValueError, match="'critic_train' publishes the weights of critic/0, and .* ones of actor/0"):
        check_publication(build_dataflow([trained("actor", hook), trained("critic", hook)], ()), ModelName("actor"))


ACTOR = """\
from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.ppo_actor import PPOActorInterface


class Actor(PPOActorInterface):
    def __init__(self, settings):
        super().__init__(settings.require_ppo())

    @property
    def inputs(self):
        table = super().inputs
        doubt = Key("doubt", "per_answer", "float32")
        return {**table, CallType.TRAIN_STEP: (*table[CallType.TRAIN_STEP], doubt)}
"""
JUDGE = """\
from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.algorithms.base import ModelInterface
from corral.workers.algorithms.policy_loss import PolicyLoss


def _loss(scores, micro_batch, config):
    return TokenLosses(-scores.logprobs * micro_batch.tensors["doubt"].mean(), {})


class Judge(ModelInterface):
    inputs = {CallType.INFERENCE: built_in("input_ids", "rewards")}
    outputs = {CallType.INFERENCE: (*built_in("rewards"), Key("doubt", "per_answer", "float32"))}

    def __init__(self, settings):
        pass

    def inference(self, engine, sample):
        doubt = -engine.forward(sample.select_keys(["input_ids"]))["logprobs"][: sum(sample.num_answers_per_sample())]
        return {"rewards": sample.data["rewards"], "doubt": doubt}


doubting = PolicyLoss(_loss, inputs=(Key("doubt", "per_answer", "float32"),))
"""


@pytest.mark.slow  # three looks at code that loads torch; test_customized_trial.py has all of it in one trial
def test_what_a_loss_reads_of_a_judge_goes_from_one_to_the_other(submit: Submit, tmp_path: Path) -> None:
    submit(MINE)  # writes the inputs
    (tmp_path / "users_judge.py").write_text(JUDGE + ACTOR)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    options = [f"cluster.fileroot={tmp_path / 'trials'}", "ppo.loss=users_judge:doubting"]
    with pytest.raises(ConfigError) as raised:
        prepare(tmp_path / "ppo.yaml", options, trial_name=None, mode="local")
    (problem,) = raised.value.problems
    assert problem.message == "ppo.loss users_judge:doubting reads doubt, and no call makes that"
    assert (problem.place, problem.path) == ("-s ppo.loss=users_judge:doubting", ("ppo", "loss"))

    options += ["reward_model.path=model", "reward_model.interface=users_judge:Judge", "reward_model.head=lm"]
    plan = prepare(tmp_path / "ppo.yaml", options, trial_name=None, mode="local").plan
    calls = {call.name: call for call in plan.master.calls}
    assert calls["rew_inf"].input_keys == ("input_ids", "rewards")
    assert calls["rew_inf"].output_keys == ("model_rewards", "doubt")
    assert "doubt" in calls["actor_train"].input_keys
    assert {key.name for key in plan.master.declared_keys} == {"model_rewards", "doubt"}

    options = [*options, "ppo.loss=ppo", "actor.interface=users_judge:Actor"]
    plan = prepare(tmp_path / "ppo.yaml", options, trial_name=None, mode="local").plan
    calls = {call.name: call for call in plan.master.calls}
    assert {calls[name].implementation for name in ("actor_inf", "actor_train")} == {"users_judge:Actor"}
    assert "doubt" in calls["actor_train"].input_keys and "rewards" not in calls["actor_train"].input_keys


def test_an_interface_that_is_not_there_is_named_with_its_key(submit: Submit, tmp_path: Path) -> None:
    submit(MINE)  # writes the inputs
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    roles = ("actor", "critic", "reward_model")
    options = [option for role in roles for option in (f"{role}.path=model", f"{role}.interface=users_mine:No{role}")]
    with pytest.raises(ConfigError) as raised:
        prepare(tmp_path / "ppo.yaml", options, trial_name=None, mode="local")
    problems = {problem.path: problem for problem in raised.value.problems}
    assert problems.keys() == {(role, "interface") for role in roles}
    for role in roles:
        assert f"users_mine.py has no callable 'No{role}'" in problems[role, "interface"].message
        assert problems[role, "interface"].hint == "it has Mine, SFTExperiment"
