"""Lets a test decide what becomes of an SGLang server's loads; each of its processes runs this file as it starts.

A test writes it into the file N, of generation_server/N, of the folder that CORRAL_TEST_LOADS names:

    once        the next load cannot read its files                             the file goes with it
    for good    no load can, but of what was read last                          as long as the file is there
    never       the next load does not end                                      the file goes with it

SGLang looks for the files of a model before it reads them, and Python says so to whoever listens.
"""

import errno
import importlib
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).parent)


class Loads:
    """Of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_read = ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "glob.glob" and str(arguments[0]).endswith("*.safetensors"):
            self._load(os.path.dirname(arguments[0]))

    def _load(self, directory: str) -> None:
        [server] = re.findall(r"sglang-(\d+)\.yaml", " ".join(sys.argv))
        order = self._folder / server
        said = order.read_text() if order.exists() else ""
        if said in ("once", "never"):
            order.unlink()
        if said == "never":
            threading.Event().wait()
        if said == "once" or (said == "for good" and directory != self._last_read):
            raise OSError(errno.EIO, "the test does not let it be read", directory)
        self._last_read = directory


sys.addaudithook(Loads(Path(os.environ["CORRAL_TEST_LOADS"])))
sys.path.remove(_HERE)
sys.modules.pop("sitecustomize")
importlib.import_module("sitecustomize")  # that of the next folder on the path
