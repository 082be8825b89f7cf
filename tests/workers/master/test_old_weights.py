"""Versions of the weights stay while the lineage or a reader needs them; orphans go, however high their number."""

import asyncio
import os
import uuid
from pathlib import Path

import pytest

from corral.name_resolve.keys import TrialKeys
from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE, WeightsInUse, read_weights_in_use
from corral.workers.checkpoint.removal import Remover
from corral.workers.master.weights import remove_old_weights, weights_name
from tests.name_services import MemoryNameService


def write(directory: Path, *versions: str) -> None:
    for version in versions:
        path = directory / weights_name(PolicyVersion.parse(version))
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights")


def left(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def names(*versions: str) -> set[str]:
    return {weights_name(PolicyVersion.parse(version)) for version in versions}


def test_the_newest_versions_of_the_lineage_stay(tmp_path: Path) -> None:
    write(tmp_path, *(f"1.{step}" for step in range(1, 8)))
    (tmp_path / "notes").mkdir()
    lineage = Lineage([PolicyVersion(1, 4)], epoch=1)
    removed = remove_old_weights(tmp_path, lineage, present=PolicyVersion(1, 7), in_use=(), remover=Remover())
    assert set(removed) == names("1.1", "1.2", "1.3", "1.4")
    assert left(tmp_path) == names("1.5", "1.6", "1.7") | {"notes"}


def test_after_a_fall_back_the_present_weights_stay_and_the_orphans_go(tmp_path: Path) -> None:
    write(tmp_path, "1.98", "1.99", "1.100", "2.91")
    lineage = Lineage([PolicyVersion(1, 90)], epoch=2)
    remove_old_weights(tmp_path, lineage, present=PolicyVersion(2, 91), in_use=(), remover=Remover())
    assert left(tmp_path) == names("2.91")
    write(tmp_path, "2.92")
    remove_old_weights(tmp_path, lineage, present=PolicyVersion(2, 92), in_use=(), remover=Remover())
    assert left(tmp_path) == names("2.91", "2.92")  # a server may be about to read the one before


def test_a_superseded_trainer_removes_nothing_of_its_successor(tmp_path: Path) -> None:
    write(tmp_path, "1.5", "2.4", "2.5", "2.6")
    lineage = Lineage([PolicyVersion(1, 3)], epoch=1)
    remove_old_weights(tmp_path, lineage, present=PolicyVersion(1, 5), in_use=(), remover=Remover())
    assert left(tmp_path) == names("1.5", "2.4", "2.5", "2.6")


def test_what_a_slow_server_reads_stays_until_it_is_done(tmp_path: Path) -> None:
    key = TrialKeys(uuid.uuid4().hex).weights_in_use()
    write(tmp_path, "1.1")
    lineage = Lineage([], epoch=1)
    slow = tmp_path / weights_name(PolicyVersion(1, 1))

    async def scenario() -> None:
        with MemoryNameService() as service:
            assert read_weights_in_use(service, key) is None  # no manager: nobody knows
            with service.lease(key, NOTHING_IN_USE, ttl_s=10.0, owner="manager") as lease:
                in_use = WeightsInUse(lease)
                async with in_use.reading(slow):
                    async with in_use.reading(slow):
                        assert read_weights_in_use(service, key) == {slow}
                    for step in range(2, 8):
                        write(tmp_path, f"1.{step}")
                        readers = read_weights_in_use(service, key)
                        assert readers == {slow}
                        remove_old_weights(
                            tmp_path, lineage, present=PolicyVersion(1, step), in_use=readers, remover=Remover()
                        )
                    assert (slow / "model.safetensors").exists()
                    assert left(tmp_path) == names("1.1", "1.5", "1.6", "1.7")
                assert read_weights_in_use(service, key) == frozenset()

    asyncio.run(scenario())
    remove_old_weights(tmp_path, lineage, present=PolicyVersion(1, 7), in_use=(), remover=Remover())
    assert left(tmp_path) == names("1.5", "1.6", "1.7")


@pytest.mark.parametrize("step", [1, 99_999_999, 100_000_000])
def test_a_version_is_found_again_by_the_name_of_its_folder(tmp_path: Path, step: int) -> None:
    write(tmp_path, f"1.{step}")
    removed = remove_old_weights(
        tmp_path, Lineage([], epoch=2), present=PolicyVersion(2, 0), in_use=(), remover=Remover()
    )
    assert removed == [weights_name(PolicyVersion(1, step))]
