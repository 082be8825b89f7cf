"""experiment.yaml + overrides -> Experiment: defaults, paths, and imports that stay cheap."""

import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

from corral.experiments import problems
from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.checks import generation as generation_checks
from corral.experiments.config.rollout import RewardPart
from corral.experiments.errors import ConfigError
from corral.experiments.registry import EXPERIMENTS, load_experiment
from corral.experiments.row_experiment import SFTExperiment
from corral.experiments.specs import worker_specs
from tests.experiments.broken_yaml import EPISODES, MICRO_BATCH, VALID_PPO, VALID_SFT, write_inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    (tmp_path / "sft.yaml").write_text(VALID_SFT)
    return tmp_path


def _ppo(folder: Path, *overrides: str) -> AsyncPPOExperiment:
    experiment = load_experiment(folder / "ppo.yaml", overrides)
    assert isinstance(experiment, AsyncPPOExperiment)
    return experiment


def test_kind_of_the_file_chooses_the_class(folder: Path) -> None:
    assert type(load_experiment(folder / "ppo.yaml")) is EXPERIMENTS["async_ppo"] is AsyncPPOExperiment
    assert type(load_experiment(folder / "sft.yaml")) is EXPERIMENTS["sft"] is SFTExperiment


def test_values_of_the_file_arrive(folder: Path) -> None:
    experiment = _ppo(folder)
    assert experiment.seed == 3
    assert experiment.actor.optimizer.lr == 3e-4
    assert experiment.launch.time_limit == "1:00:00"
    assert experiment.ppo.group_size == 4
    assert experiment.ref is None


def test_max_staleness_is_another_name_of_max_head_offpolicyness(folder: Path) -> None:
    text = VALID_PPO.replace("max_head_offpolicyness: 1", "max_staleness: 3")
    (folder / "ppo.yaml").write_text(text)
    assert _ppo(folder).max_head_offpolicyness == 3
    line = text.splitlines().index("  max_staleness: 3") + 1
    (folder / "ppo.yaml").write_text(text.replace("max_staleness: 3", "max_staleness: -3"))
    with pytest.raises(ConfigError, match=rf"ppo.yaml:{line}  rollout.max_head_offpolicyness: -3"):
        _ppo(folder)
    (folder / "ppo.yaml").write_text(text)
    with pytest.raises(ConfigError, match="max_staleness and max_head_offpolicyness are one key"):
        _ppo(folder, "rollout.max_head_offpolicyness=2")


def test_overrides_win_and_the_last_one_most(folder: Path) -> None:
    experiment = _ppo(folder, "actor.optimizer.lr=1e-5", "seed=8", "seed=9", "rollout.sampling.top_p=0.5")
    assert (experiment.actor.optimizer.lr, experiment.seed, experiment.rollout.sampling.top_p) == (1e-5, 9, 0.5)


