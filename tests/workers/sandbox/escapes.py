"""Programs that try what they can: what each is given, and how its run has to end.

Each prints what it has reached, so that nothing is to be printed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from corral.workers.sandbox.base import Limits, Result

SECRET = "a-key-that-nobody-may-see"


@dataclass(frozen=True, kw_only=True)
class Escape:
    """One program; `{parent}`, `{port}`, `{socket}` and `{folder}` are the test's own."""

    program: str
    timeout_s: float = 60.0
    limits: Limits = Limits(cpu_s=20)
    ends: Callable[[Result], bool] = lambda result: result.is_success and result.stdout == b""


def _failed(result: Result) -> bool:
    return not result.is_success and not result.timed_out and result.stdout == b""


ESCAPES = {
    "a fork bomb": Escape(
        program="""
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        timeout_s=1.5,
        ends=lambda result: result.timed_out,
    ),
    "more processes than it may have": Escape(
        program="""
import os, time
for _ in range(64):
    if not os.fork():
        time.sleep(100)
""",
        limits=Limits(processes=16),
        ends=_failed,
    ),
    "an endless loop": Escape(program="while True: pass", timeout_s=0.5, ends=lambda result: result.timed_out),
    "an endless loop of CPU time": Escape(
        program="while True: pass", limits=Limits(cpu_s=1), ends=lambda result: result.timed_out
    ),
    "an endless sleep": Escape(
        program="import time; time.sleep(10000)", timeout_s=0.5, ends=lambda result: result.timed_out
    ),
    "10 GB": Escape(
        program="bytearray(10 << 30)", ends=lambda result: _failed(result) and b"MemoryError" in result.stderr
    ),
    "much memory in many processes": Escape(
        program="""
import os, time
for _ in range(4):
    if not os.fork():
        break
held = bytearray(os.urandom(1 << 20) * 100)
time.sleep(100)
""",
        limits=Limits(memory_bytes=300 << 20),
        ends=lambda result: result.out_of_memory,
    ),
    "a full disk": Escape(
        program="""
for number in range(100):
    with open(f"/tmp/{number}", "wb") as file:
        file.write(bytes(10 << 20))
""",
        ends=lambda result: _failed(result) and b"No space left" in result.stderr,
    ),
    "a file too large": Escape(
        program="open('large', 'wb').write(bytes(10 << 20))",
        limits=Limits(file_bytes=1 << 20),
        ends=lambda result: _failed(result) and b"File too large" in result.stderr,
    ),
    "a disk full of empty files": Escape(
        program="for number in range(100_000): open(str(number), 'w').close()",
        ends=lambda result: _failed(result) and b"No space left" in result.stderr,
    ),
    "memory that no limit counts": Escape(
        program="""
import ctypes, platform
libc = ctypes.CDLL(None)
for name, number in {"memfd_create": (319, 279), "shmget": (29, 194), "io_uring_setup": (425, 425)}.items():
    number = number[platform.machine() == "aarch64"]
    if libc.syscall(number, b"x", 1 << 30, 0o1600) >= 0:
        print(name)
""",
    ),
    "files outside": Escape(
        program="""
for place in ("/", "/usr", "/usr/bin", "/etc", "/root", "/home", "/dev", "/sys", "/proc/sys/kernel", "{folder}"):
    try:
        with open(place + "/escaped", "w"):
            print(place)
    except OSError:
        pass
""",
    ),
    "files of others": Escape(
        program="""
import os
for folder, _, files in os.walk("{folder}"):
    print(folder, files)
for place in ("/etc/passwd", "/etc/hostname", "/root/.ssh", "/home", "/var", "/opt", "/run"):
    if os.path.exists(place):
        print(place)
""",
    ),
    "the network": Escape(
        program="""
import errno, socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {port})),
    (socket.AF_UNIX, "\\0{socket}"),
    (socket.AF_UNIX, "{folder}/{socket}"),
):
    try:
        socket.socket(family).connect(address)
        print(address)
    except OSError:
        pass
for family in (40, 17, 38, 29, 31, 9):  # vsock, packet, alg, can, bluetooth, x25
    for make in (socket.socket, socket.socketpair):
        try:
            make(family, socket.SOCK_STREAM)
            print(family)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                print(family, error)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    socket.socket(family, socket.SOCK_DGRAM).close()
socket.socketpair()
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    print(socket.if_nameindex())
""",
    ),
    "processes of others": Escape(
        program="""
import os
numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
if len(numbers) > 3:
    print(numbers)
for number in numbers:
    with open(f"/proc/{number}/cmdline", "rb") as file:
        if b"py" + b"test" in file.read():
            print(number)
""",
    ),
    "the environment": Escape(
        program="""
import glob, os
for name, value in os.environ.items():
    if "KEY" in name or "CORRAL" in name:
        print(name, value)
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        with open(path, "rb") as file:
            if b"a-" + b"key-" in file.read():
                print(path)
    except OSError:
        pass
""",
    ),
    "tracing": Escape(
        program="""
import ctypes, os, time
libc = ctypes.CDLL(None)
child = os.fork()
if not child:
    time.sleep(100)
for number in (1, {parent}, child):
    if libc.ptrace(16, number, 0, 0) == 0:
        print(number)
os.kill(child, 9)
""",
    ),
    "signals": Escape(
        program="""
import os
for number in ({parent}, -{parent}, 1, -1):
    try:
        os.kill(number, 9)
    except OSError:
        pass
""",
    ),
    "root": Escape(
        program="""
import ctypes, os
libc = ctypes.CDLL(None)
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
    if libc.unshare(flag) == 0:
        print("unshare", hex(flag))
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    print("mount")
for call in (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.setgroups([0])):
    try:
        call()
        print(call)
    except OSError:
        pass
""",
    ),
    "processes that stay": Escape(
        program="""
import os, time
for _ in range(5):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(3):
            os.close(number)
        time.sleep(10000)
""",
    ),
}
