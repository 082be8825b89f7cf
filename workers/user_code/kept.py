"""The code that was kept with a trial, put before everything else that modules are looked for in."""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path


class ChangedCodeError(ValueError):
    """A kept file is not what it was when the trial was submitted or resumed."""


def use_kept_code(folder: Path, digests: Mapping[str, str]) -> None:
    """Guarantee: a trial runs the code that it was submitted with, wherever its workers start and whatever lies there.

    Args:
        digests: SHA-256 of the kept files, by name; nothing happens if there are none.

    Raises:
        ChangedCodeError: naming the file and the way out.
    """
    if not digests:
        return
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ChangedCodeError(
                f"{path} is not what the trial was started with; stop the trial, and rl-submit --resume tries the code "
                "as it is now and goes on with it"
            )
    # `python -m` looks in the current folder first: there may lie another version of a module, or one not kept.
    if sys.path and Path(sys.path[0] or os.curdir).absolute() == Path.cwd():
        sys.path.pop(0)
    sys.path.insert(0, str(folder))
