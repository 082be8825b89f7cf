"""Adapters beside a frozen model: against a plain loop over merged weights, against peft, and over two real ranks.

The ranks share the data first, and then, as a mesh of their own, the layers (t2).

One pair of processes plays all of the two-rank scenes and writes what it saw; the tests compare that with one rank.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

from corral.experiments.config.model import LoraConfig
from corral.scheduling.parallel import Mesh, ParallelDims
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.functional.losses import sft_loss
from corral.workers.backends.base import LossOutput, TokenScores
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.lora import AdaptedLinear
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.backends.parallel_context import ParallelContext, mesh_contexts
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    load_reference,
    make_sample,
    optimizer_config,
    read_weights,
    save_tiny_model,
    tiny_engine,
    value_loss,
)
from tests.workers.checkpoint.test_low_rank import by_a_loop
from tests.workers.engine.tiny_models import generate_greedily
from tests.workers.some_samples import some_of

NUM_STEPS = 4
NUM_EXPORTS = 10
CLIPPING = 0.01  # below the norm of every gradient here
LENGTHS = [[5, 17, 9], [30, 4, 4], [3, 12], [40, 8, 21, 6]]
UIDS_BY_RANK = (["0:0", "0:1", "0:3"], ["0:2"])
LORA = LoraConfig(rank=4, alpha=10.0)
SOME = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "mlp.down_proj"))
DROPPING = LORA.model_copy(update={"dropout": 0.5})
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Seen:
    """What two ranks have done, and what one rank had written before for them."""

    directory: Path
    stats: list[list[dict[str, float]]]
    """By rank, by step, where the ranks share the data."""
    stats_of_layers: list[list[dict[str, float]]]
    """The same where they share the layers."""


@pytest.fixture(scope="module")
def two_ranks(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("ranks")
    single = make_engine(model_directory, LORA)
    for step in range(2):
        train(single, step)
    single.state_shard().write(directory / "single")
    play(play_rank, model_directory, directory, world_size=2, directory=directory)
    of_data, of_layers = zip(
        *(json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)), strict=True
    )
    return Seen(directory, list(of_data), list(of_layers))


def play_rank(context: ParallelContext, model_directory: Path, directory: Path) -> None:
    engine = make_engine(model_directory, LORA, context=context)
    stats = []
    for step in range(NUM_STEPS):
        stats.append(train(engine, step, UIDS_BY_RANK[context.rank]))
        if step == 1:
            engine.state_shard().write(directory / "half")
    engine.state_shard().write(directory / "last")
    engine.save_weights(directory / "weights")
    engine.offload()
    engine.save_weights(directory / "again")

    resumed = make_engine(model_directory, LORA, context=context, seed=999)
    resumed.load_state(directory / "half")
    for step in range(2, NUM_STEPS):
        train(resumed, step, UIDS_BY_RANK[context.rank])
    resumed.state_shard().write(directory / "resumed")
    resumed.load_state(directory / "single")
    resumed.save_weights(directory / "from_single")

    low = make_engine(model_directory, LORA, context=context, compute_dtype=torch.bfloat16)
    train(low, 0, UIDS_BY_RANK[context.rank])
    low.state_shard().write(directory / "low")
    dropping = make_engine(model_directory, DROPPING, context=context)
    dropped = train(dropping, 0, UIDS_BY_RANK[0])  # both ranks have the same answers
    (directory / f"dropping-{context.rank}.json").write_text(json.dumps(dropped))
    of_layers = share_layers(context, model_directory, directory / "t2")
    (directory / f"rank-{context.rank}.json").write_text(json.dumps([stats, of_layers]))


def share_layers(world: ParallelContext, model_directory: Path, directory: Path) -> list[dict[str, float]]:
    context = mesh_contexts(world, {"t2": Mesh(ranks=(0, 1), dims=ParallelDims(tp=2))})["t2"]
    engine = make_engine(model_directory, LORA, context=context)
    stats = [train(engine, step) for step in range(NUM_STEPS)]
    engine.save_weights(directory / "weights")
    engine.state_shard().write(directory / "state")
    engine.load_state(directory.parent / "last")
    engine.save_weights(directory / "from_data_parallel")
    return stats


def make_engine(directory: Path, lora: LoraConfig | None, **settings: Any) -> FSDPEngine:
    optimizer = optimizer_config(gradient_clipping=CLIPPING, weight_decay=0.1)
    return tiny_engine(directory, max_tokens=64, **{"optimizer": optimizer, "lora": lora, "seed": 7} | settings)


def batch(step: int) -> SequenceSample:
    sample = make_sample(LENGTHS, prompt_length=1, seed=step)
    return sample.select_keys(["input_ids"]).with_key("loss_mask", response_mask(sample))


def train(engine: FSDPEngine, step: int, uids: Sequence[str] | None = None) -> dict[str, float]:
    sample = batch(step) if uids is None else some_of(batch(step), list(uids))
    return engine.train_batch(sample, loss_fn=negative_logprobs)


def negative_logprobs(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    losses = torch.where(micro_batch.tensors["loss_mask"], sft_loss(scores.logprobs).losses, 0.0)
    return LossOutput(losses.sum(), {})


def test_ranks_that_compute_on_other_data_drop_other_inputs_of_adapters(model_directory: Path, two_ranks: Seen) -> None:
    """If they dropped the same of the same answers, the mean of their gradients would be the gradient of one."""
    alone = train(make_engine(model_directory, DROPPING), 0, UIDS_BY_RANK[0])
    first, second = (json.loads((two_ranks.directory / f"dropping-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["train/grad_norm"] != pytest.approx(alone["train/grad_norm"], rel=1e-3)
    assert first["train/tokens"] == 2 * alone["train/tokens"]


def read_adapter(version: Path) -> dict[str, Tensor]:
    """The tensors of an exported adapter, by the model's names."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in read_weights(version / "adapter").items()}


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """W0 + (B A) alpha / rank for every layer that has an adapter, and all else as it is."""
    result = dict(base)
    for layer, a, b in layers_of(adapter):
        result[f"{layer}.weight"] = base[f"{layer}.weight"] + (b @ a) * (lora.alpha / lora.rank)
    return result


