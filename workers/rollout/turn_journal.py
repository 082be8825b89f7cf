"""TurnJournal: the finished turns of episodes that are under way, so that who plays one again need not make them again.

    turn finished ──append──► {directory}/{uid}.{episode}     on the shared file system, where all rollout workers look,
                                                              a line of JSON for each;
                              or in memory                    while this worker lives, for its lost processes
    played again, by whichever worker: the same tokens asked in the same way ──take──► the answer as it was made

An optimisation, and nothing but one: a turn that is not found is generated, so nothing is fsynced, and a torn line ends
what is read. Each kept answer is taken once. That it was made by weights which are not too old by now is for the
trainer to see, as with any answer; what it turns away is discarded here, so that the next try makes all anew.

Only agents that do the same on the same answers gain from it; whoever does something else asks with other tokens.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer


class _Turn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A line of a file."""

    question: bytes
    ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    stopped: bool


_decode = msgspec.json.Decoder(_Turn).decode


def question_of(prompt_ids: Sequence[int], sampling: SamplingConfig, stop: Sequence[str]) -> bytes:
    """Equal where the same was asked in the same way."""
    asked = msgspec.msgpack.encode([list(prompt_ids), sampling.model_dump(), list(stop)])
    return hashlib.blake2b(asked, digest_size=16).digest()


class EpisodeJournal:
    """Of one episode."""

    def __init__(self, kept: Iterable[_Turn], keep: Callable[[_Turn], None]) -> None:
        self._kept: defaultdict[bytes, deque[_Turn]] = defaultdict(deque)
        for turn in kept:
            self._kept[turn.question].append(turn)
        self._keep = keep

    @property
    def num_turns(self) -> int:
        """That are kept and not taken."""
        return sum(map(len, self._kept.values()))

    def take(self, question: bytes, answer: PartialAnswer) -> bool:
        """Complete an answer with the one that was kept, if there is one; its finished turn is kept still."""
        if not self._kept[question]:
            return False
        turn = self._kept[question].popleft()
        answer.output_ids, answer.logprobs, answer.spans = [*turn.ids], [*turn.logprobs], [*turn.spans]
        answer.stopped = turn.stopped
        return True

    def append(self, question: bytes, answer: PartialAnswer) -> None:
        """Keep a finished turn; OSError if it cannot be written."""
        self._keep(_Turn(question, answer.output_ids, answer.logprobs, answer.spans, answer.stopped))


class TurnJournal:
    """Of one trial, or of one worker of it."""

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: of the trial's; None keeps turns in this process's memory.
        """
        self._directory = directory
        self._kept: dict[tuple[str, int], list[_Turn]] = {}

    def open(self, uid: str, episode: int) -> EpisodeJournal:
        """What is kept of an episode, whoever has played it so far."""
        if self._directory is None:
            kept = self._kept.setdefault((uid, episode), [])
            return EpisodeJournal(tuple(kept), kept.append)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{_name_of(uid)}.{episode}"
        return EpisodeJournal(_read(path), partial(_write, path))

    def discard(self, uid: str, episode: int | None = None) -> None:
        """Nobody will play this episode again, or it is to be made anew; None is all of the prompt's."""
        for key in [key for key in self._kept if key[0] == uid and episode in (None, key[1])]:
            del self._kept[key]
        if self._directory is not None:
            for path in self._directory.glob(f"{_name_of(uid)}.{'*' if episode is None else episode}"):
                path.unlink(missing_ok=True)


def _name_of(uid: str) -> str:
    return hashlib.blake2b(uid.encode(), digest_size=16).hexdigest()


def _write(path: Path, turn: _Turn) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b"\n" + msgspec.json.encode(turn))


def _read(path: Path) -> list[_Turn]:
    """What was written whole, and before anything that was not."""
    turns: list[_Turn] = []
    with suppress(FileNotFoundError, msgspec.MsgspecError):
        for line in path.read_bytes().split(b"\n")[1:]:
            turns.append(_decode(line))
    return turns
