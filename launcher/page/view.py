"""TrialViews: what the page says of its trials, each read again only where its files have grown.

    metrics.jsonl ──► curves, where the time of steps goes      plan.json ──► graph of calls, settings
    events.jsonl  ──► events                                    samples/  ──► answers          TrialStatus ──► words
    timeline/     ──► what each worker did in the last steps

All of it is JSON: texts of models and users stay texts, and the page shows them as such.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.plan import RunPlan
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.spans import spans_path
from corral.experiments.trial.worker_record import MASTER
from corral.experiments.worker_specs import MasterWorkerSpec, ModelWorkerSpec
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.page.answers import OF_A_STEP, answers_of
from corral.launcher.page.curves import curves_of
from corral.launcher.page.graph import graph_of
from corral.launcher.page.spans import timeline_of
from corral.launcher.page.step_times import StepTimes, bars_of, mean_of, step_times_of
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import polite_reader
from corral.launcher.status.text import render_trial
from corral.launcher.status.words import TrialState
from corral.launcher.trial.exits import exit_text
from corral.launcher.trial.find import TrialFacts
from corral.launcher.trial.metrics import read_metrics

_POINTS = 1_000  # of a curve: more than a chart has columns of dots
_ANSWERS = 300
_MOST_EVENTS = 500
_READ_TIMEOUT_S = 60.0  # a trial of 100,000 steps takes some seconds
_TEXT_BY_EVENT = {
    "supervisor_started": "attempt {attempt} begins",
    "worker_exited": "{worker}: {exit}",
    "worker_silent": "{worker} is silent",
    "worker_moved": "{worker} moves to {node}: {cause}",
    "unit_restarting": "{unit} is started again: {cause}",
    "unit_given_up": "{unit} is given up: {cause}",
    "node_failed": "node {node} has failed",
    "fell_back": "training goes back to step {step}: {reason}",
    "epoch_lost": "the trainer has lost its epoch: {cause}",
    "train_notice": "{text}",
    "stop_requested": "asked to stop by {by}",
    "attempt_refused": "no further attempt: {cause}",
    "attempt_ended": "attempt {attempt} ended {state}: {cause}",
    "trial_ended": "trial ended {state}",
}
_BREAKS = ("worker_exited", "worker_silent", "unit_restarting", "unit_given_up", "node_failed", "fell_back")
"""What interrupts training; so does a notice that is an alarm."""


class TrialViews:
    """Of the trials of one page, which share the room on it: a page of many has fewer points and answers of each."""

    def __init__(self, trials: Sequence[TrialFacts], *, left_out: int = 0) -> None:
        """
        Args:
            left_out: further ones that were asked for.
        """
        points, answers = max(200, _POINTS // len(trials)), max(2 * OF_A_STEP, _ANSWERS // len(trials))
        num_by_name = Counter(facts.name for facts in trials)
        names = [facts.name if num_by_name[facts.name] == 1 else str(facts.directory.path) for facts in trials]
        self._views = [
            TrialView(facts, name=name, points=points, answers=answers)
            for facts, name in zip(trials, names, strict=True)
        ]
        self._reader, self._left_out = polite_reader(), left_out
        self._lookout: Lookout[Path] = Lookout()

    def data(self, *, ends_as: TrialState | None = None) -> bytes:
        """JSON, for the page.

        Args:
            ends_as: how the trial is about to end, which is not on record yet.

        Raises:
            TimeoutError: if no trial's file system answers.
        """
        statuses = self._reader.read([view.facts for view in self._views])
        if ends_as is not None:
            statuses = [replace(status, state=ends_as, note="") for status in statuses]
        reads = {
            view.facts.directory.path: partial(view.read, status)
            for view, status in zip(self._views, statuses, strict=True)
        }
        found = self._lookout.look(reads, patience_s=_READ_TIMEOUT_S)
        told = [one for one in found.values() if not isinstance(one, Unanswered)]
        if not told:
            path, silent = next((path, one) for path, one in found.items() if isinstance(one, Unanswered))
            raise TimeoutError(silent.about(path))
        return msgspec.json.encode({"trials": told, "left_out": self._left_out + len(found) - len(told)})


class TrialView:
    """Of one trial."""

    def __init__(self, facts: TrialFacts, *, name: str, points: int, answers: int) -> None:
        """
        Args:
            points: of a curve, at most.
            answers: at most.
        """
        self.facts = facts
        self._name, self._points, self._answers = name, points, answers
        self._plan = _read_plan(facts.directory.plan_path)
        self._known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def read(self, status: TrialStatus) -> dict[str, Any]:
        """All that the page says of it, beside this status."""
        directory = self.facts.directory
        return {
            "name": self._name,
            "state": status.state,
            "is_final": status.is_final,
            "step": status.step,
            "total_steps": status.total_steps,
            "numbers": status.numbers,
            "note": status.note,
            "status": render_trial(status, wide=True),
            "settings": dict(_settings(self._plan.config)) if self._plan else {},
            "graph": _graph(self._plan.master) if self._plan else None,
            **self._part(directory.metrics_path, self._numbers),
            **self._part(directory.journal_path, _events),
            **self._part(directory.samples_path, self._said),
            # Of all workers' files the master's says when there is a further step.
            **self._part(spans_path(directory.timeline_path, MASTER), _timeline),
        }

    def _part(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What a file, or the names in a folder, say."""
        found = path.stat() if path.exists() else None
        stamp = (found.st_mtime_ns, found.st_size) if found else (0, 0)
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = stamp, read(path)
        return self._known[path][1]

    def _numbers(self, path: Path) -> dict[str, Any]:
        lines = read_metrics(path)
        calls = [call.name for call in self._plan.master.step_plan.graph.step_calls] if self._plan else []
        return {**curves_of(lines, most=self._points), "times": _times(step_times_of(lines, calls=calls))}

    def _said(self, path: Path) -> dict[str, Any]:
        if self._plan is None or not path.exists():
            return {"answers": None}
        tokenizer = self._plan.all_of(ModelWorkerSpec)[0].tokenizer
        return {"answers": answers_of(path, tokenizer, most=self._answers)}


