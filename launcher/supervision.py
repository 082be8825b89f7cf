"""The supervisor of one attempt: starts every worker, watches, restarts, stops, and leaves nothing running.

    plan.json --units--> Supervision (pure) <--exits, trial log, stop request, signals, clock-- this loop
                              |
                              +--StartUnit, SignalTask, AppendStop, EndTrial--> TaskRunner, Redis, trial log, journal

It needs no torch, so it starts on the host in a fraction of a second. It holds no state
that matters: what happened is in the journal, who may commit is in the trial log. `corral.launcher.keeper` starts a new
one if it is killed.
"""

import json
import os
import secrets as random_tokens
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from corral.experiments.attempts import AttemptRecord
from corral.experiments.journal import Journal
from corral.experiments.plan import RunPlan
from corral.experiments.secrets import TrialSecrets
from corral.experiments.trial_directory import StopRequest, TrialDirectory, atomic_write
from corral.experiments.trial_log import Done, Stop, StoppedError, TrialLog
from corral.launcher.attempt_ending import AttemptEnding
from corral.launcher.continuation import Continuation
from corral.launcher.end_actions import EndState
from corral.launcher.exits import ExitRecorder
from corral.launcher.members import Members
from corral.launcher.node_loss import NodeLoss, note_failed_node
from corral.launcher.processes import TRIAL_UUID_VARIABLE, kill_trial_processes
from corral.launcher.runner import AllocationLostError, Task, TaskRunner, TaskSpec
from corral.launcher.slurm import SlurmError
from corral.launcher.unit_actions import (
    EXIT_NODE_LOST,
    Action,
    AppendStop,
    AskPlace,
    EndTrial,
    GiveUpUnit,
    LeaveUnit,
    Outcome,
    RestartPolicy,
    RestartUnit,
    SignalTask,
    StartUnit,
    UnitSpec,
)
from corral.launcher.units import TRAINER_UNIT, Supervision, TrialPhase
from corral.scheduling.worker_information import parse_worker_id

REDIS_UNIT = "redis"
_POLL_INTERVAL_S = 0.1
_REPORT_TIMEOUT_S = 60.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class NameServer(Protocol):
    """The Redis server of this attempt, as the supervisor needs it."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; a restart keeps them."""

    def start(self) -> None:
        """Starts it, again after a crash; returns once it answers.

        Raises:
            OSError, RuntimeError, TimeoutError: if it does not come up.
        """

    def poll(self) -> int | None:
        """Return code once it ended."""

    def kill(self) -> None:
        """Ends it."""


WorkerCommand = Callable[[TrialDirectory, str, int, AttemptRecord, str], Sequence[str]]
"""(trial, kind, index, attempt, incarnation) -> command line."""


def worker_command(
    directory: TrialDirectory, kind: str, index: int, attempt: AttemptRecord, incarnation: str
) -> list[str]:
    """The command line of a worker. It holds nothing secret: other users of the node can read it."""
    return [
        sys.executable,
        "-m",
        "corral.workers",
        "--plan",
        str(directory.plan_path),
        "--kind",
        kind,
        "--index",
        str(index),
        "--attempt",
        str(attempt.attempt),
        "--incarnation",
        incarnation,
    ]


def units_of_plan(plan: RunPlan) -> list[UnitSpec]:
    """Restart units: Redis, all training ranks together, every other worker by itself."""
    workers = [f"{worker.kind}/{worker.index}" for worker in plan.workers]
    ranks = tuple(worker for worker in workers if worker.startswith(f"{TRAINER_UNIT}/"))
    units = [UnitSpec(name=REDIS_UNIT, tasks=(REDIS_UNIT,), is_service=True)]
    if ranks:
        units.append(UnitSpec(name=TRAINER_UNIT, tasks=ranks))
    return units + [UnitSpec(name=worker, tasks=(worker,)) for worker in workers if worker not in ranks]


