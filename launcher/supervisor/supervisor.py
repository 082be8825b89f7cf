"""The supervisor of one attempt: starts every worker, watches, restarts, stops, and leaves nothing running.

    plan.json --units--> UnitMachine (pure) <--exits, trial log, stop request, signals, clock-- this loop
                              |
                              +--StartUnit, SignalTask, AppendStop, EndTrial--> TaskRunner, Redis, trial log, journal

    trial directory <--FileThread: TrialWatch, Recorder--> this loop, which waits for no file without a deadline

It needs no torch, so it starts on the host in a fraction of a second. It holds no state
that matters: what happened is in the journal, who may commit is in the trial log. The keeper starts a new
one if it is killed; whatever ends it ends what it has started.

TrialWatch reads what others write for a running attempt once a second, and at once when a decision needs it:

trial log, control/ --in the file thread--> Seen --look, which waits for it up to a deadline--> the supervisor's loop

make_supervisor gives each part what it needs of plan.json, layout.json and the job's environment:

plan.json, secrets/, attempt-N.json, and on a cluster layout.json and the job's environment
      --make_supervisor--> runner, Redis, extra jobs, successor, node loss --> Supervisor
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import TypeVar

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import EndState, read_attempt
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import CorruptLogError, Done, Entry, Stop, StoppedError, TrialLogError
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.secrets import SECRETS_FILE, TrialSecrets
from corral.launcher.extra_jobs import ExtraJobs
from corral.launcher.files.file_thread import FILE_TIMEOUT_S, FileThread
from corral.launcher.files.patience import wait_until
from corral.launcher.layout.layout import Layout, PlacedTrial
from corral.launcher.runners.runner import LocalRunner, share_gpus, visible_gpus, wanted_gpus
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.own_jobs import own_job
from corral.launcher.supervisor.attempt_end import Continuation, EndShell
from corral.launcher.supervisor.attempt_tasks import AttemptTasks
from corral.launcher.supervisor.keeper import fail
from corral.launcher.supervisor.recorder import Recorder, write_page
from corral.launcher.supervisor.signs_of_life import EXIT_BROKEN, ProgressMark, SupervisorExit, WakeUp
from corral.launcher.supervisor.silence import REDIS_SILENCE_S, LeaseWatch, Silence
from corral.launcher.supervisor.units import (
    REDIS_UNIT,
    TRACKER,
    Action,
    AppendStop,
    CheckNodes,
    EndTrial,
    GiveUpUnit,
    SignalTask,
    StartUnit,
    TrialPhase,
    UnitMachine,
    UnitNews,
    UnitNodes,
    WorkerCommand,
    units_of_plan,
)
from corral.launcher.trial.ends import ExitKind, TaskExit
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE, kill_trial_processes, sweep
from corral.launcher.trial.redis_server import redis_of_trial

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The findings of one look. A value that could not be read this time is as before."""

    entries: tuple[tuple[int, Entry], ...] | None = None
    """Of the trial log, with their slots, since the look before; None if it could not be read."""
    stop_request: StopRequest | None = None
    unreadable_stop_request: str = ""
    """Why control/stop.json is none."""
    groups_kept_down: frozenset[str] | None = None
    """Kinds of worker that rl-stop keeps down; None if that could not be read."""
    why_over: str = ""
    """Why this attempt is over: a later attempt has begun, or the folder was removed; "" if it is not."""


