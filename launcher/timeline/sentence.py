"""Where the time of train steps went, and what would change that: spans of some steps -> causes, the largest first.

    the master's phases ──fraction of the steps' time──► the slow phases
    spans of other workers ──figures──► RULES of that phase ──those that hold, the costliest first──► causes

A rule names the server or rank that causes the delay, if a single one does. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

from corral.experiments.trial.spans import PHASES, Span
from corral.experiments.trial.worker_record import MASTER
from corral.launcher.timeline.reader import spans_of, steps_in, steps_of
from corral.launcher.trial.metrics import last_lines
from corral.launcher.trial.view import TrialFacts
from corral.launcher.trial.watchers import dropped_fraction

_FASTER_REWARD = "make the reward faster, or raise concurrency of its part"
LATEST_STEPS = 20  # of which one alone says little
_TAIL_BYTES = 1 << 20  # of each worker, so that many are read within a second
_LEAST_FRACTION = 0.1  # of the steps' time; a phase that takes less is not reported
_APART = 1.5  # times as slow as the median of its like is slow
_LEAST_WORK_S = 4.0  # of a rank, which is looked at twenty times a second
_WAITS_APART = 0.25  # of the ranks' time; what they spend in collectives differs by less on sound machines
_COLLECTIVE = ("train step", "inference", "evaluate")  # phases of ranks in which each needs the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that the steps have waited for."""

    fraction: float
    """Of the steps' time, spent in the phase that this cause explains."""
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


class Reason(NamedTuple):
    """Why a phase may take long, as a rule has found."""

    cost_s: float
    """Seconds of all who lost them: what is dearer is said first."""
    text: str
    remedy: str


@dataclass(frozen=True)
class Figures:
    """The figures that rules need of the spans of some steps."""

    spans: Sequence[Span]
    dropped: float = 0.0
    """Fraction of the prompts of these steps that were dropped."""
    trial: str = ""
    """experiment/trial, for commands."""

    @cached_property
    def window(self) -> tuple[float, float]:
        """From the first step's start to the last one's end."""
        steps = steps_in(self.spans).values()
        return min(step.start_s for step in steps), max(step.end_s for step in steps)

    @property
    def wall_s(self) -> float:
        return self.window[1] - self.window[0]

    @cached_property
    def master_s(self) -> Mapping[str, float]:
        """Seconds of the master in each phase; together they are all of the time, since phases have no gaps."""
        return self.seconds_by(lambda span: span.name, self.of(PHASES, MASTER))

    def of(self, lane: str, kind: str = "") -> list[Span]:
        return [span for span in self.spans if span.lane == lane and span.worker.startswith(kind)]

    def clipped_s(self, span: Span) -> float:
        """What of it was in these steps."""
        return max(0.0, min(span.end_s, self.window[1]) - max(span.start_s, self.window[0]))

    def seconds_by(self, key: Callable[[Span], str], spans: Iterable[Span]) -> dict[str, float]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in spans:
            seconds[key(span)] += self.clipped_s(span)
        return seconds

    def lane_s(self, lane: str) -> float:
        return sum(map(self.clipped_s, self.of(lane)))


def _slow_server(figures: Figures) -> Reason | None:
    tokens: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in figures.of("answers"):
        tokens[span.waits_for[0]] += span.tokens
        seconds[span.waits_for[0]] += span.seconds
    token_s = {server: seconds[server] / made for server, made in tokens.items() if made}
    if len(token_s) < 2:
        return None
    slowest = max(token_s, key=token_s.__getitem__)
    others = median(value for server, value in token_s.items() if server != slowest)
    if token_s[slowest] < _APART * others:
        return None
    text = (
        f"a group waits {1e3 * token_s[slowest]:.3g} ms for each token of {slowest}, and {1e3 * others:.3g} elsewhere"
    )
    cost_s = seconds[slowest] - others * tokens[slowest]
    return Reason(cost_s, text, "look at the host and the GPU of that server, or do without it")


