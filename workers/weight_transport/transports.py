"""Which transport a plan asks for.

weights.transport ──► "shared_memory", "delta", "lora": SharedMemoryTransport, which differ in what is read
                 └──► "disk": DiskTransport
"""

import logging

from corral.experiments.config.rollout import WeightsConfig
from corral.workers.weight_transport.adapters import fill_with_adapter
from corral.workers.weight_transport.deltas import fill_with_deltas
from corral.workers.weight_transport.disk import DiskTransport
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.shared_memory import FillVersion, SharedMemoryTransport, fill_with_copies
from corral.workers.weight_transport.transport import WeightTransport

logger = logging.getLogger(__name__)


def make_transport(config: WeightsConfig, *, trial_uuid: str, worker: str) -> WeightTransport:
    """The transport of one generation worker; without a usable host directory that is `disk`, and the log says why.

    Args:
        worker: its name, for the other workers of its host.
    """
    if config.transport == "disk":
        return DiskTransport()
    fills: dict[str, FillVersion] = {
        "shared_memory": fill_with_copies,
        "delta": fill_with_deltas,
        "lora": fill_with_adapter,
    }
    try:
        return SharedMemoryTransport(
            HostWeights(config.host_directory, trial_uuid, owner=worker), fill=fills[config.transport]
        )
    except OSError as error:
        logger.warning(
            "each server of this host reads weights from the shared file system, since %s cannot be used (%s); "
            "weights.host_directory names another place",
            config.host_directory,
            error,
        )
        return DiskTransport()
