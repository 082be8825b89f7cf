"""A sandbox's files, its output, what a run says of its end, and what of a run is nobody's fault."""

import asyncio
import errno
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.workers.sandbox.base import WORK, Limits, Result, SandboxError, SandboxFileError
from corral.workers.sandbox.bubblewrap import Bubblewrap
from corral.workers.sandbox.seccomp import compiled_filter
from tests.workers.sandbox.processes import DEADLINE_S, processes_with

ROOT = Path(__file__).parents[3]


def run(*command: str, stdin: bytes = b"", limits: Limits | None = None) -> Result:
    """One command in a new sandbox."""

    async def in_sandbox() -> Result:
        async with await Bubblewrap.create() as sandbox:
            return await sandbox.exec(command, stdin=stdin, timeout_s=DEADLINE_S, limits=limits)

    return asyncio.run(in_sandbox())


def test_files_stay_from_run_to_run_and_come_out_as_they_went_in() -> None:
    content = bytes(range(256)) * 5000

    async def use() -> None:
        async with await Bubblewrap.create() as sandbox:
            await sandbox.upload("in a folder/-x $(id)", content)
            copied = await sandbox.exec(["cp", "in a folder/-x $(id)", "/tmp/copy"], timeout_s=DEADLINE_S)
            assert copied.is_success, copied
            assert await sandbox.download("/tmp/copy") == content
            with pytest.raises(SandboxFileError, match="nowhere.*No such file"):
                await sandbox.download("nowhere")
            with pytest.raises(SandboxFileError, match="more than"):
                await sandbox.download("/dev/zero")
            with pytest.raises(SandboxFileError, match="/usr/x .*Read-only"):
                await sandbox.upload("/usr/x", content)
        async with await Bubblewrap.create(disk_bytes=1 << 20) as small:
            listed = await small.exec(["find", WORK, "/tmp", "-xdev", "-type", "f"], timeout_s=DEADLINE_S)
            assert listed.is_success and listed.stdout == b"", "files of another sandbox, or of this machine"
            with pytest.raises(SandboxFileError, match="No space left"):
                await small.upload("large", content)

    asyncio.run(use())


def test_an_end_is_told_as_it_was() -> None:
    assert run("sh", "-c", "cat; echo no >&2; exit 3", stdin=b"yes\n") == Result(
        exit_code=3, signal=None, stdout=b"yes\n", stderr=b"no\n"
    )
    killed = run("sh", "-c", "kill -TERM $$")
    assert (killed.exit_code, killed.signal, killed.timed_out) == (None, signal.SIGTERM, False)
    assert run("nothing-of-this-name").exit_code == 127


def test_output_beyond_the_limit_is_dropped_and_counted() -> None:
    result = run("sh", "-c", "head -c 5000000 /dev/zero; head -c 1000 /dev/zero >&2", limits=Limits(output_bytes=1000))
    assert (len(result.stdout), result.stdout_dropped_bytes) == (1000, 4_999_000)
    assert (len(result.stderr), result.stderr_dropped_bytes) == (1000, 0)


def test_a_program_that_does_not_want_its_input_is_not_waited_for() -> None:
    assert run("true", stdin=bytes(10 << 20)).is_success


def test_a_sandbox_has_this_python_with_what_is_installed_and_no_variable_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    result = run(sys.executable, "-I", "-c", "import os, pip, sys; print(sys.prefix, sorted(os.environ))")
    if not result.is_success:  # an environment without pip
        result = run(sys.executable, "-I", "-c", "import os, sys; print(sys.prefix, sorted(os.environ))")
    threads = ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert result.stdout.decode().strip() == f"{sys.prefix} {sorted(['HOME', 'LANG', 'PATH', 'PWD', *threads])}"


@settings(max_examples=20)
@given(after_s=st.floats(0.0, 0.04), closes=st.booleans())
def test_what_ends_at_any_moment_of_its_beginning_leaves_nothing(after_s: float, closes: bool) -> None:
    word = f"9{secrets.randbelow(10**12):012}"

    async def end_soon() -> None:
        async with await Bubblewrap.create() as sandbox:
            task = asyncio.create_task(sandbox.exec(["sleep", word], timeout_s=DEADLINE_S))
            await asyncio.sleep(after_s)
            if not closes:
                task.cancel()
        with pytest.raises(SandboxError if closes else asyncio.CancelledError):
            await task
        assert not processes_with(word)

    asyncio.run(end_soon())


