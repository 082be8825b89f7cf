from pathlib import Path

import pytest

from corral.experiments.ledger import LedgerDelta, write_delta
from corral.experiments.trial_directory import TrialDirectory
from corral.experiments.trial_log import LogWriter, TrialLog
from corral.workers.committed_ledger import CommittedLedger


@pytest.fixture
def trial(tmp_path: Path) -> TrialDirectory:
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    return trial


def commit(trial: TrialDirectory, writer: LogWriter, step: int, *trained: str) -> int:
    delta = LedgerDelta(epoch=writer.epoch, step=step, trained={step: list(trained)}, dropped={})
    file, digest = write_delta(trial, delta)
    return writer.commit(
        step=step,
        directory=f"checkpoints/{step}",
        manifest_sha256="",
        ledger_file=file,
        ledger_sha256=digest,
        trained=len(trained),
        dropped=0,
    ).slot


def test_commits_that_appear_together_are_all_counted(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("a")
    committed = CommittedLedger(trial)
    assert committed.poll() == []
    for step in (1, 2, 3):
        commit(trial, writer, step, f"0:{step}")
    assert [delta.step for delta in committed.poll()] == [1, 2, 3]
    assert committed.ledger.trained == {"0:1": 1, "0:2": 2, "0:3": 3}
    commit(trial, writer, 4, "0:4")
    assert [delta.step for delta in committed.poll()] == [4]
    assert committed.poll() == [] and committed.ledger.trained_count == 4


@pytest.mark.parametrize("looks_between", [True, False])
def test_what_a_corrupt_commit_covered_counts_no_more(trial: TrialDirectory, looks_between: bool) -> None:
    first = TrialLog(trial.log_path).claim("a")
    kept = commit(trial, first, 1, "0:a")
    commit(trial, first, 2, "0:b")
    committed = CommittedLedger(trial)
    if looks_between:
        committed.poll()
        assert committed.ledger.consumed("0:b")
    second = TrialLog(trial.log_path).claim("b")
    second.fall_back_to(kept)
    commit(trial, second, 2, "0:c")
    commit(trial, second, 3, "0:b")
    committed.poll()
    assert committed.ledger.trained == {"0:a": 1, "0:c": 2, "0:b": 3}
