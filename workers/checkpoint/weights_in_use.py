"""Which weights generation servers are reading, so that the trainer removes none of them under a slow server.

    manager --publish(directory) ... release--> leased record in name-resolve --weights_in_use--> master --> what may go

Where the record is missing, nobody knows what is being read, and nothing is removed until it is back.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from corral.name_resolve import Lease, NameNotFoundError, NameService, NameServiceError

NOTHING_IN_USE: Final = "[]"


class WeightsInUse:
    """The manager's side.

    Example:
        async with in_use.reading(published.directory):     # the record names it before anybody opens a file of it
            await client.bring_to(url, published)
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._readers: Counter[Path] = Counter()
        self._publishing = asyncio.Lock()

    @asynccontextmanager
    async def reading(self, weights: Path) -> AsyncIterator[None]:
        """While the block runs, `weights` is being read."""
        self._readers[weights] += 1
        try:
            await self._publish()
            yield
        finally:
            self._readers[weights] -= 1
            await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:  # an older text must not land after a newer one
            text = json.dumps(sorted(str(path) for path in +self._readers))
            await asyncio.to_thread(self._lease.update, text)


def read_weights_in_use(names: NameService, key: str) -> frozenset[Path] | None:
    """The directories that are being read, as the manager says; None if nobody knows at the moment."""
    try:
        return frozenset(Path(path) for path in json.loads(names.get(key)))
    except (NameNotFoundError, NameServiceError):
        return None
