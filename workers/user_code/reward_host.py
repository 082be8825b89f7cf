"""The processes that a user's reward runs in: one imports it, those that it forks are called.

    worker ──a channel──► host: imports the reward once ──fork──► a process of a channel's own ⇄ worker
           ──a number───► host: kills that process, whatever it has started too, and says how it ended

A call is a connection that the worker sends through the channel: Call there, Outcome back. The host is executed anew,
so it holds nothing of the worker's memory, and no key of the trial. It ends, and all below it, when the worker
closes its end or dies.
"""

import asyncio
import faulthandler
import io
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import msgspec

from corral.experiments.own_python import own_python
from corral.experiments.trial.tether import die_with_parent
from corral.workers.rewards.contract import StopTrialError
from corral.workers.sandbox.availability import why_no_sandbox
from corral.workers.sandbox.base import asks_for_sandbox
from corral.workers.user_code.blame import describe_error, standing_in, users_traceback, watched
from corral.workers.user_code.loading import configured, load_callable
from corral.workers.user_code.trials import Judged, Takes, as_taken, cause_of, checked_rewards, is_async, what_it_takes

_BLOCKED_AFTER_S = 0.5  # beyond its deadline: what awaits is cancelled at it, so what is left blocks its loop


class Form(msgspec.Struct):
    """The host's first word: how the reward wants to be called, or why it cannot be."""

    is_async: bool = False
    takes: Takes = "answer"
    needs_sandbox: bool = False
    error: str = ""


class Call(msgspec.Struct):
    """One call of the reward."""

    problem: str
    """JSON."""
    answers: list[str]
    """One, unless the reward takes groups; each an episode as JSON if it takes these."""
    timeout_s: float
    is_weighed: bool = True
    """Whether something is trained on what it says."""


class Outcome(msgspec.Struct):
    """What came of a call."""

    rewards: list[Judged] = []
    """One for each answer; none if it failed."""
    cause: str = ""
    """Of a failure: one line, with file and line."""
    traceback: str = ""
    is_stuck: bool = False
    """Whether the process has to be ended."""
    is_killed: bool = False
    """Whether the process ended by SIGKILL, which may be the kernel's for want of memory, or a person's."""
    ends_trial: bool = False


def receive_all(connection: socket.socket) -> bytes:
    """What the other side has to say, until it closes its half."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def main(import_path: str, descriptor: int, *, settings: str = "{}", is_hidden: bool = False) -> None:
    """Serves forks until the worker is gone.

    Args:
        settings: of a class, as JSON.
        is_hidden: whether it runs behind a curtain, where it can make no sandbox.
        descriptor: of this side of the SOCK_SEQPACKET pair that the worker asks through.
    """
    faulthandler.enable()
    sys.stdout, sys.stderr = (_lossy(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s reward %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # the worker says when; unlike SIG_IGN it is not left to programs
        signal.signal(number, lambda *_: None)
    worker, children = socket.socket(fileno=descriptor), set[int]()
    try:
        reward = configured(load_callable(import_path), json.loads(settings), key="settings")
        form = Form(is_async(reward), what_it_takes(reward))
        form.needs_sandbox = asks_for_sandbox(reward)
        if form.needs_sandbox and not is_hidden and (reason := why_no_sandbox()):
            form.error = f"{import_path} runs in a sandbox, and {socket.gethostname()} can make none: {reason}"
    except BaseException as error:
        form = Form(error=f"{import_path} cannot be imported: {describe_error(error)}")
    try:
        worker.send(msgspec.msgpack.encode(form))
        while not form.error:
            word, descriptors, _, _ = socket.recv_fds(worker, 64, 1)
            if descriptors:
                pid = _fork(worker, socket.socket(fileno=descriptors[0]), reward, form)
                children.add(pid)
                worker.send(msgspec.msgpack.encode(pid))
            elif word:
                pid = msgspec.msgpack.decode(word, type=int)
                children.remove(pid)
                worker.send(msgspec.msgpack.encode(_end(pid)))
            else:
                return
    except ConnectionError:
        return
    finally:
        for pid in children:
            _end(pid)


class _LossyFile(io.FileIO):
    """What the disk has no room for is lost: it is the log's, and no failure of the reward that prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lossy(descriptor: int) -> TextIO:
    buffered = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffered, errors="backslashreplace", line_buffering=True)


