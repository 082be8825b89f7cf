"""Evaluations by generation servers, beside training: the master asks for one, and writes down what comes out.

    master ──Evaluate──► manager ──problems──► rollout workers ⇄ generation servers
       │  ◄──Evaluation──   │ ◄──sums──────────┘
       ▼
    a line of metrics.jsonl: eval/accuracy, eval/NAME/accuracy, ..., eval/version_min, eval/version_max

Servers go on to new weights meanwhile, so an answer that was begun by the version that is evaluated may be ended by
later ones: the line says which versions made tokens of it. They are one version where training waits, as it does before
the first step and after the last.

Guarantee: an evaluation is in the line of its step whole, or not at all. It is asked for until it is complete; a
manager that has just started begins it anew, and with the master it is lost: the next epoch begins with one of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from corral.experiments.trial.worker_record import MANAGER
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.data.held_out import means_by_set, unjudged_text
from corral.workers.master.best import BestWeights
from corral.workers.master.epoch import Epoch
from corral.workers.master.metrics import StepLines
from corral.workers.requests.manager_messages import (
    REQUEST_DEADLINE_S,
    Evaluate,
    Evaluation,
    ManagerReply,
    ManagerRequest,
)
from corral.workers.requests.messages import TrainNotice
from corral.workers.streams.closing import AsyncClosing, cancel
from corral.workers.streams.errors import StreamTimeoutError
from corral.workers.streams.rpc import AsyncRequestClient

logger = logging.getLogger(__name__)

_TOPIC = "held-out problems without reward"


class ServerEvaluations(AsyncClosing):
    """Of one trainer epoch, one at a time.

    Example:
        async with ServerEvaluations(epoch, lines, on_done=news.set) as evaluations:
            evaluations.begin(version)
            ...                             # train steps
            evaluations.check()
            evaluations.is_running
    """

    def __init__(
        self, epoch: Epoch, lines: StepLines, *, on_done: Callable[[], None], best: BestWeights | None
    ) -> None:
        self._epoch = epoch
        self._lines = lines
        self._best = best
        self._on_done = on_done
        self._task: asyncio.Task[None] | None = None
        context = epoch.context
        self._manager = AsyncRequestClient[ManagerRequest, ManagerReply](
            context.security, ManagerReply, lambda: context.names.get(context.keys.manager()), server=MANAGER
        )
        self.progress = ""
        """How far the one that runs is, for `rl-status`."""

    async def close(self) -> None:
        """What runs is left behind."""
        if self._task is not None:
            await cancel(self._task)
        await self._manager.close()

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, version: PolicyVersion) -> None:
        """Ask for an evaluation of the present version; the one before has ended."""
        assert not self.is_running, "one evaluation at a time"
        self._task = asyncio.create_task(self._run(version))
        self._task.add_done_callback(lambda _: self._on_done())

    def check(self) -> None:
        """Costs nothing; raises what the last one failed with."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _run(self, version: PolicyVersion) -> None:
        asked = Evaluate(epoch=self._epoch.writer.epoch, version=str(version))
        self.progress = f"evaluation of version {version}"
        is_told = False
        while True:
            try:
                reply = await self._manager.request(asked, deadline_s=REQUEST_DEADLINE_S)
            except StreamTimeoutError as error:
                logger.warning("%s; it is asked again", error)
                continue
            assert isinstance(reply, Evaluation)
            self.progress = f"evaluation of version {version}: {reply.num_done} of {reply.num_problems} problems"
            if (reply.epoch, reply.version) != (asked.epoch, asked.version):
                continue
            if reply.is_complete or (reply.failures and not is_told):
                failures = reply.failures.items()
                unjudged = {name: unjudged_text(name, reply.sums[name], failure) for name, failure in failures}
                await tell_unjudged(self._epoch, unjudged, version=version)
                is_told = True
            if reply.is_complete:
                stats = stats_of(reply)
                await self._epoch.disk.run(self._add_line, version, stats)
                if self._best is not None:
                    await self._best.consider(version, stats)
                return

    def _add_line(self, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        self._epoch.writer.check()  # the file is the present epoch's
        self._lines.add_metrics(version.step, stats)


async def tell_unjudged(epoch: Epoch, unjudged: Mapping[str, str], *, version: PolicyVersion) -> None:
    """Tell the alarm about held-out problems without a reward, or its end.

    Args:
        unjudged: what `unjudged_text` says, by name of the data set; empty if all problems have a reward.
    """
    if not unjudged:
        await epoch.end_alarm(_TOPIC, "all held-out answers have a reward", step=version.step)
        return
    text, *causes = unjudged.values()
    details = f"evaluation of version {version}; its means leave them out"
    notice = TrainNotice(topic=_TOPIC, is_alarm=True, text=text, details=details, causes=causes)
    await epoch.tell(notice, step=version.step)


def stats_of(evaluation: Evaluation) -> dict[str, float]:
    """As they are in metrics.jsonl."""
    steps = [PolicyVersion.parse(version).step for version in evaluation.versions]
    stats = {"version_min": float(min(steps)), "version_max": float(max(steps))} if steps else {}
    return {f"eval/{key}": value for key, value in (stats | means_by_set(evaluation.sums)).items()}
