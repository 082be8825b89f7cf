"""Copies are what the manifest says, or there is an error that names the file."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.workers.checkpoint.durable_file import CACHED_BYTES, no_progress
from corral.workers.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from corral.workers.weight_transport.filling import Filling, Held, whole
from tests.workers.weight_transport.versions import content_of, flip_a_byte, make_version

SIZES = st.sampled_from([0, 1, 17, CACHED_BYTES - 1, CACHED_BYTES, CACHED_BYTES + 1, 5 * CACHED_BYTES + 3])


def copy(weights: Path, manifest: Manifest, into: Path, *, on_progress: Callable[[], None] = no_progress) -> int:
    """Onto a host that holds nothing; the bytes that were read."""
    version = Filling(weights=weights, manifest=manifest, into=into, held=Held(()), on_progress=on_progress)
    return version.fill(whole).bytes_read


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(SIZES, max_size=4), seed=st.integers(0, 2**32))
def test_a_copy_is_the_same_files_whatever_their_sizes(sizes: list[int], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weights, into = Path(folder) / "v", Path(folder) / "copy"
        digest = make_version(weights, seed=seed, sizes=tuple(sizes))
        into.mkdir()
        num_bytes = copy(weights, read_manifest(weights, digest), into)
        assert content_of(into) == content_of(weights)
        assert num_bytes == sum(path.stat().st_size for path in weights.iterdir())


def copied(folder: Path, manifest: Manifest) -> None:
    into = folder / "copy"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    copy(folder / "v", manifest, into)


def test_what_differs_is_named(tmp_path: Path) -> None:
    manifest = read_manifest(tmp_path / "v", make_version(tmp_path / "v"))
    file = tmp_path / "v" / "model-00000.safetensors"
    whole = file.read_bytes()
    flip_a_byte(file)
    with pytest.raises(CorruptCheckpointError, match="model-00000.safetensors: expected BLAKE3"):
        copied(tmp_path, manifest)
    file.write_bytes(whole[:-1])
    with pytest.raises(CorruptCheckpointError, match="expected 5000001 bytes, got 5000000"):
        copied(tmp_path, manifest)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="model-00000.safetensors: expected 5000001 bytes, got no file"):
        copied(tmp_path, manifest)
    file.symlink_to("model-00001.safetensors")
    with pytest.raises(CorruptCheckpointError, match="expected 5000001 bytes, got 17"):
        copied(tmp_path, manifest)


@pytest.mark.parametrize("name", ["../v/model-00001.safetensors", "/etc/hostname", "a/../../b"])
def test_a_manifest_names_nothing_outside_of_its_directory(tmp_path: Path, name: str) -> None:
    manifest = read_manifest(tmp_path / "v", make_version(tmp_path / "v"))
    manifest.files[name] = manifest.files["model-00001.safetensors"]
    with pytest.raises(CorruptCheckpointError, match="expected names inside of it"):
        copied(tmp_path, manifest)
    assert list((tmp_path / "copy").iterdir()) == []


def test_who_gives_up_ends_the_copy(tmp_path: Path) -> None:
    manifest = read_manifest(tmp_path / "v", make_version(tmp_path / "v"))
    num_pieces = 0

    def give_up() -> None:
        nonlocal num_pieces
        num_pieces += 1
        raise TimeoutError("enough")

    (tmp_path / "copy").mkdir()
    with pytest.raises(TimeoutError, match="enough"):
        copy(tmp_path / "v", manifest, tmp_path / "copy", on_progress=give_up)
    assert 1 <= num_pieces <= len(manifest.files)
