"""The PyTorch-native engine on one rank, against plain transformers and against itself after a restart."""

import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from corral.experiments.config.model import OptimizerConfig
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.functional.losses import sft_loss
from corral.workers.backends.base import LossOutput, TokenScores
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.mesh_engine import learning_rate
from corral.workers.backends.micro_batches import MicroBatch, plan_micro_batches
from corral.workers.checkpoint.manifest import write_manifest
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.files.stored_states import whole_state
from tests.workers.backends.training_helpers import (
    NumbersRead,
    load_reference,
    make_sample,
    optimizer_config,
    read_weights,
    save_tiny_model,
    tiny_engine,
)

LENGTHS = [[5, 17, 9], [30, 3], [2, 12]]


make_engine = partial(tiny_engine, max_tokens=40)


def trainable_sample(lengths: list[list[int]] = LENGTHS, *, seed: int = 0) -> SequenceSample:
    sample = make_sample(lengths, prompt_length=1, seed=seed)
    return sample.select_keys(["input_ids"]).with_key("loss_mask", response_mask(sample))


def negative_logprobs(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    loss_mask = micro_batch.tensors["loss_mask"]
    losses = torch.where(loss_mask, sft_loss(scores.logprobs).losses, 0.0)
    return LossOutput(losses.sum(), {"entropy": (scores.entropy * loss_mask).sum()})


def moments(engine: FSDPEngine) -> list[torch.Tensor]:
    optimizer = engine._optimizer
    return [value for state in optimizer.state.values() for value in state.values()]


def padded_logprobs(directory: Path, sample: SequenceSample) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Log-probabilities from plain transformers, one padded batch with an attention mask, in the sample's order."""
    lengths = sample.answer_lengths()
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, tokens in enumerate(np.split(np.asarray(sample.data["input_ids"]), np.cumsum(lengths)[:-1])):
        ids[row, : len(tokens)] = torch.as_tensor(tokens)
    attention_mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        logits = load_reference(directory)(input_ids=ids, attention_mask=attention_mask).logits
    table = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return np.concatenate([table[row, : length - 1].numpy() for row, length in enumerate(lengths)])


def engine_logprobs(engine: FSDPEngine, sample: SequenceSample) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return engine.forward(sample)["logprobs"]


def save_llama(directory: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["qwen2", "llama_tied", "sliding_window"])
def test_packed_sequences_get_the_logprobs_of_a_padded_batch(kind: str, tmp_path: Path) -> None:
    if kind == "qwen2":
        directory = save_tiny_model(tmp_path)
    elif kind == "llama_tied":
        directory = save_llama(tmp_path)
    else:
        directory = save_tiny_model(tmp_path, use_sliding_window=True, sliding_window=6, max_window_layers=0)
    sample = trainable_sample()
    actual = engine_logprobs(make_engine(directory, optimizer=None), sample)
    np.testing.assert_allclose(actual, padded_logprobs(directory, sample), atol=1e-5)


def test_a_single_token_answer_predicts_nothing_and_disturbs_nothing(model_directory: Path) -> None:
    engine = make_engine(model_directory, optimizer=None)
    with_single = engine_logprobs(engine, trainable_sample([[1, 5], [1]]))
    assert with_single.shape == (4,)
    np.testing.assert_allclose(
        with_single, padded_logprobs(model_directory, trainable_sample([[1, 5], [1]])), atol=1e-5
    )


def test_a_resumed_run_equals_an_unfaulted_one_bit_for_bit(tmp_path: Path) -> None:
    # Dropout makes every step draw random numbers, so a wrong random state would show.
    directory = save_tiny_model(tmp_path / "model", attention_dropout=0.2)
    batches = [trainable_sample(seed=step) for step in range(4)]
    whole = make_engine(directory, seed=11)
    expected = [whole.train_batch(batch, loss_fn=negative_logprobs) for batch in batches]

    first = make_engine(directory, seed=11)
    resumed_stats = [first.train_batch(batch, loss_fn=negative_logprobs) for batch in batches[:2]]
    first.state_shard().write(tmp_path / "state")
    torch.rand(7)  # what another process has drawn before it resumes must not matter
    second = make_engine(directory, seed=999)
    pieces: list[int] = []
    second.load_state(tmp_path / "state", on_progress=lambda: pieces.append(1))
    assert len(pieces) == 3 * len(list(second.model.parameters()))  # themselves and two moments
    assert second.step == 2
    resumed_stats += [second.train_batch(batch, loss_fn=negative_logprobs) for batch in batches[2:]]

    assert resumed_stats == expected
    whole.state_shard().write(tmp_path / "whole")
    second.state_shard().write(tmp_path / "second")
    expected_state, actual_state = whole_state(tmp_path / "whole"), whole_state(tmp_path / "second")
    assert expected_state.keys() == actual_state.keys()
    assert all(torch.equal(expected_state[name], actual_state[name]) for name in expected_state)


def test_saved_weights_load_in_transformers_with_equal_logits(model_directory: Path, tmp_path: Path) -> None:
    (model_directory / "tokenizer.json").write_text("{}")
    engine = make_engine(model_directory)
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engine.save_weights(tmp_path)
    (model_directory / "tokenizer.json").unlink()
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt")) for name in names)
    sample = trainable_sample(seed=5)
    np.testing.assert_allclose(engine_logprobs(engine, sample), padded_logprobs(tmp_path, sample), atol=1e-5)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "Qwen2ForCausalLM"


def test_tied_weights_are_saved_once_and_load_tied(tmp_path: Path) -> None:
    engine = make_engine(save_llama(tmp_path / "model"))
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engine.save_weights(tmp_path / "saved")
    assert "lm_head.weight" not in read_weights(tmp_path / "saved")
    sample = trainable_sample(seed=5)
    np.testing.assert_allclose(engine_logprobs(engine, sample), padded_logprobs(tmp_path / "saved", sample), atol=1e-5)


def test_weights_are_saved_whole_after_what_they_were_loaded_from_is_gone(
    model_directory: Path, tmp_path: Path
) -> None:
    commit = shutil.copytree(model_directory, tmp_path / "commit")
    (commit / "tokenizer_config.json").write_text("{}")
    engine = make_engine(commit)
    shutil.rmtree(commit)  # newer commits have taken its place
    engine.save_weights(tmp_path / "saved")
    saved, original = read_weights(tmp_path / "saved"), read_weights(model_directory)
    assert saved.keys() == original.keys() and all(torch.equal(saved[name], original[name]) for name in saved)
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == "{}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)


@pytest.mark.parametrize("kind", ["qwen2", "llama_tied"])
def test_exported_weights_are_those_of_transformers_and_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model") if kind == "qwen2" else save_llama(tmp_path / "model")
    exported = {name: tensor.clone() for name, tensor in make_engine(directory).export_weights()}
    saved = read_weights(directory)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)
    other = make_engine(directory)
    other.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    assert not torch.equal(dict(other.export_weights())["model.norm.weight"], saved["model.norm.weight"])
    other.import_weights(reversed(exported.items()))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.export_weights())


