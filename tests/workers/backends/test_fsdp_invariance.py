"""Loss and gradient do not depend on how a batch is cut: into micro-batches, or over two real ranks under FSDP2.

One pair of processes plays all of the two-rank scenes (each process pays for torch and transformers once) and writes
what it saw; the tests compare that with one rank in this process.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from corral.experiments.config.algorithm import KLConfig, PPOConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.base import compute_logprobs
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.micro_batches import plan_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.sharding import local, reshard
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    make_sample,
    read_weights,
    save_tiny_model,
    tiny_engine,
)
from tests.workers.shared_prompts.scene import LAYOUTS as SHARING_LAYOUTS
from tests.workers.shared_prompts.scene import NUM_STEPS_OF_LAYOUTS, train_actor, train_in_layouts
from tests.workers.shared_prompts.scene import make_engine as make_shared_engine
from tests.workers.some_samples import some_of

NUM_STEPS = 3
LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12], [40, 8, 21, 6]]
UIDS_BY_RANK = (["0:0", "0:1", "0:3"], ["0:2"])  # uneven on purpose: rank 1 has the least to do
PPO = PPOConfig(
    eps_clip=0.05,
    c_clip=2.0,
    is_ratio_clip=1.2,
    kl=KLConfig(coef=0.1),
    mask_no_eos_with_zero=True,
    advantage_normalization="batch",
    loss_reduction="answer_mean",
)


def batch(step: int) -> SequenceSample:
    return make_sample(LENGTHS, seed=step, version=step)


def train(engine: FSDPEngine, uids: list[str], directory: Path) -> dict[str, Any]:
    """NUM_STEPS steps; the state after the first (its first moment is a tenth of the gradient) and after the last."""
    actor = PPOActorInterface(PPO)
    first_logprobs = compute_logprobs(engine, some_of(batch(0), uids))
    stats = []
    for step in range(NUM_STEPS):
        stats.append(actor.train_step(engine, some_of(batch(step), uids), version=step))
        if step == 0:
            engine.state_shard().write(directory / "first")
    engine.state_shard().write(directory / "last")
    engine.save_weights(directory / "weights")
    told = [msgspec.to_builtins(notice) for notice in actor.take_notices()]
    return {"stats": stats, "logprobs": first_logprobs.tolist(), "told": told}


def offload_and_count(engine: FSDPEngine) -> int:
    """Bytes of parameters that are left in an offloaded engine."""
    reshard(engine.model)
    parameters = list(engine.model.parameters())
    assert all(local(parameter).numpy().size for parameter in parameters)  # numpy holds the memory, too
    engine.offload()
    return sum(local(parameter).untyped_storage().nbytes() for parameter in parameters)


def play_rank(context: ParallelContext, model_directory: Path, directory: Path) -> None:
    """Everything that one of two ranks does."""
    rank = context.rank
    engine = tiny_engine(model_directory, context, max_tokens=48)
    seen: dict[str, Any] = train(engine, UIDS_BY_RANK[rank], directory / "trained")

    # Gradients are added up over the ranks after each micro-batch, and once for all of them.
    seen["sums"] = []
    for gradient_sums in ("each_micro_batch", "last_micro_batch"):
        summing = tiny_engine(model_directory, context, max_tokens=48, gradient_sums=gradient_sums)
        with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as sums:
            PPOActorInterface(PPO).train_step(summing, some_of(batch(0), UIDS_BY_RANK[rank]), version=0)
        seen["sums"].append(sums.call_count)
    summing.state_shard().write(directory / "summed once" / "first")

    # The state of two ranks, loaded by two ranks that keep it in host memory.
    resumed = tiny_engine(model_directory, context, max_tokens=48, hosts_optimizer=True)
    resumed.load_state(directory / "trained" / "first")
    actor = PPOActorInterface(PPO)
    for step in range(1, NUM_STEPS):
        actor.train_step(resumed, some_of(batch(step), UIDS_BY_RANK[rank]), version=step)
    resumed.save_weights(directory / "resumed")

    # The state of one rank, loaded by two.
    resumed.load_state(directory / "single" / "last")
    resumed.save_weights(directory / "from_single")

    # One rank has nothing at all.
    everything = [uid for uids in UIDS_BY_RANK for uid in uids]
    lonely = tiny_engine(model_directory, context, max_tokens=48)
    seen["lonely"] = actor.train_step(lonely, some_of(batch(0), everything if rank == 0 else []), version=0)

    # More mini-batches than rank 1 has answers.
    seen["mini_batches"] = PPOActorInterface(PPO.model_copy(update={"n_minibatches": 4})).train_step(
        lonely, some_of(batch(0), UIDS_BY_RANK[rank]), version=0
    )
    seen["mini_batch_steps"] = lonely.step

    # One rank's numbers are not finite, after all memory of the model was given back.
    seen["bytes"] = offload_and_count(resumed)
    poisoned = some_of(batch(0), UIDS_BY_RANK[rank])
    if rank == 1:
        poisoned.data["ref_logprobs"] = np.full_like(np.asarray(poisoned.data["ref_logprobs"]), np.nan)
    seen["poisoned"] = actor.train_step(resumed, poisoned, version=0)
    resumed.save_weights(directory / "after_poison")

    # A forward pass leaves the outermost module whole, and then weights are moved and saved.
    compute_logprobs(resumed, some_of(batch(0), UIDS_BY_RANK[rank]))
    resumed.state_shard().write(directory / "after_forward")
    lonely.save_weights(directory / "before_blend")
    compute_logprobs(lonely, some_of(batch(0), UIDS_BY_RANK[rank]))
    seen["bytes"] += offload_and_count(lonely) + offload_and_count(resumed)
    lonely.import_weights(resumed.export_weights(), eta=0.25)
    lonely.save_weights(directory / "after_blend")

    # Answers of a prompt that is computed once for them.
    seen["shared prompts"] = train_in_layouts(context, model_directory, directory / "shared prompts")
    (directory / f"rank-{rank}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank's results here, two ranks' results from two processes."""
    directory = tmp_path_factory.mktemp("invariance")
    model_directory = save_tiny_model(directory / "model")
    everything = [uid for uids in UIDS_BY_RANK for uid in uids]
    single = train(tiny_engine(model_directory, ParallelContext(), max_tokens=1000), everything, directory / "single")
    small = train(tiny_engine(model_directory, ParallelContext(), max_tokens=40), everything, directory / "small")

    play(play_rank, model_directory, directory, world_size=2, directory=directory)
    pair = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {"directory": directory, "single": single, "small": small, "pair": pair}


