"""Agents of a user, good and bad, which the processes of a rollout worker import; a row's `id` says who misbehaves."""

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corral.agents import Episode, EpisodeEndedError, Outcome, Session, Task
from corral.workers.sandbox.base import needs_sandbox
from corral.workers.sandbox.bubblewrap import Bubblewrap

FOLDER = "CORRAL_TEST_FOLDER"


async def asks_twice(task: Task, session: Session) -> None:
    first = await session.generate()
    session.reward(0.25, turn=first)
    await session.say("+")
    await session.generate()
    session.note(episode=task.episode, asked=2.0)


async def asks_in_branches(task: Task, session: Session) -> Outcome:
    """Two sequences that begin alike, one of which nothing is learned from in its second turn."""
    first = await session.generate()
    other = session.branch(history=task.prompt_ids)
    await session.say("1")
    await session.generate(train=False)
    await other.say("2")
    last = await other.generate()
    assert list(other.ids) == [*task.prompt_ids, *other.ids[len(task.prompt_ids) : -len(last.ids)], *last.ids]
    assert first.number == 0 and last.number == 2 and last.text == "7"
    return Outcome(await session.judge(last), metrics={"branches": 2.0}, ended="enough")


class UnshowableError(RuntimeError):
    """Its text is a mistake, too."""

    def __str__(self) -> str:
        return str(self.args[0])


async def asks_for_ever(task: Task, session: Session) -> None:
    while True:
        await session.generate()
        await session.say("+")


async def asks_until_the_end(task: Task, session: Session) -> float:
    try:
        await asks_for_ever(task, session)
    except EpisodeEndedError as error:
        return {"turns": 0.75, "length": 0.5}[error.reason]
    raise AssertionError


async def misbehaves(task: Task, session: Session, *, extra: int) -> Any:
    """Each row in another way, after an answer."""
    last = await session.generate()
    match task["id"]:
        case "1":
            return task["no such field"]
        case "2":
            raise SystemExit(0)
        case "3":
            raise asyncio.CancelledError
        case "4":
            return "7"
        case "5":
            return math.nan
        case "6":
            print("line\n" * 100_000)
        case "7":
            if os.fork() == 0:
                return None  # in the child, which does not come back
        case "8":
            os._exit(3)
        case "9":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600.0)  # it takes a moment
        case "11":
            return await _reports_much(session)
        case "12":
            await session.say([{"role": "user", "content": "1+" * 1000}])  # no sequence has room for it
        case "13":
            return Outcome(1.0, metrics={"m" * 10_000: 1.0})
        case "14":
            raise ValueError("y" * 10_000_000)
        case "15":
            raise UnshowableError
        case "16":
            raise KeyError("\ud800")
        case "17":
            session.note(**{"a\ud800b": 1.0})
            await session.judge("\ud800")
            return Outcome(await session.judge(last), metrics={"m\udfff": 1.0}, ended="x\ud800")
    return float(extra)


async def _reports_much(session: Session) -> float:
    """As if messages of this process may have 10,000 bytes."""
    host: Any = sys.modules["corral.workers.user_code.host"]
    largest, host.LARGEST_LINE = host.LARGEST_LINE, 10_000
    try:
        return await session.judge("7" * 10_000)
    finally:
        host.LARGEST_LINE = largest


async def kills_once(task: Task, session: Session) -> float:
    """Row 0 ends the process as soon as all others wait for something."""
    folder = Path(os.environ[FOLDER])
    await session.generate()
    (folder / f"{task['id']}-{task.episode}").touch()
    if task["id"] == "0" and not (folder / "killed").exists():
        while len(list(folder.iterdir())) < 8:
            await asyncio.sleep(0.01)
        (folder / "killed").touch()
        os._exit(3)
    while not (folder / "killed").exists():
        await asyncio.sleep(0.01)
    return 1.0


async def waits_for_some(task: Task, session: Session) -> float:
    """What it awaits never comes for two rows, and one of them does not take that for an end."""
    if task["id"] == "1":
        await asyncio.Event().wait()
    if task["id"] == "2":
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(60.0)  # longer than anybody waits for it
    await session.generate()
    return await session.judge()


