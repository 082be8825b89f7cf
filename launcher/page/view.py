"""TrialViews: the data of the page, for each trial read again only where its files have grown.

    metrics.jsonl ──► curves, where the time of steps goes      plan.json ──► graph of calls, settings
    events.jsonl  ──► events                                    samples/  ──► answers          TrialStatus ──► words
    timeline/     ──► what each worker did in the last steps

All of it is JSON: texts of models and users stay texts, and the page shows them as such.

metrics.jsonl -> what the page draws: each number over train steps, and what a step is in time and in tokens.

Of a long trial a curve keeps the lowest and the highest point of each stretch of steps, so that no peak is lost.

The page: one HTML file that needs nothing else, from what it says as JSON.

Nothing of it may reach the network, and no script but ours runs in it: its policy names the digest of each. Texts of
others are data in it, which no browser executes, and which scripts only ever show as texts.
"""

import base64
import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.prompts.tokens import load_tokenizer
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.samples import PART
from corral.experiments.trial.spans import STEPS, spans_path
from corral.experiments.trial.worker_record import MASTER
from corral.experiments.worker_specs import MasterWorkerSpec, ModelWorkerSpec
from corral.launcher.files.file_thread import PatientFiles
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.page.graph import graph_of
from corral.launcher.samples import KeptAnswers, gaps_of, name_of
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import polite_reader
from corral.launcher.status.text import render_trial
from corral.launcher.timeline.reader import spans_of, steps_of
from corral.launcher.timeline.sentence import LATEST_STEPS, describe_steps
from corral.launcher.trial.ends import TASK_ENDED
from corral.launcher.trial.metrics import ACCURACY, GAP, LOSS, REWARD, STALENESS, is_number, read_metrics
from corral.launcher.trial.view import TrialFacts, TrialView, find_trial, read_facts, read_plan
from corral.launcher.trial.words import TrialState

_NO_CURVES = ("step", "time", "trainer_epoch")
_SHOWN_CURVES = (ACCURACY, REWARD, LOSS, ("response_length/mean",), STALENESS, GAP)
"""What is drawn before anybody chooses: of each, the first name that the trial has written."""

Points = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Steps, and values at them."""


# Where the time of train steps goes, by call: metrics.jsonl -> bars of the page.
#
#     time/ref_inf_s           seconds that it ran             ┐
#     time/ref_inf/inputs_s    waited for its input keys       ├ one call of one step: ░░inputs░░▒▒ranks▒▒████ran████
#     time/ref_inf/ranks_s     waited for its ranks            ┘
#
# A bar per step: the wait for its batch, what ran, call on call, and the commit, beside the time that all of it took:
# where the bar is higher, calls ran at the same time. And a mean step from its start to its end, a row per call.

_MOST_BARS = 60  # more would be too thin to point at; then a bar is the mean of several steps


class CallSeconds(NamedTuple):
    """Of one call in one step, or in the mean of several."""

    inputs_s: float
    ranks_s: float
    run_s: float

    @property
    def end_s(self) -> float:
        """When it had taken the whole batch, counted from the start of the step."""
        return self.inputs_s + self.ranks_s + self.run_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one train step, or of the mean of several."""

    step: float
    calls: Mapping[str, CallSeconds]
    """By call, in the order in which they ended."""
    wait_s: float
    """Before it, for a batch."""
    run_s: float
    """All calls, from the first to the last, with the publishing of what they trained."""
    commit_s: float
    """Of the step before, which this one had to wait for."""


def step_times_of(lines: Sequence[dict[str, Any]], *, calls: Iterable[str]) -> list[StepTimes]:
    """The steps whose times were written."""
    names = tuple(calls)
    steps = []
    for line in lines:
        found = {name: seconds for name in names if (seconds := _call_seconds(line, name)) is not None}
        if found:
            times = StepTimes(
                step=line["step"],
                calls=_ordered(found),
                wait_s=line["time/wait_s"] if is_number(line.get("time/wait_s")) else 0.0,
                run_s=max(call.end_s for call in found.values()),
                commit_s=line["time/commit_s"] if is_number(line.get("time/commit_s")) else 0.0,
            )
            steps.append(times)
    return steps