def gradient(directory: Path) -> dict[str, npt.NDArray[np.floating[Any]]]:
    """The first step's gradient, from exp_avg = (1 - beta1) * gradient."""
    state = whole_state(directory / "first")
    return {name: tensor.numpy() * 10.0 for name, tensor in state.items() if name.startswith("exp_avg.")}


def assert_close_weights(left: Path, right: Path, *, atol: float) -> None:
    a, b = read_weights(left), read_weights(right)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=atol, err_msg=name)


@pytest.mark.parametrize("other", ["small", "trained", "summed once"])
def test_the_gradient_does_not_depend_on_micro_batches_or_ranks(other: str, scene: dict[str, Any]) -> None:
    expected, actual = gradient(scene["directory"] / "single"), gradient(scene["directory"] / other)
    assert expected.keys() == actual.keys()
    assert max(float(np.abs(g).max()) for g in expected.values()) > 1e-2  # there is something to compare
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5, err_msg=name)


def test_gradients_are_added_up_after_each_micro_batch_or_once(scene: dict[str, Any]) -> None:
    spec = MicroBatchSpec(max_tokens_per_micro_batch=48)
    num_micro_batches = max(len(plan_micro_batches(some_of(batch(0), uids), spec)) for uids in UIDS_BY_RANK)
    num_sums = 4  # two layers, the output, and what is around them
    for seen in scene["pair"]:
        assert seen["sums"] == [num_micro_batches * num_sums, num_sums]


def of_whole_batch(stats: dict[str, float]) -> dict[str, float]:
    """Without what is measured on some answers of each rank."""
    return {
        name: value for name, value in stats.items() if name not in ("drift/moved", "drift/allowed", "gap/of_allowed")
    }


@pytest.mark.parametrize("other", ["small", "rank 0", "rank 1"])
def test_the_statistics_do_not_depend_on_micro_batches_or_ranks(other: str, scene: dict[str, Any]) -> None:
    actual = scene["small"] if other == "small" else scene["pair"][int(other[-1])]
    for step, (expected_stats, stats) in enumerate(zip(scene["single"]["stats"], actual["stats"], strict=True)):
        assert expected_stats.keys() == stats.keys()
        for name, value in of_whole_batch(expected_stats).items():
            assert stats[name] == pytest.approx(value, abs=1e-5 if step == 0 else 1e-4), (step, name)
    assert scene["single"]["stats"][0]["ppo/capped_fraction"] > 0.0


def test_several_steps_end_at_the_same_weights(scene: dict[str, Any]) -> None:
    directory = scene["directory"]
    assert_close_weights(directory / "single" / "weights", directory / "small" / "weights", atol=1e-4)
    assert_close_weights(directory / "single" / "weights", directory / "trained" / "weights", atol=1e-4)


