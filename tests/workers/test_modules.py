"""While modules are loaded nothing is searched for garbage; what they consist of is left alone afterwards, too."""

import gc
import subprocess
import sys

import pytest

from corral.workers.modules import loading_modules


def test_what_is_loaded_is_not_searched_and_what_comes_later_is() -> None:
    before = gc.get_freeze_count()
    with loading_modules():
        assert not gc.isenabled()
        loaded = [[] for _ in range(3 * gc.get_threshold()[0])]
    assert gc.isenabled() and gc.get_freeze_count() > before + len(loaded)
    later: list[object] = []
    later.append(later)
    assert any(each is later for each in gc.get_objects()) and not any(each is loaded[0] for each in gc.get_objects())


def test_a_module_that_cannot_be_loaded_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), loading_modules():
        import corral.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_transformers_reads_the_files_of_its_models_once() -> None:
    program = """
import sys
from collections import Counter
opened = Counter()
sys.addaudithook(lambda event, values: event == "open" and opened.update([str(values[0])]))
from corral.workers.modules import loading_modules
with loading_modules():
    from transformers.models.qwen2 import Qwen2Config
read = {name: number for name, number in opened.items() if "/transformers/models/" in name and name.endswith(".py")}
print(len(read), sum(read.values()), Qwen2Config.__name__)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    files, times, name = said.split()
    assert 1000 < int(files) <= int(times) < int(files) + 100 and name == "Qwen2Config"