def test_override_can_create_and_remove_a_section(folder: Path) -> None:
    with_ref = _ppo(folder, f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1")
    assert with_ref.ref is not None and with_ref.ref.path == folder / "model"
    assert _ppo(folder, f"ref.path={folder / 'model'}", "ref=null").ref is None


def test_override_takes_lists_and_text_with_equal_signs(folder: Path) -> None:
    experiment = _ppo(folder, "launch.extra_sbatch_arguments=[--licenses=a:1, --mail-type=END]")
    assert experiment.launch.extra_sbatch_arguments == ("--licenses=a:1", "--mail-type=END")


@pytest.mark.parametrize(("typed", "value"), [("30", "30"), ("2-12", "2-12"), ('"45"', "45")])
def test_numbers_need_no_quotes_in_overrides_of_text(folder: Path, typed: str, value: str) -> None:
    assert _ppo(folder, f"launch.time_limit={typed}").launch.time_limit == value


def test_environment_variables_need_no_quotes_in_overrides(folder: Path) -> None:
    experiment = _ppo(folder, "groups.model_worker.scheduling.env_vars.OMP_NUM_THREADS=2")
    scheduling = experiment.groups["model_worker"].scheduling
    assert scheduling is not None
    assert scheduling.env_vars == {"OMP_NUM_THREADS": "2"}


def test_leading_zeros_of_a_name_survive_an_override(folder: Path) -> None:
    assert _ppo(folder, "name=007").name == "007"


def test_paths_are_relative_to_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    experiment = _ppo(folder)
    assert experiment.actor.path == folder / "model"
    assert experiment.evaluation is not None
    assert experiment.evaluation.dataset.path == folder / "heldout.jsonl"


def test_paths_of_overrides_are_relative_to_the_current_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "other.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 1)
    monkeypatch.chdir(elsewhere)
    experiment = _ppo(folder, "evaluation.dataset.path=other.jsonl")
    assert experiment.evaluation is not None
    assert experiment.evaluation.dataset.path == elsewhere / "other.jsonl"
    assert experiment.dataset.path == folder / "train.jsonl"


def test_tilde_is_the_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert _ppo(folder, "cluster.fileroot=~/runs").cluster.fileroot == folder / "runs"


def test_group_scheduling_keeps_the_defaults_of_its_kind(folder: Path) -> None:
    scheduling = _ppo(folder, "groups.master_worker.scheduling.cpu=3").groups["master_worker"].scheduling
    assert scheduling is not None
    assert (scheduling.cpu, scheduling.mem) == (3, 20 * 1024)


@pytest.mark.parametrize(
    "definition",
    [
        "async def act(): ...",
        "class act: ...",
        "from elsewhere import act",
        "from elsewhere import other as act",
        "act = make()",
        "act: object = make()",
        "if True:\n    async def act(): ...",
        "try:\n    import act\nexcept ImportError:\n    act = None",
        "from elsewhere import *",
        "def __getattr__(name): ...",
    ],
)
def test_every_way_to_define_a_name_counts(folder: Path, monkeypatch: pytest.MonkeyPatch, definition: str) -> None:
    (folder / "my_agents.py").write_text(definition + "\n")
    monkeypatch.chdir(folder)
    assert _ppo(folder, "rollout.agent=my_agents:act").rollout.agent == "my_agents:act"


def test_sequences_of_episodes_are_as_long_as_all_can_take_and_no_longer_than_asked(folder: Path) -> None:
    experiment = _ppo(folder, EPISODES, MICRO_BATCH)
    assert experiment.planned_rollout.episode.max_tokens == 32
    assert {"episodes", "turn_rewards"} <= set(experiment.trajectory_keys)
    asked = _ppo(folder, EPISODES, MICRO_BATCH, "rollout.episode.max_tokens=24")
    assert asked.planned_rollout.episode.max_tokens == 24 and asked.row_kind == "prompts"
    assert not _ppo(folder, MICRO_BATCH).rollout.makes_episodes


def test_settings_of_agents_that_the_single_turn_does_not_read_are_warned_of(folder: Path) -> None:
    settings = ("rollout.episode.max_turns=3", "rollout.agent_processes=1")
    assert list(_ppo(folder, EPISODES, *settings).find_warnings()) == []
    warnings = list(_ppo(folder, *settings).find_warnings())
    assert [warning.split(" has no effect")[0] for warning in warnings] == [
        "rollout.agent_processes",
        "rollout.episode",
    ]


def test_reward_of_ones_own_needs_no_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_rewards.py").write_text("def score(problem, answer):\n    return 1.0\n")
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(20)))
    monkeypatch.chdir(folder)
    assert _ppo(folder, "rollout.reward=my_rewards:score").dataset.path == folder / "train.jsonl"
    with pytest.raises(ConfigError, match="no answer"):
        _ppo(folder)


def test_an_import_path_alone_is_a_part_of_a_reward_under_its_name(folder: Path) -> None:
    reward = _ppo(folder, "rollout.reward={right: 'corral.workers.rewards:math'}").rollout.reward
    assert reward == {"right": RewardPart(function="corral.workers.rewards:math")}


def test_settings_without_effect_are_named(folder: Path) -> None:
    experiment = _ppo(
        folder,
        f"ref.path={folder / 'model'}",
        f"evaluation.dataset.path={folder / 'train.jsonl'}",
        "ppo.use_decoupled_loss=false",
        "ppo.is_ratio_clip=3.0",
        "weights.transport=delta",
        "rollout.spare_answers=2",
    )
    warnings = list(experiment.find_warnings())
    assert [
        word
        for word in ("kl.coef is 0", "training data", "is_ratio_clip", "delta saves nothing", "shorter answers")
        if not any(word in w for w in warnings)
    ] == []
    assert list(_ppo(folder).find_warnings()) == []
    assert list(_ppo(folder, "weights.transport=delta", "actor.dtype=bfloat16").find_warnings()) == []
    for name in ("luffy", "sft_mix"):
        (warning,) = _ppo(folder, f"ppo.algorithm={name}").find_warnings()
        assert f"{name} shows no answers without rollout.demonstrations" in warning
        assert list(_ppo(folder, f"ppo.algorithm={name}", "rollout.demonstrations=answer").find_warnings()) == []


def test_trackers_that_could_not_run_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ppo(folder, "tracking.to=[prometheus, own.module:Lines]").tracking.to == ("prometheus", "own.module:Lines")
    refused = {
        "tracking.to=[wand]": "there is no tracker 'wand'",
        "tracking.to=[command]": "give both, or neither",
        "tracking.command=[mail-me]": "give both, or neither",
        "tracking.to=[mlflow]": "pip install 'corral-rl",
    }
    monkeypatch.setattr(problems, "find_spec", lambda name: None)
    for override, words in refused.items():
        with pytest.raises(ConfigError) as error:
            _ppo(folder, override)
        assert words in str(error.value)


