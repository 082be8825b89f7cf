"""A folder full of files named like modules of Python and of what is installed: none of them may be imported."""

import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

WORDS = "was imported from the current folder"


def write_misleading_modules(folder: Path) -> None:
    """Every one of them ends the process that imports it."""
    installed = {name for name in packages_distributions() if name.isidentifier() and not name.startswith("_")}
    for name in filter(find_spec, (sys.stdlib_module_names | installed) - {"corral"}):  # none that is of other systems
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} {WORDS}')\n")
