"""WeightProof: whether one server holds the weights that it was brought to, asked of the server itself.

    expect(directory), it generates on ──► update ──► check what it holds, it stands still ──► holds them
                                                        └──► StaleServerError: it said so, and does not

A server that cannot be asked (a model with other names, an engine that answers no /weights_checker) is believed, and
the log says so once. One that was found stale is believed no more before a check finds that it holds what it says.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from corral.workers.generation.held_weights import Fingerprints, Held, Probe, compare
from corral.workers.generation.http_calls import ServerError
from corral.workers.generation.server_client import GenerationServerClient

logger = logging.getLogger(__name__)


class StaleServerError(ServerError):
    """A server acknowledged an update and still holds weights from before; its answers would carry a wrong version."""


class WeightProof:
    """Of one server, from its start on."""

    def __init__(self, client: GenerationServerClient, url: str) -> None:
        self._client = client
        self._url = url
        self._probe: Probe | None = None
        """Of what it holds."""
        self._held: Sequence[Fingerprints] = ()
        """What it said of that."""
        self._next: Probe | None = None
        """Of what it is being brought to; None where it is believed."""
        self._is_stale = False
        """Whether the last check has found that it does not hold what it said."""
        self._was_told = False

    async def expect(self, weights: Path) -> None:
        """Look at the files that it is about to be brought to, and, the first time, at what it holds.

        Raises:
            StaleServerError: it was found stale, and these cannot be looked at.
        """
        self._next = None
        try:
            expected = await asyncio.to_thread(Probe.of, weights)
            if not expected.fingerprints:
                raise ValueError(f"{weights} has none of the tensors that would be looked at")
            if self._probe is None:
                directory = await self._client.model_path(self._url)
                self._held = await self._client.fingerprints(self._url, skipped=expected.skipped)
                self._probe = await asyncio.to_thread(Probe.of, directory)
        except (OSError, ValueError, KeyError, ServerError) as error:
            self._believe(error)
            return
        self._next = expected

    @property
    def looked_at(self) -> Sequence[str]:
        """The tensors whose fingerprints show it; none where it is believed."""
        return list(self._next.fingerprints) if self._next is not None else []

    async def ask(self) -> None:
        """Ask the server, and `check` what it says; StaleServerError also if it was found stale, and does not say."""
        if self._next is None:
            return
        try:
            held = await self._client.fingerprints(self._url, skipped=self._next.skipped)
        except ServerError as error:
            self._believe(error)
            return
        self.check(held)

    def check(self, held: Sequence[Fingerprints]) -> None:
        """StaleServerError unless it holds what is expected; any thread may call it while nothing else is done here.

        Args:
            held: what each rank says of itself after the update.
        """
        if self._next is None or self._probe is None:
            return
        before = self._probe
        state, stale = compare(
            files_before=before.comparable_with(self._next),
            files=self._next.fingerprints,
            held_before=self._held,
            held=held,
        )
        self._is_stale = state is Held.STALE
        if self._is_stale:
            raise StaleServerError(
                f"{self._url} says that it has taken over new weights, and holds others in {', '.join(stale)}; its "
                "requests are given up, and it is brought to them once more"
            )
        if state is Held.UNMOVED:
            logger.warning(
                "%s shows no change after an update, in fingerprints of a way of its own: its weights are rounded so "
                "that this step does not show, or it has not loaded them",
                self._url,
            )
        self._probe, self._held = self._next, held

    def _believe(self, reason: Exception) -> None:
        if self._is_stale:
            raise StaleServerError(f"what {self._url} holds since it was found stale is unknown: {reason}") from reason
        self._probe = None
        if not self._was_told:
            self._was_told = True
            logger.warning("what %s holds after an update is not looked at, but believed: %s", self._url, reason)