def mean_of(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean step; a call that some steps lack counts where it is."""
    names = dict.fromkeys(name for step in steps for name in step.calls)
    of_calls = {name: [step.calls[name] for step in steps if name in step.calls] for name in names}
    return StepTimes(
        step=fmean(step.step for step in steps),
        calls=_ordered({name: CallSeconds(*map(fmean, zip(*calls, strict=True))) for name, calls in of_calls.items()}),
        wait_s=fmean(step.wait_s for step in steps),
        run_s=fmean(step.run_s for step in steps),
        commit_s=fmean(step.commit_s for step in steps),
    )


def bars_of(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """The steps, or means of as many as there is room for bars."""
    size = -(-len(steps) // _MOST_BARS)
    return [mean_of(steps[first : first + size]) for first in range(0, len(steps), size or 1)]


def _call_seconds(line: Mapping[str, Any], name: str) -> CallSeconds | None:
    seconds: list[Any] = [line.get(f"time/{name}{part}_s") for part in ("/inputs", "/ranks", "")]
    return CallSeconds(*map(float, seconds)) if all(map(is_number, seconds)) else None


def _ordered(calls: Mapping[str, CallSeconds]) -> dict[str, CallSeconds]:
    return dict(sorted(calls.items(), key=lambda item: (item[1].end_s, item[0])))


def curves_of(lines: Sequence[Mapping[str, Any]], *, most: int) -> dict[str, Any]:
    """Curves by name, with at most so many points each: `{"axes", "curves", "shown"}`.

    Args:
        lines: of every step once, in order.
        most: points of a curve.
    """
    numbers = _columns(lines)
    times, tokens = (numbers.get(name, _NO_POINTS) for name in ("time", "train/tokens"))
    curves = {}
    for name in sorted(numbers.keys() - set(_NO_CURVES)):
        steps, values = numbers[name]
        kept = thinned(values, most=most)
        curves[name] = {"steps": steps[kept].tolist(), "values": [float(f"{value:.6g}") for value in values[kept]]}
    shown = (next((name for name in candidates if name in curves), None) for candidates in _SHOWN_CURVES)
    axes = _axes(times, tokens, most=most)
    return {"axes": axes, "curves": curves, "shown": [name for name in shown if name]}


def thinned(values: npt.NDArray[np.float64], *, most: int) -> npt.NDArray[np.int64]:
    """Which values stay, in order: all of few; of many, the lowest and the highest of each of `most / 2` stretches."""
    if len(values) <= most:
        return np.arange(len(values))
    size = math.ceil(len(values) / (most // 2))
    filled = np.pad(values, (0, -len(values) % size), mode="edge").reshape(-1, size)
    first = np.arange(len(filled)) * size
    kept = np.concatenate([first + filled.argmin(axis=1), first + filled.argmax(axis=1)])
    return np.unique(np.minimum(kept, len(values) - 1))


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            # A bool, which is an int, has no point, nor has what is not finite.
            if (type(value) is float or type(value) is int) and math.isfinite(value):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {name: (np.array(steps), np.array(values, np.float64)) for name, (steps, values) in columns.items()}


def _axes(times: Points, tokens: Points, *, most: int) -> dict[str, list[float]]:
    """What the time and the tokens of a step are: between two of these both grow evenly."""
    steps, moments = times
    at = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(int))
    trained = np.concatenate([[0.0], np.cumsum(tokens[1])])[np.searchsorted(tokens[0], steps[at], side="right")]
    return {"step": steps[at].tolist(), "time": moments[at].tolist(), "tokens": trained.tolist()}


_NO_POINTS: Points = (np.array([], np.int64), np.array([], np.float64))


_POINTS = 1_000  # of a curve: more than a chart has columns of dots
_ANSWERS = 300
_MOST_EVENTS = 500
_READ_TIMEOUT_S = 60.0  # a trial of 100,000 steps takes some seconds
_TEXT_BY_EVENT = {
    "supervisor_started": "attempt {attempt} begins",
    TASK_ENDED: "{who}: {why}",
    "worker_silent": "{worker} is silent",
    "unit_restarting": "{unit} is started again: {cause}",
    "unit_given_up": "{unit} is given up: {cause}",
    "node_failed": "node {node} has failed",
    "fell_back": "training goes back to step {step}: {reason}",
    "epoch_lost": "the trainer has lost its epoch: {cause}",
    "train_notice": "{text}",
    "stop_requested": "asked to stop by {by}",
    "attempt_refused": "no further attempt: {cause}",
    "attempt_ended": "attempt {attempt} ended {state}: {cause}",
}
_BREAKS = (TASK_ENDED, "worker_silent", "unit_restarting", "unit_given_up", "node_failed", "fell_back")
"""What interrupts training; so does a notice that is an alarm."""


# Which trials a page is about: from what a user types, names and folders, to directories.

_MOST = 50


def choose_trials(arguments: Sequence[str], fileroot: Path) -> tuple[list[TrialFacts], int]:
    """The trials that are meant, the newest last, and how many older ones have no room beside them.

    Args:
        arguments: trials, and folders with trials in them; without any the fileroot is one.

    Raises:
        ConfigError: if a folder has none, or cannot be read.
        TimeoutError: if a file system does not answer.
        TrialNotFoundError, PlanDamagedError: see `find_trial`.
    """
    files = PatientFiles()
    chosen: dict[Path, TrialFacts] = {}
    for argument in arguments or [str(fileroot.absolute())]:
        place = Path(os.path.expanduser(argument))
        try:
            found = files.run(partial(_find, argument, place, fileroot), place)
        except TimeoutError:
            raise
        except OSError as error:
            hint = f"trials are private to their owners; ask whose it is for a page: rl-view {argument} -o FILE"
            raise ConfigError.of(f"{error.filename or place} cannot be read: {error.strerror}", hint=hint) from error
        chosen |= {facts.directory.path: facts for facts in found}
    newest = list(chosen.values())[-_MOST:]
    return newest, len(chosen) - len(newest)


def _find(argument: str, place: Path, fileroot: Path) -> list[TrialFacts]:
    is_path = os.sep in argument or argument.startswith((".", "~"))
    if not is_path or not place.is_dir() or (place / "plan.json").exists():
        return [find_trial(argument, fileroot)]
    os.listdir(place)  # a glob passes over what may not be read
    plans = [plan for pattern in ("*/plan.json", "*/*/plan.json") for plan in place.glob(pattern)]
    plans.sort(key=lambda plan: plan.stat().st_mtime)
    if found := [facts for plan in plans if (facts := read_facts(TrialDirectory(Path(os.path.realpath(plan.parent)))))]:
        return found
    hint = "a folder of trials is a file root, or an experiment's folder in it; rl-status lists trials"
    raise ConfigError.of(f"{place} has no trials in it", hint=hint)


# timeline/ -> what the page shows of it: where the time of the last steps went, and each span of the very last.

_DRAWN_STEPS = 4
_MOST_SPANS = 1_500
_TAIL_BYTES = 1 << 20  # of each worker's file, which has the last steps


def timeline_of(facts: TrialFacts) -> dict[str, Any] | None:
    """Sentences about the last steps, and the longest spans of a few of them; None where no timeline is kept."""
    folder = facts.directory.timeline_path
    if not (there := sorted(steps_of(folder, most_bytes=_TAIL_BYTES))):
        return None
    spans = spans_of(folder, there[-LATEST_STEPS:], most_bytes=_TAIL_BYTES)
    drawn = [span for span in spans if span.step in there[-_DRAWN_STEPS:]]
    longest = sorted(drawn, key=lambda span: -span.seconds)[:_MOST_SPANS]
    begin_s = min(span.start_s for span in drawn)
    return {
        "said": describe_steps(spans, facts),
        "first": there[-_DRAWN_STEPS:][0],
        "last": there[-1],
        "left_out": len(drawn) - len(longest),
        "spans": [
            {
                "row": f"{span.worker} {span.lane}",
                "kind": STEPS if span.lane == STEPS else span.name,
                "what": " ".join(filter(None, [span.name, span.about, *span.waits_for])),
                "start_s": round(span.start_s - begin_s, 4),
                "seconds": round(span.seconds, 4),
            }
            for span in sorted(longest, key=lambda span: (span.worker, span.lane, span.start_s))
        ],
    }


# samples/ -> answers for the page: of steps between the first that is kept and the newest, those of extreme rewards.
#
# Whatever a model wrote, the page stays small: steps, answers of a step, characters and tokens have bounds.

OF_A_STEP = 8
_MOST_CHARACTERS = 20_000
_MOST_TOKENS = 2_000
_MOST_BYTES = 8_000_000  # of all; with more, the page would open slowly
_TOKEN_BYTES = 25  # of one in JSON: its text and its numbers
_SHOWN = ("step", "uid", "reward", "advantage", "length", "is_cut", "staleness", "gap")


def answers_of(folder: Path, tokenizer: Path, *, most: int) -> dict[str, Any]:
    """So many answers at most, as `{"rows", "of_steps"}`; none where none are kept.

    Args:
        tokenizer: directory of the model whose tokens they are; where it is gone, answers have texts alone.
    """
    try:
        kept = KeptAnswers(folder)
    except ConfigError:
        return {"rows": [], "of_steps": 0}
    words = _Words(tokenizer)
    steps = kept.steps("all")
    chosen = steps[:: -max(1, -(-len(steps) * OF_A_STEP // most))]  # the newest is one of them
    rows = [_for_page(row, words) for step in chosen for row in _extremes(kept, step)]
    while len(rows) > 1 and sum(map(_size, rows)) > _MOST_BYTES:
        rows = rows[::2]
    return {"rows": rows, "of_steps": len(steps)}


def _extremes(kept: KeptAnswers, step: int) -> Sequence[Mapping[str, Any]]:
    rows = {name_of(row): row for sort in ("-reward", "reward") for row in kept.read([step], sort=sort, most=4)}
    return list(rows.values())


def _for_page(row: Mapping[str, Any], words: "_Words") -> dict[str, Any]:
    end = _MOST_TOKENS
    tokens = {
        "texts": words.of(row["ids"][:end]),
        "made": list(map(int, row["made"][:end])),
        "logprob": _rounded(row["logprobs"][:end]),
        "gap": _rounded((gaps_of(row) or [])[:end]),
        "advantage": _rounded(row["advantages"][:end]),
    }
    texts = {name: (row.get(name) or "")[:_MOST_CHARACTERS] for name in ("prompt", "said", "remarks")}
    num_left_out = max(0, len(row["ids"]) - end)
    return {
        "name": name_of(row),
        **{name: row[name] for name in _SHOWN},
        "parts": {
            name.removeprefix(PART): value for name, value in row.items() if name.startswith(PART) and value is not None
        },
        **texts,
        "tokens": tokens if tokens["texts"] else None,
        "tokens_left_out": num_left_out,
    }


def _size(row: Mapping[str, Any]) -> int:
    num_tokens = len(row["tokens"]["texts"]) if row["tokens"] else 0
    return len(row["prompt"]) + len(row["said"]) + len(row["remarks"]) + _TOKEN_BYTES * num_tokens


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


class _Words:
    """Token ids as texts, each decoded once."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer: Any = None
        if (directory / "tokenizer.json").is_file():
            self._tokenizer = load_tokenizer(directory)
        self._text_by_id: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """A text for each; none at all without a tokenizer."""
        if self._tokenizer is None:
            return []
        for new in {*ids} - self._text_by_id.keys():
            self._text_by_id[new] = self._tokenizer.decode([new], skip_special_tokens=False)
        return [self._text_by_id[one] for one in ids]


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
            ShownTrial(facts, name=name, points=points, answers=answers)
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
        reported = [one for one in found.values() if not isinstance(one, Unanswered)]
        if not reported:
            path, silent = next((path, one) for path, one in found.items() if isinstance(one, Unanswered))
            raise TimeoutError(silent.about(path))
        return msgspec.json.encode({"trials": reported, "left_out": self._left_out + len(found) - len(reported)})


class ShownTrial:
    """The data of one trial on the page."""

    def __init__(self, facts: TrialFacts, *, name: str, points: int, answers: int) -> None:
        """
        Args:
            points: of a curve, at most.
            answers: at most.
        """
        self.facts = facts
        self._name, self._points, self._answers = name, points, answers
        self._plan: RunPlan | None = None
        with suppress(ConfigError):  # another version's: what does not need it is shown
            self._plan = read_plan(facts.directory)
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
            **self._part(directory.journal_path, lambda _: _events(directory)),
            **self._part(directory.samples_path, self._said),
            # Of all workers' files the master's says when there is a further step.
            **self._part(spans_path(directory.timeline_path, MASTER), lambda _: {"timeline": timeline_of(self.facts)}),
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


def _events(directory: TrialDirectory) -> dict[str, Any]:
    reported = [event for event in map(_reported_event, TrialView.open(directory).events) if event is not None]
    return {"events": reported[-_MOST_EVENTS:], "events_left_out": max(0, len(reported) - _MOST_EVENTS)}


def _reported_event(event: Mapping[str, Any]) -> dict[str, Any] | None:
    name = event["event"]
    if name not in _TEXT_BY_EVENT:
        return None
    if name == TASK_ENDED and (event["code"] == 0 or event["caused_by"]):  # what explains it is reported
        return None
    text = _TEXT_BY_EVENT[name].format_map(defaultdict(str, event))
    return {
        "time": event["time"],
        "text": text.rstrip(": "),
        "is_break": name in _BREAKS or event.get("is_alarm") is True,
        "is_mark": name != "train_notice" or event.get("is_alarm") is True,
    }


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Settings with their keys, `ppo.kl.coef`; those that are not set are left out."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _settings(part, f"{key}.{name}" if key else str(name))
    elif value is not None:
        yield key, value if isinstance(value, str) else msgspec.json.encode(value).decode()


_FOLDER = Path(__file__).parent


def render_page(data: bytes, *, title: str, refresh_s: float | None = None) -> bytes:
    """The file.

    Args:
        data: JSON, as `TrialViews.data` gives it.
        refresh_s: after how many seconds the page asks its server for new data; None for a file.
    """
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    library, script = _chart_library(), (_FOLDER / "page.js").read_text()
    page = environment.get_template("page.html").render(
        title=title,
        refresh_s=refresh_s,
        policy=_policy([library, script], is_served=refresh_s is not None),
        style=Markup((_FOLDER / "page.css").read_text()),
        # Within a script element only "<" can end it, or begin another one; JSON may write it otherwise.
        data=Markup(data.decode().replace("<", "\\u003c")),
        library=Markup(library),
        script=Markup(script),
    )
    return page.encode()


def _policy(scripts: Sequence[str], *, is_served: bool) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    connect = "'self'" if is_served else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; connect-src {connect}; img-src data:; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _chart_library() -> str:
    """The JavaScript of plotly, without importing its Python."""
    spec = find_spec("plotly")
    assert spec is not None and spec.origin is not None, "plotly is one of corral's dependencies"
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text()
