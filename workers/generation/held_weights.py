"""HeldWeights: which version one server holds, and the proof that it does, by fingerprints of some tensors.

    expect(directory), it generates on ──► update ──► check what it holds, it stands still ──► holds them
                                                        └──► StaleServerError: it said so, and does not

    files of a version ──fingerprints──► {tensor: first 8 bytes of its SHA-256}   as SGLang's /weights_checker on a CPU
    server, before and after the update ──► {tensor: whatever it computes}, for each of its ranks

    it said of the version before what the files say?
        yes: it must say so of the new one, too
        no (another dtype, a GPU's own hash, a part of a tensor, rounded): it is believed; a warning if nothing changed

The tensors are whole and under their own names in every engine: none that SGLang fuses (q, k, v; gate, up), and none
that is large. That every other tensor was loaded is not shown by this; see docs/rollout.md for what shows it.

A server that cannot be asked (a model with other names, a server that answers no /weights_checker) is believed, and
the log says so once. One that was found stale is believed no more before a check finds that it holds what it says.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corral.workers.engine.stored_tensors import StoredTensor, stored_tensors
from corral.workers.generation.server_client import Fingerprints, ServerError

logger = logging.getLogger(__name__)


_PROBED: Final = re.compile(r"model\.layers\.(?P<layer>\d+)\.self_attn\.o_proj\.weight", re.ASCII)
_FINAL_NORM: Final = "model.norm.weight"
_FUSED: Final = ("qkv_proj", "gate_up_proj", "experts")  # SGLang's own names, which are in no file


@dataclass(frozen=True, slots=True)
class Probe:
    """Fingerprints of some tensors of a directory of weights, and how to ask a server for the same."""

    fingerprints: Fingerprints
    dtypes: Mapping[str, str]
    """Of the same tensors, in the files."""
    skipped: tuple[str, ...]
    """Parts of the names of all other tensors, as `skip_tensor_list` of /weights_checker."""

    def comparable_with(self, other: "Probe") -> Fingerprints:
        """Those of the tensors that have one dtype in both: the same values in another are other bytes."""
        return {name: value for name, value in self.fingerprints.items() if self.dtypes[name] == other.dtypes.get(name)}

    @classmethod
    def of(cls, directory: Path) -> "Probe":
        """Read them; without any where the model's tensors have other names than these architectures'.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is no safetensors.
        """
        places: dict[str, StoredTensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            places |= stored_tensors(path)
        layers = sorted((int(match["layer"]), name) for name in places if (match := _PROBED.fullmatch(name)))
        probed = {name for _, name in (*layers[:1], *layers[-1:])} | ({_FINAL_NORM} & places.keys())
        return cls(
            {name: places[name].fingerprint() for name in sorted(probed)},
            {name: places[name].dtype for name in sorted(probed)},
            (*_FUSED, *sorted(places.keys() - probed)),
        )


def compare(
    *,
    files_before: Fingerprints,
    files: Fingerprints,
    held_before: Sequence[Fingerprints],
    held: Sequence[Fingerprints],
) -> tuple[list[str], bool]:
    """The tensors in which a server is stale: it holds other values than the files. And whether it is unmoved: none can
    be compared with the files, and none has changed, though the files have; rounding may do that, too.

    Args:
        files_before: of the version that it held until now.
        files: of the version that it says it holds.
        held_before: what each of its ranks said of itself before the update.
        held: the same after it.

    Example:
        compare(files_before={"a": "1"}, files={"a": "2"}, held_before=[{"a": "1"}], held=[{"a": "1"}])
        # (["a"], False)
    """
    compared: dict[str, bool] = {}
    moved = []
    for before, after in zip(held_before, held, strict=False):
        for name in files.keys() & files_before.keys() & before.keys() & after.keys():
            if before[name] == files_before[name]:
                compared[name] = compared.get(name, True) and after[name] == files[name]
            elif files[name] != files_before[name]:
                moved.append(after[name] != before[name])
    stale = sorted(name for name, is_new in compared.items() if not is_new)
    return stale, not compared and bool(moved) and not any(moved)


class StaleServerError(ServerError):
    """A server acknowledged an update and still holds weights from before; its answers would carry a wrong version."""


class HeldWeights:
    """Of one server, from its start on."""

    def __init__(
        self, fingerprints: Callable[..., Awaitable[list[Fingerprints]]], url: str, *, version: str, directory: Path
    ) -> None:
        """
        Args:
            fingerprints: of the server, see `GenerationBackend.fingerprints`.
            version: tag of the weights that it was started with.
            directory: that they were read from.
        """
        self._fingerprints = fingerprints
        self.url = url
        self.version = version
        """Tag of the weights that it holds."""
        self.directory = directory
        """That they were read from."""
        self._probe: Probe | None = None
        """Of what it holds."""
        self._held: Sequence[Fingerprints] = ()
        """What it said of that."""
        self._next: Probe | None = None
        """Of what it is being brought to; None where it is believed."""
        self.is_stale = False
        """Whether the last check has found that it does not hold what it said: its word counts for nothing then."""
        self._has_warned = False

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
                self._held = await self._fingerprints(skipped=expected.skipped)
                self._probe = await asyncio.to_thread(Probe.of, self.directory)
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
            held = await self._fingerprints(skipped=self._next.skipped)
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
        stale, is_unmoved = compare(
            files_before=before.comparable_with(self._next),
            files=self._next.fingerprints,
            held_before=self._held,
            held=held,
        )
        self.is_stale = bool(stale)
        if stale:
            raise StaleServerError(
                f"{self.url} says that it has taken over new weights, and holds others in {', '.join(stale)}; its "
                "requests are given up, and it is brought to them once more"
            )
        if is_unmoved:
            logger.warning(
                "%s shows no change after an update, in fingerprints of a way of its own: its weights are rounded so "
                "that this step does not show, or it has not loaded them",
                self.url,
            )
        self._probe, self._held = self._next, held

    def _believe(self, reason: Exception) -> None:
        if self.is_stale:
            raise StaleServerError(f"what {self.url} holds since it was found stale is unknown: {reason}") from reason
        self._probe = None
        if not self._has_warned:
            self._has_warned = True
            logger.warning("what %s holds after an update is not looked at, but believed: %s", self.url, reason)
