"""rl-stop: a request in the trial directory, answered by the master with a last commit, seen through by the supervisor.

stop.json --> master: checkpoint, Stop in the trial log --> supervisor: ends the workers, then itself
              no answer within the grace period ---------> supervisor: Stop in the trial log, ends the workers
--now: Stop in the trial log, ends the workers
nobody is there any more: Stop in the trial log from here, and scancel of the job if it waits in the queue
"""

import getpass
import socket
import time
from collections.abc import Callable

from corral.experiments.trial_directory import StopRequest
from corral.experiments.trial_log import DoneError, TrialLog
from corral.launcher.slurm import SlurmClient
from corral.launcher.status import FINAL_STATES, TrialStatus
from corral.launcher.status_reader import StatusReader
from corral.launcher.trials import TrialFacts

_NOT_STARTED = ("QUEUED", "BLOCKED", "HELD", "REQUEUED")
_TEARDOWN_S = 40.0  # SIGTERM, SIGKILL, SLURM's own epilogue, the report
_POLL_INTERVAL_S = 0.2


def request_stop(facts: TrialFacts, *, now: bool, grace_s: float) -> None:
    """Leaves the request where master and supervisor find it."""
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    facts.directory.write_stop_request(StopRequest(requested_at=time.time(), by=by, now=now, grace_s=grace_s))


def stop_trial(
    facts: TrialFacts,
    *,
    now: bool = False,
    grace_s: float | None = None,
    client: SlurmClient | None = None,
    on_status: Callable[[TrialStatus], None] = lambda status: None,
) -> TrialStatus:
    """Stops a trial and waits until it has ended; a trial that has ended already is left as it is.

    Raises:
        TimeoutError: if it is still there after the grace period and a bounded teardown.
    """
    client = client or SlurmClient()
    reader = StatusReader(client)
    grace_s = facts.stop_grace_s if grace_s is None else grace_s
    (status,) = reader.read([facts])
    if status.is_final and status.state != "LOST":
        return status
    request_stop(facts, now=now, grace_s=grace_s)
    if status.state == "LOST" or status.state in _NOT_STARTED:
        _append_stop(facts)
        if status.job_id and status.state in _NOT_STARTED:
            client.cancel(status.job_id)
        (status,) = reader.read([facts])
        return status
    deadline = time.monotonic() + (0.0 if now else grace_s) + _TEARDOWN_S
    while status.state not in FINAL_STATES:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"trial {facts.name} is still {status.state} after {grace_s:.0f} s of grace; "
                f"rl-stop --now {facts.name} does not wait"
                + (f", scancel {status.job_id} ends its job" * bool(status.job_id))
            )
        time.sleep(_POLL_INTERVAL_S if facts.mode == "local" else 1.0)
        (status,) = reader.read([facts])
        on_status(status)
    return status


def _append_stop(facts: TrialFacts) -> None:
    try:
        TrialLog(facts.directory.log_path).request_stop(f"{getpass.getuser()}@{socket.gethostname()}", reason="rl-stop")
    except DoneError:
        return
