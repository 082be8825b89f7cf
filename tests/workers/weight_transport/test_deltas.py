"""A host reads what changed where it holds the version before, and else all of it; and never stages anything wrong."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch import Tensor

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.checkpoint.manifest import (
    MANIFEST_NAME,
    CorruptCheckpointError,
    SealedDirectory,
    read_manifest,
    write_manifest,
)
from corral.workers.weight_transport import filling
from corral.workers.weight_transport.filling import StagedVersion, StagingError
from corral.workers.weight_transport.staging import WeightStaging, by_deltas
from tests.workers.backends.trained_versions import publish, random_weights, stepped
from tests.workers.checkpoint.sealing import describe
from tests.workers.weight_transport.versions import LONG_S, content_of, flip_a_byte, joined, patience

COMPANION = b'{"model_type": "qwen2"}' * 1000


class Trainer:
    """Publishes versions, each trained from the one before, of 0.4 MB in three files and one that never changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_bytes(COMPANION)
        self.weights: dict[str, Tensor] = random_weights(0, shape=(100, 330))
        self._last: Path | None = None
        self._num_written = 0

    def write(self, name: str, *, base: Path | None = None, share: float = 0.02) -> SealedDirectory:
        self._num_written += 1
        self.weights = stepped(self.weights, share=share, seed=self._num_written)
        base = base or self._last
        self._last = self._folder / name
        return publish(self._last, self.weights, base=base, max_shard_bytes=133_000, companions=self._folder / "model")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[WeightStaging]:
    with closing(joined(tmp_path, "delta")) as transport:
        yield transport


def stage(transport: WeightStaging, version: SealedDirectory) -> StagedVersion:
    """What is staged is what was published, bit for bit and without deltas, however it came."""
    staged = transport.stage(version.path.name, version.path, version.digest, timeout_s=LONG_S)
    published = content_of(version.path)
    assert content_of(staged.path) == {name: published[name] for name in published if not name.endswith(".delta")}
    assert staged.path != version.path
    return staged


def bytes_of(version: SealedDirectory, *suffixes: str) -> int:
    return sum(entry.size for name, entry in version.files.items() if name.endswith(suffixes))


def whole(version: SealedDirectory) -> int:
    return bytes_of(version, "") - bytes_of(version, ".delta")


def small(version: SealedDirectory) -> int:
    """The deltas, and the manifest that names them; the index and the companion are those of the version before."""
    assert bytes_of(version, ".delta") > 0
    return bytes_of(version, ".delta", MANIFEST_NAME)


def test_only_what_changed_is_read_version_after_version(transport: WeightStaging, trainer: Trainer) -> None:
    first = trainer.write("v1-e1")
    assert stage(transport, first).bytes_read == whole(first)
    for name in ("v2-e1", "v3-e1", "v4-e1"):
        version = trainer.write(name)
        assert stage(transport, version).bytes_read == small(version) < 0.05 * whole(version)


