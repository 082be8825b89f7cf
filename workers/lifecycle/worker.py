"""The life of a worker process, the same for all five kinds.

    start ──► setup ──► running ──► done (exit 0)
                │          │
                │          ├─ SIGINT, and SIGTERM unless it is only a notice: finish what is cheap, leave (exit 0)
                │          ├─ superseded: another process has its place (exit 75)
                │          └─ error: traceback in the log (exit 1); the supervisor restarts it
                └─ never restarted: bad configuration (exit 2), a loss that stays not finite (exit 77), damage that only
                   a person can mend, or no progress (exit 78), user code that fails on everything (exit 81)

A worker wires parts that are handed to it in a WorkerContext. Its presence record lives in a thread of its own, which
goes on while the main thread computes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from pydantic import BaseModel

from corral.experiments.errors import ChangedInputError
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.plan import RunPlan, check_models
from corral.experiments.trial.directory import StopRequest, TrialDirectory
from corral.experiments.trial.log_state import CorruptLogError
from corral.experiments.trial.mode import has_jobs
from corral.experiments.trial.secrets import SecretFilter, TrialSecrets
from corral.experiments.trial.trust import Trust
from corral.experiments.trial.worker_record import LEASE_TTL_S
from corral.name_resolve.base import Lease, NameService, NameServiceError
from corral.name_resolve.keys import TrialKeys
from corral.scheduling.worker_information import parse_worker_id
from corral.workers.lifecycle.presence import Presence
from corral.workers.streams.security import StreamSecurity

logger = logging.getLogger(__name__)

SpecType = TypeVar("SpecType", bound=BaseModel)
Action = Callable[[], Awaitable[None]]

_NEWS_PAUSE_S = (
    0.05  # of a trainer group that registers, or leaves, its watchers hear a few times, not once for each rank
)


class BadConfigurationError(ValueError):
    """The user's configuration cannot work; restarting would not help."""


class CannotContinueError(RuntimeError):
    """The trial's state is damaged or makes no progress; restarting would not help."""


class UserCodeError(RuntimeError):
    """The user's own code has failed on everything since the trial began; restarting would not help."""


class PromptsFailError(RuntimeError):
    """Agent, reward or teacher fail on everything now, and did not before, or generation servers do: the worker starts
    again, as what they ask may do."""


class SupersededWorkerError(RuntimeError):
    """Another process holds this worker's place; this one must not act any more."""


class PeersFailedError(RuntimeError):
    """A rank of the collective is gone; all ranks must start again together."""


class TrainingNotFiniteError(RuntimeError):
    """Loss or gradient stays not finite, from the last commit on, too; training on would change nothing."""


class WrongDevicesError(RuntimeError):
    """This process sees other GPUs than the plan gives it; on the CPU it would compute the same, for weeks."""

    @classmethod
    def of(cls, who: str, *, kind: str, planned: int, visible: int) -> "WrongDevicesError":
        """With the GPUs that this host shows, and where to look; `kind` is the group whose GPUs they are."""
        return cls(
            f"the plan gives {who} {planned} GPU{'s' if planned > 1 else ''}, and it sees {visible} on "
            f"{socket.gethostname()} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}); look there "
            f"at nvidia-smi and at what its container shows, or set gpu: 0 in groups.{kind}.scheduling to compute on "
            "the CPU"
        )


