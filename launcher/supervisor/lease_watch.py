"""Looks at the leased records of an attempt's workers, in a thread: the supervisor's loop waits for no Redis.

Redis --every two seconds--> records, or None where it does not answer --take--> Silence
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.worker_record import WorkerRecord
from corral.launcher.supervisor.units.silence import LOOK_INTERVAL_S
from corral.launcher.trial.rendezvous import connect_name_service
from corral.name_resolve.base import NameService
from corral.name_resolve.errors import NameServiceError
from corral.name_resolve.keys import TrialKeys

_TIMEOUT_S = 1.0
_MAX_KEPT = 30

Look = tuple[float, Mapping[str, WorkerRecord] | None]
"""When (monotonic seconds), and the records by kind/index; None if Redis did not answer."""


class LeaseWatch:
    """Looks from `begin` on, until the process ends."""

    def __init__(self, directory: TrialDirectory, trial_uuid: str) -> None:
        self._directory = directory
        self._trial_uuid = trial_uuid
        self._looks: deque[Look] = deque(maxlen=_MAX_KEPT)

    def begin(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch, name="leases", daemon=True).start()

    def take(self) -> list[Look]:
        """What was seen since the last call."""
        taken = []
        while self._looks:
            taken.append(self._looks.popleft())
        return taken

    def _watch(self) -> None:
        names: NameService | None = None
        while True:
            records = None
            with contextlib.suppress(NameServiceError, OSError, ValueError):
                # Connected anew after each failure: another start of Redis may be elsewhere.
                names = names or connect_name_service(self._directory, self._trial_uuid, timeout_s=_TIMEOUT_S)
                root = TrialKeys(self._trial_uuid).workers_root()
                records = {
                    name.removeprefix(f"{root}/"): msgspec.json.decode(text, type=WorkerRecord)
                    for name, text in names.get_subtree(root).items()
                }
            self._looks.append((time.monotonic(), records))
            if records is None and names is not None:
                with contextlib.suppress(NameServiceError, OSError):
                    names.close()
                names = None
            time.sleep(LOOK_INTERVAL_S)
