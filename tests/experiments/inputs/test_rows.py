"""Rows as people have them: answers that are numbers, and a few that are too long."""

import json
from pathlib import Path

import pytest

from corral.experiments.config.data import DatasetConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.dataset_file import dataset_spec
from corral.experiments.plan import RunPlan
from corral.experiments.worker_specs import RolloutWorkerSpec
from corral.launcher.submit.prepare import Submission, prepare
from corral.workers.data.prompts import load_planned_rows, load_row_ids
from corral.workers.rollout.rewards import exact_match
from tests.experiments.broken_yaml import VALID_PPO, tokenizer_json, write_inputs

LONG = {"id": "long", "prompt": "1+" * 8 + "1=", "answer": "9"}


def submit(folder: Path, *rows: dict[str, object], held_out: tuple[dict[str, object], ...] = ()) -> Submission:
    write_inputs(folder)
    (folder / "model" / "tokenizer.json").write_text(tokenizer_json())
    (folder / "ppo.yaml").write_text(VALID_PPO)
    for name, added in (("train", rows), ("heldout", held_out)):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in added))
    return prepare(folder / "ppo.yaml", [f"cluster.fileroot={folder / 'trials'}"], trial_name=None, mode="local")


def planned(plan: RunPlan) -> RolloutWorkerSpec:
    worker = plan.worker("rollout_worker", 0)
    assert isinstance(worker, RolloutWorkerSpec)
    return worker


def test_an_answer_that_is_a_number_is_the_text_of_it(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"id": str(n), "prompt": "1+1=", "answer": n} for n in (2, -3, 0.5)]
    loaded = load_planned_rows(planned(submit(tmp_path, *rows).plan).dataset)
    assert [loaded[str(n)].answers for n in (2, -3, 0.5)] == [("2",), ("-3",), ("0.5",)]
    assert exact_match(loaded["0.5"].fields, " 0.5\n") == 1.0


def test_rows_that_are_too_long_are_left_out_everywhere_and_counted(tmp_path: Path) -> None:
    submission = submit(tmp_path, LONG, {**LONG, "id": "last", "prompt": "1+1="}, {**LONG, "id": "longer"})
    (warning,) = submission.warnings
    assert warning.startswith("2 of 43 rows of the dataset are left out, since they are too long; the first: ")
    assert "train.jsonl:41: " in warning and "prompt has 18 tokens" in warning
    dataset = planned(submission.plan).dataset
    assert (dataset.num_rows, submission.plan.master.num_prompts, dataset.too_long) == (41, 41, "41,43")
    loaded = load_planned_rows(dataset)
    assert len(loaded) == 41 and "last" in loaded and not {"long", "longer"} & loaded.keys()
    assert load_row_ids(dataset) == list(loaded)


def test_the_names_of_rows_alone_are_those_of_the_rows_whatever_they_look_like(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        '{"prompt": "a"}',
        "",
        '{"prompt": "b", "na\\u006de": "nested \\u00e9", "id": "x"}',
        "  ",
        '{"name": 7, "prompt": "c"}',
    ]
    path.write_text("\n".join([*lines, '{"name": "0x", "prompt": "left out"}', '{"prompt": "d"}']))
    config = DatasetConfig(path=path, id_key="name")
    dataset = dataset_spec(config, kind="prompts", too_long=[6])
    assert load_row_ids(dataset) == list(load_planned_rows(dataset)) == ["0", "nested é", "7", "6"]
    with path.open("a") as file:
        file.write("no row")
    with pytest.raises(ValueError, match="has changed since the trial was submitted"):
        load_row_ids(dataset)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load_row_ids(dataset)


def test_held_out_rows_are_all_looked_at_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 held-out rows are too long; the first: .*heldout.jsonl:11"):
        submit(tmp_path, held_out=(LONG,))