class StopRequested(Exception):  # noqa: N818 - a wish, not an error
    """SIGTERM or SIGINT arrived."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The context of a worker: its plan, its index, and the trial's services."""

    plan: RunPlan
    kind: str
    index: int
    attempt: int
    incarnation: str
    """Random; shared by the ranks of one trainer group start, new at each restart."""
    address: str
    """Interface that this worker's servers listen on."""
    trial: TrialDirectory
    names: NameService
    keys: TrialKeys
    secrets: TrialSecrets
    security: StreamSecurity
    presence: Presence
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the worker is asked to leave."""

    @property
    def trust(self) -> Trust:
        """By which servers of the trial are known."""
        return Trust(self.trial.secrets_path)

    @property
    def worker_id(self) -> str:
        return f"{self.kind}/{self.index}"

    def workers(self, kind: str) -> tuple[str, ...]:
        """The trial's workers of one kind, as kind/index."""
        return tuple(f"{worker.kind}/{worker.index}" for worker in self.plan.workers if worker.kind == kind)

    def specification(self, wanted: type[SpecType]) -> SpecType:
        """This worker's part of the plan.

        Raises:
            BadConfigurationError: if the plan describes another kind of worker under its name.
            ChangedInputError: if a model that it names is not there any more.
        """
        spec = self.plan.worker(self.kind, self.index)
        if not isinstance(spec, wanted):
            raise BadConfigurationError(
                f"the plan's {self.worker_id} is a {type(spec).__name__}, not a {wanted.__name__}"
            )
        check_models(spec)
        return spec

    def check_gpus(self, visible: int) -> int:
        """How many GPUs this worker computes on: those that the plan gives it, and it sees them.

        Guarantee: what was planned for GPUs never computes on a CPU, nor on the GPU of a neighbour.

        Args:
            visible: GPUs that the driver shows this process.

        Raises:
            WrongDevicesError: if it sees more or fewer; none is right for a worker that is planned without.
        """
        kind, index = parse_worker_id(self.worker_id)
        planned = self.plan.scheduling[kind].scheduling_of(index).gpu
        if planned and visible != planned:
            raise WrongDevicesError.of(self.worker_id, kind=self.kind, planned=planned, visible=visible)
        return planned

    def lease(self, key: str, value: str, *, owner: str = "") -> Lease:
        """Publish something while this process lives; what a predecessor that died left under the key is taken over.

        Args:
            owner: who publishes, if not this start of the worker.
        """
        return self.names.lease(key, value, ttl_s=LEASE_TTL_S, owner=owner or self.incarnation)


class Worker(ABC):
    """One kind of worker; `run` returns when its work is done."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @abstractmethod
    def run(self) -> None:
        """Set up, then work until the trial is done or `context.stopping` is set."""

    async def every(self, interval_s: float, action: Action, *, sooner: asyncio.Event | None = None) -> None:
        """Look at something again and again until the worker is to leave; outages of the name service are outlasted.

        Args:
            sooner: is set when it should not wait for the end of the interval.
        """
        sooner = sooner or asyncio.Event()
        while not self.context.stopping.is_set():
            sooner.clear()
            try:
                await action()
            except NameServiceError as error:
                logger.warning("name-resolve does not answer: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):  # wait_for would lose a cancellation that comes with its end
                    await sooner.wait()

    async def follow(self, actions: Mapping[str, Action], *, at_least_every_s: float) -> None:
        """Perform the action of a root of names when a name directly below it changes.

        That news comes at once is an optimisation; each action is performed at first and every so many seconds, too,
        and finds for itself what is new: records expire without news.
        """
        loop, ended = asyncio.get_running_loop(), threading.Event()
        news = {action: asyncio.Event() for action in actions.values()}

        def listen() -> None:
            seen = dict.fromkeys(actions, "")
            while not ended.is_set():
                try:
                    changed = self.context.names.changes(seen, timeout_s=at_least_every_s)
                except NameServiceError:  # every action that needs the service says so
                    ended.wait(_NEWS_PAUSE_S)
                    continue
                seen |= changed
                for root in changed:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(news[actions[root]].set)
                ended.wait(_NEWS_PAUSE_S)

        threading.Thread(target=listen, name="names", daemon=True).start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for action, sooner in news.items():
                    tasks.create_task(self.every(at_least_every_s, action, sooner=sooner))
        finally:
            ended.set()


class Notice:
    """SIGTERM in a step of a job: notice that the job is about to end, passed to `tell`, and no order to leave.

    preemption --SIGTERM, GraceTime before the end--> all steps, and not the supervisor
        master --control/stop.json: checkpoint, then the next attempt--> supervisor, which asks SLURM why
        others: go on, as the last commit needs them
    supervisor --SIGINT--> the worker leaves
    """

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._tell()


def notice_of(mode: str, trial: TrialDirectory, kind: str, *, stop_grace_s: float) -> Notice | None:
    """What SIGTERM is to a worker; None where it is an order, because nobody but the supervisor sends it.

    Args:
        mode: of the trial.
        stop_grace_s: how long a last commit may take.
    """
    if not has_jobs(mode):
        return None
    tell = partial(request_last_commit, trial, stop_grace_s=stop_grace_s)
    return Notice(tell) if kind == "master_worker" else Notice()


def request_last_commit(trial: TrialDirectory, *, stop_grace_s: float) -> None:
    """Leaves a request to checkpoint and go on in the next attempt, unless somebody has asked for a stop already."""
    request = StopRequest(
        requested_at=time.time(),
        by="SLURM (SIGTERM to the steps)",
        now=False,
        grace_s=stop_grace_s,
        then="requeue",
        is_notice=True,
    )
    try:
        trial.write_stop_request(request, replace=False)
    except OSError as error:
        logger.warning("SLURM's notice of the job's end could not be passed on: %s", error)


def install_signal_handlers(stopping: threading.Event, *, notice: Notice | None = None) -> None:
    """SIGTERM and SIGINT ask the worker to leave: the event is set and the main thread is interrupted once.

    `notice` is what SIGTERM does instead, where it is no order.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            return
        stopping.set()
        raise StopRequested(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, notice or on_signal)
    signal.signal(signal.SIGINT, on_signal)