class TrialWatch:
    """Looks for one attempt.

    Args:
        files: the thread that looks.
        log: is read in that thread only.
    """

    def __init__(self, files: FileThread, directory: TrialDirectory, log: TrialLog, *, attempt: int) -> None:
        self._files = files
        self._directory = directory
        self._attempt = attempt
        self._log = log
        self._late: Future[Seen] | None = None
        """A look that the file system has not answered in time."""
        self._next_look = float("-inf")
        self._trouble = ""
        self._folder: int | None = None

    def look(self, now: float, *, is_awaited: bool) -> tuple[list[Seen], bool]:
        """What is found, if it is time to look, or somebody cannot go on without; and whether the trial log was read.

        Waits for the file system; while it hangs, not at all. What it says too late is found by a later look.

        Raises:
            CorruptLogError: if the trial log is damaged.
        """
        if now < self._next_look and not is_awaited:
            return [], False
        self._next_look = now + _LOOK_INTERVAL_S
        found = []
        if self._late is not None:
            if not self._late.done():
                return [], False
            found.append(self._late.result())
        self._late = self._files.submit(self._look)
        if not self._files.wait_for(self._late, FILE_TIMEOUT_S):
            return found, False
        found.append(self._late.result())
        self._late = None
        return found, found[-1].entries is not None

    def _look(self) -> Seen:
        refused: list[OSError] = []

        def read(file: Callable[[], T]) -> T | None:
            try:
                return file()
            except OSError as error:
                refused.append(error)
                return None

        entries = read(self._log.poll)
        request, why_unreadable = read(self._read_stop_request) or (None, "")
        kept_down = read(self._directory.read_groups_kept_down)
        is_superseded = read((self._directory.control_path / f"claim-{self._attempt + 1}.json").exists)
        why_over = f"attempt {self._attempt + 1} has begun" if is_superseded else ""
        if read(self._is_removed):
            why_over = f"{self._directory.path} was removed"
        trouble = str(refused[0]) if refused else ""
        if trouble and trouble != self._trouble:
            logger.warning("the trial directory cannot be read now: %s", trouble)
        self._trouble = trouble
        return Seen(
            entries=None if entries is None else tuple(entries),
            stop_request=request,
            unreadable_stop_request=why_unreadable,
            groups_kept_down=kept_down,
            why_over=why_over,
        )

    def _is_removed(self) -> bool:
        """Whether the folder is gone for good; one that was moved still has a name."""
        if self._folder is None:
            self._folder = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY)
        # Some file systems report 0 names of every folder.
        return os.fstat(self._folder).st_nlink == 0 and not self._directory.path.exists()

    def _read_stop_request(self) -> tuple[StopRequest | None, str]:
        try:
            return self._directory.read_stop_request(), ""
        except ValueError as error:
            self._directory.clear_stop_request()
            return None, str(error)


