"""The files of docs/customize.md, run as they stand there."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from corral.experiments.config.algorithm import DPOConfig, PPOConfig
from corral.experiments.errors import ConfigError
from corral.experiments.registry import load_experiment
from corral.experiments.specs import graph_keys
from corral.launcher.submit.prepare import prepare
from corral.scheduling.keys import BUILT_IN_KEYS, Key, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.algorithms.base import check_call, compute_logprobs
from corral.workers.algorithms.call_trial import keys_of_interface
from corral.workers.algorithms.check import check_file, main
from corral.workers.algorithms.interfaces import InterfaceSettings, make_interface
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.algorithms.preferences import DPOInterface
from corral.workers.data.sequence_sample import SequenceSample
from tests.experiments.broken_yaml import VALID_PPO, write_inputs
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample

DOCUMENT = Path(__file__).parents[1] / "docs" / "customize.md"
FILES = {name: text for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)}
PAIRS = {
    "experiment": "dpo",
    "name": "pairs",
    "actor": {"path": "model"},
    "ref": {"path": "model"},
    "dataset": {"path": "pairs.jsonl", "max_prompt_tokens": 8},
    "train_batch_size": 4,
    "groups": {
        "master_worker": {"scheduling": {"cpu": 1, "mem": "1G"}},
        "model_worker": {"scheduling": {"cpu": 1, "gpu": 0, "mem": "1G"}},
    },
}
SURPRISE = Key("surprise", "per_answer", "float32")


@pytest.fixture(autouse=True)
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder that a user submits from, with the files of the document."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


def judged(engine: SmallEngine) -> SequenceSample:
    sample = make_sample([[8, 12, 9], [5, 6, 7]])
    logprobs = compute_logprobs(engine, sample)
    return sample.with_key("old_logprobs", logprobs).with_key("proximal_logprobs", logprobs)


def test_every_file_is_shorter_than_forty_lines() -> None:
    assert FILES.keys() == {
        "my_rows",
        "my_reward",
        "my_order",
        "gentle_loss",
        "fluent_loss",
        "tempered_loss",
        "hinge_pairs",
        "curiosity",
        "surprise",
        "curious_ppo",
        "judge",
    }
    lines = {name: len(text.splitlines()) + 1 for name, text in FILES.items()}  # and the line with its name
    assert all(number < 40 for number in lines.values())
    # Those of one trial are as short as the page says, and import one module of corral's.
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| \w", DOCUMENT.read_text(), re.MULTILINE)
    assert [int(number) for _, number in table] == [lines[name] for name, _ in table]
    assert len(table) == 4 and max(lines[name] for name, _ in table) <= 30
    assert {found for name, _ in table for found in re.findall(r"corral[\w.]*", FILES[name])} == {"corral.api"}


def test_a_loss_of_ones_own_decides_how_answers_are_trained() -> None:
    def gains(config: PPOConfig) -> list[float]:
        """How much likelier each answer has become."""
        engine = SmallEngine("lm", lr=0.05)
        sample = judged(engine)
        sample.data["rewards"] = np.array([1, 0, 0, 1, 1, 0], np.float32)
        stats = PPOActorInterface(config).train_step(engine, sample, version=0)
        if config.loss != "ppo":
            assert 0.0 < stats["gentle/worse_fraction"] < 1.0
        change = compute_logprobs(engine, sample) - sample.data["old_logprobs"]
        return [float(x.sum()) for x in np.split(change, np.cumsum([n - 1 for n in sample.answer_lengths()])[:-1])]

    usual, gentle = gains(PPOConfig()), gains(PPOConfig(loss="gentle_loss:gentle"))
    assert sum(gentle) > sum(usual)


def test_every_loss_and_advantage_of_the_page_passes_the_check_that_it_names() -> None:
    assert main(["tempered_loss:Tempered", "loss_settings.worse=0.3"]) == 0
    assert check_file("curiosity:curious", {}) == []
    assert check_file("fluent_loss:fluent", {}) == []
    actor = PPOActorInterface(PPOConfig(loss="tempered_loss:Tempered", loss_settings={"worse": 0.0}))
    engine = SmallEngine("lm", lr=0.05)
    sample = judged(engine)
    assert actor.train_step(engine, sample, version=0)["train/skipped_nonfinite"] == 0.0
    with pytest.raises(ValueError, match="loss_settings: worse must be greater than or equal to 0"):
        PPOActorInterface(PPOConfig(loss="tempered_loss:Tempered", loss_settings={"worse": -1.0}))


def test_a_loss_of_pairs_of_ones_own_holds_them_as_far_apart_as_it_is_told(tmp_path: Path) -> None:
    def margin(**settings: object) -> float:
        dpo = DPOInterface(DPOConfig.model_validate({"beta": 1.0, **settings}))
        engine, sample = SmallEngine("lm", lr=0.05), make_sample([[6, 9], [7, 8]])
        sample = sample.with_key("ref_logprobs", dpo.inference(engine, sample)["logprobs"])
        for version in range(60):
            dpo.train_step(engine, sample, version=version)
        return dpo.evaluate(engine, sample)["margin"]

    held = margin(loss="hinge_pairs:Hinge", loss_settings={"ahead": 0.5})
    assert 0.4 < held < 1.5 < margin()
    with pytest.raises(ValueError, match="loss_settings has no effect without a loss of your own"):
        DPOConfig(loss_settings={"ahead": 0.5})
    # As rl-submit tries it.
    write_inputs(tmp_path)
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(PAIRS))
    overrides = ["dpo.loss=hinge_pairs:Hinge", f"cluster.fileroot={tmp_path}"]
    submission = prepare(tmp_path / "dpo.yaml", overrides, trial_name=None, mode="local")
    assert set(submission.code.contents) == {"hinge_pairs.py"}
    with pytest.raises(ConfigError, match=r"loss_settings: ahead must be greater than 0"):
        prepare(tmp_path / "dpo.yaml", [*overrides, "dpo.loss_settings={ahead: -1}"], trial_name=None, mode="local")


def test_a_loss_of_ones_own_reads_a_key_that_it_declares() -> None:
    engine = SmallEngine("lm", lr=0.05)
    sample = judged(engine)
    fluency = np.log(np.array([0.5, 0.25, 0.125, 0.5, 0.25, 0.125], np.float32))
    sample = sample.with_key(Key("fluency", "per_answer", "float32"), fluency)
    actor = PPOActorInterface(PPOConfig(loss="fluent_loss:fluent"))
    assert "fluency" in {key.name for key in actor.inputs[CallType.TRAIN_STEP]}
    assert 0.125 < actor.train_step(engine, sample, version=0)["fluent/weight"] < 0.5


def test_a_key_of_ones_own_goes_from_an_interface_through_the_plan_to_an_advantage() -> None:
    told = keys_of_interface("surprise:Surprise", None)
    keys = [key for key in told.keys if key.name not in BUILT_IN_KEYS]
    assert keys == [SURPRISE]
    call = ModelFunctionCall(
        name="surprise_inf",
        model_name=ModelName("ref"),
        call_type=CallType.INFERENCE,
        implementation="surprise:Surprise",
        n_seqs=2,
        input_keys=("input_ids", "prompt_mask"),
        output_keys=("surprise",),
    )
    assert graph_keys([call], {call.implementation: keys}, ["input_ids", "prompt_mask"]) == (SURPRISE,)

    interface = make_interface(call.implementation, InterfaceSettings())
    check_call(interface, call)
    engine = SmallEngine("lm", lr=0.05)
    sample = judged(engine)
    made = interface.inference(engine, sample.select_keys(call.input_keys))["surprise"]
    # The store of a rank knows the plan's keys, a rank without samples among them.
    table = merge_keys(keys)
    sample = SequenceSample.gather([sample], specs=table).with_key("surprise", made)
    assert SequenceSample.gather([], keys=["surprise"], specs=table).data["surprise"].dtype == np.float32

    actor = PPOActorInterface(PPOConfig(advantage="curiosity:curious"))
    assert SURPRISE in actor.inputs[CallType.TRAIN_STEP]
    sample.data["rewards"] = np.zeros(6, np.float32)  # only the bonus tells answers apart
    assert actor.train_step(engine, sample, version=0)["train/tokens"] > 0
    change = compute_logprobs(engine, sample) - sample.data["old_logprobs"]
    gains = [float(x.sum()) for x in np.split(change, np.cumsum([n - 1 for n in sample.answer_lengths()])[:-1])]
    for group in (slice(0, 3), slice(3, 6)):
        assert np.argmax(gains[group]) == np.argmax(made[group])


def test_an_experiment_of_ones_own_gives_its_key_to_the_advantage_that_reads_it(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    settings = yaml.safe_load(VALID_PPO) | {"experiment": "curious_ppo:CuriousPPO", "allocation": "fsdp:d1"}
    settings |= {"ref": {"path": "model"}, "ppo": {"kl": {"coef": 0.1}, "advantage": "curiosity:curious"}}
    settings["launch"] = {}
    del settings["rollout"]["max_head_offpolicyness"], settings["groups"]["generation_server"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    for surprised in ("ref", "actor"):
        experiment = load_experiment(tmp_path / "mine.yaml", [f"surprised={surprised}"])
        graph = experiment.graph
        made = graph.call("surprise_inf")
        assert (made.role, made.output_keys) == (surprised, ("surprise",))
        assert [maker for maker in graph.makers_of("actor_train") if "surprise" in maker.output_keys] == [made]


def test_a_reward_of_ones_own_adds_what_a_model_says_to_what_the_function_said() -> None:
    assert keys_of_interface("judge:Judge", None).names("inputs", CallType.INFERENCE) == (
        "input_ids",
        "prompt_mask",
        "rewards",
    )
    assert keys_of_interface("judge:Judge", None).names("outputs", CallType.INFERENCE) == ("rewards", "fluency")
    engine = SmallEngine("lm", lr=0.05)
    sample = judged(engine)
    sample.data["rewards"] = np.array([1, 0, 0, 1, 1, 0], np.float32)
    made = make_interface("judge:Judge", InterfaceSettings()).inference(engine, sample)
    lengths = [length - 1 for length in sample.answer_lengths()]
    logprobs = np.split(compute_logprobs(engine, sample), np.cumsum(lengths)[:-1])
    means = [part[part != 0.0].mean() for part in logprobs]
    np.testing.assert_allclose(made["fluency"], means, rtol=1e-5)
    np.testing.assert_allclose(made["rewards"] - sample.data["rewards"], 0.5 * np.array(means), rtol=1e-4)