class Supervisor:
    """One attempt of one trial, from the first start to the last exit."""

    def __init__(
        self,
        *,
        directory: TrialDirectory,
        plan: RunPlan,
        attempt: AttemptRecord,
        runner: TaskRunner,
        name_server: NameServer,
        worker_command: WorkerCommand = worker_command,
        members: Members | None = None,
        continuation: Continuation | None = None,
        node_loss: NodeLoss | None = None,
        signals: Sequence[signal.Signals] = (),
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._attempt = attempt
        self._runner = runner
        self._name_server = name_server
        self._worker_command = worker_command
        self._journal = Journal(directory.journal_path)
        self._exits = ExitRecorder(directory, attempt.attempt)
        self._log = TrialLog(directory.log_path)
        self._members = members
        units = units_of_plan(plan)
        if members is not None:
            units = members.with_places(units)
        self._tasks_by_unit = {unit.name: unit.tasks for unit in units}
        self._supervision = Supervision(
            units,
            RestartPolicy(
                max_restarts=plan.supervision.max_restarts,
                pause_s=plan.supervision.restart_pause_s,
                healthy_after_s=plan.supervision.healthy_after_s,
            ),
        )
        self._tasks: dict[str, Task] = {}
        self._name_server_runs = False
        self._failed_starts: list[tuple[str, int]] = []
        self._lost_allocation = ""
        self._signals = [*signals]
        self._ends = AttemptEnding(
            directory=directory,
            attempt=attempt.attempt,
            plan=plan,
            continuation=continuation,
            record=self._record,
        )
        self._continuation = continuation
        self._node_loss = node_loss
        self._seen_stop_request: StopRequest | None = None
        self._held_groups: frozenset[str] = frozenset()
        self._end: EndTrial | None = None

    def run(self) -> int:
        """Supervises until the trial has ended; returns the exit code."""
        os.environ[TRIAL_UUID_VARIABLE] = self._plan.trial.uuid  # inherited by everything that is started from here
        with self._listen_to_signals() as wake_up:
            self._clean_up_after_predecessor()
            self._record("supervisor_started", pid=os.getpid(), node=os.uname().nodename, mode=self._attempt.mode)
            while self._end is None:
                self._step()
                if self._end is None:
                    select.select([wake_up], [], [], _POLL_INTERVAL_S)
                    _drain(wake_up)
            return self._finish(self._end)  # here, as a signal in between must not kill us

    def _step(self) -> None:
        exits = self._collect_exits()
        if exits:
            exits = self._after_node_loss(exits)
        # After the exits were collected, before they are judged: a worker that ended because of Done is no crash.
        self._read_trial_log()
        self._read_requests()
        self._leave_lost_allocation()
        if self._members is not None:
            # Before the exits are judged: those whose nodes were taken are no crashes.
            self._apply(self._members.drive(self._supervision, time.monotonic()))
        for task, returncode in exits:
            self._apply(self._supervision.exited(task, returncode, time.monotonic()))
        self._apply(self._supervision.tick(time.monotonic()))

    def _collect_exits(self) -> list[tuple[str, int]]:
        exits, self._failed_starts = self._failed_starts, []
        for worker, task in list(self._tasks.items()):
            if (returncode := task.poll()) is not None:
                del self._tasks[worker]
                exits.append((worker, returncode))
                self._exits.record(worker, returncode, pid=task.pid, node=task.node)
                self._record("worker_exited", worker=worker, pid=task.pid, node=task.node, returncode=returncode)
        if self._name_server_runs and (returncode := self._name_server.poll()) is not None:
            self._name_server_runs = False
            exits.append((REDIS_UNIT, returncode))
            self._record("redis_exited", worker=REDIS_UNIT, pid=self._name_server.pid, returncode=returncode)
        return exits

    def _after_node_loss(self, exits: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """If the allocation outlives its nodes: moves what ran on a lost one, and says whose exit that explains."""
        if self._node_loss is None:
            return list(exits)
        for node in self._node_loss.look():
            note_failed_node(self._directory, node, self._record)
            self._relocate(node)
        return [
            (worker, EXIT_NODE_LOST if self._node_loss.excuse(worker) else returncode) for worker, returncode in exits
        ]

    def _relocate(self, node: str) -> None:
        assert self._node_loss is not None
        cause = f"node {node} failed"
        relocation = self._node_loss.relocate()
        for worker, step in {**relocation.moves, **relocation.shares}.items():
            self._record("worker_moved", worker=worker, cause=cause, node=self._node_loss.host_of(step))
        if relocation.why_over:
            self._ends.nodes_lost(f"{cause}, and {relocation.why_over}")
            self._apply(
                self._supervision.stop_requested(reason=cause, grace_s=0.0, immediately=True, now=time.monotonic())
            )
            return
        for worker in relocation.without_room:
            self._supervision.give_up(worker)
            self._record("unit_given_up", unit=worker, cause=f"{cause}, and no other has room for it")

    def _leave_lost_allocation(self) -> None:
        """The next attempt gets all of its nodes again."""
        cause, self._lost_allocation = self._lost_allocation, ""
        if cause and self._continuation is not None and self._supervision.phase is TrialPhase.RUNNING:
            self._ends.nodes_lost(cause)
            self._apply(
                self._supervision.stop_requested(reason=cause, grace_s=0.0, immediately=True, now=time.monotonic())
            )

    def _read_trial_log(self) -> None:
        for slot, entry in self._log.poll():
            if slot < self._attempt.start_slot:
                continue
            if isinstance(entry, Done):
                self._apply(self._supervision.log_ended(Outcome.COMPLETE, "", time.monotonic()))
            elif isinstance(entry, Stop):
                reason = f"{entry.reason} (by {entry.by})" if entry.reason else f"stopped by {entry.by}"
                self._apply(self._supervision.log_ended(Outcome.STOPPED, reason, time.monotonic()))

    def _read_requests(self) -> None:
        self._read_held_groups()
        self._read_stop_request()  # before a signal's request takes its place
        while self._signals:
            self._request_stop_for(self._signals.pop(0))
            self._read_stop_request()

    def _read_held_groups(self) -> None:
        held = self._directory.read_held_groups()
        if held == self._held_groups:
            return
        self._held_groups = held
        self._record("groups_held", groups=sorted(held))
        for unit in self._tasks_by_unit:
            is_held = unit.partition("/")[0] in held
            self._apply(self._supervision.hold(unit, is_held=is_held, now=time.monotonic()))

    def _read_stop_request(self) -> None:
        try:
            request = self._directory.read_stop_request()
        except ValueError as error:
            self._record("stop_request_unreadable", cause=str(error))
            self._directory.clear_stop_request()
            return
        if request is None or request == self._seen_stop_request:
            return
        self._seen_stop_request = request
        self._ends.requested(request)
        self._record("stop_requested", by=request.by, now=request.now, grace_s=request.grace_s, then=request.then)
        self._apply(
            self._supervision.stop_requested(
                reason=f"stopped by {request.by}",
                grace_s=request.grace_s,
                immediately=request.now,
                now=time.monotonic(),
            )
        )

    def _request_stop_for(self, number: signal.Signals) -> None:
        request = self._ends.signalled(number, was_asked=self._supervision.phase is not TrialPhase.RUNNING)
        if request is not None:
            # A file like rl-stop's, because the master has to see it too.
            self._directory.write_stop_request(request)

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartUnit(unit):
                    self._start_unit(unit)
                case SignalTask(task, kill):
                    self._signal_task(task, kill=kill)
                case RestartUnit(unit, cause, pause_s, restarts):
                    self._record("unit_restarting", unit=unit, cause=cause, pause_s=pause_s, restarts=restarts)
                case LeaveUnit(unit, cause):
                    self._record("unit_left", unit=unit, cause=cause)
                case AskPlace(unit) if self._members is not None:
                    self._members.ask(unit)
                case GiveUpUnit(unit, cause):
                    self._record("unit_given_up", unit=unit, cause=cause)
                    if self._members is not None:
                        self._members.give_up(unit)
                case AppendStop(reason):
                    self._append_stop(reason)
                case EndTrial():
                    self._end = action

    def _start_unit(self, unit: str) -> None:
        if unit == REDIS_UNIT:
            self._start_name_server()
            return
        incarnation = random_tokens.token_hex(8)
        for worker in self._tasks_by_unit[unit]:
            self._start_worker(worker, incarnation)

    def _start_worker(self, worker: str, incarnation: str) -> None:
        kind, _, index = worker.partition("/")
        try:
            spec = TaskSpec(
                worker=worker,
                command=tuple(self._worker_command(self._directory, kind, int(index), self._attempt, incarnation)),
                environment=self._worker_environment(worker),
                log_path=self._directory.worker_log(self._attempt.attempt, kind, int(index)),
            )
            task = self._runner.start(spec)
        except (OSError, SlurmError) as error:
            self._failed_starts.append((worker, 127))
            self._record("worker_not_started", worker=worker, cause=str(error))
            if isinstance(error, AllocationLostError):
                self._lost_allocation = str(error)
            return
        self._tasks[worker] = task
        self._record("worker_started", worker=worker, pid=task.pid, node=task.node, incarnation=incarnation)

    def _worker_environment(self, worker: str) -> dict[str, str]:
        kind, index = parse_worker_id(worker)
        return {
            **self._plan.scheduling[kind].scheduling_of(index).env_vars,
            "CORRAL_BIND_ADDRESS": self._runner.bind_address(worker),
            "PYTHONUNBUFFERED": "1",
        }

    def _start_name_server(self) -> None:
        try:
            self._name_server.start()
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            self._failed_starts.append((REDIS_UNIT, 1))
            self._record("redis_not_started", worker=REDIS_UNIT, cause=str(error))
            return
        self._name_server_runs = True
        host, port = self._name_server.address
        atomic_write(self._directory.rendezvous_path, json.dumps({"host": host, "port": port}).encode())
        self._record("redis_started", worker=REDIS_UNIT, pid=self._name_server.pid, port=port)

    def _signal_task(self, worker: str, *, kill: bool) -> None:
        if worker == REDIS_UNIT:
            if self._name_server_runs:
                self._name_server.kill()
        elif worker in self._tasks:
            task = self._tasks[worker]
            (task.kill if kill else task.terminate)()

    def _append_stop(self, reason: str) -> None:
        try:
            self._log.request_stop("supervisor", reason=reason[:1000], then=self._ends.then)
        except StoppedError:
            pass  # the trial ended by itself in the meantime; the end that is in the log counts

    def _clean_up_after_predecessor(self) -> None:
        self._directory.rendezvous_path.unlink(missing_ok=True)  # no worker may go to the Redis of an earlier attempt
        self._runner.clean_up()
        killed = kill_trial_processes(self._plan.trial.uuid, spare=(os.getpid(), os.getppid()))
        if killed:
            self._record("leftovers_killed", pids=killed)

    def _finish(self, end: EndTrial) -> int:
        self._read_requests()  # the last word of whoever wants the trial to stop
        self._log.poll()
        # Done may have been appended between our last look and the kill: the log, not the signal, says what happened.
        verdict = self._ends.judge(end, self._log.state)
        if self._ends.is_job_ending:
            verdict = self._ends.close(self._log)  # first of all: SLURM may kill us at any moment
        left = kill_trial_processes(self._plan.trial.uuid, spare=(os.getpid(), os.getppid()))
        if left:
            self._record("leftovers_killed", pids=left)
        if self._members is not None:
            self._members.close()
        TrialSecrets.destroy(self._directory.secrets_path)
        if not verdict.goes_on:
            self._draw_report()
        if not self._ends.is_job_ending:
            verdict = self._ends.close(self._log)
        return 1 if verdict.state is EndState.FAILED else 0

    def _draw_report(self) -> None:
        if not self._directory.metrics_path.exists():
            return
        command = [sys.executable, "-m", "corral.launcher.report", "--trial", str(self._directory.path)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_REPORT_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            self._record("report_failed", cause=error.stderr.decode(errors="replace")[-2000:])
        except (OSError, subprocess.TimeoutExpired) as error:
            self._record("report_failed", cause=str(error))

    def _record(self, event: str, **fields: object) -> None:
        self._journal.append(event, attempt=self._attempt.attempt, **fields)

    @contextmanager
    def _listen_to_signals(self) -> Iterator[int]:
        """Signals are noted, and wake the loop; SIGCHLD does no more than that."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous_descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        previous = {number: signal.signal(number, self._note_signal) for number in _STOP_SIGNALS}
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go
        try:
            yield read_end
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_descriptor)
            os.close(read_end)
            os.close(write_end)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.Signals(number))


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        return
