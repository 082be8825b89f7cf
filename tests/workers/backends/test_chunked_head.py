"""Log-probabilities made in the last layer, chunk by chunk, are those of whole logits, on one rank and over two."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    Qwen2Config,
)

from corral.workers.backends import chunked_head
from corral.workers.backends.chunked_head import (
    ChunkedHead,
    Question,
    VocabularyShard,
    install_chunked_head,
    likeliest_tokens,
    score_tokens,
)
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from tests.workers.backends.test_fsdp import negative_logprobs, trainable_sample
from tests.workers.backends.trainer_helpers import play
from tests.workers.backends.training_helpers import (
    VOCAB_SIZE,
    LargestTensor,
    optimizer_config,
    read_weights,
    save_tiny_model,
    tiny_engine,
)
from tests.workers.some_samples import some_of

Array = npt.NDArray[np.float64]
FEW_TOKENS = 5  # of a chunk, where an engine is to compute several


@dataclass(frozen=True, slots=True)
class Case:
    """The numbers of a head, and what they amount to in float64."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    slopes: Tensor
    """Of a loss by each log-probability."""
    temperature: float | Tensor
    """Of all tokens, or [T]."""

    @property
    def scales(self) -> Tensor:
        """[T] float64."""
        temperature = torch.as_tensor(self.temperature, dtype=torch.float64).expand(len(self.labels))
        return torch.where(temperature > 0.0, 1.0 / temperature, 1.0)

    def expected(self) -> dict[str, Array]:
        """Scores, and gradients of sum(slopes * logprobs), from whole logits, one row after the other."""
        hidden, weight, bias, slopes = (
            tensor.double().numpy() for tensor in (self.hidden, self.weight, self.bias, self.slopes)
        )
        scales = self.scales.tolist()
        found: dict[str, list[Any]] = {"logprobs": [], "entropy": []}
        of_logits = np.zeros((len(hidden), len(weight)))
        for t, label in enumerate(self.labels.tolist()):
            row = [scales[t] * (math.fsum(hidden[t] * weight[v]) + bias[v]) for v in range(len(weight))]
            log_normalizer = max(row) + math.log(math.fsum(math.exp(z - max(row)) for z in row))
            p = [math.exp(z - log_normalizer) for z in row]
            found["logprobs"].append(row[label] - log_normalizer)
            found["entropy"].append(math.fsum(q * (log_normalizer - z) for q, z in zip(p, row, strict=True)))
            for v in range(len(weight)):
                of_logits[t, v] = slopes[t] * scales[t] * ((v == label) - p[v])
        return {name: np.array(values) for name, values in found.items()} | {
            "of_hidden": of_logits @ weight,
            "of_weight": of_logits.T @ hidden,
            "of_bias": of_logits.sum(0),
        }

    def found(
        self, *, rows: slice = slice(None), hidden_dtype: torch.dtype = torch.float32, **arguments: Any
    ) -> dict[str, Array]:
        """The same from `score_tokens`, by some rows of the vocabulary."""
        hidden = self.hidden.to(hidden_dtype, copy=True).requires_grad_()
        weight, bias = (tensor[rows].clone().requires_grad_() for tensor in (self.weight, self.bias))
        scores = score_tokens(hidden, weight, self.labels, bias=bias, temperature=self.temperature, **arguments)
        assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
        assert not scores.entropy.requires_grad
        torch.autograd.backward((scores.logprobs * self.slopes).sum())
        assert hidden.grad is not None and weight.grad is not None and bias.grad is not None
        assert (hidden.grad.dtype, weight.grad.dtype) == (hidden_dtype, torch.float32)
        tensors = {
            "logprobs": scores.logprobs,
            "entropy": scores.entropy,
            "of_hidden": hidden.grad,
            "of_weight": weight.grad,
            "of_bias": bias.grad,
        }
        return {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}


MIXED = -1.0
"""In the place of a temperature: each token has its own, and some of padding have 0."""


