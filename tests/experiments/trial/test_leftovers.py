import os
import signal
import subprocess
import sys
from pathlib import Path

from corral.experiments.trial.leftovers import temporary_folder
from corral.launcher.trial.processes import sweep

KILLED = """
import time
from corral.experiments.trial.leftovers import temporary_folder
with temporary_folder("corral-test-") as folder:
    (folder / "said").write_text("half of it")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_temporary_folder_goes_with_its_block() -> None:
    with temporary_folder("corral-test-") as folder:
        sweep()
        assert folder.is_dir()
    assert not folder.exists()


def test_the_temporary_folder_of_a_process_that_was_killed_is_swept() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    sweep()
    assert folder.is_dir()  # its owner lives
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    sweep()
    assert not folder.exists()
