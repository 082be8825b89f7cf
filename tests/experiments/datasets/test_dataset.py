"""Rows of every format are the same rows; parts, splits, transforms and pairs of them."""

import csv
import json
import math
import sys
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from corral.experiments.config.data import Columns, DatasetConfig, MixedSourceConfig, RowKind
from corral.experiments.datasets import row_files
from corral.experiments.datasets.dataset import Dataset, Look, dataset_spec
from corral.experiments.datasets.row_files import fingerprint
from corral.experiments.datasets.row_parser import RowError, RowParser
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.located_rows import locate_rows
from corral.experiments.inputs.users_process import importing_from
from corral.experiments.prompts.messages import plain_messages
from corral.workers.data.prompts import PlannedPrompts

ROWS = [{"question": f"{number}+1?", "solution": str(number + 1)} for number in range(2500)]
COLUMNS: Columns = {"prompt": "question", "answer": "solution"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corral"


def write_lines(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_stream(path: Path) -> Path:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return path


def write_csv(path: Path) -> Path:
    path.write_text("question,solution\n" + "".join(f'"{row["question"]}",{row["solution"]}\n' for row in ROWS))
    return path


def write_shards(folder: Path) -> Path:
    folder.mkdir()
    for number, start in enumerate(range(0, len(ROWS), 1000)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[start : start + 1000]), folder / f"{number}.parquet")
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": write_lines,
    "rows.csv": write_csv,
    "stream.arrow": write_stream,
    "shards": write_shards,
    "shards/*.parquet": lambda path: write_shards(path.parent) / "*.parquet",
    "rows.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path) or path,
    "packed.arrow": lambda path: pyarrow.feather.write_feather(pyarrow.Table.from_pylist(ROWS), path) or path,
}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_every_format_are_the_same_and_are_read_by_their_names(tmp_path: Path, name: str) -> None:
    config = DatasetConfig(path=WRITERS[name](tmp_path / name), columns=COLUMNS, rows="990:1010")
    spec = dataset_spec(config, kind="answers")
    rows = Dataset.planned(type(spec).model_validate_json(spec.model_dump_json()))
    assert spec.num_rows == 20 and list(rows) == [str(number) for number in range(990, 1010)]
    assert [(row.prompt, row.answers, row.fields) for row in rows.values()] == [
        (one["question"], (one["solution"],), one) for one in ROWS[990:1010]
    ]


def test_what_datasets_has_saved_is_read_split_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS[:6])
    datasets.DatasetDict(train=whole.select([5, 1, 2]), test=whole.select([0])).save_to_disk(str(tmp_path / "saved"))
    config = DatasetConfig(path=tmp_path / "saved", split="train", columns=COLUMNS)
    rows = Dataset.open(config, kind="answers")
    assert [row.prompt for row in rows.values()] == ["5+1?", "1+1?", "2+1?"]
    with pytest.raises(ConfigError, match="has no split 'trian'.*\n.*set split to train"):
        Dataset.open(config.model_copy(update={"split": "trian"}), kind="answers")
    with pytest.raises(ConfigError, match="has 2 splits.*\n.*set split to train or test"):
        Dataset.open(config.model_copy(update={"split": None}), kind="answers")


@pytest.mark.parametrize("name", ["rows.jsonl", "shards", "shards/*.parquet"])
def test_a_split_of_what_has_none_is_refused_and_more_held_out_files_need_none(tmp_path: Path, name: str) -> None:
    config = DatasetConfig(path=WRITERS[name](tmp_path / name), split="test", columns=COLUMNS)
    with pytest.raises(ConfigError, match="has no splits, and split asks for 'test'.*\n.*remove split"):
        Dataset.open(config, kind="answers")
    assert config.path is not None and len(Dataset.open(config.of_file(config.path), kind="answers")) == len(ROWS)


def tool_rows() -> list[dict[str, Any]]:
    """Conversations whose calls, and tools whose parameters, have different keys."""
    rows = []
    for name, given in (("weather", {"city": "Rome"}), ("add", {"a": 1, "b": {"c": [2, None]}}), ("now", {})):
        schema = {"type": "object", "properties": {key: {"type": "string", "enum": [key]} for key in given}}
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": given}}
        called = {"role": "assistant", "tool_calls": [call]}
        messages = [{"role": "user", "content": "q"}, called, {"role": "tool", "content": "r"}]
        tools = [{"type": "function", "function": {"name": name, "parameters": schema}}]
        rows.append({"messages": messages, "tools": tools})
    return rows


