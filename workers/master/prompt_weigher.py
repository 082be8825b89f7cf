"""The master's side of the process in which a user's function weighs prompts (`workers/user_code/weigh_prompts.py`)."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.sandbox.curtain import draw_curtain
from corral.workers.streams.closing import AsyncClosing
from corral.workers.user_code.weigh_prompts import command

_TIMEOUT_S = 120.0  # of a step's prompts; an import may be among it
_TRIES = 3  # the function has no state, so a process that was killed, or hangs, is followed by another one
_LONGEST_LINE = 1 << 26


class PromptWeigher(AsyncClosing):
    """Starts the process when it is asked first, and again when it has died."""

    def __init__(self, import_path: str, *, hidden: Sequence[Path]) -> None:
        """
        Args:
            hidden: folders that it does not see.
        """
        self._import_path = import_path
        self._hidden = hidden
        self._process: asyncio.subprocess.Process | None = None

    async def weigh(self, histories: Sequence[Sequence[float]]) -> list[float]:
        """The weights of rows with these mean rewards.

        Raises:
            UserCodeError: if the function fails.
            TimeoutError: if process after process ends, or does not answer in time: the worker has to start again.
        """
        if not histories:
            return []
        ended = ""
        for _ in range(_TRIES):
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    line = await self._ask(json.dumps(list(map(list, histories))).encode() + b"\n")
                ended = "its process ended"
            except TimeoutError:
                line, ended = b"", f"no answer within {_TIMEOUT_S:g} s"
            if line:
                answer = json.loads(line)
                if "weights" in answer:
                    return list(answer["weights"])
                raise UserCodeError(
                    f"dataset.sampler {self._import_path} fails: {answer['error']}; mend it in the folder `code` of "
                    "the trial, and rl-submit --resume it"
                )
            await self.close()
        raise TimeoutError(f"dataset.sampler {self._import_path} gave no weights in {_TRIES} tries: {ended}")

    async def _ask(self, line: bytes) -> bytes:
        """Its answer; nothing if it has ended."""
        if self._process is None:
            curtain = await asyncio.to_thread(draw_curtain, self._hidden)
            self._process = await asyncio.create_subprocess_exec(
                *curtain.around(command(self._import_path, sys.path)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,
                limit=_LONGEST_LINE,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(ConnectionError):
            stdin.write(line)
            await stdin.drain()
        return await stdout.readline()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
