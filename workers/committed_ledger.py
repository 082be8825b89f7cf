"""CommittedLedger: which samples the commits of a trial cover, followed from outside of the trainer.

trial log --new commits--> their deltas --> Ledger --> generation-server manager (the gate's count)
                                                   --> rollout workers (what needs no keeping any more)
"""

from corral.experiments.ledger import Ledger, LedgerDelta, read_delta
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import Commit, TrialLog


class CommittedLedger:
    """The ledger of the newest commit and its ancestors.

    Example:
        committed = CommittedLedger(trial)
        for delta in committed.poll():      # at any interval: no commit is missed
            forget(delta.dropped)
        committed.ledger.consumed("0:problem-17")
    """

    def __init__(self, trial: TrialDirectory) -> None:
        self.ledger = Ledger()
        self._trial = trial
        self._log = TrialLog(trial.log_path)
        self._slot = 0

    def poll(self) -> list[LedgerDelta]:
        """Takes in the commits since the last call; returns what each of them covers, oldest first."""
        return [self._take_in(slot, entry) for slot, entry in self._log.poll() if isinstance(entry, Commit)]

    def _take_in(self, slot: int, commit: Commit) -> LedgerDelta:
        delta = read_delta(self._trial, commit)
        if commit.parent == self._slot:
            self.ledger.add(delta)
        else:  # the trainer fell back past a commit that was corrupt, which does not count any more
            lineage = self._log.state.lineage(slot)
            self.ledger = Ledger.load(self._trial, [logged.commit for logged in lineage])
        self._slot = slot
        return delta
