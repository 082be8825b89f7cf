"""Which files the rows of a source are in, and what has to be done before they can be read in place.

    path ─┬─ a file, a pattern, a folder of files of one kind ───┬─ JSON lines, Arrow ───────────────► RowFiles
          └─ a folder that `datasets` has saved, its split ──────┤
    hub ──── what `datasets` finds in the user's cache ──────────┴─ Parquet, CSV ──once──► Arrow, in the cache

A format is known by the first bytes, CSV by its name. Nothing here asks the network.
"""

import csv
import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.config.data import DatasetConfig, SourceConfig
from corral.experiments.datasets.row_files import ArrowRows, JsonLines, RowFile, RowFiles
from corral.experiments.errors import ConfigProblem, closest, display_path
from corral.experiments.own_python import own_python
from corral.experiments.regular_file import open_regular, read_regular
from corral.scheduling.errors import RuleError, message_and_hint

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_BATCH = 1000  # what one row costs that is read alone is not more than its batch, where that is compressed
_CSV_BLOCK_BYTES = 4 << 20
_KINDS = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow"}
_OTHER_KINDS = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive",
}
_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv")
_SPLITS, _SAVED = "dataset_dict.json", "state.json"


# A process that asks the library `datasets` which files of a data set of the hub are in this user's cache.
#
#     python -m corral.experiments.datasets.formats NAME SUBSET SPLIT      empty for none
#
# It prints JSON: files, or what is wrong. A process of its own: the library reads once, when it is imported, whether
# it may use the network; nobody else of us imports it.

_DEADLINE_S = 600.0  # the library may have to write Parquet of its cache down as Arrow
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def files_in_cache(name: str, *, subset: str | None, split: str | None) -> tuple[Path, ...]:
    """The Arrow files of a split. Nothing is downloaded.

    Raises:
        ValueError: if they are not there, with the way out after a semicolon.
    """
    command = own_python("-m", __name__, name, subset or "", split or "")
    try:
        done = subprocess.run(
            command, env={**os.environ, **_OFFLINE}, capture_output=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuleError(
            f"the library `datasets` has not found {name} in the cache within {_DEADLINE_S:.0f} s",
            "write the split to a file once, with to_parquet, and name that in `path`",
        ) from error
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuleError(f"the library `datasets` cannot be asked for {name}: {text[-1]}", "pip install 'datasets>=5.2'")
    answer = json.loads(done.stdout.splitlines()[-1])
    if splits := answer.get("splits"):
        raise RuleError(f"{name} has several splits", f"set split to {' or '.join(splits)}")
    if "problem" in answer:
        asked = f"{name!r}, {subset!r}" if subset else repr(name)
        raise RuleError(
            f"{name} is not in this user's cache as it is asked for ({answer['problem']}), and nothing is downloaded "
            f"here",
            f"fetch it once where there is a network: python -c \"__import__('datasets').load_dataset({asked})\"",
        )
    return tuple(map(Path, answer["files"]))


def find(name: str, subset: str | None, split: str | None) -> dict[str, Any]:
    """What the library says: `files`, or `splits` where none is asked for, or a `problem`."""
    import datasets

    try:
        found = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises what it likes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"problem": lines[0]}
    if isinstance(found, dict):
        return {"splits": list(found)}
    return {"files": [file["filename"] for file in found.cache_files]}


if __name__ == "__main__":
    print(json.dumps(find(sys.argv[1], sys.argv[2] or None, sys.argv[3] or None)))


def name_of(config: SourceConfig) -> str:
    """The name of a source for people."""
    if isinstance(config, DatasetConfig) and config.sources:
        return " + ".join(map(name_of, config.sources.values()))
    return display_path(config.path) if config.path is not None else config.hub or "(tasks of the environment)"


def find_files(config: SourceConfig) -> tuple[Path, ...]:
    """The files of a source, in their order.

    Raises:
        OSError: if they cannot be looked for.
        ValueError: if there are none, with the way out after a semicolon.
    """
    if config.files:
        return config.files
    if config.hub is not None:
        return files_in_cache(config.hub, subset=config.subset, split=config.split)
    path = config.path
    if path is None:
        raise RuleError("no file is named", "name one in `path`, or a data set of the hub in `hub`")
    is_pattern = any(mark in path.name for mark in "*?[") and not path.exists()
    if config.split is not None and (is_pattern or path.exists()) and not (path / _SPLITS).exists():
        way = "remove split, or let path be the pattern of its files, such as data/train-*.parquet"
        raise RuleError(f"{display_path(path)} has no splits, and split asks for {config.split!r}", way)
    if is_pattern:
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise RuleError(f"no file is called {display_path(path)}", "check the pattern")
        return tuple(found)
    if not path.is_dir():
        return (path,)
    return _saved_by_datasets(path, config.split) or _in_folder(path)


def unreadable(config: SourceConfig, error: OSError | ValueError) -> ConfigProblem:
    """The error of a source whose files cannot be found, or read."""
    if not isinstance(error, OSError):
        return ConfigProblem(*message_and_hint(error))
    named = display_path(Path(error.filename)) if error.filename else name_of(config)
    reason = (error.strerror or str(error)).lower()
    hint = "check the path; in an experiment file it is relative to that file's folder"
    return ConfigProblem(f"cannot read dataset {named}: {reason}", hint)


