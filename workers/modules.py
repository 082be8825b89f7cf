"""Modules are loaded without a search for garbage among what they consist of, and what they consist of is read once.

    with loading_modules(): import torch      searched for nothing meanwhile; what came is left alone afterwards, too

A library like torch makes millions of objects that all stay. Python would search them again and again, which takes a
third of the time until a worker has what it needs. And transformers reads all of its 2500 files of models to know what
they define, 45 MB, once for itself and once more for their package; each file is a question to a network file system.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


class _ModelsAreReadOnce(MetaPathFinder):
    """Finds nothing. Before transformers.models is loaded it lets that ask for what is known of its folder.

    The answers are kept by path, and the two ask for the folder by different ones.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "transformers.models":
            utils: Any = import_module("transformers.utils.import_utils")
            read = getattr(utils, "create_import_structure_from_path", None)
            if read is None:  # an optimisation: another version reads them as often as it likes
                return
            utils.create_import_structure_from_path = lambda file: read(Path(str(file).removesuffix("/__init__.py")))


@contextmanager
def loading_modules() -> Iterator[None]:
    """For the imports of a process, while it does nothing else; what is garbage by then stays for good."""
    gc.disable()
    finder = _ModelsAreReadOnce()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        gc.freeze()
        gc.enable()
