"""LiveTimeout: a deadline for something to come, by which nobody is blamed for an event loop that stood still.

    entered, renewed ──a quarter of the time──► look ──► look ──► look ──► TimeoutError
                                                  └── something came in between: renewed

What comes while a loop stands still waits in a socket, and is read once the loop goes round. So time is counted in
looks, each in a round of its own: however late one comes, it counts as one, and what waits is read before the next.
"""

import asyncio
from typing import Final, Self

_LOOKS: Final = 4


class LiveTimeout:
    """
    Example:
        async with LiveTimeout(3.0) as deadline:        # TimeoutError once nothing has come for so long
            async for event in stream:
                deadline.renew(3.0)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looks_left = _LOOKS
        self._timeout = asyncio.timeout(None)

    def renew(self, seconds: float) -> None:
        """Something has come; so long from now on."""
        if seconds != self._seconds:
            self._timer.cancel()
            self._seconds = seconds
            self._arm()
        self._looks_left = _LOOKS + 1  # the present quarter has begun already

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._arm()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(*exception)  # type: ignore[arg-type]  # of whatever was raised

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._looks_left -= 1
        if self._looks_left > 0:
            self._arm()
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())
