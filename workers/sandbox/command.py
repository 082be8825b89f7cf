"""The view of a sandbox, as bubblewrap's command line. Pure, but for looking at which folders there are.

/usr, and what Python needs elsewhere    read-only: no home, no /etc but the linker's, no environment
/proc, /dev, a loopback interface        its own: no process and no network but those of the sandbox
/sandbox, /tmp, /dev/shm                 its own, bounded: nothing else can be written
one Unix socket                          where it is given, the only way out
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from corral.workers.sandbox.base import WORK, SandboxError

_SYSTEM_FOLDERS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
_OWN_USER = "1000"
WRITABLE = (WORK, "/tmp", "/dev/shm")
"""All that can be written in a sandbox."""
_NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv"),
    *("--uid", _OWN_USER, "--gid", _OWN_USER, "--hostname", "sandbox"),
)


def bwrap(
    command: Sequence[str],
    *,
    program: str,
    read_only: Mapping[str, str],
    writable: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    options: Sequence[str] = (),
) -> list[str]:
    """The command line that runs a command so.

    Args:
        program: path of bwrap.
        read_only: what lies at each path of the sandbox, besides /usr.
        writable: bubblewrap's own words for each path that can be written.
        options: others of bubblewrap's, such as descriptors that it is to use.
    """
    search_path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": search_path, "HOME": WORK, "LANG": "C.UTF-8", **environment}
    mounts = {path: ("--ro-bind", source, path) for path, source in read_only.items()} | dict(writable)
    return [
        *(program, *_NAMESPACES, *options, *_system(), "--proc", "/proc", "--dev", "/dev"),
        # Folders above first: what is below is bound into them.
        *(word for _, words in sorted(mounts.items()) for word in words),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK),
        *(word for name, value in environment.items() for word in ("--setenv", name, value)),
        *("--", *command),
    ]


def wrapped_command(
    command: Sequence[str],
    *,
    program: str = "bwrap",
    binds: Sequence[Path] = (),
    unix_socket: Path | None = None,
    environment: Mapping[str, str] | None = None,
    memory_disk_bytes: int = 2**28,
) -> list[str]:
    """The command line of a long-lived process that sees /usr, some folders, and one Unix socket.

    Once it has begun, it ends with the thread that started it, and whatever it has started ends with it; before, see
    `HiddenSecrets`. It has no limits but those that it is started with, and no filter of system calls. It is the
    calling user's: it can read what that user can read below the binds.

    Args:
        binds: files and folders that it may read, at the same paths; `python_folders()` for this Python.
        unix_socket: the one thing outside that it can speak to, at the same path. It has to be there already.
        environment: beside PATH, HOME and LANG. Everybody on the host can read it: no secrets.
        memory_disk_bytes: of each of /sandbox, /tmp and /dev/shm, which are in memory, and gone at its end.
    """
    writable: dict[str, tuple[str, ...]] = {
        path: ("--size", str(memory_disk_bytes), "--tmpfs", path) for path in WRITABLE
    }
    if unix_socket is not None:
        writable[str(unix_socket)] = ("--bind", str(unix_socket), str(unix_socket))
    return bwrap(
        command,
        program=program,
        read_only={str(path): str(path) for path in binds},
        writable=writable,
        environment=environment or {},
    )


def python_folders() -> tuple[Path, ...]:
    """What this Python consists of outside of /usr: its installation, and its virtual environment.

    Raises:
        SandboxError: if one of them holds the home directory, which no sandbox may see.
    """
    installed = Path(sys.executable).resolve().parent.parent
    folders = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.base_prefix).resolve(), installed}
    outside = sorted(folder for folder in folders if not folder.is_relative_to("/usr"))
    home = Path(os.path.expanduser("~")).resolve()
    for folder in outside:
        if home.is_relative_to(folder.resolve()):
            raise SandboxError(
                f"Python is installed in {folder}, which holds the home directory {home}; use a Python in a folder of "
                "its own"
            )
    return tuple(outside)


def _system() -> Iterator[str]:
    """Programs and libraries, where this system has them."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in _SYSTEM_FOLDERS:
        path = f"/{name}"
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        yield from ("--ro-bind-try", path, path)
