"""BestWeights: of the versions that were evaluated, the one with the best number stays, as exports/best.

    evaluation begins ──► exports/.evaluated          second names of the version's files: no byte is written twice
    its result ──worse──► gone
             └──better──► .evaluated/evaluated.json ──► takes the place of exports/best

What the best number is so far stands in that file, so it outlives every process. One that was reached by weights which
a failure took back counts like any other: they are there, and are worth it.
"""

from collections.abc import Mapping

from corral.experiments.config.data import BestConfig
from corral.experiments.trial.evaluation import BestVersion
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.checkpoint.removal import Remover
from corral.workers.master.epoch import Epoch
from corral.workers.master.weights import PublishedVersions
from corral.workers.requests.messages import TrainNotice


class BestWeights:
    """Of one epoch; one evaluation at a time."""

    def __init__(self, epoch: Epoch, weights: PublishedVersions, config: BestConfig) -> None:
        self._epoch = epoch
        self._weights = weights
        self._config = config
        self._remover = Remover()
        folder = epoch.trial.exports_path
        self._best, self._evaluated = folder / "best", folder / ".evaluated"

    async def begin(self, version: PolicyVersion) -> None:
        """The present version is about to be evaluated: its files stay until it is known what they are worth."""
        await self._epoch.disk.run(self._set_aside, version)

    async def consider(self, version: PolicyVersion, stats: Mapping[str, float]) -> None:
        """The numbers of that evaluation, by their names in metrics.jsonl."""
        value = stats.get(f"eval/{self._config.metric}")
        if value is None:
            await self._tell_missing(version, stats)
        elif await self._epoch.disk.run(self._replace_if_better, version, value):
            await self._epoch.note("best_weights", version=str(version), metric=self._config.metric, value=value)

    def _set_aside(self, version: PolicyVersion) -> None:
        if BestVersion.read(self._evaluated) is not None and not self._best.exists():
            self._evaluated.rename(self._best)  # whoever was to do so died before
        self._weights.keep(self._evaluated.name, version)

    def _replace_if_better(self, version: PolicyVersion, value: float) -> bool:
        """Guarantee: a reader of exports/best finds all files of one version, and what it is worth."""
        self._epoch.writer.check()  # a master that was replaced decides about nothing
        metric, sign = self._config.metric, 1.0 if self._config.is_highest else -1.0
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
            text=f"evaluation.best.metric {self._config.metric!r} is no number of the evaluation of {version}",
            details=f"there are {names}",
            causes=[],
        )
        await self._epoch.tell(notice, step=version.step)
