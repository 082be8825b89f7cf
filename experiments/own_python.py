"""How corral starts further processes of its own interpreter: never with the current folder on their module path.

`python -m` and `python -c` search the current folder first. That folder is where the user called a command: a file
queue.py or tokenizers.py there would be imported in place of the module of Python or of a library.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def own_python(*arguments: str) -> list[str]:
    """The command line of this interpreter with these arguments, such as "-m", "corral.workers"."""
    return [sys.executable, "-P", *arguments]


def python_path(environment: Mapping[str, str], *first: Path) -> dict[str, str]:
    """PYTHONPATH for such a process, as a variable of its environment: `first`, then the entries that the user set.

    An empty entry, which `PYTHONPATH=$PYTHONPATH:/lib` leaves where the variable was unset, means the current folder to
    Python; it is dropped. Other relative entries become absolute, so that they mean the same in every folder.
    """
    set_by_user = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    entries = [*map(str, first), *map(os.path.abspath, set_by_user)]
    return {"PYTHONPATH": os.pathsep.join(entries)} if entries or "PYTHONPATH" in environment else {}