def test_every_rank_gets_the_logprobs_of_its_own_answers(scene: dict[str, Any]) -> None:
    together = scene["pair"][0]["logprobs"] + scene["pair"][1]["logprobs"]
    np.testing.assert_allclose(together, scene["single"]["logprobs"], atol=1e-5)


def test_both_ranks_report_the_same_numbers(scene: dict[str, Any]) -> None:
    assert scene["pair"][0]["stats"] == scene["pair"][1]["stats"]


def test_both_ranks_find_out_what_one_does_wherever_the_answer_is_that_shows_it(scene: dict[str, Any]) -> None:
    (notice,) = scene["single"]["told"]  # these samples were recorded by nobody
    assert notice["is_alarm"] and "the largest at token" in notice["details"]
    assert scene["pair"][0]["told"] == scene["pair"][1]["told"] == [notice]


def test_two_ranks_resume_bit_for_bit(scene: dict[str, Any]) -> None:
    assert_close_weights(scene["directory"] / "trained" / "weights", scene["directory"] / "resumed", atol=0.0)


def test_a_state_moves_to_another_number_of_ranks_unchanged(scene: dict[str, Any]) -> None:
    directory = scene["directory"]
    assert_close_weights(directory / "single" / "weights", directory / "from_single", atol=0.0)
    merged = tiny_engine(directory / "model", ParallelContext(), max_tokens=1000)
    merged.load_state(directory / "trained" / "last")
    assert merged.step == NUM_STEPS
    merged.save_weights(directory / "merged")
    assert_close_weights(directory / "trained" / "weights", directory / "merged", atol=0.0)


def test_a_rank_without_samples_keeps_in_step(scene: dict[str, Any]) -> None:
    for seen in scene["pair"]:
        assert seen["lonely"]["ppo/loss"] == pytest.approx(scene["single"]["stats"][0]["ppo/loss"], abs=1e-5)
        assert seen["lonely"]["ppo/num_answers"] == sum(map(len, LENGTHS))


def test_every_mini_batch_is_one_step_even_where_a_rank_has_too_few_answers(scene: dict[str, Any]) -> None:
    for seen in scene["pair"]:
        assert seen["mini_batch_steps"] == 1 + 4
        assert seen["mini_batches"]["train/tokens"] == scene["single"]["stats"][0]["train/tokens"]


def test_one_ranks_bad_numbers_stop_the_step_on_both(scene: dict[str, Any]) -> None:
    for seen in scene["pair"]:
        assert seen["poisoned"]["train/skipped_nonfinite"] == 1.0
    assert_close_weights(scene["directory"] / "from_single", scene["directory"] / "after_poison", atol=0.0)


def test_a_state_saved_after_a_forward_pass_is_as_good_as_before_it(scene: dict[str, Any]) -> None:
    directory = scene["directory"]
    engine = tiny_engine(directory / "model", ParallelContext(), max_tokens=1000)
    engine.load_state(directory / "after_forward")
    engine.save_weights(directory / "restored")
    assert_close_weights(directory / "after_poison", directory / "restored", atol=0.0)


def test_an_offloaded_model_has_no_memory_on_any_rank(scene: dict[str, Any]) -> None:
    # That it comes back as it was is what the weights after it say, in the tests around this one.
    assert [seen["bytes"] for seen in scene["pair"]] == [0, 0]


def test_weights_blend_over_two_ranks_as_on_one(scene: dict[str, Any]) -> None:
    directory = scene["directory"]
    own, given = read_weights(directory / "before_blend"), read_weights(directory / "after_poison")
    blended = read_weights(directory / "after_blend")
    assert not torch.equal(own["lm_head.weight"], given["lm_head.weight"])
    assert blended.keys() == own.keys()
    for name, tensor in blended.items():
        np.testing.assert_allclose(tensor, 0.25 * given[name] + 0.75 * own[name], atol=1e-7, err_msg=name)


def test_ranks_compute_a_prompt_once_for_its_answers_unless_they_share_rows(scene: dict[str, Any]) -> None:
    alone = make_shared_engine(scene["directory"] / "model", shares_prompts=False)
    expected = train_actor(alone, num_steps=NUM_STEPS_OF_LAYOUTS)
    alone.save_weights(scene["directory"] / "each prompt")
    for seen in scene["pair"]:
        assert {layout: of_it["shares"] for layout, of_it in seen["shared prompts"].items()} == SHARING_LAYOUTS
        for of_it in seen["shared prompts"].values():
            for stats, wanted in zip(of_it["stats"], expected, strict=True):
                assert of_whole_batch(stats) == pytest.approx(of_whole_batch(wanted), rel=1e-5, abs=1e-5)
    for layout in SHARING_LAYOUTS:
        assert_close_weights(
            scene["directory"] / "each prompt", scene["directory"] / "shared prompts" / layout, atol=1e-5
        )
