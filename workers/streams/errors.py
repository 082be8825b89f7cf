"""Errors of streams.

StreamError
+-- MalformedMessageError    bytes that are no message of this trial; receivers count and drop it
+-- WrongTrialKeyError       the server refused our key, or is not the server of this trial
+-- StreamTimeoutError       a wait ran into its deadline; also a TimeoutError
+-- PeerDeadError            the peer's process is gone, or was replaced by another one
+-- RemoteError              the peer's handler raised; carries the remote traceback
+-- StaleEpochError          a newer trainer epoch owns the peer: a master that sees this must stop acting
+-- StreamClosedError        our own end was closed while something waited on it
"""


class StreamError(Exception):
    """A stream failed; the subclasses say which case a caller can answer."""


class MalformedMessageError(StreamError):
    """Received bytes are not a message that this stream carries."""


class WrongTrialKeyError(StreamError):
    """The server at the address does not accept our CURVE key, or does not hold the trial's server key."""


class StreamTimeoutError(StreamError, TimeoutError):
    """Nobody answered before the deadline."""


class PeerDeadError(StreamError):
    """The process that should have answered is gone."""


class RemoteError(StreamError):
    """The peer answered with an exception of its own; the text says of which class, and with which traceback."""


class StaleEpochError(StreamError):
    """The peer follows a newer trainer epoch."""

    def __init__(self, *, peer: str, epoch: int, max_epoch: int) -> None:
        super().__init__(
            f"{peer} refused a request of trainer epoch {epoch}: it already follows epoch {max_epoch}, "
            "so another master has taken over this trial and this one must exit"
        )


class StreamClosedError(StreamError):
    """The stream was closed here."""
