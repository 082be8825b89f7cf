"""Weights that are damaged after they were published, and a trainer that holds them."""

import asyncio
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.journal import read_journal
from corral.experiments.trial.log import TrialLog
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.checkpoint import verify_checkpoint
from corral.workers.checkpoint.published_weights import NOTHING_IN_USE, Refusal, WeightsInUse, read_weights_in_use
from corral.workers.checkpoint.removal import Remover
from corral.workers.lifecycle.worker import CannotContinueError
from corral.workers.master.weights import PublishedVersions, remove_old_weights, weights_name
from tests.name_services import MemoryNameService
from tests.workers.master.trials import NUM_STEPS, UUID, Begin, Trainers, step_by_uid
from tests.workers.weight_transport.versions import flip_a_byte


def notices(trial: TrialDirectory, topic: str) -> list[tuple[bool, str]]:
    events = read_journal(trial.journal_path)
    return [(one["is_alarm"], one["text"]) for one in events if one.get("topic") == topic]


def check_log(trial: TrialDirectory, trainers: Trainers, *, steps: list[int]) -> None:
    """These steps were committed, every sample once, and what is left of the commits is whole."""
    commits = [logged.commit for logged in TrialLog(trial.log_path).read().lineage]
    assert [commit.step for commit in commits] == steps
    assert step_by_uid(trial) == {uid: step for step, uids in enumerate(trainers.trained, 1) for uid in uids}
    for commit in commits[-2:]:
        verify_checkpoint(trial, commit)


def refuse(trainers: Trainers) -> None:
    """As the manager does when a server has refused what is published now."""
    now = trainers.published_weights()
    refusal = Refusal(weights=now.weights, server="generation_server/0", reason="it is flipped", is_served=False)
    text = msgspec.json.encode({"refused": refusal}).decode()
    trainers.context.names.add(trainers.context.keys.weights_in_use(), text)


def test_a_version_that_servers_refuse_is_published_again_and_committed_again(begin: Begin) -> None:
    trial, run = begin("control.commit_every=1 step")
    published: list[str] = []

    def act(name: str) -> None:
        if name == "clear" and len(trainers.trained) == 2:  # step 2 is published, and its commit begun
            flip_a_byte(trainers.published_weights().directory / "model.safetensors")
            refuse(trainers)
        if name == "load_rows":
            published.append(trainers.published_weights().directory.name)

    trainers = Trainers(at_call=act)
    assert run(trainers) == WorkerExit.DONE
    assert published[1:4] == ["v00000001-e1", "v00000002-e1-copy1", "v00000003-e1"]
    assert notices(trial, "published weights") == [
        (True, "version 1.2 was damaged after it was written, and is published again, 1 of 3 times"),
        (False, "version 1.3 is published"),
    ]
    check_log(trial, trainers, steps=[1, 2, *range(2, NUM_STEPS + 1)])  # what had the damaged files is committed again
    assert not list(trial.weights_path.glob("v00000002*"))  # what is old goes, under each of its names


class Copies(PublishedVersions):
    """Whose versions are written nowhere: each is another directory."""

    def __init__(self, look: Callable[[Path], Refusal | None]) -> None:
        names, keys = MemoryNameService(), TrialKeys(UUID)
        self.present, self.announced = Path("/weights/v1"), list[str]()
        context = SimpleNamespace(names=names, keys=keys)
        super().__init__(
            cast(Any, SimpleNamespace(context=context, tell=self._hear)), cast(Any, None), publish=self._note
        )
        self._look = look
        self._record()

    @property
    def directory(self) -> Path:
        return self.present

    def _record(self) -> None:
        """As the manager does."""
        record = msgspec.json.encode({"refused": self._look(self.present)}).decode()
        context = self._epoch.context
        context.names.add(context.keys.weights_in_use(), record)

    async def _write(self, version: PolicyVersion, *, copy: int = 0) -> None:
        self.present = Path(f"/weights/v1-copy{copy}")
        self._record()
        self.announced.append(self.present.name)

    async def _hear(self, *said: object, **where: object) -> None: ...

    def _note(self, *said: object) -> None: ...


@pytest.mark.parametrize("is_served", [True, False])
def test_what_is_damaged_each_time_ends_the_trial_unless_somebody_serves_it(is_served: bool) -> None:
    weights = Copies(lambda now: Refusal(weights=str(now), server="s/0", reason="bad memory", is_served=is_served))

    async def scenario() -> None:
        assert [await weights.publish_again_if_damaged(PolicyVersion(1, 1)) for _ in range(3)] == [True] * 3
        if is_served:
            assert not await weights.publish_again_if_damaged(PolicyVersion(1, 1))
        else:
            with pytest.raises(CannotContinueError, match=r"version 1\.1 was written 4 times.*s/0: bad memory"):
                await weights.publish_again_if_damaged(PolicyVersion(1, 1))
        assert await weights.publish_again_if_damaged(PolicyVersion(1, 2))  # another version has its own count

    asyncio.run(scenario())
    assert weights.announced == ["v1-copy1", "v1-copy2", "v1-copy3", "v1-copy1"]


@pytest.mark.parametrize("refused", [None, "/weights/v0"])
def test_a_refusal_of_what_is_not_published_any_more_changes_nothing(refused: str | None) -> None:
    weights = Copies(
        lambda now: Refusal(weights=refused, server="s/0", reason="late", is_served=False) if refused else None
    )
    assert not asyncio.run(weights.publish_again_if_damaged(PolicyVersion(1, 1)))


# --- which versions of the weights stay -----------------------------------------------------------------------------


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