def make_case(*, num_tokens: int, vocab_size: int, hidden_size: int, temperature: float = 1.0, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    mixed = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(num_tokens)[:num_tokens]
    return Case(
        hidden=torch.tensor(rng.normal(size=(num_tokens, hidden_size)), dtype=torch.float32),
        weight=torch.tensor(2 * rng.normal(size=(vocab_size, hidden_size)), dtype=torch.float32),
        bias=torch.tensor(rng.normal(size=vocab_size), dtype=torch.float32),
        labels=torch.tensor(rng.integers(0, vocab_size, size=num_tokens)),
        slopes=torch.tensor(rng.normal(size=num_tokens), dtype=torch.float32),
        temperature=mixed if temperature == MIXED else temperature,
    )


def rounded(tensor: Tensor) -> Tensor:
    """To what bfloat16 can hold."""
    return tensor.bfloat16().float()


def assert_close(actual: dict[str, Array], expected: dict[str, Array], *, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=atol, err_msg=name)


NUM_ASKED, TOP_K = 3, 4


def asked_scores(case: Case, *, rows: slice = slice(None), **arguments: Any) -> dict[str, Array]:
    """What is said of further tokens, with gradients, and of the likeliest ones, by some rows of the vocabulary."""
    hidden = case.hidden.clone().requires_grad_()
    weight, bias = (tensor[rows].clone().requires_grad_() for tensor in (case.weight, case.bias))
    arguments |= {"bias": bias, "temperature": case.temperature}
    scores = score_tokens(hidden, weight, case.labels, asked=asked_of(case), **arguments)
    assert scores.asked is not None
    torch.autograd.backward(loss_of(scores.logprobs, scores.asked, case.slopes))
    top_k = min(TOP_K, len(case.weight))
    ids, top = likeliest_tokens(hidden, weight, top_k, **arguments)
    assert hidden.grad is not None and weight.grad is not None
    found = {"asked": scores.asked, "of_hidden": hidden.grad, "of_weight": weight.grad, "ids": ids, "top": top}
    return {name: tensor.detach().double().numpy() for name, tensor in found.items()}


def asked_of(case: Case) -> Tensor:
    """[T, 3] tokens, some of them twice and some the label."""
    return (case.labels[:, None] * torch.tensor([1, 2, 5]) + torch.tensor([0, 1, 1])) % len(case.weight)


def loss_of(logprobs: Tensor, asked: Tensor, slopes: Tensor) -> Tensor:
    """Curved in what is asked, with another weight for each."""
    weights = torch.arange(1.0, asked.shape[1] + 1, dtype=asked.dtype)
    return (slopes * logprobs).sum() + (slopes[:, None] * weights * asked.exp()).sum()


def expected_asked(case: Case) -> dict[str, Array]:
    """The same from whole logits in float64."""
    hidden, weight = case.hidden.double().requires_grad_(), case.weight.double().requires_grad_()
    table = ((hidden @ weight.T + case.bias.double()) * case.scales[:, None]).log_softmax(-1)
    asked, logprobs = table.gather(1, asked_of(case)), table.gather(1, case.labels[:, None])[:, 0]
    torch.autograd.backward(loss_of(logprobs, asked, case.slopes.double()))
    top, ids = table.topk(min(TOP_K, len(case.weight)))
    assert hidden.grad is not None and weight.grad is not None
    found = {"asked": asked, "of_hidden": hidden.grad, "of_weight": weight.grad, "ids": ids, "top": top}
    return {name: tensor.detach().double().numpy() for name, tensor in found.items()}


# --- one rank -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 8),
    hidden_size=st.integers(1, 5),
    chunk_tokens=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.6, 1.7, 0.0, MIXED]),
    seed=st.integers(0, 999),
)
def test_scores_and_gradients_are_those_of_whole_logits_in_float64(chunk_tokens: int, **sizes: Any) -> None:
    case = make_case(**sizes)
    assert_close(case.found(chunk_tokens=chunk_tokens), case.expected(), atol=2e-4)


@pytest.mark.parametrize(("vocab_size", "temperature"), [(2, 1.0), (7, 0.6), (40, 1.7), (9, MIXED)])
def test_tokens_that_are_asked_for_besides_and_the_likeliest_are_those_of_whole_logits(
    vocab_size: int, temperature: float
) -> None:
    case = make_case(num_tokens=9, vocab_size=vocab_size, hidden_size=5, temperature=temperature)
    assert_close(asked_scores(case, chunk_tokens=4), expected_asked(case), atol=2e-4)


def test_low_operands_are_multiplied_and_added_up_in_float32() -> None:
    case = make_case(num_tokens=12, vocab_size=40, hidden_size=16)
    expected = replace(case, hidden=rounded(case.hidden), weight=rounded(case.weight)).expected()
    found = case.found(hidden_dtype=torch.bfloat16, dtype=torch.bfloat16, chunk_tokens=5)
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(found[name], expected[name], atol=2e-5, err_msg=name)
    for name in ("of_hidden", "of_weight", "of_bias"):  # the gradient of the logits is rounded, too
        np.testing.assert_allclose(found[name], expected[name], atol=0.02 * np.abs(expected[name]).max(), err_msg=name)


