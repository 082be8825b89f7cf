"""`rl-submit --dry-run --shape`: what each GPU would hold on a cluster that is not there, and what cannot fit."""

import re
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.errors import ConfigError, UnsatisfiableError
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan
from corral.experiments.registry import load_experiment, load_with_source
from corral.launcher.submit import preflight
from corral.launcher.submit.check_memory import check_memory
from corral.launcher.submit.memory_plan import gpu_uses, render_memory
from corral.launcher.submit.preflight import ClusterShape, Preflight
from corral.launcher.terminal import fold
from corral.scheduling.parallel import ParallelDims

EXAMPLES = Path(__file__).parents[3] / "examples"
DENSE, MIXTURE = EXAMPLES / "qwen3_32b_grpo.yaml", EXAMPLES / "qwen3_30b_a3b_grpo.yaml"
SHAPE = ClusterShape.parse("4x8x80G")
WITH_REFERENCE = (f"ref.path={EXAMPLES}/models/qwen3_32b", "ref.max_tokens_per_micro_batch=8192", "ppo.kl.coef=0.1")


def plan_of(path: Path, *overrides: str) -> RunPlan:
    experiment = load_with_source(path, overrides, is_to_run=False).experiment
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid="ab" * 16, directory=path.parent / "t")
    return make_run_plan(experiment, identity, "slurm")


def with_memory(plan: RunPlan, gpu_memory_mb: int) -> RunPlan:
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"gpu_memory": gpu_memory_mb})})


def check_on_shape(plan: RunPlan, shape: ClusterShape) -> Preflight:
    return preflight.check_on_shape(shape.in_plan(plan), shape)


def problem_of(plan: RunPlan, shape: ClusterShape = SHAPE) -> Any:
    with pytest.raises(ConfigError) as refused:
        check_on_shape(plan, shape)
    assert refused.value.exit_code == 2
    [problem] = refused.value.problems
    return problem


def test_models_without_weights_are_refused_to_run_and_planned_all_the_same() -> None:
    with pytest.raises(ConfigError, match="has no .*safetensors"):
        load_experiment(DENSE)
    assert check_on_shape(plan_of(DENSE), SHAPE).layout is not None


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_fits_the_nodes_that_it_names_and_uses_each_gpu_of_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    named = re.search(r"--shape (\d+x8x80G)", path.read_text())
    assert named is not None
    shape = ClusterShape.parse(named.group(1))
    plan = plan_of(path)
    found = check_on_shape(plan, shape)
    assert found.layout is not None and found.warnings == ()
    num_gpus = shape.num_nodes * 8
    assert sum(one.num_nodes * one.gpus_per_node for one in found.layout.allocations) == num_gpus
    assert sum(use.num_gpus for use in gpu_uses(plan)) == num_gpus
    assert re.match(rf"imagined cluster of {shape.num_nodes} nodes? with 8 GPUs of 80 GiB", found.checks[0])
    assert "CPUs and host memory" in found.checks[2]


def test_parameters_are_those_of_config_json_where_there_are_no_weights() -> None:
    roles = [role for worker in plan_of(MIXTURE).workers for role in getattr(worker, "roles", [])]
    assert roles[0].num_parameters is not None and roles[0].num_parameters.trained == 30_532_122_624


@pytest.mark.parametrize("width", [80, 120, None])
def test_the_table_shows_models_of_one_gpu_below_each_other_on_any_terminal(width: int | None) -> None:
    text = fold(render_memory(gpu_uses(plan_of(DENSE, *WITH_REFERENCE)), gpu_memory_mb=80 * 1024), width)
    lines = text.splitlines()
    assert lines[0].split() == "GiB of one GPU params grads optim activ head KV buffers all".split()
    actor, ref = (
        next(line.split() for line in lines if line.startswith(f"  {role}/0 d3c8")) for role in ("actor", "ref")
    )
    assert ref[2:] == ["5.1", "5.1"] and actor[2:5] == ["5.1", "5.1", "10.2"]
    total = next(line.split() for line in lines if line.startswith("  all, in actor_train"))
    assert float(total[-1]) == pytest.approx(float(actor[-1]) + float(ref[-1]), abs=0.11)
    assert "74.0 of a GPU's 80 GiB are usable" in " ".join(lines)
    assert max(map(len, lines[:-1])) <= (width or 120) and "..." not in text and "\u2026" not in text


def test_a_refusal_names_the_role_the_largest_part_and_the_nearest_layout() -> None:
    problem = problem_of(plan_of(DENSE, "allocation=sglang:d2t4+fsdp:d24"))
    assert problem.message.startswith("actor/0 cannot fit: model_worker 0-23 (d24) need 2")
    assert problem.message.endswith("of each GPU, and 74.0 GiB of its 80.0 GiB are usable")
    assert problem.note == "the largest part: activations of actor/0, 218.6 GiB, in actor_train"
    assert problem.path == ("allocation",)
    proposed = re.match(r"allocation (sglang:d2t4\+fsdp:\w+) fits", problem.hint)
    assert proposed is not None
    check_on_shape(plan_of(DENSE, f"allocation={proposed[1]}"), SHAPE)