def _slow_judge(lane: str, judge: str, remedy: str) -> Callable[[Figures], Reason | None]:
    def rule(figures: Figures) -> Reason | None:
        judged, answers = figures.of(lane, "rollout_worker"), figures.of("answers")
        judged_s, made_s = figures.lane_s(lane), figures.lane_s("answers")
        if not judged or not answers or judged_s < made_s:
            return None
        mean_s = sum(span.seconds for span in judged) / len(judged)
        text = f"a group waits {mean_s:.3g} s for its {judge}, {judged_s / (judged_s + made_s):.0%} of its time"
        return Reason(judged_s, text, remedy)

    return rule


_slow_reward = _slow_judge("rewards", "reward", _FASTER_REWARD)
_slow_teacher = _slow_judge("teachers", "teacher", "give rollout.teacher a faster server")


def _slow_agents(figures: Figures) -> Reason | None:
    episodes_s, made_s = figures.lane_s("episodes"), figures.lane_s("answers")
    if not episodes_s or made_s > episodes_s / 2:
        return None
    text = f"{1 - made_s / episodes_s:.0%} of the time of episodes is the agent's own, tools and environments included"
    return Reason(episodes_s - made_s, text, "make them faster, or raise rollout.agent_processes")


def _shut_gate(figures: Figures) -> Reason | None:
    by_phase = figures.seconds_by(lambda span: span.name, figures.of(PHASES, "rollout_worker"))
    fraction = (by_phase["wait for the trainer"] + by_phase["wait for admission"]) / (sum(by_phase.values()) or 1.0)
    if fraction < 0.3:
        return None
    text = f"rollout workers may begin nothing for {fraction:.0%} of the time"
    return Reason(0.0, text, "raise rollout.max_head_offpolicyness (eta), or rollout.max_concurrent_rollouts")


def _no_server(figures: Figures) -> Reason | None:
    without_s = sum(figures.clipped_s(span) for span in figures.of(PHASES, "gserver_manager") if span.waits_for)
    if without_s < 0.2 * figures.wall_s:
        return None
    text = f"no server holds the new weights for {without_s / figures.wall_s:.0%} of the time"
    return Reason(0.0, text, "see weights.transport, or allow older ones: rollout.max_head_offpolicyness (eta)")


def _dropped(figures: Figures) -> Reason | None:
    if figures.dropped < _LEAST_FRACTION:
        return None
    text = f"{figures.dropped:.0%} of the prompts were dropped, for which answers were made in vain"
    return Reason(
        figures.dropped * figures.master_s["wait for a batch"], text, f"rl-logs {figures.trial} --errors says why"
    )


def _slow_rank(figures: Figures) -> Reason | None:
    worked: defaultdict[str, list[Span]] = defaultdict(list)
    for span in figures.of(PHASES, "model_worker"):
        if span.name in _COLLECTIVE:
            worked[span.worker].append(span)
    waits = {
        rank: sum(span.among_ranks_s for span in found) / work_s
        for rank, found in worked.items()
        if (work_s := sum(span.seconds for span in found)) >= _LEAST_WORK_S
    }
    if len(waits) < 2:
        return None
    slowest = min(waits, key=waits.__getitem__)
    others = median(fraction for rank, fraction in waits.items() if rank != slowest)
    if others - waits[slowest] < _WAITS_APART:
        return None
    waited = f"{others:.0%} of their calls, and it for {waits[slowest]:.0%}"
    text = f"{slowest} holds up the other ranks, which wait for {waited}"
    cost_s = (others - waits[slowest]) * sum(span.seconds for span in worked[slowest])
    return Reason(cost_s, text, "look at its host, its GPU and what runs beside it")


def _slow_judging(figures: Figures) -> Reason | None:
    by_rank = figures.seconds_by(lambda span: span.worker, figures.of("rewards", "model_worker"))
    judged_s, calls_s = max(by_rank.values(), default=0.0), figures.master_s["train step"]
    if judged_s < calls_s / 2:
        return None
    return Reason(judged_s, f"rewards take {judged_s / calls_s:.0%} of it", _FASTER_REWARD)


