"""A trial log that lost entries is refused before anybody writes into it, and goes on once they are back."""

import os
from pathlib import Path

import pytest

from corral.experiments.trial import log
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter, TrialLog, read_whole_log
from corral.experiments.trial.log_state import CorruptLogError
from corral.workers.checkpoint.ledger import LedgerDelta, write_delta


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialDirectory:
    monkeypatch.setattr(log, "VISIBLE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(log, "_STOP_PATIENCE_S", 0.0)
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    return trial


def commit(writer: LogWriter, step: int) -> None:
    writer.commit(
        step=step,
        directory=f"checkpoints/step-{step:08d}-e{writer.epoch}-00000000",
        manifest_digest="",
        ledger_file=f"ledger/{writer.epoch}-{step}-00000000.json",
        ledger_digest="",
        trained=0,
        dropped=0,
    )


def history(trial: TrialDirectory) -> list[str]:
    for step in (1, 2):
        commit(TrialLog(trial.log_path).claim("job"), step)
    return sorted(os.listdir(trial.log_path))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_nothing_is_written_into_a_hole_and_the_slot_can_be_put_back(trial: TrialDirectory, missing: int) -> None:
    slots = history(trial)
    hole = trial.log_path / f"{missing:08d}"
    hole.rename(trial.path / "backup")
    message = f"slot {missing:08d} .* is missing, but slot 00000004 is there; put it back"
    with pytest.raises(CorruptLogError, match=message):
        TrialLog(trial.log_path).claim("job")
    with pytest.raises(CorruptLogError, match=message):
        TrialLog(trial.log_path).request_stop("user@host")
    with pytest.raises(CorruptLogError, match=message):
        read_whole_log(trial, TrialLog(trial.log_path))
    (trial.path / "backup").rename(hole)
    assert sorted(os.listdir(trial.log_path)) == slots
    assert TrialLog(trial.log_path).claim("job").epoch == 3


def test_a_slot_that_shows_late_is_waited_for(trial: TrialDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    history(trial)
    hole = trial.log_path / "00000002"
    hole.rename(trial.path / "backup")
    monkeypatch.setattr(log, "VISIBLE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(log.time, "sleep", lambda pause_s: (trial.path / "backup").rename(hole))
    assert TrialLog(trial.log_path).claim("job").epoch == 3


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("witness", ["checkpoint", "weights", "delta"])
def test_a_log_without_the_claim_of_an_epoch_that_wrote_files_has_lost_entries(
    trial: TrialDirectory, witness: str, kept: int
) -> None:
    slots = history(trial)
    if witness == "checkpoint":
        (trial.checkpoints_path / "step-00000002-e2-0123abcd").mkdir()
    elif witness == "weights":
        (trial.weights_path / "v00000002-e2").mkdir()
    else:
        write_delta(trial, LedgerDelta(epoch=2, step=2, trained={}, dropped={}))
    assert read_whole_log(trial, TrialLog(trial.log_path)).epoch == 2
    for slot in slots[kept:]:
        (trial.log_path / slot).unlink()
    with pytest.raises(CorruptLogError, match=f"was written by epoch 2.*ends with slot {kept:08d}.*are lost"):
        read_whole_log(trial, TrialLog(trial.log_path))


def test_a_lost_last_commit_is_a_step_that_is_trained_again(trial: TrialDirectory) -> None:
    slots = history(trial)
    (trial.checkpoints_path / "step-00000002-e2-0123abcd").mkdir()
    (trial.log_path / slots[3]).unlink()
    state = read_whole_log(trial, TrialLog(trial.log_path))
    assert (state.epoch, state.head) == (2, 2)


def test_other_files_of_a_trial_are_no_witnesses(trial: TrialDirectory) -> None:
    for name in ("my-notes", ".removing-step-00000009-e9-0123abcd", "step-00000009"):
        (trial.checkpoints_path / name).mkdir()
    (trial.ledger_path / ".9-9-0123abcd.json.0123abcd.tmp").touch()
    assert read_whole_log(trial, TrialLog(trial.log_path)).epoch == 0