async def blocks_for_some(task: Task, session: Session) -> float:
    """Row 1 keeps the event loop to itself, in a task of its own, and once more when interrupted; row 2 takes the
    signal away that would interrupt it.
    """

    async def block() -> None:
        try:
            time.sleep(600.0)
        finally:
            time.sleep(600.0)

    await session.generate()
    if task["id"] == "1":
        await asyncio.gather(block())
    if task["id"] == "2":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(600.0)
    return 1.0


async def always_raises(task: Task, session: Session) -> Any:
    return task["no such field"]


async def fails_for_some(task: Task, session: Session) -> float:
    """So many episodes of a row as it says; the others go on when they have."""
    folder = Path(os.environ[FOLDER])
    await session.generate()
    if task.episode < task["fails"]:
        (folder / f"{task['id']}-{task.episode}").touch()
        return float(task["no such field"])
    while len(list(folder.glob(f"{task['id']}-*"))) < task["fails"]:
        await asyncio.sleep(0.01)
    return 1.0


async def dies_once(task: Task, session: Session) -> float:
    """Once, the first two turns are for nothing, as the process is gone."""
    killed = Path(os.environ[FOLDER]) / "killed"
    for _ in range(2):
        await session.generate()
        await session.say("+")
    if not killed.exists():
        killed.touch()
        asyncio.get_running_loop().call_soon(os._exit, 3)  # in nobody's step
        await asyncio.Event().wait()
    await session.generate()
    return 1.0


async def waits_between(task: Task, session: Session) -> float:
    """Two turns, then another one as soon as it may."""
    for _ in range(2):
        await session.generate()
        await session.say("+")
    while not (Path(os.environ[FOLDER]) / "go").exists():
        await asyncio.sleep(0.01)
    await session.generate()
    return 1.0


@needs_sandbox
async def makes_a_sandbox(task: Task, session: Session) -> float:
    """And says which process it is in."""
    place = os.readlink("/proc/self/ns/pid")  # where secrets are hidden each has its own, and the same number in it
    (Path(os.environ[FOLDER]) / f"{place}-{os.getpid()}").touch()
    await session.generate()
    async with await Bubblewrap.create() as sandbox:
        run = await sandbox.exec(["echo", "made"], timeout_s=60.0)
    return float(run.stdout == b"made\n")


async def fails_at_first(task: Task, session: Session) -> float:
    first = Path(os.environ[FOLDER]) / "first"
    await session.generate()
    if not first.exists():
        first.touch()
        raise KeyError
    await session.say("+")
    await session.generate()
    return 1.0


async def looks_around(task: Task, session: Session) -> float:
    """Writes down everything that it can find in its own process."""
    await session.generate()
    opened = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            opened[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    folder = Path(os.environ[FOLDER])
    for name in ("environ", "cmdline"):
        (folder / name).write_bytes(Path(f"/proc/self/{name}").read_bytes())
    (folder / "memory").write_bytes(_memory())
    seen = {
        "opened": opened,
        "processes": [name for name in os.listdir("/proc") if name.isdigit()],
        "secrets": [str(path) for folder in task["look in"] for path in Path(folder).iterdir()],
    }
    (folder / "seen").write_text(json.dumps(seen))
    return 1.0


def _memory() -> bytes:
    """Of this process, as far as it can be written: what it was given is somewhere in it."""
    parts = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            if mode.startswith("rw"):
                start, end = (int(part, 16) for part in span.split("-"))
                try:
                    memory.seek(start)
                    parts.append(memory.read(end - start))
                except (OSError, OverflowError, ValueError):
                    continue
    return b"".join(parts)


def waits_for_the_others(problem: Mapping[str, Any], answer: str) -> float:
    """A reward that takes longer for row 3 than any agent may be at work of its own."""
    if problem["id"] == "3":
        (Path(os.environ[FOLDER]) / "fifo").open().close()  # until it has a writer
    return 1.0


def ranks(problem: Mapping[str, Any], episodes: list[Episode]) -> list[float]:
    """A judge of groups: each by its note, and by how many turns it had."""
    return [episode.notes["episode"] + 10.0 * len(episode.turns) for episode in episodes]
