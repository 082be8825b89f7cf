"""The supervisor of one attempt: starts every worker, watches, restarts, stops, and leaves nothing running.

    plan.json --units--> UnitMachine (pure) <--exits, trial log, stop request, signals, clock-- this loop
                              |
                              +--StartUnit, SignalTask, AppendStop, EndTrial--> TaskRunner, Redis, trial log, journal

    trial directory <--FileThread: TrialWatch, Recorder--> this loop, which waits for no file without a deadline

It needs no torch, so it starts on the host in a fraction of a second. It holds no state
that matters: what happened is in the journal, who may commit is in the trial log. The keeper starts a new
one if it is killed; whatever ends it ends what it has started.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from signal import Signals

from corral.experiments.trial.attempts import EndState
from corral.experiments.trial.directory import StopRequest
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Done, Stop, StoppedError, TrialLogError
from corral.experiments.trial.secrets import TrialSecrets
from corral.launcher.extra_jobs.extra_jobs import ExtraJobs
from corral.launcher.files.file_thread import FILE_TIMEOUT_S, FileThread
from corral.launcher.files.patience import wait_until
from corral.launcher.supervisor.attempt_end import EndShell
from corral.launcher.supervisor.attempt_tasks import AttemptTasks
from corral.launcher.supervisor.continuation import Continuation
from corral.launcher.supervisor.recorder import write_page
from corral.launcher.supervisor.signs_of_life import ProgressMark, SupervisorExit
from corral.launcher.supervisor.silence import REDIS_SILENCE_S, LeaseWatch, Silence
from corral.launcher.supervisor.trial_watch import Seen, TrialWatch
from corral.launcher.supervisor.unit_specs import (
    REDIS_UNIT,
    TRACKER,
    UnitNodes,
    units_of_plan,
)
from corral.launcher.supervisor.units import (
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
)
from corral.launcher.supervisor.wake_up import WakeUp
from corral.launcher.trial.ends import ExitKind, TaskExit
from corral.launcher.trial.processes import TRIAL_UUID_VARIABLE, kill_trial_processes
from corral.launcher.trial.sweep import sweep

_TICK_S = 0.1
_SETUP_MARGIN_S = 30.0  # the worker gives up first, and says why
_GUARDS_END_S = 2.0
_TOLD_TIMEOUT_S = 10.0  # at the end, for what could not be told before


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
            self._clean_up_after_predecessor()
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
            end = self._abandon() if self._end is None else self._finish(self._end)
            self.recorder.close(timeout_s=_TOLD_TIMEOUT_S)
            return end

    def _step(self) -> None:
        exits, signals = self.tasks.collect(), self._wake.take_signals()
        if (exits or signals) and not (self._exits or self._signals):
            self._judge_by = self._look_deadline()
        self._exits += exits
        self._signals += signals
        # A worker that ended because of Done is no crash, and a stop request comes before a signal's.
        has_looked = self._look(is_awaited=bool(self._exits or self._signals))
        self._leave_lost_allocation()
        if self._unit_nodes is not None:  # before the exits are judged: those whose nodes were lost are no crashes
            self._apply(self._unit_nodes.drive(self._unit_machine, time.monotonic()))
        if has_looked or time.monotonic() >= self._judge_by:
            self._judge()
        self._end_silent()
        self._apply(self._unit_machine.tick(time.monotonic()))

    def _look_deadline(self) -> float:
        """Until when a look at the trial directory is worth waiting for."""
        return time.monotonic() + (0.0 if self._looks.hangs else FILE_TIMEOUT_S)

    def _look(self, *, is_awaited: bool) -> bool:
        """Whether the trial log was read."""
        found, is_whole = self._watch.look(time.monotonic(), is_awaited=is_awaited)
        for seen in found:
            self._heed(seen)
        return is_whole

    def _judge(self) -> None:
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

    def _end_silent(self) -> None:
        """Workers whose leases say nothing any more, though Redis answers; and Redis, if it does not for long."""
        for looked_at, records in self._leases.take():
            for task, silent_s in self._silence.looked(records, looked_at).items():
                if actions := self._unit_machine.silent(task, silent_s):
                    self._record("worker_silent", worker=task, silent_s=silent_s)
                    self._apply(actions)
        if self._silence.is_redis_frozen:
            self._silence.redis_started(time.monotonic())
            self._record("redis_frozen", worker=REDIS_UNIT, pid=self.tasks.redis.pid)
            self._apply(self._unit_machine.silent(REDIS_UNIT, REDIS_SILENCE_S))

    def _leave_lost_allocation(self) -> None:
        cause, self.tasks.lost_allocation = self.tasks.lost_allocation, ""
        if cause and self.continuation is not None and self._unit_machine.phase is TrialPhase.RUNNING:
            self._leave_nodes(cause, cause)

    def _leave_nodes(self, reason: str, cause: str) -> None:
        """At once: the next attempt gets all of its nodes again."""
        self._ends.machine.hand_over(EndState.NODE_FAILED, cause)
        now = time.monotonic()
        self._apply(self._unit_machine.stop_requested(reason=reason, grace_s=0.0, immediately=True, now=now))

    def _heed(self, seen: Seen) -> None:
        """What others want, and what has become of the trial."""
        self._why_abandoned = seen.why_over or self._why_abandoned
        for slot, entry in seen.entries or ():
            if slot >= self.attempt.start_slot and isinstance(entry, Done):
                self._apply(self._unit_machine.end_trial(EndState.COMPLETE, "", time.monotonic()))
            elif slot >= self.attempt.start_slot and isinstance(entry, Stop):
                reason = f"{entry.reason} (by {entry.by})" if entry.reason else f"stopped by {entry.by}"
                self._apply(self._unit_machine.end_trial(EndState.STOPPED, reason, time.monotonic()))
        if seen.groups_kept_down is not None:
            self._keep_groups_down(seen.groups_kept_down)
        if seen.unreadable_stop_request:
            self._record("stop_request_unreadable", cause=seen.unreadable_stop_request)
        if seen.stop_request is not None:
            self._heed_stop_request(seen.stop_request)

    def _keep_groups_down(self, down: frozenset[str]) -> None:
        if down == self._groups_kept_down:
            return
        self._groups_kept_down = down
        self._record("groups_kept_down", groups=sorted(down))
        for unit in self._tasks_by_unit:
            is_kept_down = unit.partition("/")[0] in down
            self._apply(self._unit_machine.keep_down(unit, is_kept_down=is_kept_down, now=time.monotonic()))

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
                    self._append_stop(reason)
                case EndTrial():
                    self._end = action
        for kill, tasks in signals.items():
            self.tasks.signal(tasks, kill=kill)

    def _append_stop(self, reason: str) -> None:
        stop = partial(self._log.request_stop, "supervisor", reason=reason[:1000], then=self._ends.machine.then)
        try:
            with suppress(StoppedError):  # the trial ended by itself in the meantime; the end that is in the log counts
                self._looks.run(stop, self.directory.log_path)
        except (OSError, TrialLogError) as error:
            # It fences a master that we end anyway.
            self._record("stop_not_appended", cause=str(error))

    def _clean_up_after_predecessor(self) -> None:
        self.directory.rendezvous_path.unlink(missing_ok=True)  # no worker may go to the Redis of an earlier attempt
        self.tasks.runner.clean_up()
        self._kill_leftovers()

    def _kill_leftovers(self) -> None:
        found = kill_trial_processes(self.plan.trial.uuid, spare=(os.getpid(), os.getppid()), grace_s=_GUARDS_END_S)
        sweep()
        if found.killed:
            self._record("leftovers_killed", pids=found.killed, left=found.left)

    def _abandon(self) -> SupervisorExit:
        """The trial goes on elsewhere, or not at all: only what was started here is ended, and nothing is decided."""
        self._record("attempt_abandoned", cause=self._why_abandoned)
        self.tasks.kill_all()
        return SupervisorExit.ABANDONED

    def _finish(self, end: EndTrial) -> SupervisorExit:
        self._hear_last_word()
        # Done may have been appended between our last look and the kill: the log, not the signal, says what happened.
        self._ends.judge(end, self._log.state)
        closing = self._ends.machine
        if closing.is_job_ending or not closing.goes_on:
            closing.close()  # first of all: we may be killed at any moment, and another supervisor would begin anew
        self._kill_leftovers()
        if self.extra_jobs is not None:
            self.extra_jobs.close()
        self._destroy_secrets()
        if not closing.goes_on:
            write_page(self.directory, closing.state, self._record)
        closing.close()
        return SupervisorExit.FAILED if closing.state.is_failure else SupervisorExit.ENDED

    def _hear_last_word(self) -> None:
        """Of whoever wants the trial to stop, and of the trial log."""
        left_s = self._look_deadline() - time.monotonic()
        wait_until(lambda: self._look(is_awaited=True), timeout_s=left_s, pause_s=_TICK_S)
        for number in [*self._signals, *self._wake.take_signals()]:
            self._request_stop_for(number)

    def _destroy_secrets(self) -> None:
        path = self.directory.secrets_path
        try:
            self.tasks.files.run(lambda: TrialSecrets.destroy(path), path)
        except OSError as error:
            self._record("secrets_not_removed", cause=str(error))
