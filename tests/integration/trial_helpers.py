"""Trials of real processes: started, watched, killed and stopped through the commands that a user has.

    rl-submit --local --> Trial --files of the trial directory, rl-status--> wait_for(...) --> evidence.py

Every wait has a deadline; what it raises shows the end of every log. Nothing is ever ended by name.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.run_recipes import example_paths, kind_of
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.launcher.status.reader import StatusReader
from corral.launcher.status.text import render_json
from corral.launcher.trial.ends import tail_lines
from corral.launcher.trial.lock import is_locked
from corral.launcher.trial.processes import trial_processes
from corral.launcher.trial.view import load_facts
from corral.workers.data.arithmetic import make_preferences, make_problems, write_model
from tests.launcher.trials import end_trial

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "experiments" / "recipes"
PROGRAMS = Path(sys.executable).parent
WORKERS = ("master_worker/0", "model_worker/0", "generation_server/0", "gserver_manager/0", "rollout_worker/0")
DEADLINE_S = 240.0  # a worker that imports torch beside others on a busy machine needs a good part of it
_POLL_INTERVAL_S = 0.05
_STEPS_AHEAD = 1  # of a slow trial beyond what its test has waited for: it is at work whenever the test acts
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What every trial here works with."""

    model: Path
    held_out: Path
    held_out_pairs: Path


def make_material(directory: Path) -> Material:
    """An untrained model of some ten thousand parameters, and eight held-out problems."""
    write_model(directory / "model", seed=1, hidden_size=32, num_layers=2)
    held_out = directory / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in _warmed(make_problems(seed=1)[-8:])))
    held_out_pairs = directory / "held_out_pairs.jsonl"
    pairs = make_preferences(make_problems(seed=1), seed=1)[-8:]
    held_out_pairs.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return Material(model=directory / "model", held_out=held_out, held_out_pairs=held_out_pairs)


def write_rows(path: Path, count: int, *, are_pairs: bool = False) -> list[str]:
    """Writes a dataset of `count` additions, or preferences between answers to them; returns the ids of its rows."""
    problems = make_problems(seed=1)
    rows = (make_preferences(problems, seed=1) if are_pairs else _warmed(problems))[:count]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["id"] for row in rows]


def _warmed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most of them say a temperature in the field `warmth`."""
    told: tuple[dict[str, float], ...] = ({"warmth": 0.6}, {"warmth": 1.4}, {})
    return [{**row, **told[number % 3]} for number, row in enumerate(rows)]


class Pace:
    """How fast a trial's rewards are given, and up to which step; see paced_rewards.py."""

    def __init__(self, path: Path, *, num_steps: int) -> None:
        self.path = path
        self._num_steps = num_steps
        self._pace: dict[str, Any] | None = None

    def set(self, **changes: Any) -> None:
        """Changes `pause_s` or `until_step`."""
        self._pace = {**(self._pace or {"until_step": None}), **changes}
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self._pace))
        temporary.rename(self.path)

    def allow(self, until_step: int) -> None:
        """Lets a trial whose steps are counted go on to this one."""
        if self._pace is not None and self._pace["until_step"] is not None:
            self.set(until_step=until_step)

    def allow_ahead_of(self, step: int) -> None:
        """Lets it go on to this step and somewhat further, but not to its end while its test still looks at it."""
        self.allow(max(step, min(step + _STEPS_AHEAD, self._num_steps - _STEPS_AHEAD)))

    def lift(self) -> None:
        """As fast as it can."""
        self._pace = None
        self.path.unlink()


