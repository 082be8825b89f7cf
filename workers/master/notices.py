"""What the master finds out between steps, for people: rl-status shows the newest notice of each topic."""

import logging

import msgspec

from corral.workers.master.disk import Disk
from corral.workers.master.epoch_parts import EpochParts
from corral.workers.requests.messages import TrainNotice

logger = logging.getLogger(__name__)


async def tell(parts: EpochParts, disk: Disk, notice: TrainNotice, *, step: int) -> None:
    """The log says it once, and rl-status as long as no other notice of its topic follows."""
    level = logging.WARNING if notice.is_alarm else logging.INFO
    logger.log(level, "%s", "; ".join([notice.text, notice.details, *notice.causes]))
    await disk.run(
        parts.journal.append,
        "train_notice",
        attempt=parts.attempt,
        epoch=parts.writer.epoch,
        step=step,
        **msgspec.to_builtins(notice),
    )
