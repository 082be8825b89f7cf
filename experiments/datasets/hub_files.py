"""A process that asks the library `datasets` which files of a data set of the hub are in this user's cache.

    python -m corral.experiments.datasets.hub_files NAME SUBSET SPLIT      empty for none

It prints JSON: files, or what is wrong. A process of its own: the library reads once, when it is imported, whether
it may use the network; nobody else of us imports it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from corral.experiments.own_python import own_python

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
        raise ValueError(
            f"the library `datasets` has not found {name} in the cache within {_DEADLINE_S:.0f} s; "
            "write the split to a file once, with to_parquet, and name that in `path`"
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ValueError(f"the library `datasets` cannot be asked for {name}: {said[-1]}; pip install 'datasets>=5.2'")
    answer = json.loads(done.stdout.splitlines()[-1])
    if splits := answer.get("splits"):
        raise ValueError(f"{name} has several splits; set split to {' or '.join(splits)}")
    if "problem" in answer:
        asked = f"{name!r}, {subset!r}" if subset else repr(name)
        raise ValueError(
            f"{name} is not in this user's cache as it is asked for ({answer['problem']}), and nothing is downloaded "
            f"here; fetch it once where there is a network: python -c \"__import__('datasets').load_dataset({asked})\""
        )
    return tuple(map(Path, answer["files"]))


def find(name: str, subset: str | None, split: str | None) -> dict[str, Any]:
    """What the library says: `files`, or `splits` where none is asked for, or a `problem`."""
    import datasets

    try:
        found = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises what it likes
        said = str(error).strip().splitlines() or [type(error).__name__]
        return {"problem": said[0]}
    if isinstance(found, dict):
        return {"splits": list(found)}
    return {"files": [file["filename"] for file in found.cache_files]}


if __name__ == "__main__":
    print(json.dumps(find(sys.argv[1], sys.argv[2] or None, sys.argv[3] or None)))