_TICK_S = 0.1
_SETUP_MARGIN_S = 30.0  # the worker gives up first, and says why
_GUARDS_END_S = 2.0
_CONTINUATION_TIMEOUT_S = 5.0  # it is asked while the cluster is about to kill us
_REPORT_TIMEOUT_S = 10.0  # at the end, for records that could not be written before


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """One attempt of one trial, from the first start to the last exit."""

    tasks: AttemptTasks
    extra_jobs: ExtraJobs | None = None
    continuation: Continuation | None = None
    signals: Sequence[Signals] = ()
    """Came too early for the supervisor before this one."""

    def __post_init__(self) -> None:
        self.directory, self.plan, self.attempt = self.tasks.directory, self.tasks.plan, self.tasks.attempt
        self.recorder, self._record = self.tasks.recorder, self.tasks.recorder.event
        # A thread of its own: a look that hangs must not stop a start, nor a journal that hangs a look.
        self._looks = FileThread("looks")
        self._log = TrialLog(self.directory.log_path)  # of the thread that looks, until all has ended
        self._watch = TrialWatch(self._looks, self.directory, self._log, attempt=self.attempt.attempt)
        self._wake = WakeUp(self.signals)
        units = units_of_plan(self.plan)
        self._unit_nodes = UnitNodes(self.extra_jobs) if self.extra_jobs is not None else None
        if self._unit_nodes is not None:
            units = self._unit_nodes.with_needs(units)
        self._tasks_by_unit = {unit.name: unit.tasks for unit in units}
        self._tasks_of_own_job = {task for unit in units if not unit.needs_nodes for task in unit.tasks}
        supervision = self.plan.supervision
        self._unit_machine = UnitMachine(units, supervision)
        self._leases = LeaseWatch(self.directory, self.plan.trial.uuid)
        self._silence = Silence(
            running_s=supervision.silence_timeout_s, setup_s=supervision.setup_timeout_s + _SETUP_MARGIN_S
        )
        self._mark = ProgressMark()
        self._exits: list[TaskExit] = []
        self._signals: list[Signals] = []
        """These, and the exits, are judged after a look at the trial directory that began later than they happened."""
        self._judge_by = 0.0
        self._ends = EndShell(
            directory=self.directory,
            plan=self.plan,
            log=self._log,
            continuation=self.continuation,
            recorder=self.recorder,
        )
        self._heeded_requests: set[StopRequest] = set()
        self._groups_kept_down: frozenset[str] = frozenset()
        self._end: EndTrial | None = None
        self._why_abandoned = ""

    def run(self) -> SupervisorExit:
        """Supervises until the attempt has ended."""
        os.environ[TRIAL_UUID_VARIABLE] = self.plan.trial.uuid  # inherited by everything that is started from here
        with self._wake.listening():
            self.directory.rendezvous_path.unlink(
                missing_ok=True
            )  # no worker may go to the Redis of an earlier attempt
            self.tasks.runner.clean_up()
            self._kill_leftovers()
            self._mark.begin()
            self._record("supervisor_started", pid=os.getpid(), node=os.uname().nodename, mode=self.attempt.mode)
            self._leases.begin()
            while self._end is None and not self._why_abandoned:
                self._mark.go_round()
                self._step()
                self.recorder.try_again(time.monotonic())
                if self._end is None:
                    self._wake.wait(_TICK_S)
            # Here, as a signal in between must not kill us.
            if self._end is not None:
                end = self._finish(self._end)
            else:  # the trial goes on elsewhere, or not at all: only what was started here is ended
                self._record("attempt_abandoned", cause=self._why_abandoned)
                self.tasks.kill_all()
                end = SupervisorExit.ABANDONED
            self.recorder.close(timeout_s=_REPORT_TIMEOUT_S)
            return end

    def _step(self) -> None:
        """One tick: what has happened, is wanted, and was seen goes to the machines; what they order is done."""
        exits, signals = self.tasks.collect(), self._wake.take_signals()
        if (exits or signals) and not (self._exits or self._signals):
            self._judge_by = time.monotonic() + (0.0 if self._looks.hangs else FILE_TIMEOUT_S)
        self._exits += exits
        self._signals += signals

        # A worker that ended because of Done is no crash, and a stop request comes before a signal's.
        has_looked = self._look(is_awaited=bool(self._exits or self._signals))

        lost, self.tasks.lost_allocation = self.tasks.lost_allocation, ""
        if lost and self.continuation is not None and self._unit_machine.phase is TrialPhase.RUNNING:
            # At once: the next attempt gets all of its nodes again.
            self._ends.machine.hand_over(EndState.NODE_FAILED, lost)
            now = time.monotonic()
            self._apply(self._unit_machine.stop_requested(reason=lost, grace_s=0.0, immediately=True, now=now))
        if self._unit_nodes is not None:  # before the exits are judged: those whose nodes were lost are no crashes
            self._apply(self._unit_nodes.drive(self._unit_machine, time.monotonic()))

        if has_looked or time.monotonic() >= self._judge_by:
            signals, self._signals = self._signals, []
            for number in signals:
                self._request_stop_for(number)
            exits, self._exits = self._exits, []
            gone = [one.task for one in exits]
            for one in exits:
                # Whether an extra job is gone, the cluster is asked.
                if one.kind is ExitKind.JOB_GONE and one.task in self._tasks_of_own_job:
                    self._why_abandoned = f"{one.task} could not be started: the job has ended"
                self._apply(self._unit_machine.exited(one, time.monotonic(), gone=gone))

        # Workers whose leases say nothing any more, though Redis answers; and Redis, if it does not for long.
        for looked_at, records in self._leases.take():
            for task, silent_s in self._silence.looked(records, looked_at).items():
                if actions := self._unit_machine.silent(task, silent_s):
                    self._record("worker_silent", worker=task, silent_s=silent_s)
                    self._apply(actions)
        if self._silence.is_redis_frozen:
            self._silence.redis_started(time.monotonic())
            self._record("redis_frozen", worker=REDIS_UNIT, pid=self.tasks.redis.pid)
            self._apply(self._unit_machine.silent(REDIS_UNIT, REDIS_SILENCE_S))

        self._apply(self._unit_machine.tick(time.monotonic()))

    def _look(self, *, is_awaited: bool) -> bool:
        """Whether the trial log was read."""
        found, is_whole = self._watch.look(time.monotonic(), is_awaited=is_awaited)
        for seen in found:
            self._heed(seen)
        return is_whole

    def _heed(self, seen: Seen) -> None:
        """What others want, and what has become of the trial."""
        self._why_abandoned = seen.why_over or self._why_abandoned
        for slot, entry in seen.entries or ():
            if slot >= self.attempt.start_slot and isinstance(entry, Done):
                self._apply(self._unit_machine.end_trial(EndState.COMPLETE, "", time.monotonic()))
            elif slot >= self.attempt.start_slot and isinstance(entry, Stop):
                reason = f"{entry.reason} (by {entry.by})" if entry.reason else f"stopped by {entry.by}"
                self._apply(self._unit_machine.end_trial(EndState.STOPPED, reason, time.monotonic()))
        if seen.groups_kept_down not in (None, self._groups_kept_down):
            self._groups_kept_down = down = seen.groups_kept_down or frozenset()
            self._record("groups_kept_down", groups=sorted(down))
            for unit in self._tasks_by_unit:
                is_kept_down = unit.partition("/")[0] in down
                self._apply(self._unit_machine.keep_down(unit, is_kept_down=is_kept_down, now=time.monotonic()))
        if seen.unreadable_stop_request:
            self._record("stop_request_unreadable", cause=seen.unreadable_stop_request)
        if seen.stop_request is not None:
            self._heed_stop_request(seen.stop_request)

    def _heed_stop_request(self, request: StopRequest) -> None:
        if request in self._heeded_requests:
            return
        self._heeded_requests.add(request)
        self._ends.requested(request)
        self._record("stop_requested", by=request.by, now=request.now, grace_s=request.grace_s, then=request.then)
        self._apply(
            self._unit_machine.stop_requested(
                reason=f"stopped by {request.by}",
                grace_s=request.grace_s,
                immediately=request.now,
                now=time.monotonic(),
            )
        )

    def _request_stop_for(self, number: Signals) -> None:
        request = self._ends.signalled(number, was_asked=self._unit_machine.phase is not TrialPhase.RUNNING)
        if request is not None:
            # A file like rl-stop's, because the master has to see it too.
            self.recorder.keep(partial(self.directory.write_stop_request, request))
            self._heed_stop_request(request)

    def _apply(self, actions: Sequence[Action]) -> None:
        for ended in self._unit_machine.take_verdicts():
            self.tasks.record(ended)
        signals: dict[bool, list[str]] = {False: [], True: []}
        for action in actions:
            match action:
                case StartUnit(unit):
                    self.tasks.start(self._tasks_by_unit[unit])
                    if unit == REDIS_UNIT:
                        self._silence.redis_started(time.monotonic())
                    elif unit.partition("/")[0] != TRACKER:  # trackers have no record in Redis
                        for task in self._tasks_by_unit[unit]:
                            self._silence.started(task)
                case SignalTask(task, kill):
                    signals[kill].append(task)
                case UnitNews(event, unit, cause, fields):
                    self._record(event, unit=unit, cause=cause, **fields)
                case CheckNodes(unit) if self._unit_nodes is not None:
                    self._unit_nodes.check(unit)
                case GiveUpUnit(unit, cause):
                    self._record("unit_given_up", unit=unit, cause=cause)
                    if self._unit_nodes is not None:
                        self._unit_nodes.give_up(unit)
                case AppendStop(reason):
                    stop = partial(
                        self._log.request_stop, "supervisor", reason=reason[:1000], then=self._ends.machine.then
                    )
                    try:
                        with suppress(StoppedError):  # the end that is in the log by now counts
                            self._looks.run(stop, self.directory.log_path)
                    except (OSError, TrialLogError) as error:
                        # It fences a master that we end anyway.
                        self._record("stop_not_appended", cause=str(error))
                case EndTrial():
                    self._end = action
        for kill, tasks in signals.items():
            self.tasks.signal(tasks, kill=kill)

    def _kill_leftovers(self) -> None:
        found = kill_trial_processes(self.plan.trial.uuid, spare=(os.getpid(), os.getppid()), grace_s=_GUARDS_END_S)
        sweep()
        if found.killed:
            self._record("leftovers_killed", pids=found.killed, left=found.left)

    def _finish(self, end: EndTrial) -> SupervisorExit:
        # A last look at stop requests and at the trial log.
        left_s = 0.0 if self._looks.hangs else FILE_TIMEOUT_S
        wait_until(lambda: self._look(is_awaited=True), timeout_s=left_s, pause_s=_TICK_S)
        for number in [*self._signals, *self._wake.take_signals()]:
            self._request_stop_for(number)
        # Done may have been appended between our last look and the kill: the log, not the signal, says what happened.
        self._ends.judge(end, self._log.state)
        closing = self._ends.machine
        if closing.is_job_ending or not closing.goes_on:
            closing.close()  # first of all: we may be killed at any moment, and another supervisor would begin anew
        self._kill_leftovers()
        if self.extra_jobs is not None:
            self.extra_jobs.close()
        secrets_path = self.directory.secrets_path
        try:
            self.tasks.files.run(lambda: TrialSecrets.destroy(secrets_path), secrets_path)
        except OSError as error:
            self._record("secrets_not_removed", cause=str(error))
        if not closing.goes_on:
            write_page(self.directory, closing.state, self._record)
        closing.close()
        return SupervisorExit.FAILED if closing.state.is_failure else SupervisorExit.ENDED


