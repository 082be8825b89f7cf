import errno
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import LogWriter, TrialLog
from corral.experiments.trial.log_state import Commit, LoggedCommit
from corral.workers.checkpoint import durable_file
from corral.workers.checkpoint import manifest as manifests
from corral.workers.checkpoint.checkpoint import (
    WEIGHTS,
    CheckpointWriter,
    NoValidCheckpointError,
    collect_garbage,
    committed_ledger,
    last_valid_commit,
    state_folder,
    verify_checkpoint,
)
from corral.workers.checkpoint.durable_file import FileEntry, write_durable
from corral.workers.checkpoint.ledger import Ledger, LedgerViolationError, write_delta
from corral.workers.checkpoint.low_rank import ADAPTER_CONFIG
from corral.workers.checkpoint.manifest import (
    ADAPTER_FOLDER,
    CorruptCheckpointError,
    SealedDirectory,
    verify_manifest,
    write_manifest,
)
from corral.workers.checkpoint.removal import Remover
from tests.workers.checkpoint.rows import ROWS, trained
from tests.workers.checkpoint.sealing import describe


@pytest.fixture
def trial(tmp_path: Path) -> TrialDirectory:
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    return trial


def _save(trial: TrialDirectory, writer: LogWriter, step: int, trained: list[str]) -> LoggedCommit:
    new = CheckpointWriter(trial, epoch=writer.epoch, step=step)
    folder = new.folder(state_folder("actor"))
    shard = write_durable(folder / "rank-0.safetensors", [f"state after {step}".encode() * 20])
    new.add(
        state_folder("actor"),
        {"rank-0.safetensors": shard, "state.json": write_durable(folder / "state.json", [b"{}"])},
    )
    new.link(WEIGHTS, _published(trial, step))
    parent = writer.state.last_commit
    ledger = committed_ledger(trial, parent, ROWS) if parent else Ledger(ROWS)
    ledger.train(step, trained)
    new.add_ledger(ledger.states())
    digest = new.write_manifest({"layout": "d2"})
    delta = ledger.delta_for(epoch=writer.epoch, step=step)
    file, ledger_digest = write_delta(trial, delta)
    return writer.commit(
        step=step,
        directory=new.relative_path,
        manifest_digest=digest,
        ledger_file=file,
        ledger_digest=ledger_digest,
        trained=len(trained),
        dropped=0,
    )


def _published(trial: TrialDirectory, step: int) -> SealedDirectory:
    """A version of the weights."""
    path = trial.weights_path / f"v{step}-{len(os.listdir(trial.weights_path))}"
    path.mkdir()
    file = write_durable(path / "model.safetensors", [f"weights after {step}".encode() * 20])
    return write_manifest(path, {"model.safetensors": file}, {})


def _directory(trial: TrialDirectory, logged: LoggedCommit) -> Path:
    return trial.path / logged.commit.directory


def test_a_manifest_seals_every_file_with_size_and_digest(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "v1.3"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"abc")
    (folder / "sub" / "empty").write_bytes(b"")
    (folder / "sub" / "manifest.json").write_bytes(b"not the manifest")
    (folder / ".nfs0001").write_bytes(b"removed while open")
    sealed = write_manifest(folder, describe(folder), {"version": "1.3"})
    manifest = verify_manifest(folder, sealed.digest)
    assert sealed.files == describe(folder) and sealed.path == folder
    assert manifest.files["a.safetensors"].size == 3
    assert manifest.files["a.safetensors"].digest == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert sorted(manifest.files) == ["a.safetensors", "sub/empty", "sub/manifest.json"]
    assert manifest.extra == {"version": "1.3"} and verify_manifest(folder, None) == manifest


def test_what_is_no_json_cannot_be_sealed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        write_manifest(tmp_path, {}, {"loss": object()})