def test_an_imported_share_is_an_exponential_moving_average(model_directory: Path, tmp_path: Path) -> None:
    reference, actor = make_engine(model_directory, optimizer=None), make_engine(model_directory)
    expected = {name: tensor.double() for name, tensor in reference.export_weights()}
    for step in range(3):
        actor.train_batch(trainable_sample(seed=step), loss_fn=negative_logprobs)
        given = {name: tensor.clone() for name, tensor in actor.export_weights()}
        reference.import_weights(given.items(), eta=0.3)
        expected = {name: 0.3 * given[name].double() + 0.7 * own for name, own in expected.items()}
    for name, tensor in reference.export_weights():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-6, err_msg=name)


def test_weights_of_another_model_are_not_taken_over(model_directory: Path) -> None:
    engine = make_engine(model_directory)
    weights = {name: tensor.clone() for name, tensor in engine.export_weights()}
    name, tensor = weights.popitem()
    with pytest.raises(ValueError, match=f"1 of {len(weights) + 1} weights were not given: {name}"):
        engine.import_weights(weights.items())
    with pytest.raises(ValueError, match="'lora' is no parameter of this model"):
        engine.import_weights([("lora", tensor)])
    with pytest.raises(ValueError, match=f"'{name}' was given twice"):
        engine.import_weights([(name, tensor), (name, tensor)])
    with pytest.raises(ValueError, match=f"'{name}' has shape .*, the model's has"):
        engine.import_weights([(name, tensor[:-1])])
    with pytest.raises(ValueError, match="eta must be in"):
        engine.import_weights(weights.items(), eta=1.5)


