"""The workers of one host: who reads the shared file system, what is held, and what remains when they are gone."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from corral.experiments.config.rollout import WeightsConfig
from corral.workers.checkpoint.manifest import CorruptCheckpointError
from corral.workers.weight_transport.filling import Filling, FindSource, StagedVersion, StagingError, whole
from corral.workers.weight_transport.host_weights import HostWeights
from corral.workers.weight_transport.staging import WeightStaging, make_staging
from tests.workers.trusted import trust
from tests.workers.weight_transport.versions import LONG_S, content_of, flip_a_byte, make_version

TRIAL, ANOTHER_TRIAL = "ab" * 16, "cd" * 16
PLENTY = 2**40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of the host's memory."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def leaving() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Versions:
    """Made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digests: dict[int, str] = {}

    def path(self, seed: int) -> Path:
        return self._folder / f"v{seed}"

    def stage(self, transport: WeightStaging, seed: int) -> StagedVersion:
        if seed not in self.digests:
            self.digests[seed] = make_version(self.path(seed), seed=seed)
        return transport.stage(f"0.{seed}", self.path(seed), self.digests[seed], timeout_s=LONG_S)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "weights")


def worker(root: Path, number: int = 0, *, trial: str = TRIAL, room: int = PLENTY) -> WeightStaging:
    host = HostWeights(root, trial, owner=f"generation_server/{number}", room=lambda path: room)
    return WeightStaging(host)


def held_in(root: Path, trial: str = TRIAL) -> set[str]:
    return {path.name for path in (root / f"corral-weights-{trial}").iterdir()} - {"staging.lock"}


def test_one_worker_of_a_host_reads_and_the_others_use_it(root: Path, versions: Versions, leaving: ExitStack) -> None:
    first, second = (leaving.enter_context(closing(worker(root, number))) for number in range(2))
    staged = versions.stage(first, 1)
    assert content_of(staged.path) == content_of(versions.path(1))
    assert staged.bytes_read == sum(path.stat().st_size for path in versions.path(1).iterdir())
    (versions.path(1) / "model-00000.safetensors").unlink()
    again = versions.stage(second, 1)
    assert (again.path, again.bytes_read) == (staged.path, 0)
    assert staged.path.parent.stat().st_mode & 0o777 == 0o700 and staged.path.stat().st_mode & 0o777 == 0o700


def test_workers_that_ask_at_the_same_time_read_once(root: Path, versions: Versions, leaving: ExitStack) -> None:
    writing, may_go_on = threading.Event(), threading.Event()

    def slowly(version: Filling) -> FindSource:
        writing.set()
        assert may_go_on.wait(LONG_S)
        return whole(version)

    hosts = [HostWeights(root, TRIAL, owner=f"generation_server/{number}") for number in range(3)]
    transports = [leaving.enter_context(closing(WeightStaging(host, encode=slowly))) for host in hosts]
    versions.digests[1] = make_version(versions.path(1), seed=1)
    staged: list[StagedVersion] = []
    threads = [threading.Thread(target=lambda t=t: staged.append(versions.stage(t, 1))) for t in transports]
    for thread in threads:
        thread.start()
    assert writing.wait(LONG_S)
    with pytest.raises(StagingError, match=r"waited for generation_server/\d \(process \d+\), which stages a version"):
        impatient = leaving.enter_context(closing(worker(root, 3)))
        impatient.stage("0.1", versions.path(1), versions.digests[1], timeout_s=0.1)
    may_go_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(each.bytes_read for each in staged)[:2] == [0, 0] and len({each.path for each in staged}) == 1
    assert sum(each.bytes_read for each in staged) == sum(path.stat().st_size for path in versions.path(1).iterdir())


def test_the_present_version_and_the_next_are_held_and_no_other(
    root: Path, versions: Versions, leaving: ExitStack
) -> None:
    fast, slow = (leaving.enter_context(closing(worker(root, number))) for number in range(2))
    versions.stage(fast, 1)
    versions.stage(slow, 1)
    versions.stage(fast, 2)
    assert held_in(root) == {versions.digests[1], versions.digests[2]}  # the other server still reads the first
    versions.stage(slow, 2)
    assert held_in(root) == {versions.digests[2]}
    versions.stage(fast, 3)
    versions.stage(slow, 3)
    assert held_in(root) == {versions.digests[3]}


