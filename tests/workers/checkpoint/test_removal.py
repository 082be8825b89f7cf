"""What cannot be removed takes room, is told once, and ends nothing."""

import logging
from pathlib import Path

import pytest

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.removal import Remover
from corral.workers.master.weights import remove_old_weights, weights_name
from tests.immovable import immovable


def folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "stays").touch()
    return path


def test_what_cannot_be_removed_frees_its_name_is_told_once_and_goes_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remover, path = Remover(), folder(tmp_path, "old")
    with immovable(path / "stays"), caplog.at_level(logging.WARNING):
        assert remover.remove(path) and not path.exists()
        remover.sweep(tmp_path)
        assert [left.name for left in tmp_path.rglob("*") if left.is_file()] == ["stays"]
    assert len(caplog.records) == 1 and "takes room until it can be" in caplog.text
    remover.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_free_stays_free(tmp_path: Path) -> None:
    assert Remover().remove(tmp_path / "none") and not list(tmp_path.iterdir())


def test_old_weights_that_stay_hold_up_no_later_version(tmp_path: Path) -> None:
    versions = [PolicyVersion(1, step) for step in range(1, 9)]
    remover, lineage = Remover(), Lineage([], epoch=1)
    paths = {version: folder(tmp_path, weights_name(version)) for version in versions[:4]}
    with immovable(*(path / "stays" for path in paths.values())):
        removed: list[str] = []
        for present in versions[3:]:
            paths.setdefault(present, tmp_path / weights_name(present)).mkdir(exist_ok=True)
            removed += remove_old_weights(tmp_path, lineage, present=present, in_use=(), remover=remover)
        assert removed == [weights_name(version) for version in versions[:5]]
    remove_old_weights(tmp_path, lineage, present=versions[-1], in_use=(), remover=remover)
    assert {path.name for path in tmp_path.iterdir()} == {weights_name(version) for version in versions[5:]}