def _read_plan(path: Path) -> RunPlan | None:
    try:
        return RunPlan.from_json(path.read_bytes())
    except ValueError:  # another version's: what does not need it is shown
        return None


def _graph(master: MasterWorkerSpec) -> dict[str, Any]:
    nodes, edges = graph_of(master.step_plan, samples=master.samples_from, published_to=master.weights_go_to)
    step = f"a train step of {master.train_batch_size} {master.sample_unit}"
    return {"step": step, "nodes": list(map(asdict, nodes)), "edges": list(map(asdict, edges))}


def _times(steps: list[StepTimes]) -> dict[str, Any] | None:
    if not steps:
        return None
    bars = [{**_as_json(bar), "wall_s": bar.wait_s + bar.run_s + bar.commit_s} for bar in bars_of(steps)]
    return {"bars": bars, "typical": _as_json(mean_of(steps[1:] or steps))}  # the first one loads and compiles


def _as_json(step: StepTimes) -> dict[str, Any]:
    calls = {name: call._asdict() for name, call in step.calls.items()}
    return {"step": step.step, "wait_s": step.wait_s, "commit_s": step.commit_s, "calls": calls}


def _timeline(path: Path) -> dict[str, Any]:
    return {"timeline": timeline_of(path.parent)}


def _events(path: Path) -> dict[str, Any]:
    told = [event for event in map(_told, read_journal(path)) if event is not None]
    return {"events": told[-_MOST_EVENTS:], "events_left_out": max(0, len(told) - _MOST_EVENTS)}


def _told(event: Mapping[str, Any]) -> dict[str, Any] | None:
    name = event["event"]
    if name not in _TEXT_BY_EVENT or event.get("returncode") == 0:
        return None
    exit_ = exit_text(event["returncode"]) if "returncode" in event else ""
    text = _TEXT_BY_EVENT[name].format_map(defaultdict(str, event, exit=exit_))
    return {
        "time": event["time"],
        "text": text.rstrip(": "),
        "is_break": name in _BREAKS or event.get("is_alarm") is True,
        "is_mark": name not in ("train_notice", "trial_ended") or event.get("is_alarm") is True,
    }


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Settings with their keys, `ppo.kl.coef`; those that are not set are left out."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _settings(part, f"{key}.{name}" if key else str(name))
    elif value is not None:
        yield key, value if isinstance(value, str) else msgspec.json.encode(value).decode()
