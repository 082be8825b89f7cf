"""SglangProcess: one SGLang server as a child of this process, its log, and its end.

argv ──► process group of its own ──stdout, stderr──► scrubbed ──► log file; its first error is reported
                                                          └── what the disk has no room for is left out, and counted
   worker dies, SIGKILL included ──kernel──► the server dies ──kernel──► its schedulers die
   stop ──► SIGTERM ──grace──► SIGKILL to the rest of the group ──► its temporary files, its names in memory
"""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from corral.experiments.trial import leftovers
from corral.experiments.trial.tether import die_with_parent

logger = logging.getLogger(__name__)

_LAST_LINES = 30
_POLL_INTERVAL_S = 0.05
GPU_GRACE_S = 9.0
"""SGLang looks for an order to end every five seconds, and then has its schedulers free what they have of a GPU; the
supervisor gives a worker ten."""
STOP_GRACE_S = 1.0  # nothing in the server is durable, and what it leaves on the host is removed here
_ERROR = re.compile(r"^(?:\[[^]]*\] )?(?:ERROR: +)?(?P<what>(?:[\w.]*(?:Error|Exception)|\[Errno \d+\]).*\S)")
"""The last line of a traceback, or what uvicorn says of an address; what SGLang says of a child's end comes later."""
_IS_UP = "The server is fired up and ready to roll!"  # a call of its own, which comes too early, fails before that
_CRASHED = re.compile(r"(?P<what>[\w ]*crashed with exit code -?\d+)")
_KILL_TIMEOUT_S = 30.0  # a process that waits for a dead disk or GPU dies when that answers


class SglangProcess:
    """A running server; to be started from the main thread, see `die_with_parent`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        scrub: Callable[[str], str],
        descriptors: Sequence[int] = (),
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        """
        Args:
            log_path: appended to.
            descriptors: inherited under their numbers.
            grace_s: between the order to end and SIGKILL.
            scrub: takes secrets out of a line: SGLang prints all its settings when it starts, the keys among them.
        """
        self._began = time.time()
        self._temporary = tempfile.mkdtemp(prefix="sglang-")
        self._process = subprocess.Popen(
            list(command),
            env={**environment, "TMPDIR": self._temporary},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
            pass_fds=descriptors,
            preexec_fn=die_with_parent(),
        )
        self.pid = self._process.pid
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.first_error = ""
        """The first line of its log, since it was up, that names one; empty while there is none."""
        self._scrub = scrub
        self._grace_s = grace_s
        self._log_path = log_path
        # Closed before the file that it reads is: it ends when the last process of the group has ended.
        self._copier = threading.Thread(target=self._copy_log, name="sglang log", daemon=True)
        self._copier.start()

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        num_lost, log = 0, None
        with self._process.stdout as lines:  # read on whatever becomes of the log: the server would die of a full pipe
            for line in lines:
                clean = self._scrub(line)
                self._last_lines.append(clean.rstrip())
                if _IS_UP in clean:
                    self.first_error = ""  # it is up in spite of it
                elif not self.first_error and (found := _ERROR.match(clean) or _CRASHED.search(clean)):
                    self.first_error = found["what"].strip()
                try:
                    log = log or self._log_path.open("ab", buffering=0)
                    if num_lost:
                        log.write(b"(%d lines could not be written here)\n" % num_lost)
                    num_lost = 0
                    log.write(clean.encode(errors="replace"))
                except OSError as error:
                    num_lost += 1
                    if num_lost == 1:
                        logger.warning("%s cannot be written, and misses lines until it can: %s", self._log_path, error)
        if log is not None:
            log.close()

    def poll(self) -> int | None:
        """Its return code once it has ended (negative: a signal); the rest of its group is killed first."""
        if self._process.returncode is not None:
            return self._process.returncode
        # Look before reaping: while the leader is a zombie its id cannot be used again, so the group is still ours.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._kill_group()
        return self._process.wait()

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        return "\n".join(self._last_lines)

    async def stop(self) -> None:
        """Ends the server and all that it started; returns when they are gone, or cannot be ended."""
        started = time.monotonic()
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        while self.poll() is None:
            if time.monotonic() > started + self._grace_s:
                self._kill_group()
            if time.monotonic() > started + _KILL_TIMEOUT_S:
                logger.error("SGLang's process %d does not end, even by SIGKILL; it is left behind", self.pid)
                return
            await asyncio.sleep(_POLL_INTERVAL_S)
        await asyncio.to_thread(self._copier.join, STOP_GRACE_S)
        await asyncio.to_thread(self._remove_remains)

    def _remove_remains(self) -> None:
        """A worker may start many servers, and none of them removes its sockets, semaphores and slots."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        leftovers.remove_unused_names(since=self._began)

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody is left in it
