"""Where rows really are: files in place of patterns and names of the hub, and the rows that a user's function made.

    SourceConfig ──find_files──► files
                 ──transform───► python -m corral.workers.user_code transform, in users_root()
                                     each row ──the user's function──► row, or none ──► JSON lines in the cache

The function runs in a process of its own, which has no keys. What it returns is named by its content: nothing that is
kept can be of an older function.
"""

import contextlib
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from corral.experiments.config.data import DatasetConfig, SourceConfig
from corral.experiments.datasets.formats import cache_folder, find_files, name_of, unreadable
from corral.experiments.errors import ConfigError, ConfigProblem, KeyPath
from corral.experiments.inputs.users_process import users_process
from corral.experiments.trial.leftovers import temporary_folder
from corral.scheduling.errors import RuleError

_TRANSFORM_TIMEOUT_S = 3600.0


def locate_rows(config: DatasetConfig, path: KeyPath) -> DatasetConfig:
    """The same data set, with the files that its rows are in.

    Raises:
        ConfigError: if there are none, or a function of the user's fails on a row.
    """
    if not config.is_named:
        return config
    located: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for name, one in config.all_sources.items():
        try:
            located[name] = _located(one)
        except (OSError, ValueError) as error:
            place = (*path, "sources", name) if name else (*path, "hub" if one.hub else "path")
            problems.append(replace(unreadable(one, error), path=place))
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"sources": located} if config.sources else located[""])


def _located(config: SourceConfig) -> Any:
    """Another source, or what has to change of it where it is the data set itself."""
    changes: dict[str, Any] = {"files": find_files(config)}
    if config.transform is not None:
        changes = {"files": (_transformed(config, changes["files"]),), "transform": None, "rows": ":"}
    return changes if isinstance(config, DatasetConfig) else config.model_copy(update=changes)


def _transformed(config: SourceConfig, files: tuple[Path, ...]) -> Path:
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with temporary_folder("unfinished-", inside=cache) as folder:
        output, log = folder / "rows.jsonl", folder / "log"
        source = SourceConfig(files=files, rows=config.rows, transform=config.transform).model_dump_json()
        print(f"{name_of(config)}: {config.transform} makes its rows ...", file=sys.stderr, flush=True)
        with users_process("transform", source, str(output), log=log) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TRANSFORM_TIMEOUT_S)
            is_late = process.poll() is None
        if is_late:
            raise RuleError(
                f"{config.transform} has not been through {name_of(config)} within {_TRANSFORM_TIMEOUT_S:.0f} s",
                "take fewer rows, or write what it makes to a file once",
            )
        if process.returncode:
            words = log.read_bytes()[-2000:].decode(errors="replace").strip() or "it said nothing"
            raise RuleError(f"{config.transform} fails on {name_of(config)}: {words}", "mend it, and submit again")
        with output.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return output.replace(cache / f"{digest[:32]}.jsonl")
