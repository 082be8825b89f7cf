"""What processes of a trial inherit from the login shell of who submits it, set right: soft limits and proxies.

    login shell --ulimit -S, http_proxy--> rl-submit --sbatch --export=ALL--> keeper --srun--> guard --> worker
                                           leave_login_shell                  again            again

SLURM hands soft limits on to jobs (PropagateResourceLimits). They are raised up to the hard ones of each machine;
nobody but root can raise those. A proxy is for other sites: what a trial listens on is excepted from it.
"""

import contextlib
import math
import os
import resource
from collections.abc import Mapping, Sequence

_STACK = 8 << 20  # bytes, Linux's default; every thread takes as much address space as the limit says
_OPEN_FILES = 1 << 20  # Linux's default fs.nr_open; some programs close all that they could have open, one by one
_MOST_BY_NAME = {
    **dict.fromkeys(("CPU", "AS", "DATA", "FSIZE", "NPROC", "MEMLOCK", "SIGPENDING", "MSGQUEUE"), math.inf),
    "STACK": _STACK,
    "NOFILE": _OPEN_FILES,
}
_LEAST_BY_NAME = {
    **dict.fromkeys(("CPU", "AS", "DATA", "FSIZE"), math.inf),
    "NPROC": 4096,
    "STACK": _STACK,
    "NOFILE": 4096,
}
"""What a worker may come to need."""
_WORDS_BY_NAME = {
    "CPU": "s of CPU time (ulimit -t)",
    "AS": "bytes of address space (ulimit -v)",
    "DATA": "bytes of data (ulimit -d)",
    "FSIZE": "bytes in a file (ulimit -f)",
    "NPROC": "processes of this user (ulimit -u)",
    "STACK": "bytes of stack (ulimit -s)",
    "NOFILE": "open files (ulimit -n)",
}


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def leave_login_shell(*own_addresses: str) -> None:
    """Gives this process, and all that it starts, what its hard limits allow, and direct ways to this trial.

    Args:
        own_addresses: where processes of the trial listen, beside loopback.
    """
    os.environ.update(proxy_exceptions(os.environ, own_addresses))
    for name, most in _MOST_BY_NAME.items():
        number = getattr(resource, f"RLIMIT_{name}")
        soft, hard = map(_amount, resource.getrlimit(number))
        wanted = min(hard, most)
        if wanted > soft:
            with contextlib.suppress(ValueError, OSError):  # a machine may have further rules: it stays as it was
                resource.setrlimit(number, (_value(wanted), _value(hard)))


def proxy_exceptions(environment: Mapping[str, str], own_addresses: Sequence[str] = ()) -> dict[str, str]:
    """`no_proxy` and `NO_PROXY` with this machine and the trial's own addresses beside what the user has in them."""
    exceptions = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        hosts = [host for host in environment.get(name, environment.get(other, "")).split(",") if host.strip()]
        if "*" not in map(str.strip, hosts):  # no proxy for anybody; beside other hosts some clients do not know it
            hosts = list(dict.fromkeys([*hosts, *_LOOPBACK, *own_addresses]))
        exceptions[name] = ",".join(hosts)
    return exceptions


def low_hard_limits() -> list[str]:
    """The hard limits of this process that a worker may reach, for people: `3600 s of CPU time (ulimit -t)`."""
    hard_by_name = {
        name: _amount(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]) for name in _WORDS_BY_NAME
    }
    return [f"{hard} {_WORDS_BY_NAME[name]}" for name, hard in hard_by_name.items() if hard < _LEAST_BY_NAME[name]]


def _amount(value: int) -> float:
    return math.inf if value == resource.RLIM_INFINITY else value


def _value(amount: float) -> int:
    return resource.RLIM_INFINITY if amount == math.inf else int(amount)
