"""What layers compute again in the backward pass: the same numbers, of which less is kept until then."""

import gc
from pathlib import Path

import pytest
import torch

from corral.experiments.config.model import LoraConfig, Recompute
from corral.workers.backends.micro_batches import make_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from tests.workers.backends.layout_scene import Variant, make_engine, save_tiny, train
from tests.workers.backends.replay_scene import save_tiny_mixture
from tests.workers.backends.training_helpers import make_sample, memory_changes, save_tiny_model

WITH_DROPOUT = LoraConfig(rank=2, alpha=8.0, dropout=0.2)


@pytest.mark.parametrize(
    ("kind", "dtype", "lora"),
    [
        ("qwen3", torch.float32, None),
        ("qwen3", torch.bfloat16, WITH_DROPOUT),
        ("mixture", torch.float32, None),
    ],
    ids=["whole", "adapters with dropout in bfloat16", "mixture of experts"],
)
def test_numbers_are_the_same_to_the_bit(
    kind: str, dtype: torch.dtype, lora: LoraConfig | None, tmp_path: Path
) -> None:
    model = save_tiny_mixture(tmp_path) if kind == "mixture" else save_tiny(kind, tmp_path)
    trained = []
    for how in ("none", "selective", "full"):
        engine = make_engine(model, ParallelContext(), Variant(dtype=dtype, lora=lora, recompute=how))
        stats = train(engine, range(3))
        trained.append((stats, dict(engine.export_weights())))
    (stats, weights), *others = trained
    for own_stats, own_weights in others:
        assert own_stats == stats
        assert all(torch.equal(tensor, weights[name]) for name, tensor in own_weights.items())


def kept_bytes_of_a_layer(how: Recompute, directory: Path, *, tokens: int) -> float:
    """Of one token, between forward and backward pass; without what a layer keeps whatever the number of tokens."""
    kept = []
    for num_layers in (2, 4):
        model = save_tiny_model(directory / f"{how}-{num_layers}", num_hidden_layers=num_layers)
        engine = make_engine(model, ParallelContext(), Variant(dtype=torch.bfloat16, recompute=how))
        sample = make_sample([[tokens // 4] * 4])
        [row] = make_micro_batches(sample, [list(range(4))], count=1, device=torch.device("cpu"))
        engine.model.train()
        engine._scores(row)  # what is made once, at the first use, is not counted
        gc.collect()
        kept.append(sum(memory_changes(lambda engine=engine, row=row: engine._scores(row))))
    of_a_layer = (kept[1] - kept[0]) / 2
    random_state = torch.get_rng_state().nbytes if how != "none" else 0
    return (of_a_layer - random_state) / tokens


def test_a_layer_keeps_its_input_and_at_most_what_products_gave(tmp_path: Path) -> None:
    hidden, inner, queries, keys, heads = 64, 96, 64, 32, 4
    products = queries + 2 * keys + hidden + 2 * inner + hidden
    attention = 2 * queries + 4 * heads  # with the logarithm of each softmax's sum, in float32
    kept = {how: kept_bytes_of_a_layer(how, tmp_path, tokens=128) for how in ("none", "selective", "full")}
    assert kept["selective"] == 4 * hidden + 2 * products + attention < 0.5 * kept["none"]
    assert kept["full"] == 4 * hidden < 0.1 * kept["none"]
