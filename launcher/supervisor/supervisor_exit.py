"""What a supervisor tells its keeper by its exit code. Any other code, or a signal: it broke, and is started again."""

from enum import IntEnum


class SupervisorExit(IntEnum):
    """Ends after which no other supervisor follows; no interpreter or library ends with these by itself."""

    ENDED = 90
    """The attempt has ended, which is recorded."""
    FAILED = 91
    """The same, and the trial has failed."""
    ABANDONED = 92
    """The attempt is not this supervisor's any more: a later one has begun, or its job has gone."""

    @property
    def of_keeper(self) -> int:
        """The exit code of the batch step, or of a local trial's process."""
        return 0 if self is SupervisorExit.ENDED else 1


EXIT_BROKEN = 70
"""Something that the supervisor could not answer; it is in its log."""
