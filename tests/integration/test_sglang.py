"""Trials with a real server of SGLang: one of an environment, and the GRPO recipe, whose processes are killed."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from corral.experiments.trial import leftovers
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.trial.processes import descendants_of, process_start_ticks
from tests.environments import needs_environments
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
    find_secrets,
)
from tests.integration.trial_helpers import Material, Trial, looking, submit_environment

_START_S = 480.0  # SGLang's own start is 20 s of computing, beside the trial's


def schedulers(trial: Trial) -> list[int]:
    """Processes of SGLang that hold a model; by their names, as they write these over their environments."""
    worker = psutil.Process(trial.pid("generation_server/0"))
    return [child.pid for child in worker.children(recursive=True) if "scheduler" in child.name()]


@needs_environments
def test_tasks_of_an_environment_are_answered_by_sglang_and_trained_on_once_whoever_plays_them_is_lost(
    material: Material, tmp_path: Path
) -> None:
    trial = submit_environment(tmp_path, material, num_tasks=48, overrides={"allocation": "sglang:d1+fsdp:d1"})
    try:
        secrets = [secret.reveal() for secret in TrialSecrets.load(trial.directory.secrets_path).values()]
        trial.wait_for_steps(1, timeout_s=_START_S)
        trial.kill("rollout_worker/0")
        assert find_secrets(trial.directory, secrets) == {"secrets/secrets.json", "secrets/server.pem"}
        trial.wait_for_end()
        check_end(trial, num_steps=6, num_starts=1)
        assert [line["eval/problems"] for line in trial.metrics() if "eval/problems" in line] == [4.0, 4.0]
    finally:
        trial.close()


def check_end(trial: Trial, *, num_steps: int, num_starts: int) -> None:
    """All was trained once, on answers of so many starts of SGLang."""
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
    assert trial.train_steps() == list(range(1, num_steps + 1))
    check_generator_and_trainer_agreed(trial)
    log = trial.directory.worker_log(0, "sglang", 0).read_text()
    assert log.count("The server is fired up and ready to roll!") == num_starts


class Traces:
    """What a trial's processes are, and have on this host beside their own memory, as long as somebody looks."""

    def __init__(self) -> None:
        self.start_ticks: dict[int, int] = {}
        self.paths: set[Path] = set()

    def look(self, keeper: int) -> None:
        pids = [keeper, *descendants_of(keeper)]
        for pid in pids:
            if (ticks := process_start_ticks(pid)) is not None:
                self.start_ticks[pid] = ticks
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                self.paths |= {Path(os.fsdecode(line[7:])) for line in lines if line.startswith(b"TMPDIR=/tmp/corral-")}
        self.paths |= leftovers.names_in_memory(pids)

    def left(self) -> list[str]:
        living = [f"process {pid}" for pid, ticks in self.start_ticks.items() if process_start_ticks(pid) == ticks]
        return living + [str(path) for path in self.paths if path.exists()]


@pytest.mark.slow
def test_nothing_is_left_of_a_trial_whose_processes_are_killed_while_sglang_loads(
    start_trial: Callable[..., Trial],
) -> None:
    trial = start_trial(num_rows=48, overrides={"allocation": "sglang:d1+fsdp:d1", "evaluation.every": "1000 steps"})
    worker = "generation_server/0"
    trial.wait_for(lambda: trial.starts(worker), f"the start of {worker}")
    supervisor = trial.pid("supervisor")
    keeper = psutil.Process(supervisor).ppid()
    traces = Traces()

    def is_loading() -> bool:
        log = trial.directory.worker_log(0, "sglang", 0)
        return bool(schedulers(trial)) and "fired up" not in (log.read_text() if log.exists() else "")

    with looking(lambda: traces.look(keeper)):
        trial.wait_for(is_loading, "SGLang to load", timeout_s=_START_S)
        first = schedulers(trial)
        trial.kill(worker)
        trial.wait_for(lambda: schedulers(trial) not in ([], first), "SGLang to load again", timeout_s=_START_S)
        trial.wait_for(
            lambda: any(path.parent == leftovers.MEMORY for path in traces.paths), "names in memory", timeout_s=_START_S
        )
    traces.look(keeper)
    for pid in (keeper, supervisor):
        os.kill(pid, signal.SIGKILL)
    assert {path.parent for path in traces.paths} >= {Path("/tmp"), leftovers.MEMORY}
    trial.wait_for(lambda: not traces.left(), f"{traces.left()} to go", timeout_s=30.0)
    assert trial.processes() == [] and not trial.directory.secrets_path.exists()
    assert not Path("/dev/shm", f"corral-weights-{trial.uuid}").exists()


@pytest.mark.slow
def test_a_server_of_two_processes_answers_for_a_whole_trial(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(num_rows=32, overrides={"allocation": "sglang:d1t2+fsdp:d1", "evaluation.every": "1000 steps"})
    trial.wait_for_steps(1, timeout_s=_START_S)
    assert len(schedulers(trial)) == 2
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=1)
