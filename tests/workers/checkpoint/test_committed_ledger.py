import asyncio
import shutil
from pathlib import Path

import pytest

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter, TrialLog
from corral.experiments.trial.log_state import MOST_COMMITS, LoggedCommit
from corral.workers.checkpoint.checkpoint import CheckpointWriter, CommittedLedger, LedgerNews, committed_ledger
from corral.workers.checkpoint.ledger import Ledger, write_delta
from tests.workers.checkpoint.rows import ROWS, trained


@pytest.fixture
def trial(tmp_path: Path) -> TrialDirectory:
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    return trial


class Trainer:
    """Commits what it is told, as a trainer epoch does."""

    def __init__(self, trial: TrialDirectory, writer: LogWriter, ledger: Ledger | None = None) -> None:
        self.trial, self.writer, self.ledger = trial, writer, ledger or Ledger(ROWS)

    def commit(self, step: int, *trained: str, dropped: tuple[str, ...] = ()) -> LoggedCommit:
        self.ledger.train(step, trained)
        for uid in dropped:
            self.ledger.drop(uid, "reward_error")
        checkpoint = CheckpointWriter(self.trial, epoch=self.writer.epoch, step=step)
        checkpoint.add_ledger(self.ledger.states())
        manifest = checkpoint.write_manifest({})
        delta = self.ledger.delta_for(epoch=self.writer.epoch, step=step)
        file, digest = write_delta(self.trial, delta)
        self.ledger.mark_committed(delta)
        return self.writer.commit(
            step=step,
            directory=checkpoint.relative_path,
            manifest_digest=manifest,
            ledger_file=file,
            ledger_digest=digest,
            trained=len(trained),
            dropped=len(dropped),
        )


@pytest.fixture
def trainer(trial: TrialDirectory) -> Trainer:
    return Trainer(trial, TrialLog(trial.log_path).claim("a"))


def test_commits_that_appear_together_are_all_counted(trial: TrialDirectory, trainer: Trainer) -> None:
    committed = CommittedLedger(trial, ROWS)
    assert asyncio.run(committed.look()) == LedgerNews()
    for step in (1, 2):
        trainer.commit(step, f"0:{step}")
    trainer.commit(3, "0:3", dropped=("0:x",))
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:1", "0:2", "0:3"), dropped=("0:x",))
    assert trained(committed.ledger) == {"0:1", "0:2", "0:3"}
    trainer.commit(4, "0:4")
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:4",))
    assert asyncio.run(committed.look()) == LedgerNews() and committed.ledger.trained_count == 4


def test_whoever_comes_late_reads_one_file_and_not_every_delta(trial: TrialDirectory, trainer: Trainer) -> None:
    for step in range(1, 21):
        trainer.commit(step, f"0:{step}")
    shutil.rmtree(trial.ledger_path)
    committed = CommittedLedger(trial, ROWS)
    assert len(asyncio.run(committed.look()).trained) == 20
    assert trained(committed.ledger) == trained(trainer.ledger)


def test_whoever_looks_seldom_misses_no_commit(trial: TrialDirectory, trainer: Trainer) -> None:
    committed = CommittedLedger(trial, ROWS)
    trainer.commit(1, "0:a")
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:a",))
    for step in range(2, MOST_COMMITS + 3):  # more than a look at the log has room for
        trainer.commit(step, f"0:{step}")
    news = asyncio.run(committed.look())
    assert set(news.trained) == {f"0:{step}" for step in range(2, MOST_COMMITS + 3)} and not news.has_gone_back


@pytest.mark.parametrize("looks_between", [True, False])
def test_what_a_rejected_commit_covered_counts_no_more_before_the_next_commit(
    trial: TrialDirectory, trainer: Trainer, looks_between: bool
) -> None:
    kept = trainer.commit(1, "0:a")
    trainer.commit(2, "0:b")
    committed = CommittedLedger(trial, ROWS)
    if looks_between:
        asyncio.run(committed.look())
        assert committed.ledger.consumed("0:b")
    writer = TrialLog(trial.log_path).claim("b")
    writer.fall_back_to(kept.slot, reason="a shard is damaged")
    # The trainer cannot commit before the prompt is issued again, so this must not take a commit to be noticed.
    assert asyncio.run(committed.look()).has_gone_back == looks_between
    assert trained(committed.ledger) == {"0:a"}
    second = Trainer(trial, writer, committed_ledger(trial, kept.commit, ROWS))
    second.commit(2, "0:c")
    second.commit(3, "0:b")
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:c", "0:b"))
    assert trained(committed.ledger) == {"0:a", "0:b", "0:c"}


@pytest.mark.parametrize("damage", [b"", b"{}"])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_delta_is_made_up_for(trial: TrialDirectory, trainer: Trainer, damaged: int, damage: bytes) -> None:
    committed = CommittedLedger(trial, ROWS)
    saved = [trainer.commit(step, f"0:{step}") for step in (1, 2, 3)]
    (trial.path / saved[damaged].commit.ledger_file).write_bytes(damage)
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:1", "0:2", "0:3"))
    trainer.commit(4, "0:4")
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:4",))


def test_whoever_starts_on_damaged_checkpoints_adds_deltas_to_the_one_before(
    trial: TrialDirectory, trainer: Trainer
) -> None:
    # The master may not have fallen back yet; who took this for an empty ledger would generate everything again.
    saved = [trainer.commit(step, f"0:{step}") for step in range(1, 21)]
    for last in saved[-2:]:
        (trial.path / last.commit.directory / "ledger.msgpack").unlink()
    committed = CommittedLedger(trial, ROWS)
    assert len(asyncio.run(committed.look()).trained) == 20 and trained(committed.ledger) == trained(trainer.ledger)


def test_what_cannot_be_read_at_all_is_known_with_the_next_commit(trial: TrialDirectory, trainer: Trainer) -> None:
    committed = CommittedLedger(trial, ROWS)
    trainer.commit(1, "0:a")
    asyncio.run(committed.look())
    bad = trainer.commit(2, "0:b")
    (trial.path / bad.commit.ledger_file).unlink()
    (trial.path / bad.commit.directory / "ledger.msgpack").unlink()
    assert asyncio.run(committed.look()) == LedgerNews() and trained(committed.ledger) == {"0:a"}
    trainer.commit(3, "0:c")
    assert asyncio.run(committed.look()) == LedgerNews(trained=("0:b", "0:c"))
