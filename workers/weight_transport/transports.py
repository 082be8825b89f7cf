"""Which transport a plan asks for.

weights.transport ──► "shared_memory", "delta", "lora": SharedMemoryTransport, which differ in what is read
                 ├──► "broadcast": SharedMemoryTransport, which asks other hosts first, and is asked by them
                 └──► "disk": DiskTransport
"""

import logging
import ssl

from corral.experiments.config.rollout import WeightsConfig
from corral.workers.weight_transport.adapters import fill_with_adapter
from corral.workers.weight_transport.deltas import fill_with_deltas
from corral.workers.weight_transport.disk import DiskTransport
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.peers import Peers
from corral.workers.weight_transport.shared_memory import FillVersion, SharedMemoryTransport, fill_with_copies
from corral.workers.weight_transport.transport import WeightTransport

logger = logging.getLogger(__name__)


def make_transport(
    config: WeightsConfig, *, trial_uuid: str, worker: str, admin_key: str, tls: ssl.SSLContext
) -> WeightTransport:
    """The transport of one generation worker; without a usable host directory that is `disk`, and the log says why.

    Args:
        worker: its name, for the other workers of its host.
        admin_key: what workers of other hosts want of those that they give weights to.
        tls: by which those workers prove themselves first.
    """
    if config.transport == "disk":
        return DiskTransport()
    fills: dict[str, FillVersion] = {
        "shared_memory": fill_with_copies,
        "broadcast": fill_with_copies,
        "delta": fill_with_deltas,
        "lora": fill_with_adapter,
    }
    peers = Peers(admin_key, tls) if config.transport == "broadcast" else None
    try:
        host = HostWeights(config.host_directory, trial_uuid, owner=worker)
        return SharedMemoryTransport(host, fill=fills[config.transport], peers=peers)
    except OSError as error:
        logger.warning(
            "each server of this host reads weights from the shared file system, since %s cannot be used (%s); "
            "weights.host_directory names another place",
            config.host_directory,
            error,
        )
        return DiskTransport()