def run_async(main: Coroutine[Any, Any, None], stopping: threading.Event) -> None:
    """Run an asyncio worker; signals that are no notice cancel it where it waits, never in the middle of a statement.

    One task that fails in a group of them ends the worker with its own exception.

    Guarantee: who asks a worker to leave while it does so already never kills it. The loop's own handlers would leave
    the process with none when it closes, so it has plain ones, and gets back afterwards those that it had.

    Raises:
        StopRequested: if a signal ended it.
    """
    handlers = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGINT)
        if not isinstance(handler := signal.getsignal(number), Notice)
    }

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(main)

        def stop() -> None:
            stopping.set()
            if not task.cancelling():  # what ends in order is not disturbed by who asks again
                task.cancel()

        def on_signal(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(stop)

        for number in handlers:
            signal.signal(number, on_signal)
        failure: BaseException | None = None
        try:
            await task
        except asyncio.CancelledError:
            raise StopRequested("signal") from None
        except BaseExceptionGroup as group:
            failure = _cause_of(group)
        if failure is not None:  # not where the group is handled, or the traceback would show it as part of the cause
            raise failure

    try:
        asyncio.run(guarded())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cause_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group failed of, if that is one kind of thing: its class says how the worker ends."""
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup) and len({type(each) for each in cause.exceptions}) == 1:
        cause = cause.exceptions[0]
    return cause


_ENDINGS: dict[type[Exception], tuple[WorkerExit, int, str]] = {
    StopRequested: (WorkerExit.DONE, logging.INFO, "%s leaves: asked to stop (%s)"),
    ChangedInputError: (WorkerExit.BAD_CONFIGURATION, logging.ERROR, "%s cannot work with these inputs: %s"),
    BadConfigurationError: (WorkerExit.BAD_CONFIGURATION, logging.ERROR, "%s cannot work with this configuration: %s"),
    CannotContinueError: (WorkerExit.CANNOT_CONTINUE, logging.ERROR, "%s cannot go on: %s"),
    UserCodeError: (WorkerExit.USER_CODE, logging.ERROR, "%s ends the trial: %s"),
    PromptsFailError: (WorkerExit.ERROR, logging.ERROR, "%s leaves, and is started again: %s"),
    SupersededWorkerError: (WorkerExit.SUPERSEDED, logging.WARNING, "%s leaves: %s"),
    PeersFailedError: (WorkerExit.PEERS_FAILED, logging.ERROR, "%s leaves: %s"),
    WrongDevicesError: (WorkerExit.WRONG_DEVICES, logging.ERROR, "%s cannot compute here: %s"),
    TrainingNotFiniteError: (WorkerExit.NOT_FINITE, logging.ERROR, "%s gives up: %s"),
}


def run_to_exit_code(make: Callable[[WorkerContext], Worker], context: WorkerContext) -> WorkerExit:
    """Make a worker, run it, and say how it ended as a WorkerExit."""
    worker_id, cause = context.worker_id, ""
    try:
        make(context).run()
    except tuple(_ENDINGS) as error:
        exit_code, level, message = _ENDINGS[type(error)]
        logger.log(level, message, worker_id, error)
        cause = str(error)
    except Exception as error:  # the last line of the log must be the cause; the supervisor decides what follows
        if context.stopping.is_set():
            logger.info("%s was interrupted while it stopped:\n%s", worker_id, traceback.format_exc())
            return WorkerExit.DONE
        causes = list(_causes_of(error))
        if (damage := next((cause for cause in causes if isinstance(cause, CorruptLogError)), None)) is not None:
            logger.error("%s cannot go on: %s", worker_id, damage)
            exit_code, cause = WorkerExit.CANNOT_CONTINUE, str(damage)
        elif refusal := next((text for cause in causes if (text := _refused_file(cause))), ""):
            frames = traceback.extract_tb(error.__traceback__)[::-1]
            places = ", called by ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
            logger.error("at %s\n%s failed: %s", places, worker_id, refusal)
            exit_code, cause = WorkerExit.ERROR, refusal
        else:
            logger.error("%s failed:\n%s", worker_id, traceback.format_exc())
            exit_code = WorkerExit.NO_ROOM if any(map(is_no_room, causes)) else WorkerExit.ERROR
            cause = f"{type(error).__name__}: {error}"
    else:
        logger.info("%s is done", worker_id)
        return WorkerExit.DONE
    if exit_code not in (WorkerExit.DONE, WorkerExit.NO_ROOM):
        leave_word(context.trial, worker_id, SecretFilter(context.secrets.values()).scrub(cause))
    return exit_code


def leave_word(trial: TrialDirectory, worker_id: str, cause: str) -> None:
    """Puts down why a worker ends; the supervisor reads it into its records, and rl-status and rl-logs show it."""
    try:
        trial.leave_word(worker_id, cause)
    except OSError as error:
        logger.warning("%s could not put down why: %s", worker_id, error)


def _causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and what groups of them hold: whichever of a worker's tasks noticed it."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes_of(inner)
    if error.__cause__ is not None:
        yield from _causes_of(error.__cause__)


_FILE_REMEDIES = {
    errno.ENOENT: "put it back",
    errno.ENOTDIR: "put it back",
    errno.EACCES: "let the user of the trial read and write there",
    errno.EPERM: "let the user of the trial read and write there",
    errno.EROFS: "make the file system writable again",
    errno.EIO: "look at the disk or the file server",
    errno.ESTALE: "look at the file server",
}


def _refused_file(error: BaseException) -> str:
    """What the file system refuses, and what to do about it; "" if the error is another one."""
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _FILE_REMEDIES:
        return ""
    remedy = f"{_FILE_REMEDIES[error.errno]}, and the worker, which is started again meanwhile, goes on"
    return f"{os.fsdecode(error.filename)}: {error.strerror}; {remedy}"


def is_no_room(error: BaseException) -> bool:
    """Whether a disk is full, or a quota used up: what fails of it waits for room, and is charged to no budget."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def flush_output() -> None:
    """Write out what logging has buffered, before the process leaves without running its exit handlers."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