def test_all_servers_of_a_host_share_what_one_has_built_and_a_late_joiner_goes_on_from_it(
    transport: WeightStaging, trainer: Trainer, tmp_path: Path
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    stage(transport, second)
    with closing(joined(tmp_path, "delta", number=1)) as joiner:
        assert stage(joiner, second).bytes_read == 0
        third = trainer.write("v3-e1")
        assert stage(joiner, third).bytes_read == small(third)
        assert stage(transport, third).bytes_read == 0


def test_who_missed_versions_reads_what_changed_in_each_of_them(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v1-e1"))
    missed = [trainer.write("v2-e1"), trainer.write("v3-e1")]
    fourth = trainer.write("v4-e1")
    read = sum(bytes_of(version, ".delta") for version in missed) + small(fourth)
    assert stage(transport, fourth).bytes_read == read < 0.15 * whole(fourth)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_version_that_was_missed_and_is_gone_or_torn_is_no_way(transport: WeightStaging, trainer: Trainer) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    third = trainer.write("v3-e1")
    gone, torn, *_ = sorted(second.path.glob("*.delta"))
    gone.unlink()
    torn.write_bytes(b"no delta")
    read_whole = sum(third.files[path.name.removesuffix(".delta")].size for path in (gone, torn))
    last = bytes_of(second, "3-of-00003.safetensors.delta") + bytes_of(third, "3-of-00003.safetensors.delta")
    assert stage(transport, third).bytes_read == read_whole + last + bytes_of(third, MANIFEST_NAME)
    fourth = trainer.write("v4-e1")
    assert stage(transport, fourth).bytes_read == small(fourth)


def test_a_missed_version_is_damaged_where_no_header_shows_it_and_nothing_wrong_is_staged(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    third = trainer.write("v3-e1")
    for path in second.path.glob("*.delta"):
        flip_a_byte(path)
    unchanged = bytes_of(third, "config.json", "index.json")
    assert stage(transport, third).bytes_read == whole(third) - unchanged
    assert "is damaged" in caplog.text or "expected BLAKE3" in caplog.text


def test_an_orphan_is_no_base_and_the_resumed_trainer_s_commit_is(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer goes back to the commit of step 1 while this host holds step 2 of the lost branch."""
    first = trainer.write("v1-e1")
    stage(transport, first)
    kept = trainer.weights
    orphan = trainer.write("v2-e1")
    stage(transport, orphan)
    trainer.weights = kept
    again = trainer.write("v2-e2", base=first.path)
    assert again.files != orphan.files
    assert stage(transport, again).bytes_read == whole(again) - bytes_of(again, "config.json", "index.json")
    assert stage(transport, trainer.write("v3-e2")).bytes_read < 0.05 * whole(again)

    trainer.weights = kept
    resumed = trainer.write("v2-e3", base=first.path)
    stage(transport, first)  # servers are brought to the commit first
    assert stage(transport, resumed).bytes_read == small(resumed)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


Damage = Callable[[Path], object]


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (tear, "the delta ends"),
        (flip_a_byte, "is damaged"),
        (os.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "expected b'corral delta"),
    ],
    ids=["torn", "garbled", "gone", "empty"],
)
def test_a_damaged_delta_is_named_and_its_file_read_whole(
    damage: Damage, says: str, transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    name = "model-00002-of-00003.safetensors"
    damage(second.path / f"{name}.delta")
    expected = small(second) - second.files[f"{name}.delta"].size + second.files[name].size
    published = content_of(second.path)
    staged = transport.stage("v2-e1", second.path, second.digest, timeout_s=LONG_S)
    assert content_of(staged.path)[name] == published[name] and staged.bytes_read == expected
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"v2-e1/{name} is read whole" in record.message and says in record.message


def test_a_delta_that_leads_elsewhere_is_named_and_its_file_read_whole(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    names = [f"model-0000{number}-of-00003.safetensors.delta" for number in (1, 2)]
    contents = [(second.path / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (second.path / name).write_bytes(content)
    sealed = write_manifest(second.path, _without_manifest(second.path), {})
    stage(transport, sealed)
    assert caplog.text.count("is read whole") == 2 and "and the manifest has" in caplog.text


def _without_manifest(directory: Path) -> dict[str, FileEntry]:
    return {name: entry for name, entry in describe(directory).items() if name != MANIFEST_NAME}


def test_a_host_directory_without_hard_links_is_no_hindrance(
    transport: WeightStaging, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    monkeypatch.setattr(os, "link", refuse)
    assert stage(transport, second).bytes_read == small(second) + bytes_of(second, "config.json", "index.json")
    assert "config.json is read whole, from the next that has it: " in caplog.text


def test_what_memory_has_lost_is_found_by_the_digest_of_the_result(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    staged = stage(transport, trainer.write("v1-e1"))
    flip_a_byte(staged.path / "model-00001-of-00003.safetensors")
    second = trainer.write("v2-e1")
    stage(transport, second)
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "model-00001-of-00003.safetensors is read whole" in record.message
    assert "expected BLAKE3" in record.message


def test_whole_files_that_are_torn_are_refused_even_where_deltas_are_not(
    transport: WeightStaging, trainer: Trainer
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")
    tear(second.path / "model-00002-of-00003.safetensors")
    staged = transport.stage("v2-e1", second.path, second.digest, timeout_s=LONG_S)
    assert describe(staged.path)["model-00002-of-00003.safetensors"] == second.files["model-00002-of-00003.safetensors"]
    third = trainer.write("v3-e1", share=1.0)  # has no deltas
    flip_a_byte(third.path / "model-00002-of-00003.safetensors")
    with pytest.raises(CorruptCheckpointError, match="model-00002-of-00003.safetensors: expected BLAKE3"):
        transport.stage("v3-e1", third.path, third.digest, timeout_s=LONG_S)


def test_memory_that_is_full_in_the_middle_of_a_delta_sends_servers_to_the_shared_directory(
    transport: WeightStaging, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(transport, trainer.write("v1-e1"))
    second = trainer.write("v2-e1")

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(filling, "write_hashed", full)
    staged = transport.stage("v2-e1", second.path, second.digest, timeout_s=LONG_S)
    assert staged.path == second.path


def test_who_gives_up_ends_the_building(transport: WeightStaging, trainer: Trainer, tmp_path: Path) -> None:
    held = stage(transport, trainer.write("v1-e1")).path
    second = trainer.write("v2-e1")
    (tmp_path / "into").mkdir()
    with pytest.raises(StagingError, match="was not staged within 0 s"):
        manifest = read_manifest(second.path, second.digest)
        filling.Filling(
            weights=second.path,
            manifest=manifest,
            into=tmp_path / "into",
            held=filling.Held.of([held]),
            on_progress=patience(0.0).check,
        ).fill(by_deltas)
    assert not (tmp_path / "into" / MANIFEST_NAME).exists()
