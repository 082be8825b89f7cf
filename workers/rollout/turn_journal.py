"""TurnJournal: the finished turns of unfinished episodes, so that a second start of an episode need not repeat them.

    turn finished ──append──► {directory}/{uid}.{episode}     on the shared file system, where all rollout workers look,
                                                              a line of JSON for each;
                              or in memory                    while this worker lives, for its lost processes
    played again, by whichever worker: the same tokens asked in the same way ──take──► the answer as it was made

An optimisation, and nothing but one: a turn that is not found is generated. So nothing is fsynced, a torn line ends
what is read, and what cannot be written or read, on a disk that is full, is passed over and counted. Files are read
and written in threads: a file system that hangs holds up the episode, and no other one. Each kept answer is taken once.
That it was made by weights which are not too old by now is for the trainer to see, as with any answer; what it turns
away is discarded here, so that the next try makes all anew.

Only agents that act the same on the same answers gain from it; another agent asks with other tokens.
"""

import asyncio
import hashlib
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer

P = ParamSpec("P")
T = TypeVar("T")


class _Turn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A line of a file."""

    question: bytes
    ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    stopped: bool


logger = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(_Turn).decode


def question_of(prompt_ids: Sequence[int], sampling: SamplingConfig, stop: Sequence[str]) -> bytes:
    """Equal where the same was asked in the same way."""
    asked = msgspec.msgpack.encode([list(prompt_ids), sampling.model_dump(), list(stop)])
    return hashlib.blake2b(asked, digest_size=16).digest()


class EpisodeJournal:
    """Of one episode."""

    def __init__(self, kept: Iterable[_Turn], keep: Callable[[_Turn], Awaitable[None]]) -> None:
        self._kept: defaultdict[bytes, deque[_Turn]] = defaultdict(deque)
        for turn in kept:
            self._kept[turn.question].append(turn)
        self._keep = keep

    def take(self, question: bytes, answer: PartialAnswer) -> bool:
        """Complete an answer with the one that was kept, if there is one; its finished turn is kept still."""
        if not self._kept[question]:
            return False
        turn = self._kept[question].popleft()
        answer.output_ids, answer.logprobs, answer.spans = [*turn.ids], [*turn.logprobs], [*turn.spans]
        answer.stopped = turn.stopped
        return True

    async def append(self, question: bytes, answer: PartialAnswer) -> None:
        """Keep a finished turn."""
        await self._keep(_Turn(question, answer.output_ids, answer.logprobs, answer.spans, answer.stopped))


class TurnJournal:
    """Of one trial, in a directory of the trial's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_passed_over = 0
        """Files that could not be read, written or removed."""

    async def open(self, uid: str, episode: int) -> EpisodeJournal:
        """The kept turns of an episode, whichever worker has played it so far."""
        path = self._directory / f"{_name_of(uid)}.{episode}"

        async def write(turn: _Turn) -> None:
            await self._try(_write, path, turn)

        return EpisodeJournal(await self._try(_read, path) or (), write)

    async def discard(self, uid: str, episode: int | None = None) -> None:
        """Nobody will play this episode again, or it is to be made anew; None is all of the prompt's."""
        pattern = f"{_name_of(uid)}.{'*' if episode is None else episode}"
        await self._try(_remove, self._directory, pattern)

    async def _try(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What it returns; None if the file system fails at it."""
        try:
            return await asyncio.to_thread(function, *args, **kwargs)
        except OSError as error:
            self.num_passed_over += 1
            if self.num_passed_over == 1:
                logger.warning("%s; turns are made again that could not be kept, from now on without a word", error)
            return None


def _name_of(uid: str) -> str:
    return hashlib.blake2b(uid.encode(), digest_size=16).hexdigest()


def _write(path: Path, turn: _Turn) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(b"\n" + msgspec.json.encode(turn))


def _remove(directory: Path, pattern: str) -> None:
    for path in directory.glob(pattern):
        path.unlink(missing_ok=True)


def _read(path: Path) -> list[_Turn]:
    """What was written whole, and before anything that was not."""
    turns: list[_Turn] = []
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        for line in path.read_bytes().split(b"\n")[1:]:
            turns.append(_decode(line))
    return turns
