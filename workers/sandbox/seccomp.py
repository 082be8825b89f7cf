"""The filter of system calls in a sandbox: ways to memory that no limit counts, and into the kernel or other processes.

architecture ──another──► the process is killed
number       ──refused──► ENOSYS, as if this kernel did not know it: libraries then take another way
family       ──of a socket, and not one that a namespace covers──► EAFNOSUPPORT
             ──else─────► allowed: namespaces without capabilities and rlimits bound it
"""

import errno
import platform
import socket
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h: ld word, jeq, jge, ret
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # system calls of x86_64 by other numbers

_AUDIT_BY_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (number on x86_64, number on aarch64)
_REFUSED = {
    # memory that is neither in a process nor on the sandbox's disk
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    # what no such program needs, and kernels have had their holes in
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}

_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Others reach beyond a network namespace, as AF_VSOCK does, or kernels have had their holes in them."""


def compiled_filter(machine: str = platform.machine()) -> bytes:
    """The program for `bwrap --seccomp`, as struct sock_filter has it.

    Raises:
        ValueError: if the machine's numbers are not known here.
    """
    if machine not in _AUDIT_BY_MACHINE:
        raise ValueError(f"there is no filter of system calls for {machine}, only for {', '.join(_AUDIT_BY_MACHINE)}")
    column = list(_AUDIT_BY_MACHINE).index(machine)
    tests = [(_AT_LEAST, _X32), *((_EQUAL, each[column]) for each in _REFUSED.values())]
    sockets = [each[column] for each in _SOCKETS.values()]
    behind_sockets, behind_tests = len(sockets), len(tests) + len(sockets)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, _AUDIT_BY_MACHINE[machine], if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        # Each jumps over those after it and the word that allows; a socket's over the word that refuses, too.
        *(_instruction(test, value, if_true=behind_tests - index) for index, (test, value) in enumerate(tests)),
        *(_instruction(_EQUAL, value, if_true=behind_sockets - index + 1) for index, value in enumerate(sockets)),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        *(_instruction(_EQUAL, family, if_true=len(_FAMILIES) - index) for index, family in enumerate(_FAMILIES)),
        _instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _instruction(code: int, value: int, *, if_true: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, 0, value)