USES: dict[str, Callable[[FSDPEngine, Path], object]] = {
    "train": lambda engine, _: engine.train_batch(trainable_sample(seed=1), loss_fn=negative_logprobs),
    "forward": lambda engine, _: engine.forward(trainable_sample(seed=1))["logprobs"].tolist(),
    "export": lambda engine, _: {name: tensor.tolist() for name, tensor in engine.export_weights()},
    "import": lambda engine, _: engine.import_weights(
        [(name, torch.ones_like(tensor)) for name, tensor in engine.export_weights()], eta=0.5
    ),
    "save weights": lambda engine, directory: engine.save_weights(directory / "weights"),
    "save state": lambda engine, directory: engine.state_shard().write(directory / "state"),
    "evaluate": lambda engine, _: engine.model(
        input_ids=torch.arange(5)[None], segment_lengths=(5,), cu_seqlens=torch.tensor([0, 5], dtype=torch.int32)
    ).logits.tolist(),
    "bring back": lambda engine, _: engine.onload(),
}


@pytest.mark.parametrize("use", list(USES))
def test_an_offloaded_engine_has_no_memory_and_comes_back_unchanged_with_its_next_use(
    use: str, model_directory: Path, tmp_path: Path
) -> None:
    engines = [make_engine(model_directory), make_engine(model_directory)]
    for engine in engines:
        engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engines[0].offload()  # from here on all memory is its own
    tensors = [*engines[0].model.parameters(), *moments(engines[0])]
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    assert min(sizes) > 0
    for _ in range(2):  # the second changes nothing
        engines[0].offload()
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0

    results = [USES[use](engine, tmp_path / str(number)) for number, engine in enumerate(engines)]
    assert results[0] == results[1]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    for number, engine in enumerate(engines):
        engine.state_shard().write(tmp_path / f"state-{number}")
    states = [read_weights(tmp_path / f"state-{number}") for number in range(2)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_state_is_loaded_into_an_offloaded_engine(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory)
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engine.state_shard().write(tmp_path / "before")
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engine.offload()
    engine.load_state(tmp_path / "before")
    parameters = list(engine.model.parameters())
    assert all(tensor.numpy().size for _, tensor in engine.export_weights())
    engine.offload()
    # What was read from a file may be mapped, and what numpy has seen is its own, too: then copies took their places.
    assert sum(tensor.untyped_storage().nbytes() for tensor in [*parameters, *moments(engine)]) == 0
    engine.state_shard().write(tmp_path / "after")
    before, after = read_weights(tmp_path / "before"), read_weights(tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_compute_keeps_float32_masters_and_publishes_bfloat16(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory, compute_dtype=torch.bfloat16)
    stats = engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    assert stats["loss"] == pytest.approx(
        make_engine(model_directory).train_batch(trainable_sample(), loss_fn=negative_logprobs)["loss"], abs=0.02
    )
    engine.save_weights(tmp_path / "weights")
    engine.state_shard().write(tmp_path / "state")
    assert {t.dtype for t in read_weights(tmp_path / "weights").values()} == {torch.bfloat16}
    assert {t.dtype for t in read_weights(tmp_path / "state").values()} == {torch.float32}


def test_bfloat16_weights_have_deltas_and_of_float32_ones_it_is_said_once_that_they_would_save_nothing(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deltas: dict[str, list[bool]] = {"float32": [], "bfloat16": []}
    for dtype, has_delta in deltas.items():
        optimizer = optimizer_config(lr=1e-6)
        engine = make_engine(model_directory, optimizer=optimizer, compute_dtype=getattr(torch, dtype))
        write_manifest(tmp_path / dtype / "0", engine.save_weights(tmp_path / dtype / "0"), {})
        for step in (1, 2):
            engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
            directory = tmp_path / dtype / str(step)
            files = engine.save_weights(directory, base=directory.with_name(str(step - 1)))
            write_manifest(directory, files, {})
            has_delta.append("model.safetensors.delta" in files)
    assert deltas == {"float32": [False, False], "bfloat16": [True, True]}
    assert caplog.text.count("too much has changed") == 1


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(
    where: str, model_directory: Path, tmp_path: Path
) -> None:
    def poisoned(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        output = negative_logprobs(scores, micro_batch)
        if where == "loss":
            return LossOutput(output.loss_sum * math.nan, output.stats)
        zero = (scores.logprobs - scores.logprobs.detach()).sum()
        # sqrt has an infinite slope at 0: the loss stays finite, its gradient does not.
        return LossOutput(output.loss_sum + zero.square().sqrt(), output.stats)

    engine = make_engine(model_directory)
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    engine.state_shard().write(tmp_path / "before")
    stats = engine.train_batch(trainable_sample(seed=1), loss_fn=poisoned)
    engine.state_shard().write(tmp_path / "after")
    assert stats["train/skipped_nonfinite"] == 1.0
    assert all(math.isfinite(value) for value in stats.values())
    assert (engine.step, engine.num_nonfinite, engine.is_damaged) == (1, 1, False)
    before, after = read_weights(tmp_path / "before"), read_weights(tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.train_batch(trainable_sample(seed=1), loss_fn=negative_logprobs)["train/skipped_nonfinite"] == 0.0
    assert engine.step == 2


def test_a_step_that_overflows_the_weights_is_seen(model_directory: Path) -> None:
    optimizer = optimizer_config().model_copy(update={"lr": 1e39})
    engine = make_engine(model_directory, optimizer=optimizer, total_steps=10)
    engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    assert (engine.num_nonfinite, engine.is_damaged) == (0, True)


def test_a_loss_that_says_stop_changes_nothing_and_tells_what_it_saw(model_directory: Path, tmp_path: Path) -> None:
    engine = make_engine(model_directory)
    engine.state_shard().write(tmp_path / "before")
    seen: list[dict[str, float]] = []

    def may_step(stats: Mapping[str, float]) -> bool:
        seen.append(dict(stats))
        return False

    stats = engine.train_batch(trainable_sample(), loss_fn=negative_logprobs, may_step=may_step)
    engine.state_shard().write(tmp_path / "after")
    assert stats["train/skipped_early_stop"] == 1.0
    assert seen == [{"loss": stats["loss"], "entropy": stats["entropy"]}]
    before, after = read_weights(tmp_path / "before"), read_weights(tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (engine.step, engine.num_nonfinite) == (0, 0)


def test_groups_stay_together_where_a_loss_compares_answers() -> None:
    sample = make_sample([[5, 9], [3, 4], [8, 2]])
    spec = MicroBatchSpec(max_tokens_per_micro_batch=17)
    plan = plan_micro_batches(sample, spec, keeps_groups=True)
    assert sorted(plan) == [[0, 1], [2, 3, 4, 5]]
    assert len(plan_micro_batches(sample, MicroBatchSpec(n_min=3), keeps_groups=True)) == 3


def test_calls_on_a_model_have_the_products_that_it_was_given(model_directory: Path) -> None:
    seen: list[str] = []

    def loss(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
        seen.append(torch.get_float32_matmul_precision())
        return negative_logprobs(scores, micro_batch)

    for takes_tf32 in (True, False):
        engine = make_engine(model_directory, takes_tf32=takes_tf32)
        engine.train_batch(trainable_sample(), loss_fn=loss)
    assert [precision for precision, _ in groupby(seen)] == ["high", "highest"]


def test_a_batch_without_a_token_to_train_on_is_skipped(model_directory: Path) -> None:
    engine = make_engine(model_directory)
    nothing = trainable_sample()
    nothing.data["loss_mask"] = np.zeros_like(np.asarray(nothing.data["loss_mask"]))
    assert engine.train_batch(nothing, loss_fn=negative_logprobs)["train/skipped_empty"] == 1.0
    assert engine.step == 0


def test_a_step_reads_no_more_numbers_for_more_micro_batches(model_directory: Path) -> None:
    reads = []
    for max_tokens in (30, 100):
        engine = make_engine(model_directory, max_tokens=max_tokens)
        with NumbersRead() as numbers:
            engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
            engine.forward(trainable_sample())
        reads.append(numbers.count)
    assert len(plan_micro_batches(trainable_sample(), MicroBatchSpec(max_tokens_per_micro_batch=30))) > 2
    assert reads[0] == reads[1]


def test_gradients_are_clipped_to_the_configured_norm(model_directory: Path, tmp_path: Path) -> None:
    optimizer = optimizer_config(gradient_clipping=0.5, betas=(0.0, 0.95))
    engine = make_engine(model_directory, optimizer=optimizer, total_steps=10)
    stats = engine.train_batch(trainable_sample(), loss_fn=negative_logprobs)
    assert stats["train/grad_norm"] > 0.5
    engine.state_shard().write(tmp_path)
    # With a first beta of 0 the first moment is the clipped gradient itself.
    moments = [t for name, t in read_weights(tmp_path).items() if name.startswith("exp_avg.")]
    assert float(torch.stack([m.square().sum() for m in moments]).sum().sqrt()) == pytest.approx(0.5, rel=1e-4)


def test_an_answer_longer_than_the_budget_is_an_error_that_names_the_remedy(model_directory: Path) -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch"):
        engine_logprobs(make_engine(model_directory, max_tokens=16), trainable_sample([[17]]))


def test_a_model_without_optimizer_refuses_to_train(model_directory: Path) -> None:
    with pytest.raises(AssertionError, match="has no optimizer"):
        make_engine(model_directory, optimizer=None).train_batch(trainable_sample(), loss_fn=negative_logprobs)


def test_the_state_of_another_model_is_refused(model_directory: Path, tmp_path: Path) -> None:
    make_engine(model_directory).state_shard().write(tmp_path / "state")
    other = make_engine(save_tiny_model(tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(ValueError, match="of another model"):
        other.load_state(tmp_path / "state")
    wider = make_engine(save_tiny_model(tmp_path / "wider", intermediate_size=80))
    with pytest.raises(ValueError, match="has shape"):
        wider.load_state(tmp_path / "state")


def test_the_learning_rate_follows_its_schedule() -> None:
    def rates(**settings: object) -> list[float]:
        config = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps_proportion": 0.2, **settings})
        return [round(learning_rate(config, step=step, total_steps=10), 6) for step in range(11)]

    assert rates(lr_schedule="constant") == [0.5] + 10 * [1.0]
    linear = rates(lr_schedule="linear", min_lr_ratio=0.2)
    assert linear[:3] == [0.5, 1.0, 1.0]
    assert linear[-1] == 0.2
    assert linear[6] == pytest.approx(0.6)
    cosine = rates(lr_schedule="cosine")
    assert cosine[6] == pytest.approx(0.5)
    assert cosine[-1] == pytest.approx(0.0)