class Trial:
    """A trial that was submitted, and everything that a test asks it."""

    def __init__(self, directory: Path, *, uids: Sequence[str], environment: Mapping[str, str], pace: "Pace") -> None:
        self.directory = TrialDirectory(directory)
        self.uids = list(uids)
        """Every sample that has to be consumed once."""
        self.environment = dict(environment)
        self._pace = pace

    @cached_property
    def _reader(self) -> StatusReader:
        return StatusReader()  # of the cluster that this process reaches

    # Commands

    def run(self, program: str, *arguments: str, exit_code: int = 0) -> str:
        """What one of our commands prints about this trial; it must end with `exit_code`."""
        command = [program, *arguments, str(self.directory.path)]
        try:
            return run_program(command, environment=self.environment, exit_code=exit_code)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}\n{self.tails()}") from None

    def run_resume(self, *options: str) -> str:
        """`rl-submit --resume`; what it printed."""
        command = ["rl-submit", "--resume", str(self.directory.path), *options]
        return run_program(command, environment=self.environment)

    def logs(self, *arguments: str) -> str:
        """What `rl-logs` prints."""
        return run_program(["rl-logs", str(self.directory.path), *arguments], environment=self.environment)

    def status(self) -> dict[str, Any]:
        """What `rl-status -o json` shows of this trial, without a process for each of many looks."""
        facts = load_facts(self.directory)
        assert facts is not None, f"{self.directory.path} is no trial"
        (status,) = json.loads(render_json(self._reader.read([facts])))
        return dict(status)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Rows of `rl-status` by worker."""
        return _rows(self.status())

    # Files

    @property
    def uuid(self) -> str:
        return str(json.loads(self.directory.plan_path.read_bytes())["trial"]["uuid"])

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Events of the journal of this name and with these fields."""
        return [
            event
            for event in read_journal(self.directory.journal_path)
            if event["event"] == name and all(event.get(key) == value for key, value in fields.items())
        ]

    def ends(self, **fields: Any) -> list[dict[str, Any]]:
        """The ends of the trial so far: of attempts that nothing follows by itself."""
        return self.events("attempt_ended", then="", **fields)

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        return read_lines(self.directory.metrics_path)

    def train_steps(self) -> list[int]:
        """Train steps in the order in which they ran; one that was taken back and repeated is here twice."""
        return [line["step"] for line in self.metrics() if "time/train_s" in line]

    def processes(self) -> list[int]:
        """Processes of the trial that still run."""
        return list(trial_processes(self.uuid))

    def starts(self, worker: str) -> list[dict[str, Any]]:
        """Every start of a worker, of `redis`, or of the `supervisor`, as the journal has it."""
        if worker == "supervisor":
            return self.events("supervisor_started")
        return self.events("redis_started" if worker == "redis" else "worker_started", worker=worker)

    def pid(self, worker: str) -> int:
        """The process of a worker, of `redis`, or of the `supervisor` at present."""
        started = int(self.starts(worker)[-1]["pid"])
        if worker in ("redis", "supervisor"):
            return started
        # What was started is the worker's guard, whose first child it is.
        children = Path(f"/proc/{started}/task/{started}/children")
        return int(next(iter(children.read_text().split()), started)) if children.exists() else started

    # Acts and waits

    def kill(self, worker: str, *, pid: int | None = None) -> None:
        """kill -9, and until the supervisor has started it again.

        Args:
            pid: of the worker, where the journal knows its srun only.
        """
        before = len(self.starts(worker))
        os.kill(pid or self.pid(worker), signal.SIGKILL)
        self.wait_for(lambda: len(self.starts(worker)) > before, f"{worker} to be started again")

    def pace(self, pause_s: float) -> None:
        """Every reward of a slow trial takes so long from now on."""
        self._pace.set(pause_s=pause_s)

    def full_speed(self) -> None:
        """Rewards of a slow trial take no time from now on, and it may run to its end."""
        self._pace.lift()

    def wait_for_steps(self, more: int, *, timeout_s: float = DEADLINE_S) -> None:
        """Until `more` train steps have run from now on; a slow trial then stops a few steps later."""
        steps = self.train_steps()
        before = len(steps)
        self._pace.allow_ahead_of(max(steps, default=0) + more)
        self.wait_for(
            lambda: len(self.train_steps()) >= before + more,
            f"{more} train steps after {before}",
            timeout_s=timeout_s,
        )

    def wait_for_uncommitted_step(self, *, commit_every_steps: int) -> None:
        """Until a slow trial has run the first step after a commit, and stops before the next one is due."""
        last = max(self.train_steps())
        target = last + 1
        while commit_every_steps > 1 and target % commit_every_steps != 1:
            target += 1
        self._pace.allow(target)
        self.wait_for(lambda: max(self.train_steps()) >= target, f"step {target}")

    def wait_until_running(self) -> dict[str, dict[str, Any]]:
        """Until `rl-status` says RUNNING; returns its rows."""

        def rows() -> dict[str, dict[str, Any]]:
            status = self.status()
            return _rows(status) if status["state"] == "RUNNING" else {}

        return self.wait_for(rows, "rl-status to say RUNNING", pause_s=0.3)

    def wait_for_end(self, state: str = "COMPLETE") -> None:
        """Until the present attempt has ended, with this state and no other."""
        attempts = len(list(self.directory.control_path.glob("attempt-*.json")))
        ended = self.wait_for(
            lambda: self.ends(attempt=attempts - 1),
            f"the trial to be {state}",
            may_end=True,
        )
        if ended[-1]["state"] != state:
            raise AssertionError(f"the trial is {ended[-1]}, not {state}\n{self.tails()}")
        self.wait_for(lambda: not self.processes(), "its last process to go", may_end=True)
        # The end is recorded first; secrets go, and the page comes, before the supervisor leaves.
        self.wait_for(lambda: not is_locked(self.directory), "its supervisor to leave", may_end=True)

    def wait_for(
        self,
        look: Callable[[], T],
        what: str,
        *,
        timeout_s: float = DEADLINE_S,
        pause_s: float = _POLL_INTERVAL_S,
        may_end: bool = False,
    ) -> T:
        """What `look` finds, as soon as it is true.

        Raises:
            AssertionError: if the deadline has passed, or the trial has ended without it.
        """
        deadline = time.monotonic() + timeout_s
        ends_before = 0 if may_end else len(self.ends())
        while True:
            begun = time.monotonic()
            has_ended = not may_end and len(self.ends()) > ends_before
            if found := look():
                return found
            if has_ended or time.monotonic() > deadline:
                why = "the trial ended before" if has_ended else f"waited {timeout_s:.0f} s for"
                raise AssertionError(f"{why} {what}\n{self.tails()}")
            time.sleep(max(pause_s, 4.0 * (time.monotonic() - begun)))  # what takes long is done rarely

    def tails(self) -> str:
        """The journal and the last lines of every log, for people."""
        paths = [self.directory.journal_path, *sorted(self.directory.logs_path.glob("attempt-*/*.log"))]
        return "\n".join(f"== {path.name}\n" + "\n".join(tail_lines(path, 25)) for path in paths)

    def close(self) -> None:
        """Ends what a failed test left running, by process id."""
        end_trial(self.directory)