def run_supervisor(
    directory: TrialDirectory, worker_command: WorkerCommand, recorder: Recorder, signals: Sequence[signal.Signals]
) -> int:
    """Runs a supervisor. What it cannot survive ends it and what it has started; then the keeper starts another one.

    What would end that one too ends the trial: a plan that cannot be carried out here, a damaged trial log.
    """
    try:
        try:
            supervisor = make_supervisor(directory, worker_command, recorder, signals)
        except ValueError as error:
            return _trial_failed(directory, recorder, error)
        return supervisor.run()
    except CorruptLogError as error:
        return _trial_failed(directory, recorder, error)
    except Exception as error:
        logger.error("the supervisor breaks; the keeper starts another one", exc_info=True)
        recorder.event("supervisor_failed", cause=f"{type(error).__name__}: {error}")
        recorder.close(timeout_s=_REPORT_TIMEOUT_S)
        return EXIT_BROKEN


def make_supervisor(
    directory: TrialDirectory, worker_command: WorkerCommand, recorder: Recorder, signals: Sequence[signal.Signals]
) -> Supervisor:
    """The supervisor of an attempt that the keeper has opened; `signals` came too early for the one before it."""
    attempt = recorder.attempt
    if not (directory.secrets_path / SECRETS_FILE).exists():  # one before this was killed as it handed the trial over
        TrialSecrets.destroy(directory.secrets_path)
        TrialSecrets.create(directory.secrets_path)
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    tasks = partial(
        AttemptTasks,
        directory=directory,
        plan=plan,
        attempt=read_attempt(directory, attempt),
        recorder=recorder,
        worker_command=worker_command,
    )
    redis_at = partial(redis_of_trial, directory, plan.trial.uuid, attempt=attempt)
    if not has_jobs(plan.mode):
        gpus = share_gpus(wanted_gpus(plan), visible_gpus())
        local = LocalRunner(bind_address=plan.cluster.bind_address, gpus_by_worker=gpus)
        return Supervisor(tasks=tasks(runner=local, redis=redis_at(host=local.bind_address(""))), signals=signals)
    cluster = SlurmCluster()
    own = own_job(os.environ)
    if own is None:
        raise ValueError(f"trial {directory.path} runs in jobs, and this supervisor in none; submit it with rl-submit")
    layout = Layout.from_json(directory.layout_path.read_bytes())
    trial = PlacedTrial(plan=plan, layout=layout, directory=directory)
    extra_jobs = ExtraJobs(
        cluster=cluster,
        trial=trial,
        attempt=attempt,
        own=own.allocations,
        record=recorder.event,
        exclude_nodes=directory.failed_nodes(),
    )
    runner = cluster.make_runner(trial, allocations=extra_jobs.allocations, why_away=extra_jobs.why_away)
    runner.wait_for_cluster(own.host)
    bind_address = plan.cluster.bind_address
    redis = redis_at(host=runner.address_of(own.host) if bind_address == "auto" else bind_address)
    return Supervisor(
        tasks=tasks(runner=runner, redis=redis),
        signals=signals,
        extra_jobs=extra_jobs,
        continuation=Continuation(
            cluster=SlurmCluster(timeout_s=_CONTINUATION_TIMEOUT_S),
            trial=trial,
            own=own,
            record=recorder.event,
        ),
    )


def _trial_failed(directory: TrialDirectory, recorder: Recorder, error: Exception) -> SupervisorExit:
    logger.error("the trial has failed", exc_info=True)
    return fail(directory, recorder, f"supervisor: {error}")
