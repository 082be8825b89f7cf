"""The trial directory: the one place that survives every process, every node and Redis.

    {fileroot}/{experiment}/{trial}/
        config.yaml plan.json trial.sbatch rdzv.json      written whole, at submission or at the start of an attempt
        events.jsonl metrics.jsonl trajectories.jsonl     appended to
        secrets/ (0700)   log/ (the trial log)            see secrets.py and log.py
        logs/attempt-N/{kind}-{index}.log  logs/latest    what workers print
        checkpoints/ weights/ exports/ ledger/ spool/ page.html
        control/                                          requests from the command line to a running trial

Launcher and workers meet here: `rl-stop` writes `control/stop.json`, and the master worker reads it.
"""

import contextlib
import errno
import os
import re
import secrets as random_tokens
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRIAL_NUMBER = re.compile(r"trial-(\d+)", re.ASCII)
_MAX_WORD_CHARS = 1000
_FOLDERS = ("logs", "log", "checkpoints", "weights", "ledger", "spool", "control")


class TrialExistsError(FileExistsError):
    """A trial of this name already has a directory."""


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of `rl-stop` to a running trial."""

    requested_at: float
    """Unix time; shown to people, never compared."""
    by: str
    """The user that asked, as user@host."""
    now: bool
    """True: stop without a last checkpoint."""
    grace_s: float
    """How long the trial may take to commit before it is cancelled."""
    then: Literal["", "requeue"] = ""
    """`requeue`: checkpoint, then go on in the next attempt."""
    state: str = ""
    """How the attempt ends by this, as a word of rl-status, where a supervisor asks for its job's sake."""
    is_notice: bool = False
    """Whether SLURM wants the steps to leave; the supervisor asks it why."""


@dataclass(frozen=True, slots=True)
class _Below:
    """Attribute of a trial directory: a path in it."""

    name: str

    def __get__(self, directory: "TrialDirectory", owner: type["TrialDirectory"]) -> Path:
        return directory.path / self.name


