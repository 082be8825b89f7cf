"""Exit codes of commands and of workers; docs/operations.md says the same to people."""

from enum import IntEnum


class CommandExit(IntEnum):
    """Exit codes of rl-submit, rl-status, rl-stop, rl-logs, rl-eval and rl-doctor."""

    DONE = 0
    ERROR = 1
    """Something unexpected, or a trial that did not start or end in time."""
    BAD_CONFIGURATION = 2
    """Of the file or the command line, whatever the cluster."""
    NOT_FOUND = 3
    UNREACHABLE = 4
    """SLURM cannot be asked."""
    REFUSED = 5
    """This cluster can never run it."""
    FAILED = 6
    """With --wait: the trial did."""
    STOPPED = 7
    """With --wait: somebody stopped the trial."""
    SUFFERS = 8
    """With --check: the trial is in trouble, a watcher fired, or there is an alarm."""


class UserError(Exception):
    """An error that a user can mend: a command prints it, and exits with its code."""

    exit_code = CommandExit.ERROR


class WorkerExit(IntEnum):
    """How a worker leaves; a signal is its negative number."""

    DONE = 0
    """Or asked to leave."""
    ERROR = 1
    BAD_CONFIGURATION = 2
    """It refuses what it was given: another try gives the same answer."""
    HUNG = 74
    """A phase passed its deadline."""
    SUPERSEDED = 75
    """Another process has its place: nothing crashed."""
    PEERS_FAILED = 76
    """Another rank is gone, which is the cause."""
    NOT_FINITE = 77
    """Training gives no finite loss, from the last commit on, too: another try gives the same."""
    CANNOT_CONTINUE = 78
    """What the trial stands on is damaged, or it makes no progress: another try gives the same."""
    USER_CODE = 81
    """The user's own code has failed on everything since the trial began: another try gives the same."""
    NO_ROOM = 79
    """A disk is full, or a quota used up: another try succeeds once there is room."""
    WRONG_DEVICES = 80
    """It sees other GPUs than the plan gives it: the node's fault, or its container's, and not the program's."""
    OUT_OF_MEMORY = 82
    """The kernel has killed it, or what it had started, for the memory that its group asks for; its guard says so."""
