"""What a name service can answer other than a value.

    NameServiceError
    +-- NameExistsError               a lease met a record of somebody else
    +-- NameNotFoundError             no such name (never added, deleted, or expired)
    +-- NameTimeoutError              wait() ran into its deadline; also a TimeoutError
    +-- NameServiceUnavailableError   the backend itself could not be reached for a bounded time

Malformed names, prefixes and durations are `ValueError`: they are what a caller wrote, not what the service answered.
"""


class NameServiceError(Exception):
    """The name service refused or failed; the subclasses say which case a caller can answer."""


class NameExistsError(NameServiceError):
    """The name is taken by a record that is not ours."""


class NameNotFoundError(NameServiceError):
    """The name does not exist, or its time to live has passed."""


class NameTimeoutError(NameServiceError, TimeoutError):
    """A name did not appear before the deadline of the wait."""


class NameServiceUnavailableError(NameServiceError):
    """The backend could not be reached; nothing is known about the name."""