LOWERED = """
import asyncio, resource
from corral.workers.sandbox.bubblewrap import Bubblewrap

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.setrlimit(resource.RLIMIT_CPU, (50, 50))

async def main():
    async with await Bubblewrap.create() as sandbox:
        result = await sandbox.exec(["prlimit", "--nofile", "--cpu", "-o", "HARD", "--noheadings"], timeout_s=60.0)
        print(result.stdout.decode().split(), result.stderr.decode())

asyncio.run(main())
"""


def test_limits_are_never_above_those_of_the_process_that_asks() -> None:
    lowered = subprocess.run(
        [sys.executable, "-c", LOWERED], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert lowered.stdout == "['100', '11'] \n", lowered


def test_a_sandbox_that_cannot_be_made_is_an_error_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="no bwrap in the PATH"):
        run("true")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: it is broken' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    with pytest.raises(SandboxError, match="did not begin"):
        run("true")
    with pytest.raises(SandboxError, match="no namespace of a sandbox's own: .*/nowhere"):
        asyncio.run(Bubblewrap.create(binds=[Path("/nowhere")]))


def _verdict(program: bytes, *, architecture: int, number: int, argument: int = 2) -> int:
    """What the kernel would answer: an interpreter of the few instructions that there are."""
    words = [program[start : start + 8] for start in range(0, len(program), 8)]
    data, accumulator, at = {4: architecture, 0: number, 16: argument}, 0, 0
    while True:
        code, if_true = int.from_bytes(words[at][:2], sys.byteorder), words[at][2]
        value = int.from_bytes(words[at][4:], sys.byteorder)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = data[value]
        elif (code == 0x15 and accumulator == value) or (code == 0x35 and accumulator >= value):
            at += if_true


MEMFD_CREATE = {"x86_64": (0xC000003E, 319, 101), "aarch64": (0xC00000B7, 279, 117)}


@given(machine=st.sampled_from(list(MEMFD_CREATE)), number=st.integers(0, 2**32 - 1) | st.integers(0, 460))
def test_the_filter_refuses_what_it_names_on_its_architecture_alone(machine: str, number: int) -> None:
    program = compiled_filter(machine)
    architecture, *named = MEMFD_CREATE[machine]
    refused, killed = 0x00050000 | 38, 0x80000000
    for each in named:
        assert _verdict(program, architecture=architecture, number=each) == refused
        assert _verdict(program, architecture=architecture ^ 1, number=each) == killed
    verdict = _verdict(program, architecture=architecture, number=number)
    assert verdict == (refused if number >= 0x40000000 else verdict) and verdict in (refused, 0x7FFF0000)
    for allowed in (0, 1, 2, 57, 59, 63, 64, 93, 221) if machine == "aarch64" else (0, 1, 2, 9, 39, 57, 59, 231):
        assert _verdict(program, architecture=architecture, number=allowed) == 0x7FFF0000


@pytest.mark.parametrize(("machine", "numbers"), [("x86_64", (41, 53)), ("aarch64", (198, 199))])
def test_the_filter_allows_sockets_of_four_families(machine: str, numbers: Sequence[int]) -> None:
    program, (architecture, *_) = compiled_filter(machine), MEMFD_CREATE[machine]
    allowed = {int(family) for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)}
    for number, family in itertools.product(numbers, range(50)):
        verdict = _verdict(program, architecture=architecture, number=number, argument=family)
        assert verdict == (0x7FFF0000 if family in allowed else 0x00050000 | errno.EAFNOSUPPORT), family


def test_there_is_no_filter_for_a_machine_whose_numbers_are_not_known() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        compiled_filter("riscv64")


def test_where_memory_runs_out_the_kernel_ends_what_is_in_sandboxes_first() -> None:
    mine = Path("/proc/self/oom_score_adj").read_text()
    assert run("cat", "/proc/self/oom_score_adj").stdout == b"1000\n"
    assert Path("/proc/self/oom_score_adj").read_text() == mine
