"""Experiment -> RunPlan -> plan.json -> RunPlan."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from corral.experiments.config.control import TrainControl
from corral.experiments.errors import ConfigError
from corral.experiments.plan import SCHEMA_VERSION, RunPlan, TrialIdentity, make_run_plan
from corral.experiments.policy import PolicyExperiment
from corral.experiments.registry import load_experiment, load_with_source
from corral.experiments.worker_specs import (
    GenerationServerSpec,
    GserverManagerSpec,
    MasterWorkerSpec,
    ModelWorkerSpec,
    RolloutWorkerSpec,
    RoutedExpertsSpec,
)
from corral.launcher.submit.prompts_text import print_prompts
from corral.scheduling.dataflow import build_dataflow
from corral.scheduling.keys import Key, teacher_keys, teacher_prompt_key
from tests.experiments.broken_yaml import NUM_TRAINING_ROWS, VALID_PPO, VALID_SFT, write_inputs
from tests.scheduling.test_dataflow import levels_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    (tmp_path / "ppo.yaml").write_text(VALID_PPO)
    (tmp_path / "sft.yaml").write_text(VALID_SFT)
    return tmp_path


def _plan(path: Path, *overrides: str) -> RunPlan:
    experiment = load_experiment(path, overrides)
    identity = TrialIdentity(
        experiment=experiment.name, trial="trial-1", uuid="ab" * 16, directory=path.parent / "trial-1"
    )
    return make_run_plan(experiment, identity, "slurm")


@pytest.mark.parametrize("name", ["ppo.yaml", "sft.yaml"])
def test_plan_survives_the_round_trip_through_json(folder: Path, name: str) -> None:
    plan = _plan(folder / name)
    read = RunPlan.from_json(plan.to_json())
    assert read == plan
    assert read.digest == plan.digest
    assert read.to_json() == plan.to_json()


def test_a_plan_grows_with_the_kinds_of_workers_and_not_with_their_number(folder: Path) -> None:
    plan = _plan(folder / "ppo.yaml", "allocation=hf:d2+fsdp:t2", "groups.rollout_worker.count=3")

    def grown(times: int) -> RunPlan:
        """The same with more of each kind, of which every other training rank takes samples, as with t2."""
        groups = [[worker for worker in plan.workers if worker.kind == kind] for kind, _ in plan.scheduling.items()]
        return plan.model_copy(
            update={
                "workers": [
                    group[number % len(group)].model_copy(update={"index": number})
                    for group in groups
                    for number in range(len(group) * (times if group[0].kind != "master_worker" else 1))
                ]
            }
        )

    large = grown(300)
    assert RunPlan.from_json(large.to_json()) == large
    assert len(large.workers) > 2000
    added = 300 * len("0,2,")  # a number for each rank that takes samples, and for each that does not
    assert len(large.to_json()) - len(plan.to_json()) < 3 * added


def test_the_plan_says_the_shape_of_each_role(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "model" / "config.json").write_text(json.dumps(config | sizes))
    shapes = RunPlan.from_json(_plan(folder / "ppo.yaml").to_json()).master.shape_by_role
    assert shapes.keys() == {"actor"}
    assert (shapes["actor"].intermediate_size, shapes["actor"].key_value_size) == (96, 32)


def test_the_trainer_is_told_how_the_answers_are_made(folder: Path) -> None:
    settings = ("engine.dtype=bfloat16", "engine.quantization=int8", "rollout.sampling.temperature=0.7")
    plan = RunPlan.from_json(_plan(folder / "ppo.yaml", *settings, "rollout.sampling.top_p=0.9").to_json())
    (rank,) = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
    behaviour = rank.behaviour
    assert (behaviour.dtype, behaviour.rounded_by) == ("bfloat16", ("engine.quantization",))
    assert (behaviour.sampling.temperature, behaviour.sampling.top_p) == (0.7, 0.9)


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}


def readers_of_experts(plan: RunPlan) -> set[str]:
    return {call.name for call in plan.master.calls if "routed_experts" in call.input_keys}


def test_the_experts_of_a_mixture_go_with_its_samples_to_whoever_computes_its_policy(folder: Path) -> None:
    assert not readers_of_experts(_plan(folder / "ppo.yaml"))  # a model without experts has nothing to replay
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | MIXTURE))
    plan = RunPlan.from_json(_plan(folder / "ppo.yaml").to_json())
    assert readers_of_experts(plan) == {"actor_train"}
    key = Key("routed_experts", "per_token", "int16", (2, 2))
    ranks = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
    assert all(worker.declared_keys == (key,) for worker in (plan.master, *ranks))
    (rollout,) = [worker for worker in plan.workers if isinstance(worker, RolloutWorkerSpec)]
    assert rollout.experts == RoutedExpertsSpec(num_layers=3, expert_layers=(0, 2), num_experts=4, top_k=2)
    servers = [worker for worker in plan.workers if isinstance(worker, GenerationServerSpec)]
    assert servers and all(server.records_experts for server in servers)
    assert [(worker.behaviour.routes_anew, worker.behaviour.keeps_experts) for worker in ranks] == [(False, True)]


def test_the_last_of_the_planned_servers_serve_the_judge(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "judge")
    (folder / "judge" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    reward = "{function: 'corral.workers.rewards:Judge', settings: {url: trial, prompt: '{answer}'}}"
    plan = _plan(
        folder / "ppo.yaml",
        "allocation=hf:d3+fsdp:d1",
        "groups.generation_server.elastic={count: 1}",
        f"rollout.judge={{path: {folder / 'judge'}, servers: 2}}",
        f"rollout.reward={{good: {reward}}}",
    )
    servers = [worker for worker in plan.workers if isinstance(worker, GenerationServerSpec)]
    assert [server.is_judge for server in servers] == [False, True, True, False]
    assert [server.initial_weights.name for server in servers] == ["model", "judge", "judge", "model"]


def test_samples_say_of_episodes_where_an_agent_may_make_several_sequences(folder: Path) -> None:
    keys = {"episodes", "turn_rewards"}
    more = ("ppo.advantage=gae", f"critic.path={folder / 'model'}", "ppo.n_minibatches=2")
    single = _plan(folder / "ppo.yaml", *more)
    assert not any(keys & set(call.input_keys) for call in single.master.calls)
    by_agent = _plan(folder / "ppo.yaml", *more, "rollout.agent=json:loads")
    readers = {call.name for call in by_agent.master.calls if keys <= set(call.input_keys)}
    assert readers == {"actor_train", "critic_train"}
    assert not any(keys & set(c.input_keys) for c in by_agent.master.calls if c.name not in readers)


def test_a_mean_over_episodes_knows_before_the_step_which_tokens_the_cap_drops(folder: Path) -> None:
    by_agent, mean = "rollout.agent=json:loads", "ppo.loss_reduction=answer_mean"
    assert _levels(_plan(folder / "ppo.yaml", mean)) == (("actor_train",),)
    assert _names(_plan(folder / "ppo.yaml", by_agent)) == ["actor_train"]
    assert _names(_plan(folder / "ppo.yaml", by_agent, mean)) == ["actor_inf", "actor_train"]
    assert _names(_plan(folder / "ppo.yaml", by_agent, mean, "ppo.is_ratio_mode=token_truncate")) == ["actor_train"]


def _names(plan: RunPlan) -> list[str]:
    return [call.name for call in plan.master.calls]


def test_a_mixture_whose_routers_cannot_be_told_is_warned_of(folder: Path) -> None:
    config = json.loads((folder / "model" / "config.json").read_text())
    other = MIXTURE | {"model_type": "olmoe"}
    (folder / "model" / "config.json").write_text(json.dumps(config | other))
    by_sglang = ("allocation=sglang:d1+fsdp:d1", "groups.generation_server.scheduling.gpu=0")
    experiment = load_with_source(folder / "ppo.yaml", by_sglang, is_to_run=False).experiment
    assert isinstance(experiment, PolicyExperiment) and experiment.routed_experts is None and experiment.routes_anew
    warnings = list(experiment.find_warnings())
    assert any("in models of type olmoe" in warning for warning in warnings)


def test_equal_experiments_have_equal_digests_and_others_not(folder: Path) -> None:
    assert _plan(folder / "ppo.yaml").digest == _plan(folder / "ppo.yaml").digest
    assert _plan(folder / "ppo.yaml").digest != _plan(folder / "ppo.yaml", "seed=4").digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seed": 3', b'"seed": 4'),
        (b"ab" * 16, b"cd" * 16),
        (b'"group_size": 4', b'"group_size": 8'),
        (b'"digest": "', b'"digest": "0'),
    ],
)
def test_edited_plan_is_refused(folder: Path, old: bytes, new: bytes) -> None:
    text = _plan(folder / "ppo.yaml").to_json()
    assert old in text
    with pytest.raises(ValueError, match="changed after submission"):
        RunPlan.from_json(text.replace(old, new, 1))


def test_a_plan_of_another_version_is_refused_with_a_way_out(folder: Path) -> None:
    plan = _plan(folder / "sft.yaml")
    text = plan.model_copy(update={"schema_version": 1}).to_json()
    with pytest.raises(ValueError, match=f"plans of form 1, this one reads form {SCHEMA_VERSION}.*submit a new trial"):
        RunPlan.from_json(text)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b'{"digest": "x"'])
def test_what_is_no_plan_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        RunPlan.from_json(text)


def test_async_ppo_plans_all_five_kinds_of_workers(folder: Path) -> None:
    overrides = [
        "allocation=hf:d2+fsdp:d3",
        "groups.generation_server.scheduling.gpu=1",
        "groups.rollout_worker.count=4",
    ]
    plan = _plan(folder / "ppo.yaml", *overrides)
    counts = {kind: group.count for kind, group in plan.scheduling.items()}
    assert counts == {
        "master_worker": 1,
        "model_worker": 3,
        "generation_server": 2,
        "gserver_manager": 1,
        "rollout_worker": 4,
    }
    assert {kind: sum(worker.kind == kind for worker in plan.workers) for kind in counts} == counts
    rank = plan.worker("model_worker", 2)
    assert isinstance(rank, ModelWorkerSpec) and (rank.world_size, rank.dataset) == (3, None)
    rollout = plan.worker("rollout_worker", 3)
    assert isinstance(rollout, RolloutWorkerSpec)
    assert (rollout.num_rollout_workers, rollout.group_size, rollout.dataset.num_rows) == (4, 4, NUM_TRAINING_ROWS)
    with pytest.raises(ValueError, match="no worker model_worker/3"):
        plan.worker("model_worker", 3)


def test_rollout_workers_follow_the_training_ranks(folder: Path) -> None:
    assert _plan(folder / "ppo.yaml", "allocation=hf:d1+fsdp:d5").scheduling["rollout_worker"].count == 5


def test_sft_plans_the_master_and_the_ranks_only(folder: Path) -> None:
    plan = _plan(folder / "sft.yaml", "allocation=fsdp:d2")
    assert sorted({worker.kind for worker in plan.workers}) == ["master_worker", "model_worker"]
    assert plan.master.source == "dataset"
    rank = plan.worker("model_worker", 1)
    assert isinstance(rank, ModelWorkerSpec) and rank.dataset is not None
    assert rank.calls[0].implementation == "sft" and rank.roles[0].optimizer is not None
    assert rank.roles[0].optimizer.lr == 1e-3


def test_dataset_digest_is_that_of_the_file(folder: Path) -> None:
    plan = _plan(folder / "sft.yaml")
    rank = plan.worker("model_worker", 0)
    assert isinstance(rank, ModelWorkerSpec) and rank.dataset is not None
    assert rank.dataset.sha256 == hashlib.sha256((folder / "train.jsonl").read_bytes()).hexdigest()


def test_dataset_that_vanished_after_loading_is_a_config_error(folder: Path) -> None:
    experiment = load_experiment(folder / "sft.yaml")
    (folder / "train.jsonl").unlink()
    identity = TrialIdentity(experiment="e", trial="t", uuid="0" * 32, directory=folder)
    with pytest.raises(ConfigError, match="cannot read dataset"):
        make_run_plan(experiment, identity, "local")


def _levels(plan: RunPlan) -> tuple[tuple[str, ...], ...]:
    keys = ("input_ids", "prompt_mask", "old_logprobs", "versions", "rewards", "seq_no_eos_mask")
    return levels_of(build_dataflow(plan.master.calls, keys))


def test_calls_follow_from_the_decoupled_loss_and_the_reference_model(folder: Path) -> None:
    ref = [f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1"]
    coupled = "ppo.use_decoupled_loss=false"
    twice = "ppo.sample_reuse=2"
    assert _levels(_plan(folder / "ppo.yaml", twice)) == (("actor_inf",), ("actor_train",))
    assert _levels(_plan(folder / "ppo.yaml", coupled, twice)) == (("actor_train",),)
    assert _levels(_plan(folder / "ppo.yaml", *ref, twice)) == (("actor_inf", "ref_inf"), ("actor_train",))
    assert _levels(_plan(folder / "ppo.yaml", *ref, coupled)) == (("ref_inf",), ("actor_train",))


def test_one_update_a_step_needs_no_call_for_the_proximal_policy_unless_a_pass_of_its_own_says_other_things(
    folder: Path,
) -> None:
    dropout = ["actor.lora.rank=4", "actor.lora.alpha=8", "actor.lora.dropout=0.1"]
    assert _levels(_plan(folder / "ppo.yaml")) == (("actor_train",),)
    assert _levels(_plan(folder / "ppo.yaml", "ppo.n_minibatches=2")) == (("actor_inf",), ("actor_train",))
    assert _levels(_plan(folder / "ppo.yaml", *dropout)) == (("actor_inf",), ("actor_train",))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    assert _levels(_plan(folder / "ppo.yaml")) == (("actor_inf",), ("actor_train",))


def test_each_model_says_whether_its_micro_batches_share_prompts(folder: Path) -> None:
    ref = [f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1"]
    plan = _plan(folder / "ppo.yaml", *ref, "actor.shared_prompts=auto", "ppo.n_minibatches=2")
    shares = {call.name: call.micro_batches.shares_prompts for call in plan.master.calls}
    assert [shares[name] for name in ("actor_inf", "actor_train", "ref_inf")] == [True, True, False]


def test_temperatures_of_rows_go_with_their_answers_to_whoever_computes_log_probabilities(folder: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "warmth": 0.5 + n % 2}) + "\n" for n in range(40)]
    (folder / "warm.jsonl").write_text("".join(rows))
    more = [f"{role}.path={folder / 'model'}" for role in ("ref", "teacher", "critic")]
    more += ["ppo.kl.coef=0.1", "ppo.distillation.coef=0.1", "ppo.advantage=gae", "ppo.sample_reuse=2"]
    own = ("dataset.columns.temperature=warmth", f"dataset.path={folder / 'warm.jsonl'}")

    def readers(plan: RunPlan) -> set[str]:
        return {call.name for call in plan.master.calls if "temperatures" in call.input_keys}

    plan = _plan(folder / "ppo.yaml", *more, *own)
    assert readers(plan) == {"actor_inf", "ref_inf", "teacher_inf", "actor_train"}  # and not the critic
    rank = plan.worker("model_worker", 0)
    assert isinstance(rank, ModelWorkerSpec) and rank.behaviour.has_row_temperatures
    assert not readers(_plan(folder / "ppo.yaml", *more))


def test_train_step_reads_what_the_inferences_make(folder: Path) -> None:
    plan = _plan(folder / "ppo.yaml", f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1", "ppo.sample_reuse=2")
    calls = {call.name: call for call in plan.master.calls}
    assert calls["actor_inf"].output_key_remap == {"logprobs": "proximal_logprobs"}
    assert calls["ref_inf"].output_key_remap == {"logprobs": "ref_logprobs"}
    assert {"proximal_logprobs", "ref_logprobs", "rewards", "versions"} <= set(calls["actor_train"].input_keys)
    rank = plan.worker("model_worker", 0)
    assert isinstance(rank, ModelWorkerSpec)
    assert [(role.role, role.optimizer is None) for role in rank.roles] == [("actor", False), ("ref", True)]


def test_a_critic_that_is_charged_a_divergence_knows_which_tokens_were_generated(folder: Path) -> None:
    more = ("ppo.algorithm=ppo", f"critic.path={folder / 'model'}", f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1")
    for place in ("reward", "loss"):
        plan = _plan(folder / "ppo.yaml", *more, f"ppo.kl.place={place}")
        [keys] = [set(call.input_keys) for call in plan.master.calls if call.name == "critic_train"]
        assert ({"old_logprobs", "ref_logprobs", "versions"} <= keys) is (place == "reward")


def test_a_teacher_says_how_likely_the_tokens_are_and_no_row_needs_an_answer_then(folder: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(40)]
    (folder / "unanswered.jsonl").write_text("".join(rows))
    plan = _plan(
        folder / "ppo.yaml",
        f"teacher.path={folder / 'model'}",
        "ppo.algorithm=distillation",
        "ppo.group_size=1",
        f"dataset.path={folder / 'unanswered.jsonl'}",
        f"evaluation.dataset.path={folder / 'unanswered.jsonl'}",
        "rollout.reward=corral.workers.rewards:no_reward",
        "allocation=hf:d1+actor=fsdp:d1,teacher=fsdp:d2",
    )
    assert _levels(plan) == (("teacher_inf",), ("actor_train",))
    call, train = plan.master.calls
    assert (call.model_name.role, call.output_key_remap) == ("teacher", {})
    assert "teacher_logprobs" in train.input_keys
    assert plan.master.meshes["teacher/0"].ranks == (1, 2)


def test_a_teacher_may_name_its_likeliest_tokens(folder: Path) -> None:
    taught = [f"teacher.path={folder / 'model'}", "ppo.algorithm=distillation"]
    plan = _plan(folder / "ppo.yaml", *taught, "ppo.distillation.top_k=5")
    keys = teacher_keys(5)
    assert plan.master.declared_keys == keys
    assert {key.name for key in keys} == set(plan.master.calls[0].output_keys) < set(plan.master.calls[1].input_keys)
    with pytest.raises(ConfigError, match="top_k 15 is more than the vocabulary of 14"):
        _plan(folder / "ppo.yaml", *taught, "ppo.distillation.top_k=15")
    with pytest.raises(ConfigError, match="set actor.shared_prompts: off"):
        _plan(folder / "ppo.yaml", *taught, "ppo.distillation.top_k=5", "actor.shared_prompts=auto")
    shutil.copytree(folder / "model", folder / "wide")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "wide" / "config.json").write_text(json.dumps(config | {"vocab_size": 16}))
    wide = ["ppo.algorithm=distillation", f"teacher.path={folder / 'wide'}"]
    _plan(folder / "ppo.yaml", *wide)
    with pytest.raises(ConfigError, match="a vocabulary of 16, the actor one of 14: it may tell of tokens"):
        _plan(folder / "ppo.yaml", *wide, "ppo.distillation.top_k=5")


def test_each_source_of_rows_may_have_a_teacher_of_its_own(folder: Path) -> None:
    text = (folder / "ppo.yaml").read_text()
    of_length = "path: train.jsonl, where: len(prompt)"  # which of them is its teacher follows from a field
    data = f"dataset:\n  sources: {{sums: {{{of_length} <= 4}}, others: {{{of_length} > 4}}}}\n"
    teachers = "teachers: {sums: {path: model}, others: {path: model}}\n"
    (folder / "taught.yaml").write_text(teachers + text.replace("dataset:\n  path: train.jsonl\n", data))
    plan = _plan(folder / "taught.yaml", "ppo.algorithm=distillation", "allocation=hf:d1+teacher_sums=d2,*=d1")
    assert _levels(plan) == (("teacher_sums_inf", "teacher_others_inf"), ("actor_train",))
    assert {"teacher_logprobs_sums", "teacher_logprobs_others"} <= set(plan.master.calls[-1].input_keys)
    assert {key.name for key in plan.master.declared_keys} == {"teacher_logprobs_sums", "teacher_logprobs_others"}
    ranks = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
    assert {role.role: (worker.index, role.taught_sources) for worker in ranks for role in worker.roles} == {
        "teacher_sums": (1, ("sums",)),
        "actor": (2, ("sums", "others")),
        "teacher_others": (2, ("others",)),
    }


def test_teachers_may_read_prompts_of_their_own_which_nobody_else_gets(folder: Path) -> None:
    told = [f"teacher.path={folder / 'model'}", "ppo.algorithm=distillation", "dataset.columns.teacher_prompt=answer"]
    plan, key = _plan(folder / "ppo.yaml", *told), teacher_prompt_key(16)
    asked, train = plan.master.calls
    assert key.name in asked.input_keys and key.name not in train.input_keys and key in plan.master.declared_keys
    (worker,) = plan.all_of(RolloutWorkerSpec)
    assert worker.teacher_prompt_tokens == 16 == plan.all_of(GserverManagerSpec)[0].dataset.config.max_prompt_tokens
    assert key not in _plan(folder / "ppo.yaml", *told[:2]).master.declared_keys
    console = Console(record=True, file=(folder / "shown").open("w"))
    print_prompts(plan, console)
    assert "what teachers read: 1 tokens" in console.export_text()
    (warning,) = load_experiment(folder / "ppo.yaml", told[2:]).find_warnings()
    assert warning == "dataset.columns.teacher_prompt has no effect: there is no teacher to read it"


def test_prompts_of_an_agent_are_shown_with_what_is_left_out(folder: Path) -> None:
    def said(*overrides: str) -> str:
        text = io.StringIO()
        print_prompts(_plan(folder / "ppo.yaml", *overrides), Console(file=text, width=300))
        return text.getvalue()

    settings = "rollout.agent_settings={tools: ['lookup:meaning'], call: '(?P<word>x)'}"
    words = "agent corral.agents:tools may add its tools (lookup:meaning) to these prompts, and they are not shown here"
    assert words in said("rollout.agent=corral.agents:tools", settings)
    assert "may add tools or a system message" in said("rollout.agent=corral.agents:feedback")
    assert "may add" not in said()


def test_a_teacher_may_be_outside_of_the_trial_for_all_rows_or_some(folder: Path) -> None:
    text = (folder / "ppo.yaml").read_text()
    served, told = "{url: 'https://t/v1', model: m}", ["ppo.algorithm=distillation"]
    experiment = load_experiment(folder / "ppo.yaml", [f"rollout.teacher={served}", *told])
    assert "nobody has compared the tokens of the teacher at https://t/v1" in "\n".join(experiment.find_warnings())
    plan = _plan(folder / "ppo.yaml", f"rollout.teacher={served}", *told, "dataset.columns.teacher_prompt=answer")
    (train,) = plan.master.calls
    assert train.name == "actor_train" and "teacher_logprobs" in train.input_keys
    assert plan.all_of(RolloutWorkerSpec)[0].teacher_prompt_tokens == 0, "samples need not carry what it reads"
    rows = "path: train.jsonl, where: len(prompt)"
    data = f"dataset:\n  sources: {{sums: {{{rows} <= 4}}, others: {{{rows} > 4}}}}\n"
    (folder / "taught.yaml").write_text(
        "teachers: {sums: {path: model}}\n" + text.replace("dataset:\n  path: train.jsonl\n", data)
    )
    own = f"rollout.teachers={{others: {served[:-1]}, path: {folder / 'model'}, key: ~/key}}}}"
    plan = _plan(folder / "taught.yaml", own, *told)
    asked, train = plan.master.calls
    assert asked.name == "teacher_sums_inf"
    assert {"teacher_logprobs_sums", "teacher_logprobs_others"} <= set(train.input_keys)
    assert {"teacher_logprobs_sums", "teacher_logprobs_others"} == {key.name for key in plan.master.declared_keys}
    (worker,) = plan.all_of(RolloutWorkerSpec)
    assert worker.rollout.teachers["others"].key == "~/key"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["teachers={sums: {path: model}}"], "teachers are named sums, and dataset.sources nothing"),
        (["teachers={a-b: {path: model}}"], "'a-b' cannot be part of a role's name"),
        (
            ["teachers={sums: {path: model}}", "teacher={path: model}"],
            "teachers.sums say who is learned from on the same rows",
        ),
        (["teachers={sums: {path: nowhere}}"], "nowhere does not exist"),
        (["rollout.teachers={a-b: {url: 'http://t/v1', model: m}}"], "'a-b' cannot be part of a role's name"),
        (["rollout.teacher={url: 'http://t/v1', model: m, path: model}", "teacher={path: model}"], "on the same rows"),
        (["rollout.teacher={url: 'http://t/v1', model: m}", "ppo.distillation.top_k=5"], "cannot name others by their"),
        (["rollout.teacher={url: 'http://t/v1', model: m}", "rollout.sampling.temperature=0.7"], "are sampled at 0.7"),
        (["rollout.teacher={url: 'http://t/v1', model: m}", "experiment=ppo"], "unknown key 'teacher' in rollout"),
        (["teacher={path: model}", "dataset.columns.teacher_prompt=promt"], "a prompt for teachers in a field 'promt'"),
        (
            ["teacher={path: model}", "dataset.columns.teacher_prompt=prompt", "rollout.agent=corral.agents:other"],
            "without rollout.agent and rollout.environment",
        ),
    ],
)
def test_teachers_of_no_source_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], words: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=words):
        load_experiment(folder / "ppo.yaml", [*settings, "ppo.algorithm=distillation"])


def test_each_rank_holds_the_roles_of_its_share(folder: Path) -> None:
    plan = _plan(
        folder / "ppo.yaml", f"ref.path={folder / 'model'}", "ppo.kl.coef=0.1", "allocation=hf:d1+actor=d2,ref=d2@1"
    )
    roles = {
        worker.index: [role.role for role in worker.roles]
        for worker in plan.workers
        if isinstance(worker, ModelWorkerSpec)
    }
    assert roles == {0: ["actor"], 1: ["actor", "ref"], 2: ["ref"]}
    assert {name: mesh.ranks for name, mesh in plan.master.meshes.items()} == {"actor/0": (0, 1), "ref/0": (1, 2)}
    assert (plan.master.num_model_workers, plan.master.sample_ranks) == (3, [0, 1])
    assert [worker.takes_samples for worker in plan.workers if isinstance(worker, ModelWorkerSpec)] == [
        True,
        True,
        False,
    ]


@given(
    rows=st.integers(1, 500), epochs=st.integers(1, 5), batch=st.integers(1, 100), most=st.none() | st.integers(1, 50)
)
def test_total_steps_cover_every_row_once_per_epoch(rows: int, epochs: int, batch: int, most: int | None) -> None:
    steps = TrainControl(total_train_epochs=epochs, max_steps=most).total_steps(num_rows=rows, batch_size=batch)
    left, counted = rows * epochs, 0
    while left > 0 and (most is None or counted < most):
        left -= batch
        counted += 1
    assert steps == counted


def test_total_steps_of_the_plan_reach_the_learning_rate_schedule(folder: Path) -> None:
    plan = _plan(folder / "ppo.yaml", "train_batch_size=7")
    rank = plan.worker("model_worker", 0)
    assert isinstance(rank, ModelWorkerSpec)
    assert plan.total_steps == rank.total_steps == 12  # 40 rows x 2 epochs / 7, rounded up
    assert isinstance(plan.master, MasterWorkerSpec)


def test_plan_keeps_the_resolved_configuration_for_people(folder: Path) -> None:
    config = json.loads(_plan(folder / "ppo.yaml").to_json())["config"]
    assert config["actor"]["optimizer"]["betas"] == [0.9, 0.95]
    assert config["launch"]["time_limit"] == "1:00:00"


def test_products_in_float32_are_warned_of_on_gpus_with_what_to_set(folder: Path) -> None:
    def warnings(gpus: int, dtype: str) -> list[str]:
        overrides = (f"groups.model_worker.scheduling.gpu={gpus}", f"actor.dtype={dtype}")
        return [text for text in load_experiment(folder / "ppo.yaml", overrides).find_warnings() if "float32" in text]

    (warning,) = warnings(1, "float32")
    assert "(actor.dtype)" in warning and "15 times" in warning and "set dtype: bfloat16" in warning
    assert warnings(0, "float32") == warnings(1, "bfloat16") == []
