"""The real supervisor, started as rl-submit starts it, with stub workers instead of the real ones."""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from corral.experiments.trial.attempts import AttemptRecord
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.supervisor.__main__ import leave, main

COMMAND = (sys.executable, str(Path(__file__).resolve()))


def stub_command(
    directory: TrialDirectory, kind: str, index: int, attempt: AttemptRecord, incarnation: str
) -> Sequence[str]:
    from corral.launcher.supervisor.units import worker_command  # not at the top: keepers do without

    real = worker_command(directory, kind, index, attempt, incarnation)
    return [sys.executable, str(Path(__file__).with_name("stub_worker.py")), *real[real.index("corral.workers") + 1 :]]


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # a script does not know the tests as a package
    from tests.launcher.supervisor.broken_files import install

    trial = Path(sys.argv[sys.argv.index("--trial") + 1])
    install(trial)
    if (trial / "shorter.json").exists():
        for name, seconds in json.loads((trial / "shorter.json").read_text()).items():
            module, _, constant = name.rpartition(".")
            setattr(import_module(f"corral.launcher.supervisor.{module}"), constant, seconds)
    leave(main(sys.argv[1:], own_command=COMMAND, worker_command=stub_command))