def write_tools(path: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """CSV has JSON text for lists; `datasets` has its type Json for what differs from row to row."""
    if form == "lines":
        return write_lines(path, rows)
    if form == "csv":
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["messages", "tools"])
            writer.writeheader()
            writer.writerows({key: json.dumps(value) for key, value in row.items()} for row in rows)
        return path.with_suffix(".csv")
    if form.startswith("datasets"):
        saved = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        saved.to_parquet(str(path)) if form == "datasets parquet" else saved.save_to_disk(str(path))
        return path
    if form in ("text", "texts"):
        wrap: Callable[[Any], Any] = json.dumps if form == "text" else lambda each: [json.dumps(one) for one in each]
        rows = [{key: wrap(value) for key, value in row.items()} for row in rows]
    table = pyarrow.Table.from_pylist(rows)
    if form == "stream":
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif form == "arrow":
        pyarrow.feather.write_feather(table, path)
    else:
        pyarrow.parquet.write_table(table, path)
    return path


@pytest.mark.parametrize(
    "form", ["lines", "csv", "parquet", "stream", "arrow", "datasets parquet", "datasets folder", "text", "texts"]
)
def test_calls_and_schemas_of_a_row_are_the_same_in_every_format(tmp_path: Path, form: str) -> None:
    written = tool_rows()
    if form in ("parquet", "stream", "arrow"):  # a struct has one kind of value per field
        written = [row for row in written if row["tools"][0]["function"]["name"] != "now"]
    path = write_tools(tmp_path / "rows", form, written)
    rows = list(Dataset.open(DatasetConfig(path=path), kind="conversations").values())
    assert len(rows) == len(written)
    for row, expected in zip(rows, written, strict=True):
        (answer,) = row.answers
        assert answer == plain_messages(expected["messages"])
        assert list(row.tools) == expected["tools"]
    path = write_tools(tmp_path / "prompts", form, written)
    columns: Columns = {"prompt": "messages"}
    for row, expected in zip(
        Dataset.open(DatasetConfig(path=path, columns=columns), kind="prompts").values(), written, strict=True
    ):
        assert not isinstance(row.prompt, str) and plain_messages(row.prompt) == plain_messages(expected["messages"])