@dataclass(frozen=True, slots=True)
class TrialDirectory:
    """Names of everything in one trial's directory.

    >>> trial = TrialDirectory.of(Path("/scratch/runs"), experiment="math-ppo", trial="trial-3")
    >>> trial.worker_log(2, "rollout_worker", 0)      # {path}/logs/attempt-2/rollout_worker-0.log
    """

    path: Path

    config_path = _Below("config.yaml")
    code_path = _Below("code")
    tasks_path = _Below("tasks.jsonl")
    """Of an environment, as it listed them at submission: rows of a dataset."""
    held_out_tasks_path = _Below("held-out-tasks.jsonl")
    plan_path = _Below("plan.json")
    layout_path = _Below("layout.json")
    """Which allocations the trial has, and where each worker runs in them; not there for a local trial."""
    sbatch_path = _Below("trial.sbatch")
    rendezvous_path = _Below("rdzv.json")
    """Where the supervisor publishes the name service's address."""
    journal_path = _Below("events.jsonl")
    metrics_path = _Below("metrics.jsonl")
    trajectories_path = _Below("trajectories.jsonl")
    """Which policy versions made what each train step consumed."""
    samples_path = _Below("samples")
    """Of what is trained on, what people may read."""
    timeline_path = _Below("timeline")
    """When each worker did what."""
    turns_path = _Below("turns")
    """Finished turns of episodes that are under way, where agents can be played again."""
    secrets_path = _Below("secrets")
    logs_path = _Below("logs")
    log_path = _Below("log")
    """The trial log: claims and commits, not text."""
    checkpoints_path = _Below("checkpoints")
    weights_path = _Below("weights")
    exports_path = _Below("exports")
    """Weights that stay: exports/final, exports/best, exports/step-*."""
    ledger_path = _Below("ledger")
    page_path = _Below("page.html")
    evaluations_path = _Below("eval")
    """The results of `rl-eval` for versions of the weights."""
    control_path = _Below("control")
    stop_request_path = _Below("control/stop.json")
    kept_down_path = _Below("control/kept-down")
    failed_nodes_path = _Below("control/failed-nodes")
    supervisor_alive_path = _Below("control/supervisor-alive")
    """What a supervisor touches as long as it wants its extra jobs: they end without it."""

    @classmethod
    def of(cls, fileroot: Path, *, experiment: str, trial: str) -> Self:
        """The directory of a named trial, which need not exist yet.

        Raises:
            ValueError: if a name is not allowed, or a symbolic link leads out of `fileroot`.
        """
        validate_name(experiment, what="experiment name")
        validate_name(trial, what="trial name")
        path = fileroot / experiment / trial
        require_inside(path, fileroot)
        return cls(path)

    def create(self) -> None:
        """Makes the directory, readable by its owner only, and its folders.

        Raises:
            TrialExistsError: if the name is taken; of two that create it at the same time, one gets this.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise TrialExistsError(
                f"trial directory {self.path} already exists; choose another trial name, continue that trial with "
                f"`rl-submit --resume`, or move the directory away"
            ) from None
        for folder in _FOLDERS:
            (self.path / folder).mkdir(mode=0o700)
        fsync_directory(self.path)
        fsync_directory(self.path.parent)

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs_path / f"attempt-{attempt}"

    def worker_log(self, attempt: int, kind: str, index: int) -> Path:
        return self.attempt_logs(attempt) / f"{kind}-{index}.log"

    def last_word_path(self, worker: str) -> Path:
        """Where a worker that fails says why, for rl-status and rl-logs."""
        return self.control_path / f"last-word-{worker.replace('/', '-')}"

    def leave_word(self, worker: str, cause: str) -> None:
        """Writes down why a worker ends; the supervisor reads it into its records, and rl-status and rl-logs show it.

        Raises:
            OSError: if the file system refuses.
        """
        word = " ".join(cause.split())[:_MAX_WORD_CHARS]
        atomic_write(self.last_word_path(worker), word.encode(errors="replace"))

    def out_of_memory_path(self, worker: str) -> Path:
        """Where a worker's guard notes that it ended for its memory: srun says 1 of it, and SLURM forgets the step."""
        return self.control_path / f"out-of-memory-{worker.replace('/', '-')}"

    def spool_path(self, rollout_index: int) -> Path:
        return self.path / "spool" / f"rollout_worker-{rollout_index}"

    def start_attempt_logs(self, attempt: int) -> Path:
        """Makes the log folder of an attempt and points `logs/latest` at it."""
        folder = self.attempt_logs(attempt)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = self.logs_path / f".latest.{random_tokens.token_hex(4)}.tmp"
        link.symlink_to(folder.name)
        link.replace(self.logs_path / "latest")
        return folder

    def remove_attempt_logs(self, attempt: int) -> None:
        """Takes back what `start_attempt_logs` did for the newest attempt."""
        shutil.rmtree(self.attempt_logs(attempt), ignore_errors=True)
        if self.attempt_logs(attempt - 1).is_dir():
            self.start_attempt_logs(attempt - 1)

    def inside(self, relative: str) -> Path:
        """A path that a file of this trial names, e.g. `checkpoints/step-...`.

        Raises:
            ValueError: if it is absolute or leads out of the trial directory.
        """
        if not relative or relative.startswith("/") or ".." in Path(relative).parts:
            raise ValueError(f"path {relative!r} must be relative and inside the trial directory {self.path}")
        path = self.path / relative
        require_inside(path, self.path)
        return path

    def relative(self, path: Path) -> str:
        """The name by which files of this trial refer to `path`; the inverse of `inside`."""
        return path.relative_to(self.path).as_posix()

    def write_stop_request(self, request: StopRequest, *, replace: bool = True) -> None:
        """Leaves the request where master and supervisor find it; without `replace` one that is there stays."""
        write = atomic_write if replace else write_if_absent
        write(self.stop_request_path, msgspec.json.encode(request))

    def read_stop_request(self) -> StopRequest | None:
        """The stop request, or None if nobody asked.

        Raises:
            ValueError: if the file is not a stop request (written by hand).
        """
        return read_record(self.stop_request_path, StopRequest, way_out="delete it and use `rl-stop` instead")

    def clear_stop_request(self) -> None:
        """Forgets the stop request: a resumed trial must not stop again for an old one."""
        self.stop_request_path.unlink(missing_ok=True)
        fsync_directory(self.control_path)

    def keep_group_down(self, kind: str, *, undo: bool = False) -> None:
        """Asks the supervisor to keep the workers of a kind down, or up again. A file each: nobody undoes another's."""
        mark(self.kept_down_path, kind, undo=undo)

    def note_failed_node(self, node: str) -> None:
        """Notes a node that has failed under the trial: later attempts avoid it. The file is empty; its name counts."""
        mark(self.failed_nodes_path, node)

    def failed_nodes(self) -> list[str]:
        """Nodes that have failed under the trial so far."""
        return list_names(self.failed_nodes_path)

    def read_groups_kept_down(self) -> frozenset[str]:
        """Kinds of worker that `rl-stop --group` keeps down."""
        return frozenset(list_names(self.kept_down_path))