def test_a_rank_of_few_answers_holds_less_than_a_micro_batch_unless_an_agent_makes_them_of_any_length() -> None:
    few = ("train_batch_size=3", "ppo.group_size=2", "actor.max_tokens_per_micro_batch=65536")
    limits = ("rollout.sampling.max_new_tokens=1024", "dataset.max_prompt_tokens=1024")

    def held(*overrides: str) -> int:
        [peak] = [use.peak for use in gpu_uses(plan_of(DENSE, *few, *limits, *overrides)) if use.kind == "model_worker"]
        assert peak is not None
        return peak.total

    assert held() < held("rollout.agent=json:loads") == held("train_batch_size=60", "rollout.agent=json:loads")


ON_MEGATRON = ("allocation=sglang:d4t2+megatron:d24e8", "actor.recompute=none")


def test_a_mixture_that_does_not_fit_is_told_how_to_spread_its_experts_and_what_to_compute_again() -> None:
    problem = problem_of(plan_of(MIXTURE, *ON_MEGATRON))
    assert problem.note.startswith("the largest part: activations of actor/0")
    proposed = re.match(r"allocation (\S+) fits; or recompute (selective|full) of actor fits this layout", problem.hint)
    assert proposed is not None
    check_on_shape(plan_of(MIXTURE, f"allocation={proposed[1]}", "actor.recompute=none"), SHAPE)
    check_on_shape(plan_of(MIXTURE, ON_MEGATRON[0], f"actor.recompute={proposed[2]}"), SHAPE)
    of_all = problem_of(plan_of(MIXTURE, "allocation=sglang:d4t2+megatron:d24"))
    assert of_all.note.startswith("the largest part: gradients of actor/0")
    assert re.match(r"allocation sglang:d4t2\+megatron:d24e\d+ fits$", of_all.hint)


def test_a_layout_is_proposed_with_recompute_where_none_fits_without() -> None:
    keeps_all = ("actor.recompute=none", "actor.max_tokens_per_micro_batch=65536")
    problem = problem_of(plan_of(MIXTURE, "allocation=sglang:d4t2+megatron:d3", *keeps_all))
    proposed = re.match(r"allocation (\S+) with recompute full of actor fits", problem.hint)
    assert proposed is not None
    plan = plan_of(MIXTURE, f"allocation={proposed[1]}", *keeps_all, "actor.recompute=full")
    check_on_shape(plan, SHAPE)


def test_more_gpus_are_proposed_where_the_state_alone_is_too_large() -> None:
    few_tokens = (
        "actor.max_tokens_per_micro_batch=1024", "rollout.sampling.max_new_tokens=512", "dataset.max_prompt_tokens=64"
    )  # fmt: skip
    problem = problem_of(plan_of(DENSE, "allocation=sglang:d2t4+fsdp:d4", *few_tokens))
    assert "optimizer of actor/0, 61.0 GiB" in problem.note
    proposed = re.match(r"allocation sglang:d2t4\+fsdp:(\w+) fits", problem.hint)
    assert proposed is not None
    num_gpus = ParallelDims.parse(proposed[1]).world_size
    assert 488 / 74 < num_gpus < 24  # GiB of parameters, gradients and moments, over what is usable of a GPU
    plan = plan_of(DENSE, f"allocation=sglang:d2t4+fsdp:{proposed[1]}", *few_tokens)
    assert check_memory(with_memory(plan, SHAPE.gpu_memory_mb), is_estimate_enough=True) == []


def test_moments_in_host_memory_are_proposed_where_computing_again_is_not_enough() -> None:
    crowded = ("allocation=sglang:d4t2+fsdp:d4t2", "actor.recompute=full")
    problem = problem_of(plan_of(DENSE, *crowded), ClusterShape.parse("2x8x80G"))
    assert "or offload optimizer of actor fits this layout" in problem.hint
    plan = plan_of(DENSE, *crowded, "actor.offload=optimizer")
    assert check_on_shape(plan, ClusterShape.parse("2x8x80G")).layout is not None
    keeps_all = (crowded[0], "actor.recompute=none")
    problem = problem_of(plan_of(DENSE, *keeps_all), ClusterShape.parse("2x8x80G"))
    assert "offload optimizer with recompute full of actor fits this layout" in problem.hint


