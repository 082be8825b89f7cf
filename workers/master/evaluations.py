"""Evaluations of the present weights: by generation servers beside training, or by the ranks between train steps.

    master ──EvaluateVersion──► manager ──problems──► rollout workers ⇄ generation servers
       │  ◄──────Evaluation────────┘ ◄──sums─────────────┘
       │
       ├──Evaluate──► ranks: held-out problems of their own ──► means over the answers of all ranks
       │
       ├──held-out rows, n_seqs at a time──► read by the ranks where samples come in
       │                                         │
       │   calls that make what is read besides ─┤    ref_inf ──ref_logprobs──┐
       │                                         ▼                            ▼
       │                           the call that evaluates, on the ranks of its mesh ──► statistics, weighed by count
       ▼
    a line of metrics.jsonl: eval/accuracy, eval/NAME/accuracy, eval/loss, ..., eval/version_min, eval/version_max

Held-out rows are samples like others, dealt, moved and freed as those are; nothing is learned from them.

Servers go on to new weights meanwhile, so an answer that was begun by the version that is evaluated may be ended by
later ones: the line says which versions made tokens of it. They are one version where training waits, as it does before
the first step and after the last.

Guarantee: an evaluation is in the line of its step whole, or not at all. It is asked for until it is complete; a
manager that has just started begins it anew, and with the master it is lost: the next epoch begins with one of its own.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

from corral.experiments.config.data import EvaluationConfig
from corral.experiments.trial.evaluation import BestVersion
from corral.experiments.trial.worker_record import MANAGER
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.removal import Remover
from corral.workers.data.held_out import means_by_set, unjudged_text
from corral.workers.data.prompts import held_out_uids
from corral.workers.master.calls import MeshCalls
from corral.workers.master.epoch import Epoch
from corral.workers.master.metrics import StepLines
from corral.workers.master.trainer_group import TrainerGroup
from corral.workers.master.weights import PublishedVersions
from corral.workers.requests.manager_messages import (
    REQUEST_DEADLINE_S,
    EvaluateVersion,
    Evaluation,
    ManagerReply,
    ManagerRequest,
)
from corral.workers.requests.messages import HeldOutReply, StatsReply, TrainNotice
from corral.workers.streams.closing import AsyncClosing, cancel
from corral.workers.streams.errors import StreamTimeoutError
from corral.workers.streams.rpc import ServerClient

logger = logging.getLogger(__name__)

COUNT = "count"
"""The statistic that says over how many (pairs, tokens) the others of a slice are means."""
_PERPLEXITY = "perplexity"  # the exponential of a mean: its logarithm is averaged
_UNJUDGED = "held-out problems without reward"  # topic of the alarm


class BestWeights:
    """Of the versions that were evaluated, the one with the best number stays, as exports/best.

        evaluation begins ──► exports/.evaluated          second names of the version's files: no byte is written twice
        its result ──worse──► gone
                 └──better──► .evaluated/evaluated.json ──► takes the place of exports/best

    What the best number is so far stands in that file, so it outlives every process. One that was reached by weights
    which a failure took back counts like any other: they are there, and are worth it.
    """

    def __init__(self, epoch: Epoch, weights: PublishedVersions, metric: str) -> None:
        self._epoch = epoch
        self._weights = weights
        self._metric = metric
        self._remover = Remover()
        folder = epoch.trial.exports_path
        self._best, self._evaluated = folder / "best", folder / ".evaluated"

    async def begin(self, version: PolicyVersion) -> None:
        """The present version is about to be evaluated: its files stay until it is known what they are worth."""
        await self._epoch.disk.run(self._set_aside, version)

    async def consider(self, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """The numbers of that evaluation, by their names in metrics.jsonl."""
        value = stats.get(f"eval/{self._metric}")
        if value is None:
            await self._tell_missing(version, stats)
        elif await self._epoch.disk.run(self._replace_if_better, version, value):
            await self._epoch.note("best_weights", version=str(version), metric=self._metric, value=value)

    def _set_aside(self, version: PolicyVersion) -> None:
        if BestVersion.read(self._evaluated) is not None and not self._best.exists():
            self._evaluated.rename(self._best)  # the master that was to do so died before
        self._weights.keep(self._evaluated.name, version)

    def _replace_if_better(self, version: PolicyVersion, value: float) -> bool:
        """Guarantee: a reader of exports/best finds all files of one version, and what it is worth."""
        self._epoch.writer.check()  # a master that was replaced decides about nothing
        metric, sign = self._metric, -1.0 if self._metric.endswith("loss") else 1.0
        best = BestVersion.read(self._best)
        if best is not None and best.metric == metric and sign * value <= sign * best.value:
            self._remover.remove(self._evaluated)
            return False
        BestVersion(version=str(version), metric=metric, value=value).write(self._evaluated)
        if not self._remover.remove(self._best):
            return False
        self._evaluated.rename(self._best)
        return True

    async def _tell_missing(self, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        names = ", ".join(sorted(name.removeprefix("eval/") for name in stats))
        notice = TrainNotice(
            topic="best weights",
            is_alarm=True,
            text=f"evaluation.best {self._metric!r} is no number of the evaluation of {version}",
            details=f"there are {names}",
            causes=[],
        )
        await self._epoch.tell(notice, step=version.step)


class Evaluations(AsyncClosing):
    """Of one trainer epoch, one at a time.

    Example:
        async with Evaluations(epoch, calls, trainer group, weights, lines, config, row_ids=[]) as evaluations:
            await evaluations.begin(version)
            ...                             # train steps
            evaluations.check()
            evaluations.is_running
    """

    def __init__(
        self,
        epoch: Epoch,
        calls: MeshCalls,
        trainers: TrainerGroup,
        weights: PublishedVersions,
        lines: StepLines,
        config: EvaluationConfig | None,
        *,
        row_ids: Sequence[str],
    ) -> None:
        """
        Args:
            config: None where nothing is held out.
            row_ids: of the held-out rows that calls read.
        """
        self._epoch, self._calls, self._trainers, self._lines, self._row_ids = epoch, calls, trainers, lines, row_ids
        self._best = BestWeights(epoch, weights, config.best) if config and config.best else None
        self.are_by_servers = config is not None and epoch.spec.source == "trajectories"
        self.progress = ""
        """How far the one that runs is, for `rl-status`."""
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """What runs is left behind."""
        if self._task is not None:
            await cancel(self._task)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def begin(self, version: PolicyVersion) -> None:
        """Evaluate the present version; the evaluation before has ended. Servers have only begun with it afterwards."""
        assert not self.is_running, "one evaluation at a time"
        if self._best is not None:
            await self._best.begin(version)
        if self.are_by_servers:
            self._task = asyncio.create_task(self._ask_servers(version))
            self._task.add_done_callback(lambda _: self._trainers.news.set())
        elif calls := self._epoch.graph.evaluate_calls:
            stats, answered = dict[str, float](), HeldOutReply(sums={})
            with self._epoch.during("evaluate", self._trainers.workers):
                for call in calls:
                    found = await evaluate_by_call(call, self._calls, self._trainers, self._row_ids, step=version.step)
                    if isinstance(found, HeldOutReply):
                        answered = found
                    else:
                        stats |= found.stats
                await self._tell_unjudged(version, answered.sums, answered.failures)
                await self._note(version, stats | means_by_set(answered.sums))

    def check(self) -> None:
        """Costs nothing; raises what the last one of servers failed with."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _ask_servers(self, version: PolicyVersion) -> None:
        context = self._epoch.context
        asked = EvaluateVersion(epoch=self._epoch.writer.epoch, version=str(version))
        self.progress = f"evaluation of version {version}"
        has_reported = False
        async with ServerClient[ManagerRequest, ManagerReply](
            context.security, ManagerReply, lambda: context.names.get(context.keys.manager()), server=MANAGER
        ) as manager:
            while True:
                try:
                    reply = await manager.request(asked, deadline_s=REQUEST_DEADLINE_S)
                except StreamTimeoutError as error:
                    logger.warning("%s; it is asked again", error)
                    continue
                assert isinstance(reply, Evaluation)
                self.progress = f"evaluation of version {version}: {reply.num_done} of {reply.num_problems} problems"
                if (reply.epoch, reply.version) != (asked.epoch, asked.version):
                    continue
                if reply.is_complete or (reply.failures and not has_reported):
                    await self._tell_unjudged(version, reply.sums, reply.failures)
                    has_reported = True
                if reply.is_complete:
                    steps = [PolicyVersion.parse(each).step for each in reply.versions]
                    of_steps = {"version_min": float(min(steps)), "version_max": float(max(steps))} if steps else {}
                    await self._note(version, of_steps | means_by_set(reply.sums))
                    return

    async def _tell_unjudged(
        self, version: PolicyVersion, sums: Mapping[str, Mapping[str, float]], failures: Mapping[str, str]
    ) -> None:
        """Tell the alarm about held-out problems without a reward, or its end."""
        if not failures:
            await self._epoch.end_alarm(_UNJUDGED, "all held-out answers have a reward", step=version.step)
            return
        text, *causes = (unjudged_text(name, sums[name], failure) for name, failure in failures.items())
        details = f"evaluation of version {version}; its means leave them out"
        notice = TrainNotice(topic=_UNJUDGED, is_alarm=True, text=text, details=details, causes=causes)
        await self._epoch.tell(notice, step=version.step)

    async def _note(self, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """The line of an evaluation, and what it means for the best weights."""
        named = {f"eval/{name}": value for name, value in stats.items()}

        def add_line() -> None:
            self._epoch.writer.check()  # the file is the present epoch's
            self._lines.add_metrics(version.step, named)

        await self._epoch.disk.run(add_line)
        if self._best is not None:
            await self._best.consider(version, named)


async def evaluate_by_call(
    call: ModelFunctionCall, calls: MeshCalls, trainers: TrainerGroup, row_ids: Sequence[str], *, step: int
) -> StatsReply | HeldOutReply:
    """What a call says of the present weights: over these held-out rows or, where it reads no keys, over problems of
    its own, which it is asked about once."""
    if not call.input_keys:
        return await calls.evaluate(call, [], version=step)
    uids, slices = held_out_uids(row_ids, version=step), list[tuple[Mapping[str, float], int]]()
    for part in _parts(uids, call.n_seqs):
        for sample in await trainers.load_rows(part):
            calls.buffer.put(sample)
        for maker in calls.graph.makers_of(call.name):
            for piece in _parts(part, maker.n_seqs):
                await calls.run_call(maker, piece, version=step, is_last_slice=piece[-1] == part[-1])
        found = await calls.evaluate(call, part, version=step)
        assert isinstance(found, StatsReply), f"{call.name} reads rows"
        slices.append((found.stats, len(part)))
        trainers.clear(calls.buffer.release(part))
    return StatsReply(stats=merge_slices(slices))


def merge_slices(slices: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Means over several slices, each weighed by its count.

    Args:
        slices: statistics of each slice, and its rows, which count where its statistics name no count.
    """
    weights = [stats.get(COUNT, float(num_rows)) for stats, num_rows in slices]
    total = sum(weights)
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for stats, _ in slices for name in stats if name != COUNT):
        values = [stats[name] for stats, _ in slices]
        if name.endswith(_PERPLEXITY):
            values = [math.log(value) for value in values]
        mean = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total if total else 0.0
        merged[name] = math.exp(mean) if name.endswith(_PERPLEXITY) else mean
    return merged | {COUNT: total}


def _parts(uids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (uids[start : start + size] for start in range(0, len(uids), size))
