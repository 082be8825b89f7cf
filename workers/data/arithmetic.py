"""The demo's task, made from a seed: two-digit addition, a character tokenizer, and a tiny untrained Qwen2.

    python -m corral.workers.data.arithmetic --out DIR [--seed 1]

writes DIR/model (Hugging Face format), problems with their answers, and preferences for right answers over wrong ones:

    train_sft.jsonl  train_grpo.jsonl  heldout.jsonl        {"id": "12+34", "prompt": "12+34=", "answer": "46"}
    heldout_few.jsonl                                       the first of heldout.jsonl
    train_preferences.jsonl  heldout_preferences.jsonl      {..., "chosen": "46", "rejected": "56"}
    train_tools.jsonl                                       the same, with answers that ask a calculator: "12+34="
    train_hinted.jsonl                                      {..., "hinted": "12+34=12+34=<eos>46="}

Held-out problems appear in no training file.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

END_OF_ANSWER = "<eos>"
PADDING = "<pad>"
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}" + END_OF_ANSWER + "{% endif %}{% endfor %}"
)
"""A conversation is what was said, one after the other: to its first prompt the model answers as without a template."""
NUM_HELD_OUT = 512
NUM_FEW = 64  # of those, where each answer costs
NUM_SFT = 3072
NUM_TOOLS = 1024


def make_problems(seed: int) -> list[dict[str, str]]:
    """Every sum of two two-digit numbers as a row, shuffled."""
    rows = [
        {"id": f"{left}+{right}", "prompt": f"{left}+{right}=", "answer": str(left + right)}
        for left in range(10, 100)
        for right in range(10, 100)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def make_preferences(problems: list[dict[str, str]], *, seed: int) -> list[dict[str, str]]:
    """Each problem's answer, preferred to the answer to some other problem, whose sum is another one."""
    draw = random.Random(seed)
    rows = []
    for row in problems:
        rejected = row["answer"]
        while rejected == row["answer"]:
            rejected = draw.choice(problems)["answer"]
        rows.append({"id": row["id"], "prompt": row["prompt"], "chosen": row["answer"], "rejected": rejected})
    return rows


def make_tool_rows(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of each problem three rows: its answer; a calculator that is asked; and the answer behind what that said."""
    rows = []
    for row in problems:
        prompt, answer = row["prompt"], row["answer"]
        rows.append({"id": f"{row['id']}/answer", "prompt": prompt, "answer": answer})
        rows.append({"id": f"{row['id']}/call", "prompt": prompt, "answer": prompt})
        rows.append({"id": f"{row['id']}/reply", "prompt": _replied(row), "answer": answer})
    return rows


def _replied(row: dict[str, str]) -> str:
    """The problem, a calculator that is asked, and what that said."""
    return f"{row['prompt']}{row['prompt']}{END_OF_ANSWER}{row['answer']}="


def make_hinted_rows(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each problem with what a teacher reads that has the calculator's reply."""
    return [{**row, "hinted": _replied(row)} for row in problems]


def write_datasets(directory: Path, *, seed: int) -> None:
    """Write the jsonl files."""
    rows = make_problems(seed)
    held_out, training = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    for name, part in (
        ("heldout.jsonl", held_out),
        ("heldout_few.jsonl", held_out[:NUM_FEW]),
        ("train_sft.jsonl", training[:NUM_SFT]),
        ("train_grpo.jsonl", training),
        ("heldout_preferences.jsonl", make_preferences(held_out, seed=seed)),
        ("train_tools.jsonl", make_tool_rows(training[:NUM_TOOLS])),
        ("train_hinted.jsonl", make_hinted_rows(training)),
        ("train_preferences.jsonl", make_preferences(training, seed=seed)),
    ):
        write_rows(directory / name, part)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(directory: Path, *, seed: int, hidden_size: int = 128, num_layers: int = 3) -> None:
    """Write an untrained Qwen2 of about half a million parameters with a tokenizer of one token a character."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    vocabulary = {token: index for index, token in enumerate([PADDING, END_OF_ANSWER, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=END_OF_ANSWER,
        unk_token=PADDING,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=vocabulary[PADDING],
        bos_token_id=None,
        eos_token_id=vocabulary[END_OF_ANSWER],
    )
    auto_class: Any = AutoModelForCausalLM  # transformers leaves these methods untyped
    auto_class.from_config(config).save_pretrained(directory, safe_serialization=True)


def main() -> None:
    """Write everything below --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if absent")
    parser.add_argument("--seed", type=int, default=1, help="decides the problems' order and the untrained weights")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_datasets(arguments.out, seed=arguments.seed)
    write_model(arguments.out / "model", seed=arguments.seed)


if __name__ == "__main__":
    main()
