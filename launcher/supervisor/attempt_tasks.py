"""The processes of an attempt: its workers, trackers and Redis server, from their starts to their exits.

start --TaskRunner, RedisServer--> processes --collect--> TaskExit: who, with what, why
                +--refused: a TaskExit too, at the next collect
UnitMachine: why --record--> event task_ended of the journal, the one record of the end
"""

import json
import secrets as random_tokens
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import AttemptRecord
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.launcher.files.file_thread import FileThread, is_momentary
from corral.launcher.files.patience import wait_until
from corral.launcher.runners.guard import OUT_OF_MEMORY_VARIABLE
from corral.launcher.runners.runner import AllocationLostError, LocalRunner, Task, TaskRunner
from corral.launcher.slurm.client import SlurmError, SlurmUnreachableError
from corral.launcher.supervisor.recorder import Recorder
from corral.launcher.supervisor.units import REDIS_UNIT, TRACKER, WorkerCommand, tracker_command
from corral.launcher.trial.ends import (
    MEMORY_LINES,
    TASK_ENDED,
    ExitKind,
    TaskExit,
    says_out_of_memory,
    tail_lines,
)
from corral.launcher.trial.redis_server import RedisServer
from corral.scheduling.worker_information import parse_worker_id

_EXIT_NOT_STARTED = 127  # a shell's "command not found"
_GUARDS_END_S = 5.0