def test_low_hidden_states_of_a_float32_head_are_taken_as_they_are() -> None:
    case = make_case(num_tokens=12, vocab_size=40, hidden_size=16)
    found = case.found(hidden_dtype=torch.bfloat16)
    expected = replace(case, hidden=rounded(case.hidden)).expected()
    np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=2e-5)
    np.testing.assert_allclose(found["of_weight"], expected["of_weight"], atol=2e-4)
    np.testing.assert_allclose(found["of_hidden"], expected["of_hidden"], rtol=0.01, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_multiplies_low_operands_to_the_same_scores() -> None:
    case = make_case(num_tokens=40, vocab_size=96, hidden_size=64)
    expected = case.found(hidden_dtype=torch.bfloat16, dtype=torch.bfloat16)
    hidden, weight = case.hidden.cuda().bfloat16().requires_grad_(), case.weight.cuda().requires_grad_()
    scores = score_tokens(
        hidden, weight, case.labels.cuda(), bias=case.bias.cuda(), dtype=torch.bfloat16, chunk_tokens=16
    )
    torch.autograd.backward((scores.logprobs * case.slopes.cuda()).sum())
    assert hidden.grad is not None and weight.grad is not None
    np.testing.assert_allclose(scores.logprobs.detach().cpu(), expected["logprobs"], atol=1e-4)
    np.testing.assert_allclose(hidden.grad.float().cpu(), expected["of_hidden"], rtol=0.02, atol=0.02)
    np.testing.assert_allclose(weight.grad.cpu(), expected["of_weight"], rtol=0.02, atol=0.02)


def test_logits_of_any_size_give_finite_scores() -> None:
    case = make_case(num_tokens=6, vocab_size=9, hidden_size=4)
    case = replace(case, weight=case.weight * 1e4)
    found = case.found(chunk_tokens=4)
    assert all(np.isfinite(values).all() for values in found.values())
    assert found["entropy"].min() >= 0.0
    np.testing.assert_allclose(found["logprobs"], case.expected()["logprobs"], rtol=1e-5, atol=0.05)


def test_no_token_is_no_score_and_no_gradient() -> None:
    found = make_case(num_tokens=0, vocab_size=7, hidden_size=3).found()
    assert found["logprobs"].shape == (0,)
    assert not found["of_weight"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_a_logit_of_every_token(dtype: torch.dtype) -> None:
    num_tokens, vocab_size, hidden_size, chunk_tokens = 64, 40, 3, 4
    case = make_case(num_tokens=num_tokens, vocab_size=vocab_size, hidden_size=hidden_size)
    with LargestTensor() as largest:
        case.found(dtype=dtype, chunk_tokens=chunk_tokens)
    assert largest.numel == max(chunk_tokens * vocab_size, num_tokens * 4)


def test_a_chunk_is_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(num_tokens=64, vocab_size=40, hidden_size=3)
    monkeypatch.setattr(chunked_head, "_CHUNK_BYTES", 4 * 40 * 7 + 3)
    with LargestTensor() as largest:
        case.found()
    assert largest.numel == 7 * 40
    monkeypatch.setattr(chunked_head, "_CHUNK_BYTES", 1)  # a token at a time at the least
    assert_close(case.found(), case.expected(), atol=2e-4)


# --- in a model ---------------------------------------------------------------------------------------------------


def test_the_last_layer_stays_itself_and_gives_logits_to_whoever_asks_for_no_scores() -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny(Qwen2Config, tie_word_embeddings=True))
    names, weight = [name for name, _ in model.named_parameters()], model.lm_head.weight
    ids = torch.arange(7)[None]
    expected = model(input_ids=ids).logits
    install_chunked_head(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.lm_head.weight is weight is model.model.embed_tokens.weight
    assert torch.equal(model(input_ids=ids).logits, expected)
    scores = model.lm_head.ask(
        Question(ids[0, 1:]), lambda: model(input_ids=ids, logits_to_keep=torch.arange(6)).logits
    )
    table = expected[0, :-1].log_softmax(-1)
    torch.testing.assert_close(scores[:, 0], table.gather(1, ids[0, 1:, None])[:, 0])
    torch.testing.assert_close(scores[:, 1], -(table.exp() * table).sum(-1))
    assert torch.equal(model(input_ids=ids).logits, expected)


def tiny(config_class: type[PretrainedConfig], **overrides: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config_class(**(sizes | overrides))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Gemma2ForCausalLM(tiny(Gemma2Config)), "final_logit_softcapping = 30.0 changes its logits"),
        (lambda: CohereForCausalLM(tiny(CohereConfig)), "logit_scale = 0.0625 changes its logits"),
    ],
)
def test_a_model_that_changes_its_logits_afterwards_is_refused(model: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        install_chunked_head(model())


def test_a_last_layer_that_is_not_plain_is_refused() -> None:
    class Louder(nn.Linear):
        pass

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    model.lm_head = Louder(16, 32)
    with pytest.raises(ValueError, match="the last layer of a GPT2LMHeadModel is Louder"):
        install_chunked_head(model)


def test_scores_that_a_model_has_changed_are_not_taken_for_scores(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model(tmp_path))

    def cap(module: nn.Module, arguments: Any, output: Any) -> None:
        output.logits = output.logits * 0.5

    engine.model.register_forward_hook(cap)
    with pytest.raises(ValueError, match="the model changes the logits that its last layer gives"):
        engine.forward(trainable_sample())
    head: Any = engine.model.get_submodule("lm_head")
    assert isinstance(head, ChunkedHead) and head._question is None


# --- in an engine, on one rank and on two -------------------------------------------------------------------------

MODELS: dict[str, Any] = {
    "qwen2": lambda directory: save_tiny_model(directory),
    "qwen2_tied": lambda directory: save_tiny_model(directory, tie_word_embeddings=True),
}
LENGTHS = [[5, 17, 9], [30, 3], [2, 12]]
UIDS_BY_RANK = (["0:0", "0:1"], ["0:2"])  # rank 1 runs padding beside rank 0's second micro-batch
NUM_STEPS = 2
TEMPERATURE = 0.8
OWN_TEMPERATURES = {1: [0.8, 0.8, 0.8, 1.5, 1.5, 0.5, 0.5]}
"""Of the answers of a step, where they have some."""
CUTS = (slice(0, 6), slice(6, 11))  # rows of the vocabulary by rank, uneven on purpose


make_engine = partial(tiny_engine, optimizer=optimizer_config(weight_decay=0.0), max_tokens=40)


def sample_of(step: int) -> SequenceSample:
    sample = trainable_sample(LENGTHS, seed=step)
    own = OWN_TEMPERATURES.get(step)
    return sample if own is None else sample.with_key("temperatures", np.array(own, np.float32))


def cut_case() -> Case:
    return make_case(num_tokens=8, vocab_size=CUTS[1].stop, hidden_size=5, temperature=MIXED, seed=3)


def play_rank(context: ParallelContext, directory: Path) -> None:
    """Everything that one of two ranks does: the head alone, then models trained through it."""
    shard = VocabularyShard(context.group, first=CUTS[context.rank].start)
    found = cut_case().found(rows=CUTS[context.rank], shard=shard, chunk_tokens=3 + context.rank)
    np.savez(directory / f"apart-{context.rank}.npz", **found)
    asked = asked_scores(cut_case(), rows=CUTS[context.rank], shard=shard, chunk_tokens=3 + context.rank)
    np.savez(directory / f"asked-{context.rank}.npz", **asked)
    chunked_head._CHUNK_BYTES = 4 * VOCAB_SIZE * FEW_TOKENS  # type: ignore[misc]
    for name in MODELS:
        train(make_engine(directory / name, context), UIDS_BY_RANK[context.rank], directory / f"{name}-two")


def train(engine: FSDPEngine, uids: list[str], directory: Path) -> None:
    for step in range(NUM_STEPS):
        engine.train_batch(some_of(sample_of(step), uids), loss_fn=negative_logprobs, temperature=TEMPERATURE)
    engine.save_weights(directory)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    torch.manual_seed(1)
    for name, save in MODELS.items():
        save(directory / name)
    play(play_rank, directory, world_size=2, directory=directory)
    return directory


def seen(directory: Path, name: str, rank: int) -> dict[str, Array]:
    with np.load(directory / f"{name}-{rank}.npz", allow_pickle=False) as found:
        return {key: found[key] for key in found}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vocabulary_cut_over_ranks_gives_each_the_scores_and_gradients_of_the_whole(
    rank: int, two_ranks: Path
) -> None:
    expected = cut_case().expected()
    for name in ("of_weight", "of_bias"):  # of this rank's own rows
        expected[name] = expected[name][CUTS[rank]]
    found = seen(two_ranks, "apart", rank)
    del found["of_hidden"], expected["of_hidden"]
    assert_close(found, expected, atol=2e-4)


def test_a_vocabulary_cut_over_ranks_gives_each_what_is_asked_for_and_the_likeliest_of_the_whole(
    two_ranks: Path,
) -> None:
    ranks, expected = [seen(two_ranks, "asked", rank) for rank in range(2)], expected_asked(cut_case())
    for rank, found in enumerate(ranks):
        for name in ("asked", "ids", "top"):
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["of_weight"], expected["of_weight"][CUTS[rank]], atol=2e-4)
    np.testing.assert_allclose(sum(found["of_hidden"] for found in ranks), expected["of_hidden"], atol=2e-4)


