"""A long-lived process in a sandbox, whose one way out is a Unix socket."""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from corral.workers.sandbox import command as command_module
from corral.workers.sandbox.base import SandboxError
from corral.workers.sandbox.command import python_folders, wrapped_command
from tests.workers.sandbox.processes import DEADLINE_S, processes_with

INSIDE = """
import json, os, socket, sys
own = socket.socket(socket.AF_UNIX)
own.connect(sys.argv[1])
lines = own.makefile("rw")
for line in lines:
    said = {"asked": line.strip(), "read": open(sys.argv[2]).read(), "environment": sorted(os.environ)}
    said["processes"] = sum(name.isdecimal() for name in os.listdir("/proc"))
    try:
        open(sys.argv[2], "w")
    except OSError as error:
        said["write"] = error.strerror
    said["beside"] = os.listdir(os.path.dirname(sys.argv[2]))
    said["interfaces"] = [name for _, name in socket.if_nameindex()]
    lines.write(json.dumps(said) + "\\n")
    lines.flush()
"""


def test_it_speaks_through_its_socket_reads_what_is_bound_and_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / "data").write_text("open")
    (tmp_path / "secret").write_text("closed")
    path, data = tmp_path / "socket", tmp_path / "bound" / "data"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        wrapped = wrapped_command(
            [sys.executable, "-I", "-c", INSIDE, str(path), str(data)],
            binds=[*python_folders(), data],
            unix_socket=path,
            environment={"EPISODE": "7"},
        )
        with subprocess.Popen(wrapped, env=os.environ | {"SOME_KEY": "secret"}) as process:
            try:
                connection = listener.accept()[0]
                with connection, connection.makefile("rw") as lines:
                    for word in ("once", "twice"):
                        lines.write(f"{word}\n")
                        lines.flush()
                        said = json.loads(lines.readline())
                        assert said == {
                            "asked": word,
                            "read": "open",
                            "write": "Read-only file system",
                            "beside": ["data"],
                            "environment": ["EPISODE", "HOME", "LANG", "PATH", "PWD"],
                            "processes": 2,
                            "interfaces": ["lo"],
                        }
            finally:
                process.kill()
    assert (tmp_path / "secret").read_text() == "closed"


def test_once_it_has_begun_it_ends_with_whoever_started_it() -> None:
    word = f"9{secrets.randbelow(10**12):012}"
    inside = wrapped_command(["sh", "-c", f"sleep {word} & sleep {word} & echo up; wait"])
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    with subprocess.Popen([sys.executable, "-c", starter, *inside], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sleeping = [
            os.pidfd_open(pid) for pid, line in processes_with(word).items() if not line.startswith(sys.executable)
        ]
        process.kill()
    assert len(sleeping) >= 4, "bwrap twice, the shell and what it has started"
    for descriptor in sleeping:
        assert select.select([descriptor], [], [], DEADLINE_S)[0], "it outlived who started it"
        os.close(descriptor)


def test_a_python_that_lies_around_the_home_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setattr(command_module.sys, "prefix", str(tmp_path))
    with pytest.raises(SandboxError, match="holds the home directory"):
        python_folders()
