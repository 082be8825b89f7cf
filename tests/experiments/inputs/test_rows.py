"""Rows as people have them: answers that are numbers, and a few that are too long."""

import json
import re
from pathlib import Path

import pytest

from corral.experiments.config.data import DatasetConfig
from corral.experiments.datasets.dataset import Dataset, dataset_spec
from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.worker_specs import RolloutWorkerSpec
from corral.launcher.submit.prepare import Submission, prepare
from corral.workers.rewards.texts import exact_match
from tests.experiments.broken_yaml import VALID_PPO, tokenizer_json, write_inputs

LONG = {"id": "long", "prompt": "1+" * 8 + "1=", "answer": "9"}


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ '+' * tools | length if tools }}="


def submit(
    folder: Path, *rows: dict[str, object], held_out: tuple[dict[str, object], ...] = (), template: str | None = None
) -> Submission:
    write_inputs(folder)
    (folder / "model" / "tokenizer.json").write_text(tokenizer_json())
    if template is not None:
        (folder / "model" / "chat_template.jinja").write_text(template)
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
    loaded = Dataset.planned(planned(submit(tmp_path, *rows).plan).dataset)
    assert [loaded[str(n)].answers for n in (2, -3, 0.5)] == [("2",), ("-3",), ("0.5",)]
    assert exact_match(loaded["0.5"].fields, " 0.5\n") == 1.0


def test_rows_that_are_too_long_are_left_out_everywhere_and_counted(tmp_path: Path) -> None:
    submission = submit(tmp_path, LONG, {**LONG, "id": "last", "prompt": "1+1="}, {**LONG, "id": "longer"})
    (warning,) = submission.warnings
    assert warning.startswith("2 of 43 rows of the dataset are left out, since they are too long; the first: ")
    assert "train.jsonl:41: " in warning and "prompt has 18 tokens" in warning
    dataset = planned(submission.plan).dataset
    assert (dataset.num_rows, submission.plan.master.num_prompts, dataset.sources[""].too_long) == (41, 41, "41,43")
    loaded = Dataset.planned(dataset)
    assert len(loaded) == 41 and "last" in loaded and not {"long", "longer"} & loaded.keys()
    assert list(Dataset.planned(dataset)) == list(loaded)


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
    config = DatasetConfig(path=path, columns={"id": "name"})
    dataset = dataset_spec(config, kind="prompts", too_long={"": [5]})
    assert list(Dataset.planned(dataset)) == ["0", "nested é", "7", "6"]
    with path.open("a") as file:
        file.write("no row")
    with pytest.raises(ValueError, match="has changed since the trial was submitted"):
        list(Dataset.planned(dataset))
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read any more .No such file or directory"):
        list(Dataset.planned(dataset))


def test_held_out_rows_are_all_looked_at_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 of 11 rows of the dataset .*too long; the first: .*heldout.jsonl:11"):
        submit(tmp_path, held_out=(LONG,))


def asked(content: object, **more: object) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": content}], "answer": "2", **more}


def test_prompts_are_text_messages_or_token_ids_and_the_same_tokens(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [{"prompt": "1+1=", "answer": 2}, asked("1+1"), {"prompt": [2, 11, 2, 12], "answer": "2"}]
    rows.append(asked("1+1", tools=[tool, tool]))
    submission = submit(tmp_path, *rows, LONG, asked("1" * 16), {"prompt": [1] * 17, "answer": 1}, template=TEMPLATE)
    dataset = planned(submission.plan).dataset
    assert dataset.sources[""].too_long == "45-47" and "3 of 47 rows" in submission.warnings[0]
    encoder, loaded = PromptEncoder(tmp_path / "model"), Dataset.planned(dataset)
    encoded = [encoder.encode(row.prompt, tools=row.tools) for row in list(loaded.values())[40:]]
    assert encoded == [[2, 11, 2, 12]] * 3 + [[2, 11, 2, 11, 11, 12]]
    assert loaded["41"].fields["prompt"] == [{"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        (asked("1+1"), None, "train.jsonl:41: model .* has no chat template"),
        (asked("1+1"), "{{ raise_exception('not so') }}", "train.jsonl:41: .*refuses these messages: not so"),
        (asked("1+1"), "{% if %}", "train.jsonl:41: the chat template of model .* is broken"),
        (
            asked(["1"]),
            TEMPLATE,
            r"train.jsonl:41: 'prompt' is neither messages nor token ids: messages\[0\] has content",
        ),
        (asked("1", tools=["add"]), TEMPLATE, r"train.jsonl:41: 'tools' \[0\] is no .*columns.tools"),
        ({"prompt": [1, 999], "answer": "2"}, None, "train.jsonl:41: the prompt has token id 999, and .* below "),
        ({"prompt": [1, True], "answer": "2"}, None, "train.jsonl:41: 'prompt' is neither messages nor token ids"),
        ({"prompt": [], "answer": "2"}, None, "train.jsonl:41: 'prompt' is no prompt: .*list of messages"),
    ],
)
def test_a_prompt_that_no_model_can_be_asked_is_refused_at_submission(
    tmp_path: Path, row: dict[str, object], template: str | None, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        submit(tmp_path, row, template=template)
    assert re.search(words, str(refused.value).replace("\n", " "))
