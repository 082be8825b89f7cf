"""The host of an environment: a program for a Python of its own, in which verifiers and the environment are installed.

    corral_host tell SETTINGS FOLDER     ──► FOLDER/described.json, and NAME.jsonl: a row a task, of each of `lists`
    corral_host play SETTINGS FD,MARK    ──► {"ready": {...}} or {"failed": why}, then episodes as long as FD is open

    worker ──run, key, task──► Env.run_slot ──► harness ──► verifiers' client ──Relay, by trace──► its endpoint
       ▲                           │ any failure is the episode's own                              │ messages
       └──done: reward, metrics────┘◄──────────────────────────────────────────────────────────────┘

Messages become tokens at the endpoint, by the trial's own template, once: the environment never sees a token.

It is found by its folder and imports nothing of corral. Lines of JSON go in both directions, as with an agent's process
(`corral/workers/user_code/host.py`); SETTINGS is JSON as well, see `Settings`. What the environment prints is for
the worker's log. It ends when the worker closes its end, or dies. Eight bytes behind MARK, which it shares with the
worker, hold the run whose step is being made: if the process dies, they say by whom.
"""

import asyncio
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils import loaders

from .packages import Settings, describe, make_config, one_line, rows_of
from .player import Player, mark_steps
from .relay import LONGEST_LINE, Relay

_MODEL = "policy"  # what the endpoint calls it
_BEAT_S = 1.0
_KEY_VARIABLE = "CORRAL_RELAY_API_KEY"  # programs that verifiers starts do not inherit names with API_KEY
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


async def serve(settings: Settings, descriptor: int, mark: int) -> None:
    """Plays until the worker closes its end."""
    mark_steps(mark)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=LONGEST_LINE)

    def say(**words: Any) -> None:
        writer.write(json.dumps(words).encode() + b"\n")

    async with AsyncExitStack() as stack:
        try:
            config = make_config(settings.id, settings.args)
            env = loaders.load_environment(config)
            relay = Relay(stack)
            os.environ[_KEY_VARIABLE] = relay.secret
            client = vf.EvalClientConfig(base_url=await relay.start(), api_key_var=_KEY_VARIABLE)
            await stack.enter_async_context(env.serving())
            # How answers are sampled is the trial's business; what an environment's agents say of it is passed on.
            context = vf.ModelContext(model=_MODEL, client=client)
            player = Player(env, relay, context, timeout_s=settings.timeout_s)
            say(ready=describe(config))
        except Exception as error:
            traceback.print_exc()
            say(failed=one_line(error))
            await writer.drain()
            return
        running: dict[Any, asyncio.Task[None]] = {}

        async def play(run: Mapping[str, Any]) -> None:
            try:
                say(**await player.play(run))
            finally:
                running.pop(run["run"], None)

        async def beat() -> None:
            for number in itertools.count():
                say(beat=number)
                await writer.drain()
                await asyncio.sleep(_BEAT_S)

        beating = asyncio.create_task(beat())
        with suppress(ConnectionError):
            while not beating.done() and (line := await reader.readline()):
                word = json.loads(line)
                if "run" in word:
                    running[word["run"]] = asyncio.create_task(play(word))
                elif "cancel" in word and word["cancel"] in running:
                    running[word["cancel"]].cancel()
        for task in (beating, *running.values()):
            task.cancel()
        await asyncio.gather(beating, *running.values(), return_exceptions=True)


def tell(settings: Settings, folder: Path) -> None:
    """Writes what the environment is, and its tasks."""
    config = make_config(settings.id, settings.args)
    loaders.load_environment(config)
    (folder / "described.json").write_text(json.dumps(describe(config)))
    for name, asked in settings.lists.items():
        taskset = loaders.load_environment(make_config(settings.id, asked["args"])).taskset
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_of(taskset, num_tasks=asked["num_tasks"]))


def main(mode: str, settings_text: str, where: str) -> int:
    """Tells, or plays; 1 with the reason as the last line of stderr if the environment cannot be used."""
    settings = Settings(**json.loads(settings_text))
    if mode == "play":
        if settings.parent:  # else another process sees to it that it ends
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != settings.parent:  # it went away before the wish was registered
                return 1
        asyncio.run(serve(settings, *map(int, where.split(","))))
        return 0
    try:
        tell(settings, Path(where))
    except Exception as error:
        traceback.print_exc()
        print(one_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
