"""Sources in an experiment file: paths beside it, conversations whose loss alone is told, and what is shown of them."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from corral.experiments.worker_specs import ModelWorkerSpec
from corral.launcher.submit.prepare import Submission, prepare
from corral.launcher.submit.prompts_text import print_prompts
from tests.chat_models import write_chat_tokenizer
from tests.experiments.broken_yaml import VALID_SFT, write_inputs

TURNS = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]


def prepared(folder: Path, *overrides: str) -> Submission:
    write_inputs(folder)
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 512}))
    write_chat_tokenizer(folder / "model", "qwen")
    (folder / "chat.jsonl").write_text(
        json.dumps({"messages": TURNS}) + "\n" + json.dumps({"messages": TURNS[:2]}) + "\n"
    )
    (folder / "sft.yaml").write_text(VALID_SFT.replace("  path: train.jsonl\n", "  sources: {a: {path: chat.jsonl}}\n"))
    return prepare(folder / "sft.yaml", [f"cluster.fileroot={folder}", *overrides], trial_name=None, mode="local")


def test_conversations_are_shown_as_the_model_will_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = f"evaluation={{dataset: {{path: {tmp_path / 'chat.jsonl'}}}}}"
    plan = prepared(tmp_path, "train_batch_size=2", held_out).plan
    rank = plan.worker("model_worker", 0)
    assert isinstance(rank, ModelWorkerSpec) and rank.dataset is not None and rank.held_out is not None
    assert rank.dataset.sources["a"].files == (tmp_path / "chat.jsonl",)
    # Nobody answers them: their loss is told.
    assert rank.held_out.row_kind == "conversations"
    assert [call.name for call in plan.master.step_plan.graph.evaluate_calls] == ["evaluate_rows"]
    monkeypatch.setenv("TERM", "dumb")
    console = Console(width=100, record=True, file=(tmp_path / "shown").open("w"))
    print_prompts(plan, console)
    shown = console.export_text()
    assert "chat.jsonl, row 0: a/0" in shown and "row 1: a/1" in shown and "It is 2.<|im_end|>" in shown
    assert "row: 68 tokens, 49 given, 19 learned" in shown
    assert "tokens, all rows: least 39, median 68, most 68" in shown
