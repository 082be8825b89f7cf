"""Everything that is needed to understand a failure elsewhere, in one file of its owner's.

plan, configuration, layout ─┐                              ┌─ secrets of the trial, values of environment variables,
journal, metrics, trial log ─┼─ last bytes of each ──scrub──┤  this user's own keys
logs, control ───────────────┤                              └─ rows and answers in what workers print
doctor, status, SLURM ───────┘                                        └──► BUNDLE.tar.gz, mode 0600

Guarantee: no secret that the trial or this command knows is in it. Prompts and answers are left out where corral writes
them; what a user's own code prints or raises stands there as it is, but for what looks like a key.
"""

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from corral.experiments.errors import ConfigError
from corral.experiments.trial.directory import TrialDirectory, read_tail
from corral.experiments.trial.secrets import Secret, SecretFilter, TrialSecrets

_MAX_BYTES: Mapping[str, int] = {".log": 1 << 18, ".jsonl": 16 << 20}
_MAX_OTHER_BYTES = 1 << 20
_MAX_SAMPLES_BYTES = 64 << 20
_FILES = ("plan.json", "config.yaml", "layout.json", "trial.sbatch", "events.jsonl", "metrics.jsonl")
_FOLDERS = ("log", "control", "logs")
_SHORTEST_SECRET = 8  # of an environment variable's values: shorter ones are numbers and names that stand in any text
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# As programs print them: a variable with its value, and what services mark as theirs.
_PRINTED = re.compile(
    r"""((?:KEY|TOKEN|SECRET|PASSW|CREDENTIAL)[A-Z0-9_]{0,30}[\\'"]{0,3}\s?[=:][\s\\'"]{0,4}|\b[Bb]earer )"""
    r"""[^\s\\'",;}]{8,}|\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gh[a-z]_\w{30,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16})"""
)
_JSON_OBJECT = re.compile(rb'\{\s*\\*".*')  # as rows are shown in warnings, to the end of the line


def write_bundle(directory: TrialDirectory, path: Path, *, others: Mapping[str, bytes], with_texts: bool) -> int:
    """Packs what there is of a trial; how many files.

    Args:
        others: further files by name.
        with_texts: whether prompts and answers are packed, too.

    Raises:
        ConfigError: if the file is there already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError.of(f"--bundle {path} cannot be written: {error.strerror}", hint="name a new file") from error
    scrub = SecretFilter(_secrets(directory)).scrub
    files = {**dict(_files_of(directory, with_texts=with_texts)), **others, "versions.json": _versions()}
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in sorted(files.items()):
            if not name.endswith(".parquet"):
                content = _PRINTED.sub(r"\1***", scrub(content.decode(errors="replace"))).encode()
            member = tarfile.TarInfo(f"{directory.path.name}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))
    return len(files)


def _files_of(directory: TrialDirectory, *, with_texts: bool) -> Iterator[tuple[str, bytes]]:
    root = directory.path
    found = [root / name for name in _FILES]
    found += [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in found:
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                content = read_tail(path, _MAX_BYTES.get(path.suffix, _MAX_OTHER_BYTES))
                if not with_texts and path.suffix == ".log":
                    content = _JSON_OBJECT.sub(b"{...}", content)
                elif not with_texts and (path.name == "events.jsonl" or path.parent.name == "control"):
                    content = b"\n".join(map(_without_rows, content.split(b"\n")))
                yield str(path.relative_to(root)), content
    if with_texts:
        left = _MAX_SAMPLES_BYTES
        for path in sorted(directory.samples_path.glob("*.parquet"), reverse=True):
            with suppress(OSError):
                left -= path.stat().st_size
                if left >= 0:
                    yield str(path.relative_to(root)), path.read_bytes()


def _without_rows(record: bytes) -> bytes:
    """A record as JSON, without what its texts show of rows."""

    def hidden(value: Any) -> Any:
        match value:
            case str():
                return _JSON_OBJECT.sub(b"{...}", value.encode(errors="replace")).decode()
            case dict():
                return {key: hidden(one) for key, one in value.items()}
            case list():
                return list(map(hidden, value))
        return value

    with suppress(ValueError):
        return json.dumps(hidden(json.loads(record))).encode()
    return record


def _secrets(directory: TrialDirectory) -> list[Secret]:
    """Each as it is, and as it stands in JSON."""
    found = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    with suppress(OSError, ValueError):
        found += _environment_values(json.loads(directory.plan_path.read_bytes()))
    found = [value for value in found if len(value) >= _SHORTEST_SECRET]
    with suppress(OSError, ValueError):  # those of a trial that is over are gone
        found += [secret.reveal() for secret in TrialSecrets.load(directory.secrets_path).values()]
    return [Secret(text) for value in found for text in (value, json.dumps(value)[1:-1])]


def _environment_values(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _environment_values(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == "env_vars" and isinstance(one, dict):
                yield from map(str, one.values())
            else:
                yield from _environment_values(one)


def _versions() -> bytes:
    packages = {one.name: one.version for one in distributions()}
    return json.dumps({"python": platform.python_version(), "system": platform.platform(), **packages}).encode()