@dataclass(slots=True, kw_only=True)
class AttemptTasks:
    """Starts, signals and collects the tasks of one attempt."""

    directory: TrialDirectory
    plan: RunPlan
    attempt: AttemptRecord
    runner: TaskRunner
    redis: RedisServer
    recorder: Recorder
    worker_command: WorkerCommand
    files: FileThread = field(default_factory=partial(FileThread, "starts"))
    """The thread that a start asks whether the file system answers."""
    lost_allocation: str = ""
    """Why a part of the trial's own job is gone; "" while all of it is there."""
    _beside: TaskRunner = field(default_factory=lambda: LocalRunner(bind_address="", gpus_by_worker={}))
    """Starts trackers where the supervisor is."""
    _running: dict[str, Task] = field(default_factory=dict)
    _redis_runs: bool = False
    _failed_starts: list[TaskExit] = field(default_factory=list)

    def start(self, tasks: Sequence[str]) -> None:
        """Starts the tasks of a unit under a new incarnation."""
        if REDIS_UNIT in tasks:
            self._start_redis()
            return
        incarnation = random_tokens.token_hex(8)
        for worker in tasks:
            self._start_worker(worker, incarnation)

    def collect(self) -> list[TaskExit]:
        """What has ended, or was not started, since the last call."""
        exits, self._failed_starts = self._failed_starts, []
        for worker, task in list(self._running.items()):
            if (returncode := task.poll()) is not None:
                del self._running[worker]
                exits.append(self._ended(worker, task, returncode))
        if self._redis_runs and (returncode := self.redis.poll()) is not None:
            self._redis_runs = False
            exits.append(TaskExit(REDIS_UNIT, returncode, pid=self.redis.pid))
        return exits

    def signal(self, tasks: Sequence[str], *, kill: bool) -> None:
        """Asks tasks to end, or ends them; those that have ended already are left out."""
        if REDIS_UNIT in tasks and self._redis_runs:
            self.redis.kill()
        for runner, own in ((self.runner, False), (self._beside, True)):
            if running := [task for task in tasks if task in self._running and _is_tracker(task) is own]:
                runner.signal(running, kill=kill)

    def kill_all(self) -> None:
        """Ends all that was started here, and waits a while for the guards, which end what workers have started."""
        self.signal([*self._running, REDIS_UNIT], kill=True)
        running = self._running.values()
        wait_until(lambda: all(task.poll() is not None for task in running), timeout_s=_GUARDS_END_S)

    def record(self, ended: TaskExit) -> None:
        """Puts down how a task ended, or why it could not be started, with the verdict on it."""
        self.recorder.event(
            TASK_ENDED,
            who=ended.task,
            code=ended.returncode,
            why=ended.why,
            caused_by=ended.caused_by,
            charged=ended.is_charged and ended.is_of_its_unit,
            pid=ended.pid,
            node=ended.node,
            log_bytes=ended.log_bytes,
        )

    def _ended(self, worker: str, task: Task, returncode: int) -> TaskExit:
        try:
            message, is_out_of_memory, log_bytes = self.files.run(
                partial(self._take_last_words, worker, returncode), self.directory.control_path
            )
        except OSError:
            message, is_out_of_memory, log_bytes = "", False, None
        if returncode and is_out_of_memory:
            returncode, message = WorkerExit.OUT_OF_MEMORY, ""
        return TaskExit(
            worker,
            returncode,
            task.exit_kind(),
            pid=task.pid,
            node=task.node,
            message=message if returncode > 0 else "",
            log_bytes=log_bytes,
        )

    def _take_last_words(self, worker: str, returncode: int) -> tuple[str, bool, int | None]:
        """What a worker, its guard and its log say of its end: its own word, whether it was its memory, the log's size.

        The files of the first two are removed, so that they explain no later end.
        """
        word_path, note_path = self.directory.last_word_path(worker), self.directory.out_of_memory_path(worker)
        message, is_out_of_memory, log_bytes = "", False, None
        with suppress(OSError):
            message = word_path.read_text(errors="replace")
            word_path.unlink()
        with suppress(OSError):
            note_path.unlink()
            is_out_of_memory = True
        with suppress(OSError):
            log_path = self._log_path(worker)
            log_bytes = log_path.stat().st_size
            last_lines = tail_lines(log_path, MEMORY_LINES, end=log_bytes)
            is_out_of_memory |= says_out_of_memory(returncode, last_lines)
        return message, is_out_of_memory, log_bytes

    def _log_path(self, worker: str) -> Path:
        kind, _, index = worker.partition("/")
        return self.directory.worker_log(self.attempt.attempt, kind, int(index))

    def _start_worker(self, worker: str, incarnation: str) -> None:
        log_path = self._log_path(worker)
        try:
            self._require_files(log_path)
            task = (self._beside if _is_tracker(worker) else self.runner).start(
                worker,
                self._command(worker, incarnation),
                environment=self._environment(worker),
                log_path=log_path,
            )
        except (OSError, SlurmError) as error:
            self._not_started(worker, error)
            if isinstance(error, AllocationLostError):
                self.lost_allocation = str(error)
            return
        self._running[worker] = task
        self.recorder.event("worker_started", worker=worker, pid=task.pid, node=task.node, incarnation=incarnation)

    def _command(self, task: str, incarnation: str) -> Sequence[str]:
        if _is_tracker(task):
            return tracker_command(self.directory, self.plan.tracking.to[int(task.partition("/")[2])], task)
        kind, index = parse_worker_id(task)
        return self.worker_command(self.directory, kind, index, self.attempt, incarnation)

    def _environment(self, task: str) -> dict[str, str]:
        shared = {OUT_OF_MEMORY_VARIABLE: str(self.directory.out_of_memory_path(task)), "PYTHONUNBUFFERED": "1"}
        if _is_tracker(task):
            return shared
        kind, index = parse_worker_id(task)
        own = self.plan.scheduling[kind].scheduling_of(index).env_vars
        return {**own, "CORRAL_BIND_ADDRESS": self.runner.bind_address(task), **shared}

    def _start_redis(self) -> None:
        try:
            self._require_files(self.directory.attempt_logs(self.attempt.attempt) / "redis.log")
            self.redis.start()
            host, port = self.redis.address
            where, content = self.directory.rendezvous_path, json.dumps({"host": host, "port": port}).encode()
            self.files.run(lambda: atomic_write(where, content), where)  # workers find Redis by it
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            self.redis.kill()
            self._not_started(REDIS_UNIT, error)
            return
        self._redis_runs = True
        self.recorder.event("redis_started", worker=REDIS_UNIT, pid=self.redis.pid, port=port)

    def _require_files(self, log_path: Path) -> None:
        """Raises OSError unless the log can be appended to: a start that hung there would hang the supervisor."""

        def append() -> None:
            if not log_path.parent.exists() and self.directory.path.exists():  # somebody has tidied up
                self.directory.start_attempt_logs(self.attempt.attempt)
            log_path.open("ab").close()

        self.files.run(append, log_path)

    def _not_started(self, task: str, error: Exception) -> None:
        kind = ExitKind.OWN
        if isinstance(error, SlurmUnreachableError):
            kind = ExitKind.SLURM_AWAY
        elif isinstance(error, OSError) and is_momentary(error):
            kind = ExitKind.FILES_AWAY
        self._failed_starts.append(TaskExit(task, _EXIT_NOT_STARTED, kind, message=str(error)))


def _is_tracker(task: str) -> bool:
    return task.partition("/")[0] == TRACKER