def test_adapters_do_not_travel_where_none_are_trained(folder: Path) -> None:
    with pytest.raises(ConfigError, match="actor has none") as caught:
        _ppo(folder, "weights.transport=lora").check()
    assert "actor.lora" in str(caught.value) and "shared_memory" in str(caught.value)


@pytest.mark.parametrize("transport", ["shared_memory", "delta", "disk"])
def test_the_master_has_deltas_written_where_servers_take_them(folder: Path, transport: str) -> None:
    workers = worker_specs(_ppo(folder, f"weights.transport={transport}"))
    [master] = [worker for worker in workers if worker.kind == "master_worker"]
    [server] = [worker for worker in workers if worker.kind == "generation_server"]
    assert (master.writes_deltas, server.weights.transport) == (transport == "delta", transport)


@pytest.mark.parametrize(
    "rounds", ["engine.quantization=int8", "sglang.flags.quantization=fp8", "sglang.flags.kv-cache-dtype=fp8_e5m2"]
)
def test_a_maker_that_rounds_is_warned_of_where_the_loss_does_not_weigh_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: str
) -> None:
    monkeypatch.setattr(generation_checks, "sglang_version", lambda python: "0.0")
    backend = "hf" if rounds.startswith("engine") else "sglang"
    memory = "groups.generation_server.scheduling.mem=2G"
    overrides = (f"allocation={backend}:d1+fsdp:d1", memory, rounds)
    assert list(_ppo(folder, *overrides).find_warnings()) == []
    [warning] = _ppo(folder, *overrides, "ppo.use_decoupled_loss=false").find_warnings()
    as_is = ("allocation=sglang:d1+fsdp:d1", memory, "sglang.flags={quantization: unquant, kv-cache-dtype: auto}")
    assert list(_ppo(folder, *as_is, "ppo.use_decoupled_loss=false").find_warnings()) == []
    assert rounds.split("=")[0] in warning and "ppo.is_ratio_mode to token_truncate" in warning


def test_rounding_that_is_the_embedded_engines_is_not_asked_of_another(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is of the embedded engine, and the allocation's servers are sglang"):
        _ppo(folder, "allocation=sglang:d1+fsdp:d1", "engine.quantization=int8")
    with pytest.raises(ConfigError, match="engine.quantization"):
        _ppo(folder, "engine.quantization=int4")


def test_answers_that_keep_old_keys_and_values_are_told_of_and_refused_of_sglang(folder: Path) -> None:
    in_place = "weights.update_mode=in_place"
    with pytest.raises(ConfigError, match="of the embedded engine; SGLang has begun the next token") as caught:
        _ppo(folder, "allocation=sglang:d1+fsdp:d1", in_place).check()
    assert "set it to retract" in str(caught.value)
    assert list(_ppo(folder, in_place).find_warnings()) == []
    [warning] = _ppo(folder, in_place, "ppo.use_decoupled_loss=false").find_warnings()
    assert "counts as learning in ppo.eps_clip" in warning
    for mode in ("retract", "abort", "in_place"):
        workers = worker_specs(_ppo(folder, f"weights.update_mode={mode}"))
        [server] = [worker for worker in workers if worker.kind == "generation_server"]
        [trainer] = [worker for worker in workers if worker.kind == "model_worker"]
        assert (server.weights.update_mode, trainer.behaviour.keeps_cache) == (mode, mode == "in_place")


def test_loaded_experiment_cannot_be_changed(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        _ppo(folder).seed = 4


_LIGHT_MODULES = (
    "corral.experiments",
    "corral.experiments.registry",
    "corral.experiments.plan",
    "corral.launcher.submit.plan_text",
)


def test_loading_and_planning_import_no_heavy_library(folder: Path) -> None:
    program = f"""
import sys
{"; ".join(f"import {module}" for module in _LIGHT_MODULES)}
from corral.experiments.plan import TrialIdentity, make_run_plan
experiment = sys.modules["corral.experiments.registry"].load_experiment({str(folder / "ppo.yaml")!r})
identity = TrialIdentity(experiment="e", trial="t", uuid="0" * 32, directory="/nowhere")
sys.modules["corral.launcher.submit.plan_text"].render_plan(make_run_plan(experiment, identity, "slurm"))
heavy = ("torch", "transformers", "tokenizers", "numpy", "jinja2", "zmq", "redis", "corral.workers")
print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_a_copy_of_an_experiment_keeps_nothing_that_followed_from_other_values(folder: Path) -> None:
    class Own(AsyncPPOExperiment):
        @cached_property
        def doubled(self) -> int:
            return 2 * self.train_batch_size

    ours = _ppo(folder)
    own = Own.model_validate({name: getattr(ours, name) for name in AsyncPPOExperiment.model_fields})
    size = own.train_batch_size
    assert (own.doubled, own.model_copy(update={"train_batch_size": 3 * size}).doubled) == (2 * size, 6 * size)
    assert own.model_copy(update={"allocation": "hf:d2+fsdp:d1"}).parsed_allocation != own.parsed_allocation