def exported(base: dict[str, Tensor], adapter: dict[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The same in the order of sums that exports promise."""
    result = dict(base)
    for layer, a, b in layers_of(adapter):
        exact = by_a_loop(base[f"{layer}.weight"].numpy(), a.numpy(), b.numpy(), lora.alpha / lora.rank)
        result[f"{layer}.weight"] = torch.from_numpy(exact)
    return result


def layers_of(adapter: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A, B of each layer that has an adapter."""
    for name, a in adapter.items():
        if name.endswith("lora_A.weight"):
            yield name.removesuffix(".lora_A.weight"), a, adapter[name.replace("lora_A", "lora_B")]


def padded(sample: SequenceSample) -> tuple[Tensor, Tensor]:
    """ids and attention mask, [answers, longest]."""
    lengths = sample.answer_lengths()
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, tokens in enumerate(np.split(np.asarray(sample.data["input_ids"]), np.cumsum(lengths)[:-1])):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
    return ids, (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()


def logprobs_of(model: Any, sample: SequenceSample) -> npt.NDArray[np.float32]:
    """Of the shifted tokens of every answer, by a transformers model on one padded batch, in the sample's order."""
    ids, mask = padded(sample)
    with torch.no_grad():
        table = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
    rows = [table[row, : length - 1, 0].numpy() for row, length in enumerate(sample.answer_lengths())]
    return np.concatenate(rows).astype(np.float32)


def plain_loop(
    model_directory: Path, first: dict[str, Tensor], lora: LoraConfig
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """NUM_STEPS steps of AdamW on adapters alone, by the gradient through merged weights.

    Returns:
        The adapters, the losses, and the gradient's norms before clipping.
    """
    model = load_reference(model_directory)
    base = {name: parameter.detach() for name, parameter in model.named_parameters()}
    adapters = {name: nn.Parameter(tensor.clone()) for name, tensor in first.items()}
    config = optimizer_config()
    optimizer = torch.optim.AdamW(adapters.values(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.1)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        ids, mask = padded(batch(step))
        weights = merged(base, dict(adapters), lora)
        logits = functional_call(model, weights, kwargs={"input_ids": ids, "attention_mask": mask}).logits
        chosen = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        loss = -chosen[mask[:, 1:].bool()].mean()  # the prompt is one token, so all that is predicted is the answer
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(adapters.values(), CLIPPING)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: parameter.detach() for name, parameter in adapters.items()}, losses, norms


def first_adapter(model_directory: Path, lora: LoraConfig, directory: Path) -> dict[str, Tensor]:
    """What is drawn before the first step."""
    make_engine(model_directory, lora).save_weights(directory)
    return read_adapter(directory)


def test_four_steps_move_some_adapters_as_a_plain_loop_over_merged_weights(
    model_directory: Path, tmp_path: Path
) -> None:
    expected, losses, norms = plain_loop(model_directory, first_adapter(model_directory, SOME, tmp_path / "0"), SOME)
    assert min(norms) > CLIPPING
    engine = make_engine(model_directory, SOME)
    stats = [train(engine, step) for step in range(NUM_STEPS)]
    np.testing.assert_allclose([line["loss"] for line in stats], losses, atol=1e-5)
    np.testing.assert_allclose([line["train/grad_norm"] for line in stats], norms, rtol=1e-4)
    engine.save_weights(tmp_path / "4")
    assert_close(read_adapter(tmp_path / "4"), expected)


def test_two_ranks_move_adapters_as_a_plain_loop_over_merged_weights(
    model_directory: Path, two_ranks: Seen, tmp_path: Path
) -> None:
    expected, losses, norms = plain_loop(model_directory, first_adapter(model_directory, LORA, tmp_path), LORA)
    for by_rank, weights in ((two_ranks.stats, "weights"), (two_ranks.stats_of_layers, "t2/weights")):
        assert by_rank[0] == by_rank[1]
        np.testing.assert_allclose([line["loss"] for line in by_rank[0]], losses, atol=1e-5)
        np.testing.assert_allclose([line["train/grad_norm"] for line in by_rank[0]], norms, rtol=1e-4)
        assert_close(read_adapter(two_ranks.directory / weights), expected)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_nothing_is_changed_before_the_first_step(model_directory: Path, tmp_path: Path) -> None:
    adapter = first_adapter(model_directory, LORA, tmp_path)
    assert all(tensor.count_nonzero() == 0 for name, tensor in adapter.items() if "lora_B" in name)
    assert all(0.0 < tensor.abs().max() <= tensor.shape[1] ** -0.5 for name, tensor in adapter.items() if "_A" in name)
    assert len({float(tensor.sum()) for name, tensor in adapter.items() if "_A" in name}) == 14  # each has its own draw
    assert_equal(read_weights(tmp_path), read_weights(model_directory))


def test_after_many_exports_the_base_is_untouched_and_the_last_is_base_and_adapter_bit_for_bit(
    model_directory: Path, tmp_path: Path
) -> None:
    base = read_weights(model_directory)
    engine = make_engine(model_directory, LORA)
    for export in range(NUM_EXPORTS):
        train(engine, export)
        version = tmp_path / str(export)
        engine.save_weights(version)
    adapter = read_adapter(version)
    frozen = {name: tensor.detach() for name, tensor in engine.model.named_parameters() if name not in adapter}
    assert_equal(frozen, base)
    published = read_weights(version)
    assert_equal(published, exported(base, adapter, LORA))
    assert sum(not torch.equal(published[name], base[name]) for name in base) == len(adapter) // 2 == 14


def test_two_ranks_export_base_and_adapter_bit_for_bit(model_directory: Path, two_ranks: Seen) -> None:
    weights = two_ranks.directory / "weights"
    for version in (weights, two_ranks.directory / "t2" / "weights"):
        assert_equal(read_weights(version), exported(read_weights(model_directory), read_adapter(version), LORA))
    assert_equal(read_weights(two_ranks.directory / "again"), read_weights(weights))


def test_only_adapters_and_their_moments_are_resumed_from(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory, SOME)
    train(engine, 0)
    optimizer = engine._optimizer
    assert len([parameter for group in optimizer.param_groups for parameter in group["params"]]) == 8
    engine.state_shard().write(tmp_path)
    names = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}
    adapters = {f"{name}.lora_{part}.weight" for name in names for part in "AB"}
    kinds = ("parameter", "exp_avg", "exp_avg_sq", "step")
    state = whole_state(tmp_path)
    assert state.keys() == {f"{kind}.{name}" for kind in kinds for name in adapters}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert engine.num_trained == sum(t.numel() for name, t in state.items() if name.startswith("parameter."))
    assert engine.num_parameters == sum(tensor.numel() for tensor in read_weights(model_directory).values())


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model_directory: Path, tmp_path: Path) -> None:
    lora = LORA.model_copy(update={"dropout": 0.3})  # draws numbers in every step
    whole = make_engine(model_directory, lora)
    expected = [train(whole, step) for step in range(NUM_STEPS)]
    first = make_engine(model_directory, lora)
    stats = [train(first, step) for step in range(2)]
    first.state_shard().write(tmp_path / "half")
    second = make_engine(model_directory, lora, seed=999)
    second.load_state(tmp_path / "half")
    stats += [train(second, step) for step in range(2, NUM_STEPS)]
    assert stats == expected
    for name, engine in (("whole", whole), ("second", second)):
        engine.state_shard().write(tmp_path / name)
    assert_equal(read_weights(tmp_path / "second"), read_weights(tmp_path / "whole"))


def test_two_resumed_ranks_equal_two_uninterrupted_ones_bit_for_bit(two_ranks: Seen) -> None:
    for file in sorted((two_ranks.directory / "last").glob("*.safetensors")):
        assert_equal(load_file(two_ranks.directory / "resumed" / file.name), load_file(file))


def test_a_state_is_the_same_for_another_number_of_ranks(
    model_directory: Path, two_ranks: Seen, tmp_path: Path
) -> None:
    engine = make_engine(model_directory, LORA)
    engine.load_state(two_ranks.directory / "last")
    engine.save_weights(tmp_path / "from_two")
    assert_equal(read_weights(tmp_path / "from_two"), read_weights(two_ranks.directory / "weights"))
    assert_equal(read_weights(two_ranks.directory / "t2" / "from_data_parallel"), read_weights(tmp_path / "from_two"))
    engine.load_state(two_ranks.directory / "t2" / "state")
    engine.save_weights(tmp_path / "from_layers")
    assert_equal(read_weights(tmp_path / "from_layers"), read_weights(two_ranks.directory / "t2" / "weights"))
    engine.load_state(two_ranks.directory / "single")
    engine.save_weights(tmp_path / "single")
    assert_equal(read_weights(tmp_path / "single"), read_weights(two_ranks.directory / "from_single"))


def test_adapters_are_not_resumed_beside_another_base(model_directory: Path, tmp_path: Path) -> None:
    make_engine(model_directory, LORA).state_shard().write(tmp_path / "state")
    other = make_engine(save_tiny_model(tmp_path / "other", seed=5), LORA)
    with pytest.raises(ValueError, match="trained beside other weights than those of .*other"):
        other.load_state(tmp_path / "state")
    with pytest.raises(ValueError, match="is of adapters: .* continue with the model and the lora settings"):
        make_engine(model_directory, None).load_state(tmp_path / "state")


def test_other_weights_are_not_taken_over(model_directory: Path) -> None:
    engine = make_engine(model_directory, LORA)
    with pytest.raises(ValueError, match="its own weights stay as they are"):
        engine.import_weights(engine.export_weights())


def test_dropout_is_seen_by_the_adapter_alone_and_in_training_alone() -> None:
    base = nn.Linear(8, 4)
    weight, bias = base.weight.detach().clone(), base.bias.detach().clone()
    layer = AdaptedLinear(base, LoraConfig(rank=2, alpha=6.0, dropout=0.5))
    nn.init.normal_(layer.lora_A.weight)
    nn.init.normal_(layer.lora_B.weight)
    x, update = torch.randn(3, 8), layer.lora_B.weight @ layer.lora_A.weight * 3.0
    torch.testing.assert_close(layer.eval()(x), x @ weight.T + bias + x @ update.T)
    torch.manual_seed(5)
    actual = layer.train()(x)
    torch.manual_seed(5)
    seen = nn.functional.dropout(x, 0.5)
    assert (seen == 0.0).any()
    torch.testing.assert_close(actual, x @ weight.T + bias + seen @ update.T)


def test_a_layer_that_is_not_there_is_named(model_directory: Path) -> None:
    with pytest.raises(ValueError, match="no linear layer of a Qwen2ForCausalLM has a name that ends in 'w_q'"):
        make_engine(model_directory, LoraConfig(rank=2, alpha=2.0, targets=("w_q",)))


def test_a_base_in_low_precision_changes_no_number(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    low = make_engine(model_directory, LORA, compute_dtype=torch.bfloat16)
    held = {name: parameter.dtype for name, parameter in low.model.named_parameters()}
    assert held["model.layers.0.mlp.up_proj.weight"] == held["lm_head.weight"] == torch.bfloat16
    assert held["model.embed_tokens.weight"] == held["model.norm.weight"] == torch.float32
    assert held["model.layers.0.mlp.up_proj.lora_A.weight"] == torch.float32
    stats = [train(low, step) for step in range(2)]
    low.state_shard().write(tmp_path / "low")
    low.save_weights(tmp_path / "weights")

    monkeypatch.setattr("corral.workers.backends.fsdp.loading.frozen_products", lambda model: [])
    full = make_engine(model_directory, LORA, compute_dtype=torch.bfloat16)
    assert [train(full, step) for step in range(2)] == stats
    full.state_shard().write(tmp_path / "full")
    assert_equal(read_weights(tmp_path / "low"), read_weights(tmp_path / "full"))
    base = {name: tensor.bfloat16().float() for name, tensor in read_weights(model_directory).items()}
    expected = merged(base, read_adapter(tmp_path / "weights"), LORA)
    assert_equal(read_weights(tmp_path / "weights"), {name: t.bfloat16() for name, t in expected.items()})


def test_two_ranks_with_a_base_in_low_precision_train_as_one(
    model_directory: Path, two_ranks: Seen, tmp_path: Path
) -> None:
    engine = make_engine(model_directory, LORA, compute_dtype=torch.bfloat16)
    train(engine, 0)
    engine.save_weights(tmp_path / "one")
    engine.load_state(two_ranks.directory / "low")
    engine.save_weights(tmp_path / "two")
    one, two = read_adapter(tmp_path / "one"), read_adapter(tmp_path / "two")
    for name, tensor in one.items():  # a first step of AdamW is the sign of the gradient, nearly
        assert (tensor - two[name]).abs().mean() < 1e-4, name


def test_ranks_that_generate_use_what_model_and_adapters_amount_to(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory, LORA, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    engine.save_weights(tmp_path)
    with torch.no_grad():
        answers = generate_greedily(engine.model.eval(), [[3, 5, 7], [9]], max_new_tokens=12)
    adapter = read_adapter(tmp_path)
    base = {
        name: tensor.bfloat16().float() if f"{name[:-7]}.lora_A.weight" in adapter or "lm_head" in name else tensor
        for name, tensor in read_weights(model_directory).items()
    }
    model = load_reference(model_directory)
    unadapted = [greedy(model, prompt) for prompt in ([3, 5, 7], [9])]
    model.load_state_dict(merged(base, adapter, LORA))
    assert answers == [greedy(model, prompt) for prompt in ([3, 5, 7], [9])]
    assert all(answer != without for answer, without in zip(answers, unadapted, strict=True))


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_peft_loads_the_adapter_with_the_same_logprobs(model_directory: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    for lora in (LORA, SOME):
        engine = make_engine(model_directory, lora)
        for step in range(3):
            train(engine, step)
        version = tmp_path / f"rank-{lora.rank}"
        engine.save_weights(version)
        expected = engine.forward(batch(0))["logprobs"]
        np.testing.assert_allclose(logprobs_of(load_reference(version), batch(0)), expected, atol=2e-6)
        assert np.abs(logprobs_of(load_reference(model_directory), batch(0)) - expected).max() > 1e-3
        theirs = peft.PeftModel.from_pretrained(load_reference(model_directory), version / "adapter").eval()
        np.testing.assert_allclose(logprobs_of(theirs, batch(0)), expected, atol=2e-6)
        config = theirs.peft_config["default"]
        assert (config.r, config.lora_alpha, config.task_type) == (lora.rank, lora.alpha, "CAUSAL_LM")


def test_an_adapter_of_pefts_is_started_from_and_given_back(model_directory: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(load_reference(model_directory), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    engine = make_engine(model_directory, SOME.model_copy(update={"adapter": tmp_path / "theirs"}))
    np.testing.assert_allclose(engine.forward(batch(0))["logprobs"], logprobs_of(theirs, batch(0)), atol=2e-6)
    engine.save_weights(tmp_path / "ours")
    assert_equal(read_weights(tmp_path / "ours" / "adapter"), read_weights(tmp_path / "theirs"))


def test_an_adapter_that_does_not_fit_is_refused_by_the_tensor(model_directory: Path, tmp_path: Path) -> None:
    make_engine(model_directory, SOME).save_weights(tmp_path)
    adapter = tmp_path / "adapter"
    for changes, message in (
        ({"targets": ("q_proj",)}, "down_proj.lora_A.weight' is no parameter of this model"),
        ({"targets": None}, "weights were not given: base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"),
        ({"rank": 2}, r"has shape \(3, 96\), the model's has \(2, 96\)"),
        ({"adapter": tmp_path / "nowhere"}, "cannot start from the adapter .*nowhere"),
    ):
        lora = SOME.model_copy(update={"adapter": adapter, **changes})
        with pytest.raises(ValueError, match=message):
            make_engine(model_directory, lora)


def test_a_score_layer_is_trained_whole_and_travels_with_the_adapter(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory, LORA, head="value")
    sample = make_sample(LENGTHS).select_keys(["input_ids", "prompt_mask"])
    for _ in range(3):
        engine.train_batch(sample, loss_fn=value_loss, counted="prompt_mask")
    engine.state_shard().write(tmp_path / "state")
    engine.save_weights(tmp_path / "weights")
    score = read_adapter(tmp_path / "weights")["score.weight"]
    assert score.count_nonzero() == score.numel() == 64
    assert torch.equal(score, read_weights(tmp_path / "weights")["score.weight"])
    again = make_engine(tmp_path / "weights", None, head="value")
    np.testing.assert_allclose(again.forward(sample)["values"], engine.forward(sample)["values"], atol=1e-5)
    resumed = make_engine(model_directory, LORA, head="value")
    resumed.load_state(tmp_path / "state")
    assert np.array_equal(resumed.forward(sample)["values"], engine.forward(sample)["values"])
