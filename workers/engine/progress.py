"""What a generation server says of its work: the numbers of a heartbeat, the same for every backend."""

from typing import TypedDict


class Progress(TypedDict):
    """What a heartbeat reports."""

    running: int
    """Requests that are being decoded."""
    queued: int
    """Requests that wait for a place."""
    tokens_generated: int
    """Since the server started."""
    version: str
    """Tag of the weights that it holds."""
