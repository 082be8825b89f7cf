"""How rows become token ids: where special tokens stand, what ends an answer, and how long a row may be."""

import json
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.data import DatasetConfig
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.prompts.length_limits import LengthLimits
from corral.experiments.prompts.tokens import end_of_answer_id, eos_token_ids, load_tokenizer
from corral.workers.model.samples import RowLoader
from tests.workers.data.tiny_tokenizer import BOS, EOS, PAD, ids_of, write_tokenizer


def row_loader(folder: Path, model: Path) -> RowLoader:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "1+2=", "answer": "3"}) + "\n")
    return RowLoader(dataset_spec(DatasetConfig(path=path), kind="conversations"), model)


def test_a_row_has_one_beginning_and_one_end(tmp_path: Path) -> None:
    sample = row_loader(tmp_path, write_tokenizer(tmp_path / "model", has_bos=True)).load("0:a")
    assert sample.data["input_ids"].tolist() == [BOS, *ids_of("1+2="), *ids_of("3"), EOS]
    assert sample.data["prompt_mask"].tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("eos_token", ["<eos>", {"content": "<eos>", "special": True}])
def test_of_several_ends_answers_are_taught_the_tokenizers_own(tmp_path: Path, eos_token: Any) -> None:
    model = write_tokenizer(tmp_path / "model", eos_token_id=[PAD, EOS], eos_token=eos_token)
    sample = row_loader(tmp_path, model).load("0:a")
    assert sample.data["input_ids"].tolist()[-1] == EOS


@pytest.mark.parametrize("eos_token", [None, "<bos>", "<unknown>"])
def test_a_tokenizers_end_that_ends_no_answer_is_not_taught(tmp_path: Path, eos_token: Any) -> None:
    model = write_tokenizer(tmp_path, eos_token_id=[PAD, EOS], eos_token=eos_token)
    assert end_of_answer_id(model, load_tokenizer(model)) == PAD


def test_every_declared_end_ends_an_answer(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, eos_token_id=[PAD, EOS])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": BOS}))
    assert eos_token_ids(model) == (BOS, PAD, EOS)


@pytest.mark.parametrize("given", [None, [], True, "1"])
def test_a_model_without_an_end_of_answer_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ValueError, match="names no eos_token_id"):
        eos_token_ids(write_tokenizer(tmp_path, eos_token_id=given))


def test_rows_are_measured_in_tokens_of_the_model(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path, has_bos=True)
    limits = LengthLimits(model, max_prompt_tokens=9, max_row_tokens=12)
    assert limits.find_excess("12345678", ["12"]) == ""  # <bos> and 8, 2 and the end: 12
    assert limits.find_excess("123456789") == "the prompt has 10 tokens, more than max_prompt_tokens 9"
    assert limits.find_excess("12345678", ["123"]).startswith("prompt and answer have 9 + 4 tokens, more than")


def test_short_rows_need_no_tokenizer(tmp_path: Path) -> None:
    assert LengthLimits(tmp_path / "nothing", max_prompt_tokens=16, max_row_tokens=24).find_excess("1+2=", ["3"]) == ""
    with pytest.raises(ValueError, match="cannot use the tokenizer"):
        LengthLimits(tmp_path / "nothing", max_prompt_tokens=16).find_excess("1" * 17)


def test_a_preference_is_a_group_of_two_the_chosen_answer_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "1+2=", "rejected": "12", "chosen": "3"}) + "\n")
    spec = dataset_spec(DatasetConfig(path=path), kind="preferences")
    sample = RowLoader(spec, write_tokenizer(tmp_path / "model")).load("0:a")
    assert sample.seqlens["input_ids"] == [[6, 7]]
    chosen = [*ids_of("1+2="), *ids_of("3"), EOS]
    assert sample.data["input_ids"].tolist() == [*chosen, *ids_of("1+2="), *ids_of("12"), EOS]
    assert sample.data["prompt_mask"].tolist() == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 3
