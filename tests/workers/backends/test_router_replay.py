"""A trainer that is told which experts made each token takes these, in every layout, and learns like a plain loop."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from corral.experiments.config.model import Recompute
from corral.scheduling.keys import ROUTED_EXPERTS
from corral.workers.algorithms.base import compute_logprobs, response_mask
from corral.workers.algorithms.ppo_actor import batch_stats
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.router_replay import install_router_replay, tell_routers
from tests.workers.backends.replay_scene import (
    GREEDY_PROMPTS,
    NUM_EXPERTS,
    make_engine,
    plain_logprobs,
    plain_loop,
    play_layouts,
    routed_batch,
    rows_of,
    save_tiny_mixture,
    train,
)
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import read_weights, save_tiny_model
from tests.workers.engine.tiny_models import generate_greedily
from tests.workers.some_samples import some_of


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("models") / "mixture")


@pytest.fixture(scope="module")
def plain(mixture: Path) -> tuple[Any, list[float]]:
    return plain_loop(mixture)


def responses_of(logprobs: Any) -> np.ndarray[Any, Any]:
    """Without the zeros that stand on prompt tokens."""
    values = np.asarray(logprobs)
    return values[values != 0.0]


def expected_logprobs(model: Any, sample: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return torch.cat(plain_logprobs(model, sample)).numpy()


def load_plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)


def test_log_probabilities_are_those_of_the_experts_that_samples_name(mixture: Path) -> None:
    engine, sample = make_engine(mixture, ParallelContext()), routed_batch(0)
    told = responses_of(compute_logprobs(engine, sample))
    np.testing.assert_allclose(told, expected_logprobs(load_plain(mixture), sample), atol=1e-5)
    keys = [key for key in sample.seqlens if key != ROUTED_EXPERTS]
    own = responses_of(compute_logprobs(engine, sample.select_keys(keys)))
    assert np.abs(own - told).mean() > 0.05  # whom the routers choose themselves says something else
    np.testing.assert_array_equal(responses_of(compute_logprobs(engine, sample)), told)


def assert_trained_like(plain: tuple[Any, list[float]], weights: Path, norms: list[float]) -> None:
    model, expected = plain
    assert norms == pytest.approx(expected, rel=1e-4)
    saved = read_weights(weights)
    stored = {name: p for name, p in model.named_parameters() if ".experts." not in name}
    for layer in (0, 2):
        experts = model.model.layers[layer].mlp.experts
        for number in range(experts.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{number}"
            gate, up = experts.gate_up_proj[number].chunk(2)
            stored |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
            stored[f"{prefix}.down_proj.weight"] = experts.down_proj[number]
    assert stored.keys() == saved.keys()
    for name, parameter in stored.items():
        np.testing.assert_allclose(saved[name], parameter.detach(), atol=1e-4, err_msg=name)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_takes_the_experts_that_samples_name(
    mixture: Path, plain: tuple[Any, list[float]], tmp_path: Path, recompute: Recompute
) -> None:
    engine = make_engine(mixture, ParallelContext(), recompute=recompute)
    assert_trained_like(plain, tmp_path, train(engine, tmp_path))


def test_a_batch_says_how_many_of_its_tokens_know_their_experts() -> None:
    sample = routed_batch(0)
    stats = batch_stats(sample.with_key("loss_mask", response_mask(sample)), version=3, context=ParallelContext())
    unknown, num_tokens = 0, 0
    for rows, length in zip(rows_of(sample), sample.answer_lengths(), strict=True):
        drawn_from = rows[1 : length - 1]  # after a prompt of two tokens, the second is what the first response saw
        num_tokens += length - 2
        unknown += int((drawn_from[:, 0, 0] < 0).sum())
    assert unknown > 0
    assert stats["ppo/replayed_fraction"] == pytest.approx(1 - unknown / num_tokens)


def test_a_model_without_routers_cannot_be_told(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model(tmp_path / "dense"), ParallelContext())
    with pytest.raises(ValueError, match="no routers that can replay them"):
        compute_logprobs(engine, routed_batch(0))


@pytest.mark.slow
def test_layouts_of_two_ranks_take_the_experts_that_samples_name(
    mixture: Path, plain: tuple[Any, list[float]], tmp_path: Path
) -> None:
    play(play_layouts, mixture, ("d2", "c2"), tmp_path, world_size=2, directory=tmp_path)
    before = load_plain(mixture)
    for rank in range(2):
        for layout, seen in json.loads((tmp_path / f"rank-{rank}.json").read_text()).items():
            assert_trained_like(plain, tmp_path / layout, seen["norms"])
            trained = load_plain(tmp_path / layout)
            assert seen["generated"] == generate_greedily(trained, GREEDY_PROMPTS, max_new_tokens=6)
            own = routed_batch(0)
            if layout == "d2":
                own = some_of(own, [uid for number, uid in enumerate(own.uids) if number % 2 == seen["dp_rank"]])
            np.testing.assert_allclose(responses_of(seen["logprobs"]), expected_logprobs(before, own), atol=1e-5)


ROUTERS: dict[str, Any] = {
    "mixtral": MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2)),
    "qwen2_moe": Qwen2MoeTopKRouter(Qwen2MoeConfig(hidden_size=16, num_experts=NUM_EXPERTS, num_experts_per_tok=2)),
    "qwen3_moe": Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=16, num_experts=NUM_EXPERTS, num_experts_per_tok=2, norm_topk_prob=True)
    ),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_of_each_kind_weighs_whom_it_is_told_to_choose_as_its_own_choice(kind: str) -> None:
    torch.manual_seed(0)
    router = ROUTERS[kind]
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(5, 16)
    own = router(hidden)
    model = torch.nn.Sequential(router)
    install_router_replay(model)
    for expected, found in zip(own, router(hidden), strict=True):
        assert torch.equal(found, expected)
    told = torch.tensor([[0, 3], [5, 1], [-1, -1], [2, 4], [3, 2]], dtype=torch.int16)
    tell_routers(model, told[:, None])
    logits, weights, experts = router(hidden)
    for token, (row, chosen) in enumerate(zip(told.tolist(), experts.tolist(), strict=True)):
        if row[0] < 0:
            assert chosen == own[2][token].tolist()
            continue
        assert chosen == row
        probabilities = [float(logits[token].exp()[expert] / logits[token].exp().sum()) for expert in row]
        total = 1.0 if kind == "qwen2_moe" else sum(probabilities)
        assert weights[token].tolist() == pytest.approx([probability / total for probability in probabilities])
