"""WeightUpdates: one server takes over new weights, staged and verified while it generates.

    bring_to(version, weights, digest) ──► stage ──► prepare ──► swap, with the proof of HeldWeights: the backend's
                                             │   it generates on │ and stands still
                                             │                   `──► StaleServerError
                                             `──► WeightsTornError: nothing was changed

One update at a time, so that an older version never overtakes a newer one. The trainer waits for none of this. Where
hosts give each other what they hold, `stage` is also called by itself before, so that a host can give a version as soon
as it has it.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from corral.experiments.config.rollout import UpdateMode
from corral.experiments.trial.spans import Span
from corral.experiments.trial.worker_record import WeightUpdate
from corral.workers.checkpoint.manifest import CorruptCheckpointError
from corral.workers.checkpoint.published_weights import PublishedWeights
from corral.workers.generation.backend import GenerationBackend, NewWeights
from corral.workers.generation.held_weights import HeldWeights
from corral.workers.generation.server_client import ServerError
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.weight_transport.filling import StagedVersion, StagingError

if TYPE_CHECKING:  # it loads torch, and the manager, which speaks to this end, does not
    from corral.workers.weight_transport.staging import WeightStaging

logger = logging.getLogger(__name__)


class WeightsTornError(ServerError):
    """A weight directory is not what was published; the server was not touched."""


class UpdateOrder(PublishedWeights, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the manager says: these weights, POST /bring_to; or POST /stage, which is the first part of it."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0)]
    """Longest time that staging them may take, and again reading them."""
    sources: list[str] = []
    """Control URLs of workers on other hosts that hold them, in the order in which they are to be asked."""

    @property
    def published(self) -> PublishedWeights:
        return PublishedWeights(version=self.version, weights=self.weights, digest=self.digest)


class Staged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of /stage."""

    is_held: bool
    """Whether other hosts can have the version from this worker."""
    failed_sources: list[str]
    """The sources that did not give a requested file."""


class WeightUpdates:
    """The updates that the manager asks a generation worker for."""

    def __init__(self, staging: "WeightStaging", *, mode: UpdateMode, record: Record = unrecorded) -> None:
        """
        Args:
            mode: what an update does to the requests under way.
            record: has what it does.
        """
        self._record = record
        self.staging = staging
        self._mode = mode
        self._lock = asyncio.Lock()
        self._serving: tuple[GenerationBackend, HeldWeights] | None = None
        self._staged: tuple[PublishedWeights, StagedVersion] | None = None
        """What `stage` has brought and verified, and what it was asked for, until the next update."""
        self.last: WeightUpdate | None = None
        """What the last update has cost."""

    def serves(self, backend: GenerationBackend, held: HeldWeights) -> None:
        """From now on updates go to this server, which holds these."""
        self._serving = backend, held

    def ended(self) -> None:
        """There is no server to update, until `serves` names one."""
        self._serving = None

    async def stage(self, order: UpdateOrder) -> Staged:
        """The first part of `bring_to`, which then finds it done.

        Raises:
            WeightsTornError, ServerError: as `bring_to`.
        """
        async with self._lock:
            staged = await self._stage(order)
            self._staged = (order.published, staged)
        is_held = order.digest is not None and self.staging.held(order.digest) is not None
        return Staged(is_held=is_held, failed_sources=list(staged.failed_sources))

    async def bring_to(self, order: UpdateOrder) -> None:
        """Load the weights unless the server holds their version already; what becomes of running requests is the
        mode's.

        Raises:
            WeightsTornError: naming the file that differs.
            StaleServerError: the server says that it has taken them over, and has not.
            ServerError: naming the call that failed, or what staging waited for.
        """
        version = order.version
        async with self._lock:
            if self._serving is None:
                raise ServerError("the generation server is being started; ask again")
            backend, held = self._serving
            if held.version == version and not held.is_stale:
                return
            before, self._staged = self._staged, None
            if before is not None and before[0] == order.published:
                staged = before[1]
            else:
                staged = await self._stage(order)
            was_staged = time.monotonic()
            await backend.prepare(staged.path)
            await held.expect(staged.path)
            new = NewWeights(
                version=version, directory=staged.path, mode=self._mode, timeout_s=order.timeout_s, held=held
            )
            stopped_s = await backend.swap(new)
            has_changed = time.monotonic()
            stopped = has_changed - stopped_s
            self._note("prepare weights", was_staged, stopped, version)
            self._note("stand still for weights", stopped, has_changed, version)
            if (says := await backend.version()) != version:
                raise ServerError(f"{held.url} holds version {says!r} after an update to {version!r}")
            held.version, held.directory = version, staged.path
            await asyncio.to_thread(self.staging.taken_over)
            self.last = WeightUpdate(
                version=version,
                bytes_read=staged.bytes_read,
                bytes_received=staged.bytes_received,
                staged_s=staged.seconds,
                prepared_s=stopped - was_staged,
                stopped_s=stopped_s,
            )
            logger.info(
                "holds version %s: read %d bytes, received %d from other hosts, staged in %.3f s, prepared in %.3f s, "
                "stood still for %.3f s",
                *msgspec.structs.astuple(self.last),
            )

    def _note(self, what: str, start_s: float, end_s: float, version: str) -> None:
        self._record(Span(lane="weights", name=what, start_s=start_s, end_s=end_s, about=version))

    async def _stage(self, order: UpdateOrder) -> StagedVersion:
        started = time.monotonic()
        try:
            return await asyncio.to_thread(
                self.staging.stage,
                order.version,
                order.directory,
                order.digest,
                timeout_s=order.timeout_s,
                sources=order.sources,
            )
        except CorruptCheckpointError as error:
            raise WeightsTornError(f"weights in {order.weights} were refused: {error}") from error
        except StagingError as error:
            raise ServerError(str(error)) from error
        finally:
            self._note("stage weights", started, time.monotonic(), order.version)
