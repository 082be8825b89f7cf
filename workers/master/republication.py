"""Weights that were published, and are damaged where they lie, are published again by those who still hold them.

    servers refuse the present version ──manager's record──┐
    a commit reads other bytes than were written ──────────┴─► written anew, beside ──► published ──► committed again
                                                                   └── as often as it may be ──► CannotContinueError

A file that was flipped on a disk stays so, and a commit gives it a second name. The trainer's memory is the one place
that is known to hold the version still, until the next step changes it.
"""

import asyncio
from typing import Final

from corral.scheduling.policy_version import PolicyVersion
from corral.workers.lifecycle.worker import CannotContinueError
from corral.workers.master.disk import Disk
from corral.workers.master.durable_state import DurableState
from corral.workers.master.epoch_parts import EpochParts
from corral.workers.master.notices import tell
from corral.workers.requests.messages import TrainNotice

_MOST: Final = 3  # of one version; a file system, or a server's host, that damages each of them is for people to mend


class Republication:
    """Of the present version, while no step runs."""

    def __init__(self, parts: EpochParts, disk: Disk, durable: DurableState) -> None:
        self._parts = parts
        self._disk = disk
        self._durable = durable
        self._version: PolicyVersion | None = None
        """The last one that was damaged."""
        self._num_written = 0
        self._is_told = False

    async def publish_if_damaged(self, version: PolicyVersion) -> bool:
        """Write and publish the weights that the ranks hold once more, if those that were published are damaged.

        Returns:
            Whether it did: a commit that names those from before is damaged, too.

        Raises:
            CannotContinueError: they were damaged each time, and no server holds them.
        """
        parts, durable = self._parts, self._durable
        cause, is_served = durable.damage, True
        refusal = await asyncio.to_thread(parts.refused_weights)
        if refusal is not None and refusal.weights == str(durable.weights):
            cause, is_served = f"{refusal.server}: {refusal.reason}", refusal.is_served
        if not cause:
            return False
        if version != self._version:
            self._version, self._num_written = version, 0
        if self._num_written == _MOST:
            if is_served:
                return False
            raise CannotContinueError(
                f"version {version} was written {_MOST + 1} times, and no server could take it over, the last time "
                f"because {cause}; look at the file system that has {durable.weights}, and at that server's host"
            )
        self._num_written += 1
        await self._tell(
            is_alarm=True,
            text=f"version {version} was damaged after it was written, and is published again, "
            f"{self._num_written} of {_MOST} times",
            details=f"in {durable.weights}",
            causes=[cause],
        )
        await durable.write_weights(version, copy=self._num_written)
        parts.publish(await durable.published(version))
        return True

    async def note_next(self, version: PolicyVersion) -> None:
        """A step has published another version: the one before needs nobody's attention any more."""
        if self._is_told:
            await self._tell(is_alarm=False, text=f"version {version} is published", details="", causes=[])

    async def _tell(self, *, is_alarm: bool, text: str, details: str, causes: list[str]) -> None:
        self._is_told = is_alarm
        step = self._version.step if self._version is not None else 0
        notice = TrainNotice(topic="published weights", is_alarm=is_alarm, text=text, details=details, causes=causes)
        await tell(self._parts, self._disk, notice, step=step)