def validate_name(name: str, *, what: str = "name") -> str:
    """Returns `name` if it may be a directory and job name.

    Raises:
        ValueError: naming the rule and the value.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{what} {name!r} is not allowed: use 1 to 64 of the characters A-Z a-z 0-9 . _ - (it has {len(name)})"
        )
    if name[0] in ".-":
        raise ValueError(f"{what} {name!r} is not allowed: it must not start with {name[0]!r}; put a letter first")
    return name


def require_inside(path: Path, root: Path) -> None:
    """Raises ValueError unless `path`, with symbolic links followed, lies strictly below `root`."""
    real_path, real_root = os.path.realpath(path), os.path.realpath(root)
    if os.path.commonpath([real_path, real_root]) != real_root or real_path == real_root:
        raise ValueError(f"path {path} leads to {real_path}, outside of {real_root}; remove the symbolic link or '..'")


def next_trial_name(experiment_directory: Path) -> str:
    """The first unused `trial-{number}`. A hint: only `TrialDirectory.create` decides who gets the name."""
    existing = list_names(experiment_directory)
    numbers = [int(match[1]) for match in map(_TRIAL_NUMBER.fullmatch, existing) if match]
    return f"trial-{max(numbers, default=0) + 1}"


def atomic_write(path: Path, data: bytes, *, mode: int = 0o600, is_durable: bool = True) -> None:
    """Replaces `path` by `data` so that a reader, or a crash at any moment, sees the old file or the new one, whole.

    Where it need not be durable nothing is forced to disk: a crash may leave neither, and a reader sees either.
    """
    with _written_beside(path, data, mode=mode, is_durable=is_durable) as temporary:
        os.rename(temporary, path)
    if is_durable:
        fsync_directory(path.parent)


def write_if_absent(path: Path, data: bytes) -> bool:
    """Puts a file where none is; of two that try, one gets True. link(2) is atomic on network file systems too."""
    with _written_beside(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    fsync_directory(path.parent)
    return True


@contextmanager
def _written_beside(path: Path, data: bytes, *, mode: int = 0o600, is_durable: bool = True) -> Iterator[Path]:
    """A new file with `data`, whose name is gone afterwards."""
    temporary = path.with_name(f".{path.name}.{random_tokens.token_hex(4)}.tmp")
    try:
        write_new_file(temporary, data, mode=mode, is_durable=is_durable)
        yield temporary
    finally:
        remove_file(temporary)


def write_new_file(path: Path, data: bytes, *, mode: int = 0o600, is_durable: bool = True) -> None:
    """Creates `path`, which must not exist, with exactly this mode whatever the umask, and forces it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
        write_all(descriptor, data)
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_files(source: Path, target: Path, *, wants: Callable[[str], bool] = lambda name: True) -> None:
    """Makes the directory `target` with a second name for every file of `source` and below, and forces it to disk.

    No byte is written twice, unless the file system has no hard links, or `target` is on another one.

    Args:
        wants: whether a file of this name, without its folder's, gets one.
    """
    target.mkdir(mode=0o700, parents=True)
    for path in source.iterdir():
        if path.is_file():
            if not wants(path.name):
                continue
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copy2(path, target / path.name)
                with open(target / path.name, "rb") as file:
                    os.fsync(file.fileno())
        elif path.is_dir() and not path.is_symlink():
            link_files(path, target / path.name, wants=wants)
    fsync_directory(target)


def mark(folder: Path, name: str, *, undo: bool = False) -> None:
    """Puts an empty file into a folder, which is made if need be, or takes it out."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if undo:
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / name).touch(mode=0o600)
    fsync_directory(folder)


def read_record(path: Path, kind: type[T], *, way_out: str) -> T | None:
    """A record of JSON; None if there is no file.

    Raises:
        ValueError: if the file holds no such record, with the way out.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {way_out}") from error


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted; empty if there is no folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_tail(path: Path, num_bytes: int, *, end: int | None = None) -> bytes:
    """The last bytes of a file, or of its first `end` bytes, or all of it; none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = size if end is None else min(end, size)
            start = file.seek(max(0, end - num_bytes))
            return file.read(end - start)
    except FileNotFoundError:
        return b""


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`; one write(2) may take less on a nearly full disk."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def fsync_directory(path: Path) -> None:
    """Forces created, renamed and removed names in `path` to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for directories; their name operations are synchronous.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


# Removing what nobody needs: it only gives room back, so that nothing that refuses to go ends anything.
#
# A file may be immutable, or kept by NFS for a reader (`.nfs...`); a folder may be filled meanwhile.


def remove_file(path: Path) -> None:
    """Removes a file, if it is there and goes."""
    with contextlib.suppress(OSError):
        path.unlink()


def remove_tree(path: Path) -> BaseException | None:
    """Removes a folder as far as it goes; why some of it stays."""
    failures: list[BaseException] = []
    shutil.rmtree(path, onerror=lambda _function, _path, info: failures.append(info[1]))
    return failures[0] if failures else None