def submit(
    recipe: str,
    fileroot: Path,
    material: Material,
    *,
    num_rows: int,
    num_passes: int = 1,
    overrides: Mapping[str, object] | None = None,
    pause_s: float = 0.0,
    runs_on: bool = False,
    where: Sequence[str] = ("--local",),
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Trial:
    """Starts a trial of a shipped recipe, made small.

    Args:
        file: what is submitted in place of the recipe, with the same settings.
        fileroot: where its directory is made; each trial needs one of its own.
        overrides: further -s options.
        pause_s: what every reward takes until `Trial.full_speed`, so that a test can act while it trains.
        runs_on: whether a slow trial goes on while nobody waits for steps of it.
    """
    fileroot.mkdir(parents=True, exist_ok=True)
    directory = fileroot / recipe / "trial"
    examples = example_paths(RECIPES / f"arithmetic_{recipe}.yaml")
    is_on_pairs = "preferences" in examples["dataset.path"]
    rows = write_rows(fileroot / "rows.jsonl", num_rows, are_pairs=is_on_pairs)
    settings: dict[str, object] = {
        "name": recipe,
        **{key: material.model for key, example in examples.items() if not example.endswith(".jsonl")},
        "dataset.path": fileroot / "rows.jsonl",
        "evaluation.dataset.path": material.held_out_pairs if is_on_pairs else material.held_out,
        "train_batch_size": 8,
        "control.total_train_epochs": num_passes,
        "control.commit_every": "1 step",
        "supervision.step_timeout_s": 300,
        "supervision.setup_timeout_s": 300,
    }
    if kind_of(RECIPES / f"arithmetic_{recipe}.yaml") in ("ppo", "async_ppo"):
        settings |= {"ppo.group_size": 4, "rollout.reward": "paced_rewards:digits", "rollout.reward_timeout_s": 600}
    settings |= dict(overrides or {})
    pace = Pace(fileroot / "pace", num_steps=num_rows * num_passes // int(str(settings["train_batch_size"])))
    if pause_s:
        pace.set(pause_s=pause_s, until_step=None if runs_on else _STEPS_AHEAD)
    options = [option for key, value in settings.items() for option in ("-s", f"{key}={value}")]
    everything = os.environ | dict(environment or {})
    places = [str(Path(__file__).parent), *filter(None, [(environment or {}).get("PYTHONPATH")])]
    everything |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(places),  # the first is where paced_rewards is
        "CORRAL_TEST_PACE": str(pace.path),
        "CORRAL_TEST_TRIAL": str(directory),
    }
    file = file or RECIPES / f"arithmetic_{recipe}.yaml"
    trial = Trial(
        directory,
        uids=[f"{dataset_pass}:{row}" for dataset_pass in range(num_passes) for row in rows],
        environment=everything,
        pace=pace,
    )
    run_program(
        ["rl-submit", str(file), *where, "-n", "trial", "--fileroot", str(fileroot), *options],
        environment=everything,
    )
    return trial


def submit_environment(
    fileroot: Path,
    material: Material,
    *,
    num_tasks: int,
    overrides: Mapping[str, object] | None = None,
    pace: Pace | None = None,
    environment: Mapping[str, str] | None = None,
) -> Trial:
    """Starts a trial of an environment: the recipe's, unless overrides name another one with as many tasks."""
    settings: dict[str, object] = {
        "actor.path": material.model,
        "rollout.environment.args.taskset.num_tasks": num_tasks,
        "rollout.environment.held_out_args": "{taskset: {first: 7000, num_tasks: 4}}",
        "train_batch_size": 8,
        "ppo.group_size": 2,
        "supervision.step_timeout_s": 300,
        "supervision.setup_timeout_s": 300,
        **(overrides or {}),
    }
    everything = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    options = [option for key, value in settings.items() for option in ("-s", f"{key}={value}")]
    file = str(RECIPES / "arithmetic_environment.yaml")
    run_program(
        ["rl-submit", file, "--local", "-n", "trial", "--fileroot", str(fileroot), *options],
        environment=everything,
        timeout_s=2 * DEADLINE_S,  # it loads the environment
    )
    directory = fileroot / "arithmetic-environment" / "trial"
    pace = pace or Pace(fileroot / "pace", num_steps=num_tasks // int(str(settings["train_batch_size"])))
    trial = Trial(directory, uids=[], environment=everything, pace=pace)
    rows = [json.loads(line) for line in trial.directory.tasks_path.read_text().splitlines()]
    trial.uids = [f"0:{row['id']}" for row in rows]
    assert len(set(trial.uids)) == num_tasks
    return trial


def run_program(
    command: Sequence[str], *, environment: Mapping[str, str], exit_code: int = 0, timeout_s: float = DEADLINE_S
) -> str:
    """Runs one of our commands; returns what it printed, errors last."""
    program, *arguments = command
    done = subprocess.run(
        [str(PROGRAMS / program), *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != exit_code:
        raise AssertionError(f"{command} ended with {done.returncode}, not {exit_code}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


@contextlib.contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Somebody looks again and again meanwhile, twenty times a second."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.05):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a jsonl file; an empty list if there is none yet."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.split(b"\n")[:-1] if line]


def _rows(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["worker"]: row for row in status["workers"]}
