"""Presence: the state of a worker, which it publishes as its leased record in name-resolve.

worker code --enter(phase, waiting_for), beat()--> Presence --at most twice a second--> leased record --> rl-status
                                                      |     +--> last_seen/...: the same, without a lease
                                                      +--each phase that has ended--> Timeline

The lease says who is there: it ends with the worker, or ten seconds after it froze. What a frozen worker did last is
read from the copy, which stays until the worker leaves in order.

Durations are this process's own, and the beat is the time of the name service, so that rl-status compares no clocks
of two machines.

A phase may have a deadline. A worker that outstays it prints the stacks of all its threads and leaves the process: a
hang becomes an exit that the supervisor sees and answers, whatever the hung thread was doing.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.guarded_listener import describe_refusals
from corral.experiments.trial.spans import PHASES, Span
from corral.experiments.trial.worker_record import Trouble, WeightUpdate, WorkerRecord
from corral.name_resolve.base import NameExistsError, NameService, NameServiceError
from corral.name_resolve.keys import last_seen_key
from corral.workers.lifecycle.timeline import Timeline
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

_PUBLISH_INTERVAL_S = 0.5  # twice a second keeps rl-status fresh and costs Redis next to nothing


class Presence(Closing):
    """The record of one worker; its methods may be called from any thread.

    Example:
        with Presence(names, key, owner=incarnation, ttl_s=10, identity=WorkerRecord(kind="master_worker")) as presence:
            presence.enter("setup", deadline_s=600)
            with presence.during("train step", waits_for=["model_worker/0"], deadline_s=3600):
                ...
    """

    def __init__(
        self,
        names: NameService,
        key: str,
        *,
        owner: str,
        ttl_s: float,
        identity: WorkerRecord,
        timeline: Timeline | None = None,
    ) -> None:
        """timeline: has each phase that has ended, and may be given spans beside them by `record`."""
        self._timeline = timeline
        self._lane_since = time.monotonic()
        self._among_ranks_s = 0.0
        self._lock = threading.Lock()
        self._record = msgspec.structs.replace(identity, is_setting_up=True)
        self._phase_since = self._entered = time.monotonic()
        self._deadline_s: float | None = None
        self._dirty = True
        self._closed = threading.Event()
        self._names = names
        self._memory = last_seen_key(key)
        self._lease = names.lease(key, self._text(), ttl_s=ttl_s, owner=owner)
        self._thread = threading.Thread(target=self._publish, name="presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last state and give the record up."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        with self._lock:
            self._end_phase()
        self._lease.release()
        try:
            self._names.delete(self._memory)
        except NameServiceError as error:  # Redis is gone: rl-status then sees the exit in the journal
            logger.debug("the copy of the presence record was not deleted: %s", error)

    def enter(
        self,
        phase: str,
        *,
        waiting_for: str = "",
        waits_for: Sequence[str] = (),
        works_with: Sequence[str] = (),
        is_setting_up: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        """Say what the worker does from now on.

        Args:
            phase: a word or two for rl-status, such as `train_step`.
            waiting_for: what it waits for, for people, where the names of workers do not say it all. With nobody in
                `waits_for` it is idle, and nobody is to blame.
            waits_for: the workers (kind/index) without which it stands still; empty while it works.
            works_with: the workers without which it would soon stand still.
            is_setting_up: whether it is not ready for work yet.
            deadline_s: seconds after which the phase counts as hung; None is no limit.
        """
        with self._lock:
            before = self._record
            if (phase, waiting_for, tuple(waits_for)) != (before.phase, before.waiting_for, before.waits_for):
                self._phase_since = time.monotonic()
                self._dirty = True
                if (phase, tuple(waits_for)) != (before.phase, before.waits_for):
                    self._end_phase()
            self._record = msgspec.structs.replace(
                before,
                phase=phase,
                waiting_for=waiting_for,
                waits_for=tuple(waits_for),
                works_with=tuple(works_with),
                is_setting_up=is_setting_up,
                progress=before.progress + 1,
            )
            self._deadline_s = deadline_s
            self._entered = time.monotonic()

    @contextmanager
    def during(self, phase: str, *, waits_for: Sequence[str] = (), deadline_s: float | None) -> Iterator[None]:
        """`enter` a phase for a block, then return to the one before."""
        with self._lock:
            before, deadline_before_s = self._record, self._deadline_s
        self.enter(phase, waits_for=waits_for, deadline_s=deadline_s)
        try:
            yield
        finally:
            self.enter(
                before.phase,
                waiting_for=before.waiting_for,
                waits_for=before.waits_for,
                works_with=before.works_with,
                is_setting_up=before.is_setting_up,
                deadline_s=deadline_before_s,
            )

    def beat(
        self,
        *,
        version: str | None = None,
        weight_update: WeightUpdate | None = None,
        troubles: Sequence[Trouble] | None = None,
    ) -> None:
        """Count progress.

        Args:
            version: the policy version that the worker now holds, as a tag; None is the same as before.
            weight_update: how it came to hold that; None is the same as before.
            troubles: of other workers; None is the same as before.
        """
        with self._lock:
            before = self._record
            version = before.version if version is None else version
            weight_update = weight_update or before.weight_update
            present = before.troubles if troubles is None else tuple(troubles)
            self._dirty = self._dirty or (version, weight_update) != (before.version, before.weight_update)
            self._record = msgspec.structs.replace(
                before, progress=before.progress + 1, version=version, weight_update=weight_update, troubles=present
            )
            self._entered = time.monotonic()

    def record(self, span: Span) -> None:
        """Keep in the timeline what happened beside the phases."""
        if self._timeline is not None:
            self._timeline.record(span)

    def note_among_ranks(self, seconds: float) -> None:
        """So much of the present phase was spent in calls that need the other ranks."""
        self._among_ranks_s += seconds

    def note_restart(self) -> None:
        """Count a new start of what this process serves by."""
        with self._lock:
            self._record = msgspec.structs.replace(self._record, restarts=self._record.restarts + 1)
            self._dirty = True

    def snapshot(self) -> WorkerRecord:
        """The record as it would be published now, but for its beat."""
        with self._lock:
            return msgspec.structs.replace(self._record, in_phase_s=time.monotonic() - self._phase_since)

    def _end_phase(self) -> None:
        """Phases are without gaps: each begins where the one before ends. What is waited for in words may change."""
        start_s, self._lane_since = self._lane_since, time.monotonic()
        among_ranks_s, self._among_ranks_s = self._among_ranks_s, 0.0
        record = self._record
        self.record(
            Span(
                lane=PHASES,
                name=record.phase,
                start_s=start_s,
                end_s=self._lane_since,
                waits_for=record.waits_for,
                about=record.waiting_for,
                among_ranks_s=among_ranks_s,
            )
        )

    def _text(self) -> str:
        asked_s = time.monotonic()
        beat = self._names.clock()
        if self._timeline is not None:
            self._timeline.note_clock(asked_s=asked_s, answered_s=time.monotonic(), clock_s=beat)
        record = msgspec.structs.replace(self.snapshot(), beat=beat)
        if refusals := describe_refusals():
            record = msgspec.structs.replace(record, phase=f"{record.phase}; {refusals};")
        return msgspec.json.encode(record).decode()

    def _publish(self) -> None:
        published = 0.0
        while not self._closed.wait(_PUBLISH_INTERVAL_S):
            self._leave_if_hung()
            # A change shows at once; without one the beat still moves every two seconds, so that silence means trouble.
            if self._dirty or time.monotonic() - published > 2.0:
                self._dirty = False
                published = time.monotonic()
                self._publish_once()

    def _publish_once(self) -> None:
        try:
            text = self._text()
            self._lease.update(text)
            self._names.add(self._memory, text)
        except NameExistsError:
            # The supervisor took this worker for dead and started a successor. Two of them must not act.
            logger.critical("another process holds this worker's record: this one was replaced, and leaves")
            sys.stderr.flush()
            os._exit(WorkerExit.SUPERSEDED)
        except NameServiceError as error:
            logger.warning("the presence record was not published: %s", error)

    def _leave_if_hung(self) -> None:
        with self._lock:
            stayed_s, deadline_s, phase = time.monotonic() - self._entered, self._deadline_s, self._record.phase
        if deadline_s is not None and stayed_s > deadline_s:
            logger.critical(
                "phase %r made no progress for %.0f s (deadline %.0f s); leaving", phase, stayed_s, deadline_s
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            sys.stderr.flush()
            os._exit(WorkerExit.HUNG)
