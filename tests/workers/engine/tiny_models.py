"""Tiny random models on disk, and what transformers says about them: the reference of the engine's tests."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from corral.workers.engine.batch import generate_all
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams

VOCAB_SIZE = 64
CONTEXT_LENGTH = 4096
EOS_TOKEN_ID = 63
NUM_EXPERTS, TOP_K = 8, 2
EXPERT_LAYERS = [0, 2]
"""Of the mixture, which has a dense layer between them."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}


def save_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    model_type: str = "qwen2",
    intermediate_size: int = 96,
    vocab_size: int = VOCAB_SIZE,
    max_shard_size: str = "1GB",
) -> Path:
    """A model whose next-token distribution is far from uniform, so that a wrong cache or weight shows."""
    shape = {**_SHAPE, "intermediate_size": intermediate_size, "vocab_size": vocab_size}
    configs: dict[str, Any] = {
        "qwen2": lambda: Qwen2Config(**shape, tie_word_embeddings=False),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **{**shape, "num_hidden_layers": 3},
            head_dim=32,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_intermediate_size=48,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        ),
        "llama": lambda: LlamaConfig(
            **shape,
            attention_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    }
    torch.manual_seed(seed)
    auto_class: Any = AutoModelForCausalLM  # transformers leaves these methods untyped
    model = auto_class.from_config(configs[model_type]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.6 if "embed" in name else 0.2))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """A tokenizer.json of one character per token, which transformers' class for Qwen2 understands as well."""
    vocabulary = {text_of([token_id]): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=text_of([0])))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def text_of(token_ids: Sequence[int]) -> str:
    """What `add_tokenizer` makes of tokens: the printable characters from 0 to o."""
    return "".join(chr(ord("0") + token_id) for token_id in token_ids)


def load_reference(directory: Path) -> Any:
    """The model as transformers runs it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def reference_greedy(model: Any, prompt: Sequence[int], *, max_new_tokens: int) -> list[int]:
    """transformers.generate on one prompt alone, end-of-sequence ids not consulted."""
    input_ids = torch.tensor([list(prompt)])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return list(output[0, len(prompt) :].tolist())


def reference_logprobs(
    model: Any, prompt: Sequence[int], output_ids: Sequence[int], *, temperature: float = 1.0
) -> Tensor:
    """[len(output_ids)] log-probability of each output token by one forward pass over everything before it."""
    return _picked(reference_logits(model, prompt, output_ids), output_ids, temperature=temperature)


def reference_logits(model: Any, prompt: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """[len(output_ids), VOCAB_SIZE] float32, what each output token was drawn from."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prompt, *output_ids]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def reference_logprobs_over_cache(
    first: Any, second: Any, prompt: Sequence[int], output_ids: Sequence[int], *, num_cached: int
) -> Tensor:
    """Of the output tokens that `second` predicts, when keys and values of the first `num_cached` are `first`'s."""
    tokens = torch.tensor([[*prompt, *output_ids]])
    cache = DynamicCache(config=first.config)
    with torch.no_grad():
        first(tokens[:, :num_cached], past_key_values=cache, use_cache=True)
        logits = second(tokens[:, num_cached:-1], past_key_values=cache, use_cache=True).logits[0].float()
    return _picked(logits, tokens[0, num_cached + 1 :].tolist(), temperature=1.0)


def _picked(logits: Tensor, token_ids: Sequence[int], *, temperature: float) -> Tensor:
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(list(token_ids)).unsqueeze(-1)).squeeze(-1)


def generate_greedily(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_token_ids: Collection[int] = ()
) -> list[list[int]]:
    """The engine's most likely continuations by a module that is loaded; a collective where its weights are sharded."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0, stop_token_ids=frozenset(stop_token_ids))
    with torch.no_grad():
        decoder = Decoder(model)
    requests = [
        GenerationRequest(request_id=str(index), prompt=tuple(prompt), sampling=sampling)
        for index, prompt in enumerate(prompts)
    ]
    return [list(output.output_ids) for output in generate_all(decoder, requests, batch_size=64)]