def open_rows(files: tuple[Path, ...], content: bytes | None = None) -> RowFiles:
    """The rows of files of one kind.

    Args:
        content: JSON lines that the one file is going to hold, where it does not yet.

    Raises:
        OSError: if one cannot be read.
        ValueError: if they are of no kind that is known, or of two; with the way out after a semicolon.
    """
    if content is not None:
        return RowFiles({display_path(file): JsonLines(content) for file in files}, line_word=":")
    kinds = {file: _kind_of(file) for file in files}
    if len(found := sorted(set(kinds.values()))) > 1:
        raise RuleError(f"{' and '.join(found)} stand side by side in {files[0].parent}", "name those of one kind")
    opened: dict[str, RowFile] = {}
    for file, kind in kinds.items():
        if kind == "JSON lines":
            opened[display_path(file)] = JsonLines(file)
        else:
            opened[display_path(file)] = ArrowRows(file if kind == "Arrow" else _as_arrow(file, kind))
    return RowFiles(opened, line_word=":" if found == ["JSON lines"] else ", row ")


def cache_folder() -> Path:
    """Where rows are kept that had to be written anew: beside those of `datasets`, whose variables say where."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME", "") or cache / "huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE", "") or home / "datasets").expanduser() / "corral"


def kept_once(name: str, write: Callable[[Path], None]) -> Path:
    """A file of the cache, written if it is missing; a later process finds the whole file, or writes the same.

    Args:
        name: that says all that it follows from.
    """
    path = cache_folder() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{name}.{secrets.token_hex(4)}")
        try:
            write(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _kind_of(file: Path) -> str:
    with open_regular(file) as stream:
        first = stream.read(16)
    for beginning, kind in _KINDS.items():
        if first.startswith(beginning):
            return kind
    for beginning, kind in _OTHER_KINDS.items():
        if first.startswith(beginning):
            raise RuleError(f"{display_path(file)} is {kind}", "unpack it")
    if first.partition(b"\n")[0].strip() == b"[":
        raise RuleError(f"{display_path(file)} is a JSON array", "write one JSON object a line: jq -c '.[]' FILE")
    return "CSV" if file.suffix in (".csv", ".tsv") else "JSON lines"


def _saved_by_datasets(folder: Path, split: str | None) -> tuple[Path, ...]:
    """Those of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`; none in another folder."""
    if (folder / _SPLITS).exists():
        splits = json.loads(read_regular(folder / _SPLITS))["splits"]
        if split is None or split not in splits:
            near = closest(split, splits) if split else None
            asked = f"has no split {split!r}" if split else f"has {len(splits)} splits"
            ways = f"set split to {near or ' or '.join(splits)}, or let path name the folder of one"
            raise RuleError(f"{display_path(folder)} {asked}", ways)
        folder = folder / split
    if not (folder / _SAVED).exists():
        return ()
    return tuple(folder / one["filename"] for one in json.loads(read_regular(folder / _SAVED))["_data_files"])


def _in_folder(folder: Path) -> tuple[Path, ...]:
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = tuple(path for path in paths if path.suffix in _SUFFIXES)
    if not found:
        raise RuleError(f"{display_path(folder)} has no file that ends with {', '.join(_SUFFIXES)}", "name another one")
    return found


def _as_arrow(file: Path, kind: str) -> Path:
    status = file.stat()
    known = f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {kind}"
    name = hashlib.sha256(known.encode()).hexdigest()[:32] + ".arrow"
    return kept_once(name, lambda path: _write_arrow(path, file, kind))


def _write_arrow(path: Path, file: Path, kind: str) -> None:
    import pyarrow.ipc

    try:
        schema, batches = _parquet_batches(file) if kind == "Parquet" else _csv_batches(file)
        # A stream: in the other form of Arrow, all parts of a column of categories would have to have the same ones.
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_table(pyarrow.Table.from_batches([batch]), max_chunksize=_ROWS_PER_BATCH)
    except (pyarrow.ArrowException, UnicodeError) as error:
        way = "write it anew, in UTF-8" if isinstance(error, UnicodeError) else "write it anew"
        raise RuleError(f"{display_path(file)} cannot be read as {kind}: {error}", way) from error


def _parquet_batches(file: Path) -> "tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]":
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file, memory_map=True)
    return parquet.schema_arrow, parquet.iter_batches(batch_size=_ROWS_PER_BATCH)


def _csv_batches(file: Path) -> "tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]":
    """Every value is text, as it is in the file: a guess would fail at the first row that is otherwise."""
    import pyarrow.csv

    delimiter = "\t" if file.suffix == ".tsv" else ","
    with file.open(newline="", encoding="utf-8-sig") as stream:
        names = next(csv.reader(stream, delimiter=delimiter), [])
    reader = pyarrow.csv.open_csv(
        file,
        read_options=pyarrow.csv.ReadOptions(block_size=_CSV_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        ),
    )
    return reader.schema, iter(reader)