def _end(pid: int) -> int:
    """Kill a child with its group; how it ended, which may have been before."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(worker: socket.socket, channel: socket.socket, reward: Callable[..., Any], form: Form) -> int:
    tie = die_with_parent()
    with channel:
        if pid := os.fork():
            return pid
        try:
            os.setpgid(0, 0)
            tie()
            worker.close()
            if form.is_async:
                asyncio.run(_await_calls(channel, reward))
            else:
                _serve_calls(channel, reward)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _serve_calls(channel: socket.socket, reward: Callable[..., Any]) -> None:
    """One after the other, in the main thread, where signals are handled."""
    while descriptors := socket.recv_fds(channel, 1, 1)[1]:
        with socket.socket(fileno=descriptors[0]) as connection:
            call = msgspec.msgpack.decode(receive_all(connection), type=Call)
            try:
                with _watched(connection, call):
                    outcome = Outcome(_checked(reward, call, _call(reward, call)))
            except BaseException as error:
                outcome = _failed(error)
            _reply(connection, outcome)


async def _await_calls(channel: socket.socket, reward: Callable[..., Any]) -> None:
    """As many at a time as come."""
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    gone = asyncio.Event()

    def accept() -> None:
        descriptors = socket.recv_fds(channel, 1, 1)[1]
        if not descriptors:
            loop.remove_reader(channel)
            gone.set()
            return
        tasks.add(task := loop.create_task(_await_call(socket.socket(fileno=descriptors[0]), reward)))
        task.add_done_callback(tasks.discard)

    loop.add_reader(channel, accept)
    await gone.wait()


async def _await_call(connection: socket.socket, reward: Callable[..., Any]) -> None:
    with connection:
        call = msgspec.msgpack.decode(await asyncio.to_thread(receive_all, connection), type=Call)
        try:
            with _watched(connection, call, extra_s=_BLOCKED_AFTER_S):
                awaited = asyncio.ensure_future(_call(reward, call))
                done, _ = await asyncio.wait([awaited], timeout=call.timeout_s)
                if done:
                    outcome = Outcome(_checked(reward, call, awaited.result()))
                else:
                    outcome = Outcome(cause=_late(call) + standing_in(next(iter(awaited.get_stack(limit=1)), None)))
                    awaited.cancel()
        except BaseException as error:
            outcome = _failed(error)
        _reply(connection, outcome)


def _call(reward: Callable[..., Any], call: Call) -> Any:
    problem = json.loads(call.problem)  # unlike msgspec's: NaN, integers of any size, half a surrogate pair
    return reward(problem, as_taken(what_it_takes(reward), call.answers))


def _checked(reward: Callable[..., Any], call: Call, value: Any) -> list[Judged]:
    return checked_rewards(reward, value, len(call.answers), is_weighed=call.is_weighed)


@contextmanager
def _watched(connection: socket.socket, call: Call, *, extra_s: float = 0.0) -> Iterator[None]:
    """Says where the main thread stands if the time is up; the worker then has this process ended."""
    lock = threading.Lock()

    def tell(place: str) -> None:
        if lock.acquire(blocking=False):  # kept: the call has no other end
            _reply(connection, Outcome(cause=_late(call) + place, is_stuck=True))

    try:
        with watched(call.timeout_s + extra_s, tell):
            yield
    finally:
        if not lock.acquire(blocking=False):
            threading.Event().wait()  # to be ended


def _late(call: Call) -> str:
    return f"no result within {call.timeout_s:g} s"


def _failed(error: BaseException) -> Outcome:
    ends_trial = isinstance(error, StopTrialError)
    return Outcome(cause=cause_of(error), traceback=users_traceback(error), ends_trial=ends_trial)


def _reply(connection: socket.socket, outcome: Outcome) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(ConnectionError):  # nobody waits for it any more
        connection.sendall(msgspec.msgpack.encode(outcome))
        connection.shutdown(socket.SHUT_WR)


def command(
    import_path: str, descriptor: int, path: Sequence[str], *, settings: Mapping[str, Any], is_hidden: bool = False
) -> list[str]:
    """Starts a host that finds modules where the worker does."""
    call = f"main(sys.argv[1], int(sys.argv[2]), settings=sys.argv[3], is_hidden={is_hidden})"
    code = f"import sys; sys.path[:] = sys.argv[4:]; from {__name__} import main; {call}"
    return own_python("-c", code, import_path, str(descriptor), json.dumps(settings), *path)
