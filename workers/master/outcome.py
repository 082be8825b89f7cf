"""StepOutcome: what a whole train step did, from what each of its calls did.

TrainReplies of every trained role ──► did all learn, none, or some?      statistics, with names that do not collide
CallTimes of every call            ──► where the step's time went
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from corral.scheduling.dataflow import DataflowGraph
from corral.workers.requests.messages import TrainNotice, TrainReply


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one go of a call did, beside the keys that it made."""

    trained: TrainReply | None = None
    """What it did to the weights, if it is a train step."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Samples that the step goes on without, and why; no other call of the step may have taken them before."""


@dataclass(slots=True)
class CallTimes:
    """Where the time of one call's goes went, in seconds."""

    inputs_s: float = 0.0
    """Until its input keys were there."""
    ranks_s: float = 0.0
    """Until its ranks had ended other calls."""
    run_s: float = 0.0
    waited_for: dict[str, float] = field(default_factory=dict)
    """Seconds by call that it waited for."""


@dataclass(slots=True)
class StepOutcome:
    """A step over its graph, as far as it has come.

    A step counts as a whole or not at all: its samples are consumed once, by all roles or by none.
    """

    graph: DataflowGraph
    train_replies: dict[str, list[TrainReply]] = field(default_factory=dict)
    """Of the train steps, by call; one per go."""
    times: dict[str, CallTimes] = field(default_factory=dict)
    """By call."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Why the step went on without a sample, by uid."""

    @property
    def by_call(self) -> dict[str, TrainReply]:
        """What each train step did in all of its goes."""
        return {name: joined(replies) for name, replies in self.train_replies.items()}

    @property
    def num_nonfinite(self) -> int:
        return sum(reply.num_nonfinite for reply in self.by_call.values())

    @property
    def is_damaged(self) -> bool:
        """Whether some role's weights are no longer finite."""
        return any(reply.is_damaged for reply in self.by_call.values())

    @property
    def skipping(self) -> list[str]:
        """The train steps that changed nothing because nothing was finite."""
        return [name for name, reply in self.by_call.items() if reply.is_skipped]

    @property
    def is_skipped(self) -> bool:
        """Whether no role learned: the version stays, and the samples were not trained on."""
        return bool(self.by_call) and len(self.skipping) == len(self.by_call)

    @property
    def is_torn(self) -> bool:
        """Whether some roles learned from the samples and others did not: only an earlier state is one state."""
        return bool(self.skipping) and not self.is_skipped

    @property
    def notices(self) -> list[TrainNotice]:
        """What the train steps found out."""
        return [notice for reply in self.by_call.values() for notice in reply.notices]

    def metrics(self) -> dict[str, float]:
        """Statistics of the train steps, and times; those of all roles but the first one begin with the role."""
        values: dict[str, float] = {}
        trained = self.graph.trained_models
        for name, reply in self.by_call.items():
            role = self.graph.call(name).role
            is_first = role == trained[0].role
            values |= {_named(key, "" if is_first else role): value for key, value in reply.stats.items()}
        for name, times in self.times.items():
            values |= _times(name, times)
        return values


def joined(replies: Sequence[TrainReply]) -> TrainReply:
    """Several goes as one: means of the statistics, sums of the counts."""
    names = dict.fromkeys(name for reply in replies for name in reply.stats)
    means = {name: [reply.stats[name] for reply in replies if name in reply.stats] for name in names}
    return TrainReply(
        stats={name: sum(values) / len(values) for name, values in means.items()},
        num_updates=sum(reply.num_updates for reply in replies),
        num_nonfinite=sum(reply.num_nonfinite for reply in replies),
        is_damaged=any(reply.is_damaged for reply in replies),
        notices=[notice for reply in replies for notice in reply.notices],
    )


def _named(key: str, role: str) -> str:
    """The statistic of a role, whose name it may begin with already."""
    return key if not role or key.startswith(f"{role}/") else f"{role}/{key}"


def _times(name: str, times: CallTimes) -> dict[str, float]:
    """How long a call ran, and how long it waited before: for which other calls, and for ranks that they had."""
    waited = {f"time/{name}/for_{other}_s": seconds for other, seconds in times.waited_for.items()}
    return {
        f"time/{name}_s": times.run_s,
        f"time/{name}/inputs_s": times.inputs_s,
        f"time/{name}/ranks_s": times.ranks_s,
    } | waited
