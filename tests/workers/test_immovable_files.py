"""A file that cannot be removed in each folder that is cleaned: it takes room, is told of, and ends nothing."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from corral.experiments.trial import leftovers
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.evaluation import EvaluationRequest, progress_path
from corral.experiments.trial.flocks import REMOVING
from corral.experiments.trial.log import TrialLog
from corral.launcher.trial.processes import sweep
from corral.workers.checkpoint.checkpoint import CheckpointWriter, collect_garbage
from corral.workers.checkpoint.removal import Remover
from corral.workers.delivery.spool import Spool
from corral.workers.evaluation import _clean_up
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.staging import WeightStaging
from tests.immovable import immovable
from tests.workers.checkpoint.test_committed_ledger import Trainer
from tests.workers.weight_transport.versions import LONG_S, make_version


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A folder that has something to clean away."""

    stays: Path
    """A file that does not go."""
    clean: Callable[[], object]
    goes_on: Callable[[], object]
    """What comes next of whoever has cleaned."""
    is_told: bool = True


def old_checkpoints(folder: Path) -> Cleaned:
    trial = new_trial(folder)
    trainer = Trainer(trial, TrialLog(trial.log_path).claim("a"))
    first = trial.path / [trainer.commit(step, f"0:{step}") for step in range(1, 5)][0].commit.directory
    clean = partial(collect_garbage, trial, trainer.writer.state, epoch=1, keep=2, remover=Remover())
    return Cleaned(stays=first / "ledger.msgpack", clean=clean, goes_on=lambda: trainer.commit(5, "0:5"))


def an_unfinished_checkpoint(folder: Path) -> Cleaned:
    trial = new_trial(folder)
    checkpoint = CheckpointWriter(trial, epoch=1, step=1)
    trainer = Trainer(trial, TrialLog(trial.log_path).claim("a"))
    stays = filled(checkpoint.path / "rank-0")
    return Cleaned(
        stays=stays, clean=checkpoint.give_up, goes_on=lambda: trainer.commit(2, "0:a"), is_told=False
    )  # a later epoch tells of it


def the_trial_log(folder: Path) -> Cleaned:
    trial = new_trial(folder)
    TrialLog(trial.log_path).claim("a")
    stays = filled(trial.log_path / ".00000001.ab.tmp")
    clean = partial(TrialLog(trial.log_path).claim, "b")
    return Cleaned(stays=stays, clean=clean, goes_on=partial(TrialLog(trial.log_path).claim, "c"), is_told=False)


def a_spool(folder: Path) -> Cleaned:
    spool = Spool(folder / "spool")
    for uid in ("0:a", "0:b"):
        spool.append(uid, [b"answer"])

    def goes_on() -> None:
        spool.append("0:a", [b"another"])
        spool.close()
        with Spool(folder / "spool") as again:
            assert {uid: again.payload(uid) for uid in again.uids()} == {"0:b": [b"answer"], "0:a": [b"another"]}

    stays = folder / "spool/record-0000000001"
    return Cleaned(stays=stays, clean=lambda: spool.discard(["0:a"]), goes_on=goes_on)


def old_weights_in_memory(folder: Path) -> Cleaned:
    stage = staging(folder)
    first = stage(1)
    return Cleaned(stays=first / "model-00000.safetensors", clean=lambda: stage(2), goes_on=lambda: stage(3))


def what_a_dead_worker_left_in_memory(folder: Path) -> Cleaned:
    stage = staging(folder)
    left = stage(1).with_name(f"{REMOVING}ab")
    left.mkdir()
    return Cleaned(stays=filled(left / "file"), clean=lambda: stage(2), goes_on=lambda: stage(3), is_told=False)


def the_weights_of_an_ended_trial_in_memory(folder: Path) -> Cleaned:
    ended, stage = HostWeights(in_memory(folder), "ab" * 16, owner="a"), staging(folder, trial_uuid="cd" * 16)
    stays = filled(ended.path / "file")
    return Cleaned(stays=stays, clean=ended.close, goes_on=lambda: stage(1))


def a_workers_temporary_folder(folder: Path) -> Cleaned:
    record = leftovers.begin("")
    temporary = folder / "temporary"
    temporary.mkdir(mode=0o700)
    record.note(temporary)
    return Cleaned(stays=filled(temporary / "file"), clean=record.remove, goes_on=sweep)


def a_record_of_what_a_worker_leaves(folder: Path) -> Cleaned:
    record = leftovers.begin("")
    return Cleaned(stays=record.path, clean=record.remove, goes_on=sweep, is_told=False)


def an_evaluation(folder: Path) -> Cleaned:
    weights, result = folder / "weights", folder / "step-1.json"
    weights.mkdir()
    filled(weights / "file")
    clean = partial(_clean_up, EvaluationRequest.model_construct(weights=weights, are_weights_ours=True, result=result))
    return Cleaned(stays=filled(progress_path(result)), clean=clean, goes_on=lambda: not_there(weights), is_told=False)


@pytest.mark.parametrize(
    "case",
    [
        old_checkpoints,
        an_unfinished_checkpoint,
        the_trial_log,
        a_spool,
        old_weights_in_memory,
        what_a_dead_worker_left_in_memory,
        the_weights_of_an_ended_trial_in_memory,
        a_workers_temporary_folder,
        a_record_of_what_a_worker_leaves,
        an_evaluation,
    ],
)
def test_what_cannot_be_removed_ends_nothing(
    case: Callable[[Path], Cleaned], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned = case(tmp_path)
    inode = cleaned.stays.stat().st_ino
    with immovable(cleaned.stays), caplog.at_level(logging.WARNING):
        cleaned.clean()
        folders = (tmp_path, leftovers.records_folder())
        assert inode in [path.stat().st_ino for folder in folders for path in folder.rglob("*")], "it was removed"
        assert ("takes room until it can be" in caplog.text) is cleaned.is_told
        cleaned.goes_on()
    if cleaned.stays.parent == leftovers.records_folder():
        sweep()
        assert not cleaned.stays.exists()


def new_trial(folder: Path) -> TrialDirectory:
    trial = TrialDirectory(folder / "trial")
    trial.create()
    return trial


def filled(path: Path) -> Path:
    path.write_bytes(b"content")
    return path


def not_there(path: Path) -> None:
    assert not path.exists()


def in_memory(folder: Path) -> Path:
    (folder / "memory").mkdir(exist_ok=True)
    return folder / "memory"


def staging(folder: Path, *, trial_uuid: str = "ab" * 16) -> Callable[[int], Path]:
    """Brings a version into the folder that stands for the host's memory, and lets go of the one before."""
    transport = WeightStaging(HostWeights(in_memory(folder), trial_uuid, owner="generation_server/0"))

    def stage(version: int) -> Path:
        weights = folder / f"weights-{version}"
        digest = make_version(weights, seed=version, sizes=(10,))
        return transport.stage(f"0.{version}", weights, digest, timeout_s=LONG_S).path

    return stage