def _long_call(figures: Figures) -> Reason | None:
    training = [span for span in figures.of(PHASES, MASTER) if span.name == "train step"]
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in figures.spans:
        if span.worker == MASTER and span.lane == span.name:  # and not a wait of that call
            seconds[span.lane] += sum(_overlap_s(span, phase) for phase in training)
    if not seconds:
        return None
    longest = max(seconds, key=seconds.__getitem__)
    text = f"{longest} runs for {seconds[longest] / sum(map(figures.clipped_s, training)):.0%} of it"
    remedy = "raise its max_tokens_per_micro_batch while memory lasts, or take more training ranks (allocation)"
    return Reason(0.0, text, remedy)


def _overlap_s(one: Span, other: Span) -> float:
    return max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))


def _always(text: str, remedy: str) -> Callable[[Figures], Reason | None]:
    return lambda figures: Reason(0.0, text, remedy)


_few_servers = _always(
    "answers are made more slowly than they are trained on", "take more generation servers (allocation)"
)


RULES: Sequence[tuple[Sequence[str], str, Sequence[Callable[[Figures], Reason | None]]]] = (
    # The master's phases, what it does in them, and what may be why. The last of the reasons always holds.
    (
        ("wait for a batch",),
        "waiting for a batch",
        (_slow_server, _slow_reward, _slow_teacher, _slow_agents, _shut_gate, _no_server, _dropped, _few_servers),
    ),
    (("train step",), "the calls of the step", (_slow_rank, _slow_judging, _long_call)),
    (
        ("write weights",),
        "writing weights",
        (_always("each step's weights are written whole", "put the trial on a faster disk, or see weights.transport"),),
    ),
    (
        ("copy", "commit"),
        "commits",
        (_always("training stands still for them", "raise control.commit_every"),),
    ),
    (
        ("evaluate",),
        "evaluations",
        (_always("training stands still for them", "raise evaluation.every"),),
    ),
)


def explain_time(spans: Sequence[Span], *, dropped: float = 0.0, trial: str = "") -> list[Cause]:
    """The causes of the time of these steps, the largest first; empty if the spans hold no step.

    Args:
        spans: `spans_of` some steps.
        dropped: fraction of the prompts of these steps that were dropped.
        trial: experiment/trial, for commands.
    """
    if not steps_in(spans):
        return []
    figures = Figures(spans, dropped, trial)
    causes = []
    for phases, what, rules in RULES:
        fraction = sum(figures.master_s[phase] for phase in phases) / figures.wall_s
        if fraction < _LEAST_FRACTION:
            continue
        found = [reason for rule in rules if (reason := rule(figures)) is not None]
        causes += [
            Cause(fraction=fraction, text=f"{fraction:.0%} went into {what}: {reason.text}", remedy=reason.remedy)
            for reason in sorted(found[:-1] or found, key=lambda reason: -reason.cost_s)
        ]
    return sorted(causes, key=lambda cause: -cause.fraction)


def describe_latest_steps(facts: TrialFacts) -> list[str]:
    """As `describe_steps`, of the last steps of a trial; nothing where none are kept."""
    folder = facts.directory.timeline_path
    if not (there := steps_of(folder, most_bytes=_TAIL_BYTES)):
        return []
    return describe_steps(spans_of(folder, sorted(there)[-LATEST_STEPS:], most_bytes=_TAIL_BYTES), facts)


def describe_steps(spans: Sequence[Span], facts: TrialFacts) -> list[str]:
    """The sentence about these steps, which tells the largest cause, and one for each of the others.

    Args:
        facts: of the trial, whose last metrics say how many prompts were dropped.
    """
    steps = steps_in(spans)
    if not steps:
        return []
    first, last = min(steps), max(steps)
    where = f"step {first}" if first == last else f"steps {first} to {last}"
    dropped = dropped_fraction(last_lines(facts.directory.metrics_path), steps)
    head, *others = list(map(str, explain_time(spans, dropped=dropped, trial=facts.name))) or ["nothing stands out"]
    return [f"of {Figures(spans).wall_s:.3g} s in {where}, {head}", *(f"besides, {other}" for other in others)]