def test_fields_of_a_table_for_rewards_have_no_keys_that_their_row_does_not_have(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "tests": {"a": 1}, "maps": {"x": 1}}, {"prompt": "q", "tests": {"b": [{"c": 2}, {"d": 3}]}}]
    table = pyarrow.Table.from_pylist(rows)
    table = table.set_column(
        2, "maps", pyarrow.array([[("x", 1)], None], type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    read = [row.fields for row in Dataset.open(DatasetConfig(path=tmp_path / "rows.parquet"), kind="prompts").values()]
    assert read == [rows[0], {**rows[1], "maps": None}]
    where = DatasetConfig(path=tmp_path / "rows.parquet", where="len(tests) == 1")
    assert len(Dataset.open(where, kind="prompts")) == 2


@pytest.mark.parametrize("answer", [["2", "two"], {"value": 2}, True, []])
def test_an_answer_that_only_rewards_read_may_be_anything(tmp_path: Path, answer: object) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": answer}])
    (row,) = Dataset.open(DatasetConfig(path=path), kind="answers").values()
    assert row.fields["answer"] == answer and row.answers == (json.dumps(answer),)
    with pytest.raises(ValueError, match="'answer' "):
        list(Dataset.open(DatasetConfig(path=path), kind="conversations").values())


def test_an_answer_that_is_a_number_has_no_exponent_whatever_the_format(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,0.00001\n2,10000000000000000\n")
    rows = [{"prompt": "1", "answer": 1e-05}, {"prompt": "2", "answer": 1e16}]
    for path in (write_lines(tmp_path / "rows.jsonl", rows), tmp_path / "rows.csv"):
        data = Dataset.open(DatasetConfig(path=path), kind="conversations")
        assert [row.answers for row in data.values()] == [("0.00001",), ("10000000000000000",)]


def test_what_json_has_no_word_for_is_text_in_rows_and_conditions(tmp_path: Path) -> None:
    """Rows are JSON to rewards and agents, which a date would end."""
    times = pyarrow.array([datetime(2024, 5, 1, 12), datetime(2023, 5, 1)], type=pyarrow.timestamp("ns"))
    row = {"on": [date(2024, 5, 1)] * 2, "cost": [Decimal("1.50")] * 2, "image": [b"\x00", None], "at": times}
    table = pyarrow.table({"question": ["1+1?", "1+2?"], **row})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = Dataset.open(
        DatasetConfig(path=tmp_path / "rows.parquet", columns=COLUMNS, where="at >= '2024'"), kind="prompts"
    )
    expected = {"on": "2024-05-01", "cost": "1.50", "image": "AA==", "at": "2024-05-01T12:00:00"}
    assert {name: one.fields for name, one in rows.items()} == {"0": {"question": "1+1?", **expected}}


def test_categories_of_parquet_are_read_though_each_part_has_its_own(tmp_path: Path) -> None:
    parts = [
        pyarrow.table({"question": ["1+1?"] * 2, "topic": pyarrow.array(topics).dictionary_encode()})
        for topics in (["sums", "more"], ["code", "sums"])
    ]
    with pyarrow.parquet.ParquetWriter(tmp_path / "rows.parquet", parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    rows = Dataset.open(DatasetConfig(path=tmp_path / "rows.parquet", columns=COLUMNS), kind="prompts")
    assert [row.fields["topic"] for row in rows.values()] == ["sums", "more", "code", "sums"]


def test_a_byte_order_mark_is_no_part_of_a_row_and_hidden_files_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8-sig")
    (folder / "b.jsonl").write_text("", encoding="utf-8-sig")
    (folder / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    rows = Dataset.open(DatasetConfig(path=folder, columns=COLUMNS), kind="answers")
    assert [row.fields for row in rows.values()] == ROWS[:1]


def test_text_that_is_not_utf_8_is_refused_with_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes("question,solution\nä?,1\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="rows.csv cannot be read as CSV: .*utf-8.*\n.*write it anew, in UTF-8"):
        Dataset.open(DatasetConfig(path=tmp_path / "rows.csv", columns=COLUMNS), kind="answers")


def test_a_data_set_of_the_hub_that_is_not_in_the_cache_is_refused_with_the_command_that_fetches_it() -> None:
    pytest.importorskip("datasets")
    words = r"(?s)not in this user's cache.*fetch it once.*load_dataset\('nobody/nothing', 'main'\)"
    with pytest.raises(ConfigError, match=words) as refused:
        locate_rows(DatasetConfig(hub="nobody/nothing", subset="main"), ("dataset",))
    assert refused.value.problems[0].path == ("dataset", "hub")


def test_of_many_rows_some_from_everywhere_are_looked_at(tmp_path: Path) -> None:
    rows = [*ROWS[:2000], {"question": "no answer"}, *ROWS[2001:]]
    dataset = Dataset.open(
        DatasetConfig(path=write_lines(tmp_path / "rows.jsonl", rows), columns=COLUMNS), kind="answers"
    )
    look = Look(dataset, most=100)
    assert [number for _, number, _ in look] == [number for number in range(0, 2500, 25) if number != 2000]
    assert (look.num_rows, look.is_whole, len(look.problems)) == (2500, False, 1)
    assert "rows.jsonl:2001: row has no answer (no field 'solution')" in look.problems[0].message
    with pytest.raises(ValueError, match="row has no answer"):
        dataset["2000"]
    assert dataset["1999"].answers == ("2000",)


def test_a_change_of_a_large_file_is_noticed_where_a_block_or_its_size_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_WHOLE_BYTES", 1000)
    path = write_lines(tmp_path / "rows.jsonl")
    before = fingerprint([path])
    content = path.read_bytes()
    for changed in (content[:-2] + b" \n", content + b"\n", b" " + content[1:]):
        path.write_bytes(changed)
        assert fingerprint([path]) != before
    path.write_bytes(content)
    assert fingerprint([path]) == before


USERS = """
def even(row):
    number = int(row["question"].split("+")[0])
    if number == 13:
        raise KeyError("thirteen")
    return {"prompt": row["question"], "answer": row["solution"], "number": number} if number % 2 == 0 else None
"""


def test_a_function_of_the_users_makes_rows_of_rows_and_leaves_some_out(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "my_rows.py").write_text(USERS)
    path = write_lines(tmp_path / "rows.jsonl")
    config = DatasetConfig(path=path, transform="my_rows:even", rows=":10")
    with importing_from(tmp_path):
        located = locate_rows(config, ("dataset",))
        assert located == located.model_copy(update=locate_rows(located, ("dataset",)).model_dump(include={"files"}))
        with pytest.raises(ConfigError, match=r"rows.jsonl:14: KeyError: 'thirteen' \(my_rows.py:5\)"):
            locate_rows(config.model_copy(update={"rows": "10:20"}), ("dataset",))
    assert located.files[0].parent == cache and "my_rows" not in sys.modules
    rows = Dataset.open(located, kind="answers")
    assert [(row.prompt, row.fields["number"]) for row in rows.values()] == [(f"{n}+1?", n) for n in range(0, 10, 2)]


LEVELS = [{"prompt": "1+1=", "level": n % 5, "topic": "ab"[n % 2]} for n in range(10)]


def named(path: Path, **config: Any) -> list[str]:
    spec = dataset_spec(DatasetConfig(path=path, **config), kind="prompts")
    names = list(Dataset.planned(type(spec).model_validate_json(spec.model_dump_json())))
    assert spec.num_rows == len(names)
    return names


@pytest.mark.parametrize("form", ["lines", "arrow"])
def test_rows_are_taken_by_a_condition_on_their_fields(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows"
    if form == "lines":
        write_lines(path, LEVELS)
    else:
        pyarrow.feather.write_feather(pyarrow.Table.from_pylist(LEVELS), path)
    for where in (
        "level <= 2 and topic != 'b'",
        "not level > 2 and topic in ['a', 'c']",
        "0 <= level < 3 and topic is not None and topic == 'a'",
    ):
        assert named(path, where=where, rows="1:") == ["2", "6"]
    assert named(path, where="len(prompt) > 3 and not len(topic) > 1 or level == -1", rows=":2") == ["0", "1"]
    refused = {
        "levl <= 2": r"(?s)rows.*1: where 'levl <= 2' fails: this row has no 'levl'.*did you mean 'level'",
        "levl == 2": r"(?s)rows.*10: no row up to here has a field 'levl'.*did you mean 'level'",
        "level <= '2'": "compare numbers with numbers",
        "level > 4": "where takes 0 of the",
    }
    for where, words in refused.items():
        look = Look(Dataset.open(DatasetConfig(path=path, where=where), kind="prompts"))
        with pytest.raises(ConfigError, match=words):
            look.check()


def test_a_field_that_only_some_rows_have_is_none_in_the_others(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "level": 1}])
    assert named(path, where="level is not None and level < 2") == ["1"]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: where .*\n.*begin with: level is not None and"):
        named(path, where="level < 2")


@pytest.mark.parametrize("form", ["lines", "arrow"])
def test_a_curriculum_goes_by_the_numbers_of_a_field(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows"
    if form == "lines":
        write_lines(path, LEVELS)
    else:
        pyarrow.feather.write_feather(pyarrow.Table.from_pylist(LEVELS), path)
    config = DatasetConfig(path=path, order="level", where="topic == 'a' and level < 5", shuffle=False)
    prompts = PlannedPrompts.load(dataset_spec(config, kind="prompts"))
    order = ["0", "6", "2", "8", "4"]
    assert list(prompts.uids(seed=1, num_epochs=2)) == [f"{epoch}:{row}" for epoch in range(2) for row in order]
    for field, got in {"topic": "a", "lvl": "null"}.items():
        with pytest.raises(ConfigError, match=rf"rows.*1: order '{field}' goes by numbers, got {got}"):
            dataset_spec(config.model_copy(update={"order": field, "where": None}), kind="prompts")


def parsed(folder: Path, kind: RowKind, **fields: Any) -> Any:
    rows = Dataset.open(DatasetConfig(path=write_lines(folder / "one.jsonl", [fields])), kind=kind)
    row = rows["0"]
    return row.prompt, list(row.answers)


def test_pairs_have_their_prompt_apart_or_begin_alike(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "q"}
    good, bad = ({"role": "assistant", "content": text} for text in "ab")
    forms: list[tuple[dict[str, Any], Any]] = [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ("q", ["a", "b"])),
        ({"prompt": [asked], "chosen": [good], "rejected": [bad]}, ([asked], [[good], [bad]])),
        ({"prompt": [asked], "chosen": "a", "rejected": "b"}, ([asked], ["a", "b"])),
        ({"chosen": [asked, good], "rejected": [asked, bad]}, ([asked], [[good], [bad]])),
        ({"chosen": "Human: hi Bot: you", "rejected": "Human: hi Bot: no"}, ("Human: hi Bot:", [" you", " no"])),
        (
            {"chosen": "Human: 12+34? Bot: 46", "rejected": "Human: 12+34? Bot: 45"},
            ("Human: 12+34? Bot:", [" 46", " 45"]),
        ),
        ({"chosen": "hi\nfour", "rejected": "hi\nfour or five"}, ("hi", ["\nfour", "\nfour or five"])),
    ]
    assert [parsed(tmp_path, "preferences", **fields) for fields, _ in forms] == [form for _, form in forms]
    with pytest.raises(ValueError, match="no beginning in common"):
        parsed(tmp_path, "preferences", chosen="ab", rejected="ac")
    with pytest.raises(ValueError, match="one answer is the beginning of the other one"):
        parsed(tmp_path, "preferences", chosen=[asked, good], rejected=[asked, good, asked])
    with pytest.raises(ValueError, match="begins with the prompt, which would be there twice; .*columns.prompt"):
        parsed(tmp_path, "preferences", prompt=[asked], chosen=[asked, good], rejected=[asked, bad])


def test_teachers_read_a_prompt_of_any_form_or_that_of_the_policy(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1+1? It is 2."}]
    rows = [{"prompt": "1+1?", "told": told} for told in (asked, "2=1+1?", [1, 2], None)] + [
        {"prompt": "a", "told": {}}
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    columns: Columns = {"teacher_prompt": "told"}
    read = Dataset.open(DatasetConfig(path=path, columns=columns), kind="prompts")
    assert [read[str(number)].teacher_prompt for number in range(4)] == [asked, "2=1+1?", [1, 2], "1+1?"]
    with pytest.raises(ValueError, match="'told' is no prompt"):
        read["4"]


def test_a_row_may_have_a_temperature_of_its_own() -> None:
    named = RowParser({"temperature": "warmth"}, "prompts")

    def read(parser: RowParser, **more: Any) -> float | None:
        return parser.parse({"prompt": "q", **more}, row_id="0", place="", source="").temperature

    given: list[Any] = [0.01, 1, 10.0, None]
    assert [read(named, warmth=value) for value in given] == [0.01, 1.0, 10.0, None] and read(named) is None
    for value in (0, -0.5, "0.7", True, [1.0], 10.5, math.inf, math.nan, 10**400):
        with pytest.raises(RowError, match="'warmth' must be a temperature, a number from 0.01 to 10, got "):
            read(named, warmth=value)
        assert read(RowParser({}, "prompts"), warmth=value) is None


def test_a_number_that_is_none_is_no_answer(tmp_path: Path) -> None:
    """As pandas has it where one is missing."""
    table = pyarrow.table({"question": ["1+1?", "1+2?"], "solution": [2.0, float("nan")]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    rows = Dataset.open(DatasetConfig(path=tmp_path / "rows.parquet", columns=COLUMNS), kind="answers")
    assert rows["0"].answers == ("2.0",)
    with pytest.raises(ValueError, match="'solution' must be text or a number, got nan"):
        rows["1"]


def test_rows_of_several_sources_have_their_names_before_their_own(tmp_path: Path) -> None:
    paths = {name: write_lines(tmp_path / f"{name}.jsonl", ROWS[:2]) for name in "ab"}
    sources = {name: MixedSourceConfig(path=path, columns=COLUMNS) for name, path in paths.items()}
    spec = dataset_spec(locate_rows(DatasetConfig(sources=sources), ("dataset",)), kind="answers")
    rows = Dataset.planned(spec)
    assert list(rows) == ["a/0", "a/1", "b/0", "b/1"] and spec.num_rows == 4
    expected = [("a", "0+1?"), ("a", "1+1?"), ("b", "0+1?"), ("b", "1+1?")]
    assert [(row.source, row.prompt) for row in rows.values()] == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "a", "hub": "b"}, "both path and hub"),
        ({"sources": {"a": {"weight": 1}}}, "sources.a has neither path nor hub"),
        ({"path": "a", "sources": {"a": {"path": "a"}}}, "path and sources both say"),
        ({"path": "a", "subset": "main"}, "only data sets of `hub` have some"),
        ({"path": "a", "rows": "5"}, "rows"),
        ({"hub": "a", "split": "train[:10%]"}, r"split 'train\[:10%\]' is a part of one; name the split"),
        ({"path": "a", "where": "level <"}, "'level <' is no condition .*; a condition has names of fields"),
        ({"path": "a", "where": "1 < 2"}, "'1 < 2' reads no field of a row"),
        ({"path": "a", "where": "open(level)"}, r"'open\(level\)' cannot be asked of a row"),
        ({"path": "a", "where": "level.real > 1"}, "'level.real' cannot be asked of a row"),
        ({"path": "a", "where": "level ** 9 > 1"}, r"'level \*\* 9' cannot be asked of a row"),
        ({"path": "a", "where": "[x for x in level]"}, "cannot be asked of a row"),
        ({"path": "a", "where": "level" + " " * 1000}, "at most 1000 characters"),
        ({"sources": {"a/b": {"path": "a"}}}, "is no name of a metric"),
    ],
)
def test_a_source_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DatasetConfig.model_validate(fields)
