"""How submitit learns what became of its jobs on a cluster without accounting: from squeue, through our own client.

submitit asks sacct and nobody else, so that without accounting a job that crashed hard is UNKNOWN to it for ever.

              sbatch
                |          squeue shows it            a final word, or gone from squeue
    (nothing) --+--> NEW ---------------> SEEN(word) ----------------------------------> done
                      `--- twice not there (asked about after SLURM has forgotten it) --> done: GONE

Nothing changes while the controller does not answer: no news is not the end of a job.
"""

import logging
import time

from submitit.slurm.slurm import SlurmInfoWatcher

from corral.launcher.cluster.jobs import JobPhase
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.words import phase_of, state_word

logger = logging.getLogger(__name__)

GONE = "GONE"
_LOOKS_BEFORE_GONE = 2  # a controller that was just restarted may know a new job only a moment later


class QueueWatcher(SlurmInfoWatcher):
    """A watcher for `SlurmJob.watcher`: one squeue call for all jobs, at most every two seconds, less often later."""

    def __init__(self, *, client: SlurmClient | None = None, delay_s: int = 10) -> None:
        super().__init__(delay_s=delay_s)
        self._client = client or SlurmClient()
        self._misses: dict[str, int] = {}

    def update(self) -> None:
        """Asks once about all jobs that have not ended."""
        waiting_for = self._registered - self._finished
        if not waiting_for:
            return
        self._num_calls += 1
        self._last_status_check = time.time()  # submitit's own clock for the next look
        try:
            shown = self._client.states()
        except SlurmError as error:
            logger.warning("SLURM does not answer, so the last known states stay: %s", error)
            return
        for job_id in waiting_for:
            if job_id in shown:
                word, reason = shown[job_id]
                self._misses[job_id] = 0
                self._info_dict[job_id] = {"JobID": job_id, "State": state_word(word) or "UNKNOWN", "Reason": reason}
            else:
                self._miss(job_id)
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended; a word that is not known is no end."""
        state = self.get_state(job_id, mode=mode)
        return state == GONE or phase_of(state) is JobPhase.ENDED

    def _miss(self, job_id: str) -> None:
        self._misses[job_id] = self._misses.get(job_id, 0) + 1
        was_seen = job_id in self._info_dict
        if was_seen or self._misses[job_id] >= _LOOKS_BEFORE_GONE:
            self._info_dict[job_id] = {"JobID": job_id, "State": GONE, "Reason": "SLURM has forgotten it"}