def test_sealing_reads_nothing(trial: TrialDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("a file was read to be sealed")

    monkeypatch.setattr(manifests, "read_pieces", refuse)
    writer = TrialLog(trial.log_path).claim("job 1")
    logged = _save(trial, writer, 10, ["0:a"])
    monkeypatch.undo()
    verify_checkpoint(trial, logged.commit)


def test_a_commit_gives_the_published_weights_a_second_name(trial: TrialDirectory) -> None:
    new = CheckpointWriter(trial, epoch=1, step=1)
    published = _published(trial, 1)
    new.link(WEIGHTS, published)
    for name in ("model.safetensors", "manifest.json"):
        assert (new.path / WEIGHTS / name).samefile(published.path / name)
    verify_manifest(new.path, new.write_manifest({}))


def test_deltas_stay_behind_when_a_version_is_kept_and_the_rest_is_whole(trial: TrialDirectory) -> None:
    path = trial.weights_path / "v2-1"
    (path / ADAPTER_FOLDER).mkdir(parents=True)
    for name in ("model.safetensors", "model.safetensors.delta", "config.json", f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}"):
        (path / name).write_bytes(name.encode() * 20)
    published = write_manifest(path, describe(path), {"version": "1.2"})
    new = CheckpointWriter(trial, epoch=1, step=2)
    new.link(WEIGHTS, published)
    new.write_manifest({})
    shutil.rmtree(path)
    kept = new.path / WEIGHTS
    assert verify_manifest(kept, describe(new.path)[f"{WEIGHTS}/manifest.json"].digest).extra == {"version": "1.2"}
    names = {"model.safetensors", "config.json", f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}", "manifest.json"}
    assert set(describe(kept)) == names
    assert verify_manifest(new.path, None).files.keys() == {f"{WEIGHTS}/{name}" for name in names}


Damage = Callable[[Path], None]


def _edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def _replace_by_link(folder: Path) -> None:
    (folder / "state" / "actor" / "state.json").unlink()
    (folder / "state" / "actor" / "state.json").symlink_to("/etc/hostname")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated shard": (
        _edit("state/actor/rank-0.safetensors", lambda data: data[:-1]),
        "rank-0.safetensors: expected .* bytes",
    ),
    "flipped bit": (
        _edit("state/actor/rank-0.safetensors", lambda data: data[:9] + b"\x00" + data[10:]),
        "BLAKE3 .* got",
    ),
    "zeroed shard": (_edit("state/actor/rank-0.safetensors", lambda data: bytes(len(data))), "BLAKE3 .* got"),
    "grown shard": (_edit("state/actor/state.json", lambda data: data + b" "), "state.json: expected 2 bytes, got 3"),
    "missing shard": (
        lambda folder: (folder / "weights" / "model.safetensors").unlink(),
        "model.safetensors: .* no file",
    ),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "never finished"),
    "truncated manifest": (_edit("manifest.json", lambda data: data[:-10]), "manifest.json: expected BLAKE3"),
    "other manifest": (_edit("manifest.json", lambda data: data.replace(b"d2", b"d4")), "expected BLAKE3"),
    "unlisted shard": (lambda folder: (folder / "rank-1.safetensors").touch(), "no such file"),
    "flipped ledger": (
        _edit("ledger.msgpack", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        "ledger.msgpack: .* BLAKE3",
    ),
    "missing ledger": (lambda folder: (folder / "ledger.msgpack").unlink(), "ledger.msgpack: .* no file"),
    "shard by link": (_replace_by_link, "neither a file nor a folder"),
    "missing directory": (shutil.rmtree, "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    trial: TrialDirectory, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, message = DAMAGES[name]
    writer = TrialLog(trial.log_path).claim("job 1")
    good = _save(trial, writer, 10, ["0:a"])
    bad = _save(trial, writer, 20, ["0:b"])
    verify_checkpoint(trial, bad.commit)
    damage(_directory(trial, bad))
    with pytest.raises(CorruptCheckpointError, match=message):
        verify_checkpoint(trial, bad.commit)

    second = TrialLog(trial.log_path).claim("job 2")
    point = last_valid_commit(second.state, trial)
    assert point.commit == good.commit and [*point.rejected] == [bad.commit.step]
    assert "commit of step 20" in caplog.text and "continuing from step 10" in caplog.text
    assert trained(committed_ledger(trial, good.commit, ROWS)) == {"0:a"}

    second.fall_back_to(point.slot, reason=next(iter(point.rejected.values())))
    again = _save(trial, second, 11, ["0:b"])
    point = last_valid_commit(TrialLog(trial.log_path).read(), trial)
    assert point.slot == again.slot and not point.rejected
    assert trained(committed_ledger(trial, again.commit, ROWS)) == {"0:a", "0:b"}


def test_without_any_commit_a_trial_starts_from_its_initial_weights(trial: TrialDirectory) -> None:
    point = last_valid_commit(TrialLog(trial.log_path).claim("job 1").state, trial)
    assert (point.commit, point.slot, point.rejected) == (None, 0, {})


def test_a_trial_never_starts_from_scratch_silently(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    for logged in [_save(trial, writer, step, [f"0:{step}"]) for step in (1, 2)]:
        shutil.rmtree(_directory(trial, logged))
    with pytest.raises(
        NoValidCheckpointError, match=r"none of the 2 newest commits .* can be loaded \(step 2: "
    ) as raised:
        last_valid_commit(writer.state, trial)
    assert "Errno" not in str(raised.value) and "restore it from a backup, or start a new trial" in str(raised.value)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_ledger_delta_costs_no_commit(trial: TrialDirectory, damaged: int) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    saved = [_save(trial, writer, step, [f"0:{step}"]) for step in (1, 2, 3)]
    (trial.path / saved[damaged].commit.ledger_file).write_bytes(b"{}")
    point = last_valid_commit(writer.state, trial)
    assert point.commit == saved[2].commit and not point.rejected
    assert trained(committed_ledger(trial, point.commit, ROWS)) == {"0:1", "0:2", "0:3"}


def test_a_checkpoint_without_a_ledger_is_no_place_to_continue_from(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    good = _save(trial, writer, 1, ["0:1"])
    bare = CheckpointWriter(trial, epoch=1, step=2)
    fields = {name: getattr(good.commit, name) for name in ("ledger_file", "ledger_digest", "trained", "dropped")}
    digest = bare.write_manifest({})
    writer.commit(step=2, directory=bare.relative_path, manifest_digest=digest, **fields)
    point = last_valid_commit(writer.state, trial)
    assert point.commit == good.commit and "expected ledger.msgpack" in next(iter(point.rejected.values()))


def test_a_checkpoint_of_an_older_version_is_refused_as_that(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    older = CheckpointWriter(trial, epoch=1, step=2)
    files = {"ledger.json": write_durable(older.path / "ledger.json", [b"{}"])}
    digest = write_manifest(older.path, files, {"epoch": 1, "step": 2}).digest
    fields = {"ledger_file": "x", "ledger_digest": "x", "trained": 1, "dropped": 0}
    writer.commit(step=2, directory=older.relative_path, manifest_digest=digest, **fields)
    with pytest.raises(NoValidCheckpointError, match="an older version of corral wrote it"):
        last_valid_commit(writer.state, trial)


def test_forgetting_to_fall_back_is_noticed_by_the_ledger(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    _save(trial, writer, 10, ["0:a"])
    (_directory(trial, _save(trial, writer, 20, ["0:b"])) / "state" / "actor" / "state.json").unlink()
    second = TrialLog(trial.log_path).claim("job 2")
    assert last_valid_commit(second.state, trial).slot == 2
    with pytest.raises(LedgerViolationError, match="'0:b'"):
        _save(trial, second, 30, ["0:b"])


def test_every_piece_that_is_hashed_counts_as_progress(trial: TrialDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "CACHED_BYTES", 100)
    monkeypatch.setattr(durable_file, "PIECE_BYTES", 100)
    folder = trial.checkpoints_path / "sealed"
    folder.mkdir()
    pieces: list[int] = []
    file = write_durable(folder / "rank-0", [os.urandom(50), os.urandom(1000)], on_progress=lambda: pieces.append(1))
    assert len(pieces) == 11
    digest = write_manifest(folder, {"rank-0": file}, {}).digest
    verify_manifest(folder, digest, on_progress=lambda: pieces.append(1))
    assert len(pieces) == 22


def test_an_error_of_the_file_system_is_no_damage_until_it_stays(
    trial: TrialDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    good, newest = (_save(trial, writer, step, [f"0:{step}"]) for step in (1, 2))
    real, failures = manifests.read_pieces, [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "I/O error")]

    def fail_first(*arguments: Any) -> Generator[memoryview, None, None]:
        if failures:
            raise failures.pop()
        return real(*arguments)

    pauses: list[float] = []
    monkeypatch.setattr(manifests, "read_pieces", fail_first)
    monkeypatch.setattr(manifests.time, "sleep", pauses.append)
    assert last_valid_commit(writer.state, trial).commit == newest.commit
    assert not failures and len(pauses) == 2

    def fail_in_newest(path: Path, expected: FileEntry) -> Generator[memoryview, None, None]:
        if newest.commit.directory in str(path):
            raise OSError(errno.EIO, "I/O error")
        return real(path, expected)

    monkeypatch.setattr(manifests, "read_pieces", fail_in_newest)
    assert last_valid_commit(writer.state, trial).commit == good.commit


@pytest.mark.parametrize("changed", ["step", "epoch"])
def test_a_commit_that_names_another_step_than_its_checkpoint_is_rejected(trial: TrialDirectory, changed: str) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    logged = _save(trial, writer, 3, ["0:a"])
    fields = {name: getattr(logged.commit, name) for name in logged.commit.__struct_fields__}
    with pytest.raises(CorruptCheckpointError, match=r"expected \(epoch, step\) .* as the trial log says"):
        verify_checkpoint(trial, Commit(**{**fields, changed: 7}))


def test_a_search_for_a_checkpoint_can_be_ended(trial: TrialDirectory) -> None:
    class Leaving(Exception):
        pass

    def leave() -> None:
        raise Leaving

    writer = TrialLog(trial.log_path).claim("job 1")
    _save(trial, writer, 1, ["0:a"])
    with pytest.raises(Leaving):
        last_valid_commit(writer.state, trial, on_progress=leave)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_any_byte_is_noticed(trial: TrialDirectory, data: st.DataObject) -> None:
    folder = trial.checkpoints_path / "sealed"
    if not folder.exists():
        folder.mkdir()
        for index in range(3):
            (folder / f"rank-{index}").write_bytes(os.urandom(64))
        (trial.path / "digest").write_text(write_manifest(folder, describe(folder), {}).digest)
    path = folder / data.draw(st.sampled_from(["rank-0", "rank-1", "rank-2", "manifest.json"]))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    changed = data.draw(
        st.sampled_from(
            [whole[:cut], whole[:cut] + bytes([whole[cut] ^ 4]) + whole[cut + 1 :], whole[:cut] + whole[cut + 1 :]]
        )
    )
    path.write_bytes(changed)
    try:
        with pytest.raises(CorruptCheckpointError, match=path.name):
            verify_manifest(folder, (trial.path / "digest").read_text())
    finally:
        path.write_bytes(whole)


def test_a_manifest_of_an_older_version_is_refused_by_its_format(tmp_path: Path) -> None:
    entry = {"size": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    content = {"files": {"a": entry}, "extra": {}, "version": 1}
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(CorruptCheckpointError, match="expected a manifest of format 2.* got format 1"):
        verify_manifest(tmp_path, None)


def test_two_attempts_at_one_step_never_share_a_directory(trial: TrialDirectory) -> None:
    first, second = (CheckpointWriter(trial, epoch=3, step=7) for _ in range(2))
    assert first.path != second.path and first.relative_path.startswith("checkpoints/step-00000007-e3-")
    assert set(os.listdir(trial.checkpoints_path)) == {first.path.name, second.path.name}


def test_a_running_trial_whose_folder_of_checkpoints_was_removed_makes_it_again(trial: TrialDirectory) -> None:
    shutil.rmtree(trial.checkpoints_path)
    assert CheckpointWriter(trial, epoch=3, step=7).path.is_dir()
    shutil.rmtree(trial.path)
    with pytest.raises(FileNotFoundError):
        CheckpointWriter(trial, epoch=3, step=8)


def test_everything_a_commit_names_is_on_disk_before_the_commit(
    trial: TrialDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_fsync, real_link = os.fsync, os.link
    at_commit: list[str] = []

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), trial.path))

    def link(source: Path, target: Path) -> None:
        at_commit[:] = synced
        real_link(source, target)

    writer = TrialLog(trial.log_path).claim("job 1")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    commit = _save(trial, writer, 1, ["0:a"]).commit
    names = [
        "state/actor/rank-0.safetensors",
        "state/actor/state.json",
        "state/actor",
        "state",
        "weights",
        "ledger.msgpack",
    ]
    expected = [f"{commit.directory}/{name}" for name in names]
    linked = "weights/v1-0/model.safetensors"
    assert {*expected, linked, commit.directory, "checkpoints", "ledger"} <= set(at_commit)
    # Files that are renamed into place are synced under their temporary names.
    for folder, name in ((commit.directory, "manifest.json"), ("ledger", "1-1-"), ("log", "00000002")):
        assert [path for path in at_commit if path.startswith(f"{folder}/.") and name in path]


def _names(trial: TrialDirectory) -> set[str]:
    return {f"checkpoints/{name}" for name in os.listdir(trial.checkpoints_path)}


def test_old_commits_go_and_the_newest_stay(trial: TrialDirectory) -> None:
    writer = TrialLog(trial.log_path).claim("job 1")
    saved = [_save(trial, writer, step, [f"0:{step}"]).commit.directory for step in range(1, 6)]
    removed = collect_garbage(trial, writer.state, epoch=1, remover=Remover(), keep=2, protect={saved[0]})
    assert [f"checkpoints/{name}" for name in removed] == saved[1:3] and _names(trial) == {saved[0], *saved[3:]}
    assert collect_garbage(trial, writer.state, epoch=1, remover=Remover(), keep=2) == [Path(saved[0]).name]


def test_what_dead_epochs_left_goes_but_not_what_this_one_writes(trial: TrialDirectory) -> None:
    first = TrialLog(trial.log_path).claim("job 1")
    committed = [_save(trial, first, step, [f"0:{step}"]).commit.directory for step in (1, 2)]
    abandoned = CheckpointWriter(trial, epoch=1, step=3)
    (abandoned.path / "rank-0").write_bytes(b"half")
    second = TrialLog(trial.log_path).claim("job 2")
    in_progress = CheckpointWriter(trial, epoch=2, step=4)
    newer = CheckpointWriter(trial, epoch=3, step=4)
    (trial.checkpoints_path / "my-notes").mkdir()
    (trial.checkpoints_path / ".removing-step-00000001-e1-00000000").mkdir()
    committed.append(_save(trial, second, 3, ["0:3"]).commit.directory)
    assert collect_garbage(trial, second.state, epoch=2, remover=Remover(), keep=2) == [
        Path(committed[0]).name,
        abandoned.path.name,
    ]
    assert _names(trial) == {
        *committed[1:],
        in_progress.relative_path,
        newer.relative_path,
        "checkpoints/my-notes",
    }


def test_nothing_is_removed_before_the_own_commit(trial: TrialDirectory) -> None:
    first = TrialLog(trial.log_path).claim("job 1")
    for step in range(1, 4):
        _save(trial, first, step, [f"0:{step}"])
    before = _names(trial)
    second = TrialLog(trial.log_path).claim("job 2")
    for state, epoch in ((second.state, 2), (TrialLog(trial.log_path).read(), 1)):
        with pytest.raises(ValueError, match="before its own first commit"):
            collect_garbage(trial, state, epoch=epoch, remover=Remover(), keep=2)
    assert _names(trial) == before


def test_after_a_fall_back_the_commits_continued_from_stay(trial: TrialDirectory) -> None:
    first = TrialLog(trial.log_path).claim("job 1")
    saved = [_save(trial, first, step, [f"0:{step}"]) for step in (1, 2, 3)]
    (_directory(trial, saved[2]) / "state" / "actor" / "state.json").unlink()
    second = TrialLog(trial.log_path).claim("job 2")
    second.fall_back_to(last_valid_commit(second.state, trial).slot, reason="state.json is gone")
    new = _save(trial, second, 3, ["0:3"])
    collect_garbage(trial, second.state, epoch=2, remover=Remover(), keep=2)
    assert _names(trial) == {saved[1].commit.directory, new.commit.directory}
