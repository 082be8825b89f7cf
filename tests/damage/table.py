"""The table of damage: one trial is killed, and resumed once for every way in which one of its files can be damaged.

    python -m tests.damage.table [--only TEXT] [--one-per-file]

    kill -9 --> base directory --copy, damage, rl-submit --resume--> outcome --> expected?
                     ^------------------------------ for every case --------'

Everything is real: commands, worker processes, Redis. Ends with 1 if an outcome was not the expected one.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.trial.journal import read_journal
from corral.launcher.trial.processes import kill_trial_processes, trial_processes
from tests.damage.cases import Case, Outcome, all_cases, one_case_per_file
from tests.integration.evidence import check_ledger_of_checkpoint
from tests.integration.trial_helpers import PROGRAMS, make_material, submit

_DEADLINE_S = 150.0  # of one trial of three steps, on a busy machine
_MOST_STARTS = 3  # a worker that is started more often without an end in sight is in a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen."""

    case: Case
    seen: Outcome
    words: str
    seconds: float

    @property
    def is_expected(self) -> bool:
        return self.seen in self.case.expected


class DamagedTrials:
    """A trial that was killed, and its resurrections at the same path."""

    def __init__(self, folder: Path) -> None:
        trial = submit(
            "grpo",
            folder,
            make_material(folder),
            num_rows=56,
            pause_s=0.1,
            overrides={"evaluation.every": "1000 steps", "supervision.max_restarts": 5},
        )
        try:
            trial.wait_for_steps(4)
        finally:
            trial.close()
        trial.wait_for(lambda: not trial.processes(), "its last process to go", may_end=True)
        trial.full_speed()
        self._trial = trial
        self._uuid = trial.uuid
        self._directory = trial.directory.path
        self._base = folder / "base"
        # Hard links stay hard links: a version and the commit that covers it share their bytes, and their damage.
        subprocess.run(["cp", "-a", str(self._directory), str(self._base)], check=True)

    def run(self, case: Case) -> Row:
        shutil.rmtree(self._directory)
        subprocess.run(["cp", "-a", str(self._base), str(self._directory)], check=True)
        case.apply(self._directory)
        started = time.monotonic()
        try:
            seen, words = self._resume()
        finally:
            self._end_all()
        return Row(case=case, seen=seen, words=words, seconds=time.monotonic() - started)

    def _end_all(self) -> None:
        self._trial.close()
        kill_trial_processes(self._uuid)
        deadline = time.monotonic() + _DEADLINE_S
        while left := list(trial_processes(self._uuid)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {left} did not end within {_DEADLINE_S:.0f} s after kill -9")
            time.sleep(0.05)

    def _resume(self) -> tuple[Outcome, str]:
        resumed_at = time.time()
        code, text = self._command("rl-submit", "--resume", str(self._directory))
        if "Traceback" in text:
            return Outcome.TRACEBACK, _last_line(text)
        if code:
            return Outcome.REFUSED, _error_line(text)
        outcome, words = self._watch(resumed_at)
        code, text = self._command("rl-status", str(self._directory))
        return (Outcome.TRACEBACK, _last_line(text)) if "Traceback" in text else (outcome, words)

    def _watch(self, resumed_at: float) -> tuple[Outcome, str]:
        """By time, not by number: whose record of attempt 0 is gone, is attempt 0 again."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            events = list(read_journal(self._directory / "events.jsonl"))
            resumed = [event for event in events if event["time"] >= resumed_at]
            starts = Counter(e["worker"] for e in resumed if e["event"] == "worker_started")
            ended = next((event for event in resumed if event["event"] == "attempt_ended"), None)
            if ended is None and max(starts.values(), default=0) > _MOST_STARTS:
                return Outcome.LOOP, f"{starts.most_common(1)[0][0]} was started {max(starts.values())} times"
            if ended is not None and not list(trial_processes(self._uuid)):
                return self._judge(ended)
            time.sleep(0.1)
        return Outcome.HANG, f"no end within {_DEADLINE_S:.0f} s"

    def _judge(self, ended: dict[str, object]) -> tuple[Outcome, str]:
        if ended["state"] != "COMPLETE":
            _, errors = self._command("rl-logs", str(self._directory), "--errors")
            if "Traceback" in errors:
                return Outcome.TRACEBACK, _last_line(errors)
            named = [line for line in errors.splitlines() if str(self._directory) in line and " cannot go on: " in line]
            return (Outcome.REFUSED, named[-1].strip()) if named else (Outcome.UNCLEAR, str(ended.get("cause")))
        head = _entries(self._directory)[-2]  # the last one is Done
        try:
            check_ledger_of_checkpoint(self._directory / head["directory"], self._trial)
        except AssertionError as error:
            return Outcome.LOST, str(error)
        fallbacks = [entry for entry in _entries(self._directory) if entry["kind"] == "fallback"]
        return (Outcome.FALLS_BACK, fallbacks[0]["reason"]) if fallbacks else (Outcome.GOES_ON, "")

    def _command(self, program: str, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(PROGRAMS / program), *arguments],
            env=self._trial.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def run_cases(cases: Iterable[Case], folder: Path) -> Iterable[Row]:
    """A row for each case, as soon as it is known."""
    trials = DamagedTrials(folder)
    for case in cases:
        yield trials.run(case)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage the files of a trial, one after the other, and resume it.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    parser.add_argument("--one-per-file", action="store_true", help="one damage for each file instead of all")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a damaged journal is read ten times a second
    cases = [c for c in (one_case_per_file() if arguments.one_per_file else all_cases()) if arguments.only in c.name]
    unexpected = 0
    with tempfile.TemporaryDirectory(prefix="corral-damage-") as folder:
        print(f"{'file':37} {'which':7} {'damage':8} {'seen':38} {'s':>5}", flush=True)
        for row in run_cases(cases, Path(folder)):
            case = row.case
            print(f"{case.file:37} {case.which:7} {case.damage:8} {row.seen.value:38} {row.seconds:5.1f}", flush=True)
            if row.words:
                print(f"    {row.words.replace(folder, '...')}", flush=True)
            if not row.is_expected:
                unexpected += 1
                print(f"    EXPECTED: {' or '.join(sorted(o.value for o in case.expected))}", flush=True)
    print(f"{len(cases)} cases, {unexpected} not as expected")
    return 1 if unexpected else 0


def _entries(trial: Path) -> list[dict[str, str]]:
    slots = sorted(path for path in (trial / "log").iterdir() if path.name.isdecimal())
    return [json.loads(path.read_bytes()) for path in slots]


def _error_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("error")), _last_line(text))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