def test_what_a_server_reads_stays_until_it_has_taken_over_another(
    root: Path, versions: Versions, leaving: ExitStack
) -> None:
    only = leaving.enter_context(closing(worker(root)))
    read = versions.stage(only, 1).path
    only.taken_over()
    for failed in (2, 3, 3):  # a load of the first fails for good, and one of the second at first
        versions.stage(only, failed)
        assert held_in(root) == {read.name, versions.digests[failed]}
    only.taken_over()
    assert held_in(root) == {versions.digests[3]}


def test_a_late_joiner_uses_what_is_there(root: Path, versions: Versions, leaving: ExitStack) -> None:
    first = worker(root, 0)
    versions.stage(first, 1)
    joiner = leaving.enter_context(closing(worker(root, 1)))
    assert versions.stage(joiner, 1).bytes_read == 0
    first.close()
    assert held_in(root) == {versions.digests[1]}


def test_who_leaves_last_removes_everything(root: Path, versions: Versions) -> None:
    first, second = worker(root, 0), worker(root, 1)
    versions.stage(first, 1)
    versions.stage(second, 1)
    first.close()
    assert held_in(root) == {versions.digests[1]}
    second.close()
    assert list(root.iterdir()) == []


def test_torn_weights_and_another_manifest_are_refused_and_nothing_of_them_stays(
    root: Path, versions: Versions, leaving: ExitStack
) -> None:
    transport = leaving.enter_context(closing(worker(root)))
    present = versions.stage(transport, 1)
    digest = make_version(versions.path(2), seed=2)
    with pytest.raises(CorruptCheckpointError, match=rf"manifest.json: expected BLAKE3 {'0' * 64}, got {digest}"):
        transport.stage("0.2", versions.path(2), "0" * 64, timeout_s=LONG_S)
    flip_a_byte(versions.path(2) / "model-00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match="model-00000.safetensors: expected BLAKE3"):
        transport.stage("0.2", versions.path(2), digest, timeout_s=LONG_S)
    assert held_in(root) == {versions.digests[1]} and content_of(present.path) == content_of(versions.path(1))
    flip_a_byte(versions.path(2) / "model-00000.safetensors")
    assert content_of(transport.stage("0.2", versions.path(2), digest, timeout_s=LONG_S).path) == content_of(
        versions.path(2)
    )


def test_without_room_servers_read_the_shared_directory_and_the_log_says_so(
    root: Path, versions: Versions, leaving: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    transport = leaving.enter_context(closing(worker(root, room=1000)))
    staged = versions.stage(transport, 1)
    assert staged.path == versions.path(1) and staged.bytes_read == 5_000_018
    assert "has room for 1,000 bytes, and the version needs 5,000,018" in caplog.text and held_in(root) == set()
    flip_a_byte(versions.path(1) / "model-00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match="expected BLAKE3"):
        versions.stage(transport, 1)


def test_a_version_that_nobody_reads_makes_room_for_the_next(
    root: Path, versions: Versions, leaving: ExitStack
) -> None:
    def room(path: Path) -> int:
        """For one version at a time."""
        return 0 if any(len(entry.name) == 64 for entry in path.iterdir()) else PLENTY

    host = HostWeights(root, TRIAL, owner="generation_server/0", room=room)
    transport = leaving.enter_context(closing(WeightStaging(host)))
    for seed in (1, 2):
        assert versions.stage(transport, seed).path.name == versions.digests[seed]
        assert held_in(root) == {versions.digests[seed]}


def test_a_full_disk_in_the_middle_is_no_room_either(root: Path, versions: Versions, leaving: ExitStack) -> None:
    def fill(version: Filling) -> FindSource:
        (version.into / "half").write_bytes(b"abc")
        raise OSError(28, os.strerror(28))

    host = HostWeights(root, TRIAL, owner="generation_server/0")
    transport = leaving.enter_context(closing(WeightStaging(host, encode=fill)))
    assert versions.stage(transport, 1).path == versions.path(1) and held_in(root) == set()


def test_a_worker_that_leaves_gives_up_what_it_stages_and_leaves_nothing(root: Path, versions: Versions) -> None:
    writing = threading.Event()

    def endlessly(version: Filling) -> FindSource:
        writing.set()
        while True:
            time.sleep(0.01)
            version.on_progress()

    transport = WeightStaging(HostWeights(root, TRIAL, owner="generation_server/0"), encode=endlessly)
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(versions.stage, transport, 1)
        assert writing.wait(LONG_S)
        transport.close()
        with pytest.raises(StagingError, match="version 0.1 was given up: the worker leaves"):
            staging.result(LONG_S)
    assert list(root.iterdir()) == []


def test_a_model_from_elsewhere_is_read_where_it_is(root: Path, tmp_path: Path, leaving: ExitStack) -> None:
    transport = leaving.enter_context(closing(worker(root)))
    (tmp_path / "model").mkdir()
    staged = transport.stage("0.0", tmp_path / "model", None, timeout_s=LONG_S)
    assert (staged.path, staged.bytes_read) == (tmp_path / "model", 0)
    with pytest.raises(CorruptCheckpointError, match="manifest.json cannot be read"):
        transport.stage("0.0", tmp_path / "model", "0" * 64, timeout_s=LONG_S)
    with pytest.raises(StagingError, match="is not there"):
        transport.stage("0.0", tmp_path / "absent", None, timeout_s=LONG_S)


def test_who_fills_a_version_is_told_which_are_there(root: Path, versions: Versions, leaving: ExitStack) -> None:
    told: list[list[str]] = []

    def fill(version: Filling) -> FindSource:
        told.append([path.name for path, _ in version.held.versions])
        return whole(version)

    host = HostWeights(root, TRIAL, owner="generation_server/0")
    transport = leaving.enter_context(closing(WeightStaging(host, encode=fill)))
    for seed in (1, 2):
        versions.stage(transport, seed)
    assert told == [[], [versions.digests[1]]]


def test_what_logind_removes_is_staged_again(root: Path, versions: Versions, leaving: ExitStack) -> None:
    transport = leaving.enter_context(closing(worker(root)))
    path = versions.stage(transport, 1).path
    shutil.rmtree(path.parent)
    again = versions.stage(transport, 1)
    assert again.bytes_read > 0 and content_of(again.path) == content_of(versions.path(1))


def test_a_directory_that_others_could_change_is_not_used(
    root: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    (root / f"corral-weights-{TRIAL}").mkdir()
    (root / f"corral-weights-{TRIAL}").chmod(0o777)
    for directory, trial in ((root, TRIAL), (root / "absent", TRIAL), (root, ANOTHER_TRIAL)):
        (root / f"corral-weights-{ANOTHER_TRIAL}").unlink(missing_ok=True)
        (root / f"corral-weights-{ANOTHER_TRIAL}").symlink_to(root)
        config = WeightsConfig(host_directory=directory)
        transport = make_staging(
            config, trial_uuid=trial, worker="generation_server/0", admin_key="", tls=trust().client()
        )
        assert versions.stage(transport, 1).path == versions.path(1)
    assert "is not private to this user" in caplog.text and "absent cannot be used" in caplog.text


class Process:
    """A worker in a process of its own, see `staging_process`."""

    def __init__(self, root: Path, weights: Path, digest: str, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.weight_transport.staging_process"]
            + [str(root), TRIAL, str(weights), digest, what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.hear() == "joined"

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=LONG_S)


def test_nothing_of_a_killed_worker_is_trusted_and_a_next_trial_clears_away_what_is_left(
    root: Path, versions: Versions
) -> None:
    versions.digests[1] = make_version(versions.path(1), seed=1)
    killed = Process(root, versions.path(1), versions.digests[1], "hang")
    waiting = Process(root, versions.path(1), versions.digests[1], "go on")
    killed.tell()
    assert killed.hear() == "hangs"
    waiting.tell()
    killed.end(kill=True)
    num_bytes, path = waiting.hear().split(" ", 1)
    assert int(num_bytes) > 0 and content_of(Path(path)) == content_of(versions.path(1))
    with closing(worker(root, trial=ANOTHER_TRIAL)):
        assert held_in(root) == {versions.digests[1]}  # of a trial that lives
    waiting.end(kill=True)
    assert held_in(root) == {versions.digests[1]}
    with closing(worker(root, trial=ANOTHER_TRIAL)):
        assert [path.name for path in root.iterdir()] == [f"corral-weights-{ANOTHER_TRIAL}"]