def test_the_hidden_gradient_is_left_in_parts_for_a_caller_that_adds_them_up(two_ranks: Path) -> None:
    parts = [seen(two_ranks, "apart", rank)["of_hidden"] for rank in range(2)]
    expected = cut_case().expected()["of_hidden"]
    assert np.abs(parts[0] - expected).max() > 0.1
    np.testing.assert_allclose(parts[0] + parts[1], expected, atol=2e-4)


def plain_training(directory: Path) -> dict[str, Tensor]:
    """The same steps by transformers and torch.optim, one answer after the other, with whole logits."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    config = optimizer_config()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0
    )
    for step in range(NUM_STEPS):
        sample = sample_of(step)
        ends, masks = np.cumsum(sample.answer_lengths())[:-1], np.asarray(sample.data["loss_mask"])
        logprobs = []
        temperatures = OWN_TEMPERATURES.get(step, [TEMPERATURE] * len(sample.answer_lengths()))
        for tokens, temperature in zip(np.split(sample.data["input_ids"], ends), temperatures, strict=True):
            ids = torch.as_tensor(tokens, dtype=torch.long)
            table = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            logprobs.append(table.gather(1, ids[1:, None])[:, 0])
        optimizer.zero_grad()
        mask = torch.as_tensor(masks)
        torch.autograd.backward(-(torch.cat(logprobs) * mask).sum() / mask.sum())
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_in_several_chunks_is_that_of_plain_transformers(
    num_ranks: int, name: str, two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = two_ranks / f"{name}-two"
    if num_ranks == 1:
        monkeypatch.setattr(chunked_head, "_CHUNK_BYTES", 4 * VOCAB_SIZE * FEW_TOKENS)
        trained = tmp_path
        train(make_engine(two_ranks / name), ["0:0", "0:1", "0:2"], trained)
    weights, expected = read_weights(trained), plain_training(two_ranks / name)
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, expected[key], atol=1e-4, err_msg=key)


@pytest.mark.parametrize("top_k", [0, 3])
def test_answers_of_several_temperatures_are_scored_as_those_of_each_alone(top_k: int, tmp_path: Path) -> None:
    engine, sample = make_engine(save_tiny_model(tmp_path)), sample_of(1)
    together = engine.forward(sample, top_k=top_k)  # in several micro-batches
    apart = [
        engine.forward(some_of(sample.select_keys(["input_ids"]), [uid]), temperature=temperature, top_k=top_k)
        for uid, temperature in zip(sample.uids, (0.8, 1.5, 0.5), strict=True)
    ]
    for name, values in together.items():
        np.testing.assert_allclose(values, np.concatenate([one[name] for one in apart]), atol=1e-5, err_msg=name)
    alike = engine.forward(sample.select_keys(["input_ids"]), top_k=top_k)
    assert any(np.abs(values - alike[name]).max() > 0.1 for name, values in together.items())


def test_log_probabilities_in_bfloat16_are_those_of_float32_to_the_rounding_of_the_layers(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    low = make_engine(directory, compute_dtype=torch.bfloat16).forward(sample_of(0), temperature=TEMPERATURE)
    full = make_engine(directory).forward(sample_of(0), temperature=TEMPERATURE)
    for name in ("logprobs", "entropy"):
        np.testing.assert_allclose(low[name], full[name], atol=0.02, err_msg=name)
        assert not np.array_equal(low[name], rounded(torch.as_tensor(low[name])).numpy())