def test_fewer_tokens_are_proposed_beside_a_layout() -> None:
    tokens = ("actor.max_tokens_per_micro_batch=16384",)
    problem = problem_of(plan_of(DENSE, *tokens), ClusterShape.parse("4x8x88G"))
    found = re.fullmatch(
        r"recompute selective of actor fits this layout; or max_tokens_per_micro_batch (\d+) fits this layout",
        problem.hint,
    )
    assert found is not None
    for number, fits in ((int(found[1]), True), (int(found[1]) + 64, False)):
        plan = plan_of(DENSE, f"actor.max_tokens_per_micro_batch={number}")
        if fits:
            check_on_shape(plan, ClusterShape.parse("4x8x88G"))
        else:
            problem_of(plan, ClusterShape.parse("4x8x88G"))


def test_no_budget_is_proposed_that_holds_no_longest_answer() -> None:
    long = ("actor.max_tokens_per_micro_batch=32768", "rollout.sampling.max_new_tokens=30000")
    assert problem_of(plan_of(DENSE, *long)).hint == "recompute full of actor fits this layout"
    small = ("actor.recompute=full", "engine.max_total_tokens=40000")
    problem = problem_of(plan_of(DENSE, *long, *small), ClusterShape.parse("4x8x24G"))
    assert problem.hint.startswith("no layout that this version runs fits; GPUs of ")


def test_a_server_that_is_too_large_is_told_of_more_gpus_or_fewer_tokens() -> None:
    problem = problem_of(plan_of(DENSE, "allocation=sglang:d8+fsdp:d3c8"))
    assert problem.message.startswith("server cannot fit: generation_server 0-7 (d8) need ")
    assert problem.hint.startswith("sglang:d4t2 in the allocation fits; or engine.max_total_tokens ")
    tokens = int(re.findall(r"max_total_tokens (\d+)", problem.hint)[0])
    plan = plan_of(DENSE, "allocation=sglang:d8+fsdp:d3c8", f"engine.max_total_tokens={tokens}")
    check_on_shape(plan, SHAPE)


def test_a_judge_is_measured_by_its_own_model_and_proposed_what_both_fit() -> None:
    asks = "{function: 'corral.workers.rewards:Judge', settings: {url: trial, prompt: '{answer}'}}"
    judged = (f"rollout.reward={{good: {asks}}}", f"rollout.judge.path={EXAMPLES}/models/qwen3_32b")
    small = f"actor.path={EXAMPLES}/models/qwen3_0_6b"
    problem = problem_of(plan_of(DENSE, "allocation=sglang:d8+fsdp:d3c8", small, *judged))
    assert problem.message.startswith("judge cannot fit: generation_server 7 (d1) need ")
    assert problem.hint.startswith("sglang:d4t2 in the allocation fits")
    uses = gpu_uses(plan_of(DENSE, "allocation=sglang:d4t2+fsdp:d3c8", small, *judged))
    servers = [use for use in uses if use.kind == "generation_server"]
    assert [(list(use.dims_by_model), use.workers) for use in servers] == [(["server"], (0, 1, 2)), (["judge"], (3,))]


def test_more_gpus_than_the_cluster_has_are_refused_with_the_cluster_that_has_them() -> None:
    with pytest.raises(
        UnsatisfiableError, match="needs 32 GPUs .*24 of model_worker.*2 nodes with 8 GPUs of 80 GiB are 16"
    ):
        check_on_shape(plan_of(DENSE), ClusterShape.parse("2x8x80G"))


def test_a_real_submission_is_refused_for_what_is_certain_and_warned_of_the_rest() -> None:
    fits, estimated, certain = 80 * 1024, 40 * 1024, 20 * 1024
    plan = plan_of(DENSE)
    assert check_memory(with_memory(plan, fits)) == []
    [warning] = check_memory(with_memory(plan, estimated))
    assert warning.startswith("actor/0 cannot fit: model_worker 0-23 (d3c8) need ")
    with pytest.raises(ConfigError, match="actor/0 cannot fit"):
        check_memory(with_memory(plan, certain))


def test_workers_without_a_gpu_are_left_out_and_unknown_models_named(tmp_path: Path) -> None:
    no_gpus = [f"groups.{kind}.scheduling={{gpu: 0}}" for kind in ("model_worker", "generation_server")]
    assert gpu_uses(plan_of(DENSE, *no_gpus)) == []
    for file in (EXAMPLES / "models" / "qwen3_32b").iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace('"model_type": "qwen3"', '"model_type": "new"'))
    uses = gpu_uses(plan_of(DENSE, f"actor.path={tmp_path}"))
    assert [use.peak for use in uses] == [None, None]
    text = render_memory(uses, gpu_memory_mb=None)
    assert "not known: config.json of actor/0" in text and "not known: config.json of server" in text


def test_an_evaluation_by_generation_servers_takes_nothing_of_the_ranks_that_train(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    overrides = (f"evaluation.dataset.path={held_out}", "evaluation.sampling.max_new_tokens=32000")
    plan = plan_of(DENSE, *overrides)
    assert check_on_shape(plan, ClusterShape.parse("8x8x80G")).warnings == ()
    assert [use.peak for use in gpu_uses(plan)] == [use.peak for use in gpu_uses(plan_of(DENSE))]
