"""TurnJournal: the finished turns of episodes that are under way, so that who plays one again need not make them again.

    turn finished ──append──► {directory}/{uid}.{episode}     on the shared file system, where all rollout workers look
    played again, by whichever worker: the same tokens asked in the same way ──take──► the answer as it was made

An optimisation, and nothing but one: a turn that is not found is generated, so nothing is fsynced, and a torn record
ends what is read. Each kept answer is taken once. That it was made by weights which are not too old by now is for the
trainer to see, as with any answer; what it turns away is discarded here, so that the next try makes all anew.

Only agents that do the same on the same answers gain from it; whoever does something else asks with other tokens.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer

_LENGTH_BYTES: Final = 4


class _Turn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What is in a file, one after the other."""

    question: bytes
    ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    stopped: bool


_decode = msgspec.msgpack.Decoder(_Turn).decode


def question_of(prompt_ids: Sequence[int], sampling: SamplingConfig, stop: Sequence[str]) -> bytes:
    """Equal where the same was asked in the same way."""
    asked = msgspec.msgpack.encode([list(prompt_ids), sampling.model_dump(), list(stop)])
    return hashlib.blake2b(asked, digest_size=16).digest()


@dataclass(slots=True)
class EpisodeJournal:
    """Of one episode."""

    path: Path
    _kept: defaultdict[bytes, deque[_Turn]] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = defaultdict(deque)
        for turn in _read(self.path):
            self._kept[turn.question].append(turn)

    @property
    def num_turns(self) -> int:
        """That are kept and not taken."""
        return sum(map(len, self._kept.values()))

    def take(self, question: bytes, answer: PartialAnswer) -> bool:
        """Complete an answer with the one that was kept, if there is one; its finished turn is kept still."""
        if not self._kept[question]:
            return False
        turn = self._kept[question].popleft()
        answer.output_ids, answer.logprobs, answer.spans = turn.ids, turn.logprobs, turn.spans
        answer.stopped = turn.stopped
        return True

    def append(self, question: bytes, answer: PartialAnswer) -> None:
        """Keep a finished turn; OSError if it cannot be written."""
        turn = _Turn(question, answer.output_ids, answer.logprobs, answer.spans, answer.stopped)
        record = msgspec.msgpack.encode(turn)
        with self.path.open("ab", buffering=0) as file:
            file.write(len(record).to_bytes(_LENGTH_BYTES, "big") + record)


@dataclass(frozen=True, slots=True)
class TurnJournal:
    """Of one trial."""

    directory: Path

    def open(self, uid: str, episode: int) -> EpisodeJournal:
        """What is kept of an episode, whoever has played it so far."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return EpisodeJournal(self.directory / f"{self._name(uid)}.{episode}")

    def discard(self, uid: str, episode: int | None = None) -> None:
        """Nobody will play this episode again, or it is to be made anew; None is all of the prompt's."""
        for path in self.directory.glob(f"{self._name(uid)}.{'*' if episode is None else episode}"):
            path.unlink(missing_ok=True)

    def _name(self, uid: str) -> str:
        return hashlib.blake2b(uid.encode(), digest_size=16).hexdigest()


def _read(path: Path) -> list[_Turn]:
    """What was written whole, and before anything that was not."""
    turns: list[_Turn] = []
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return turns
    while len(content) >= _LENGTH_BYTES:
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        record, content = content[_LENGTH_BYTES : _LENGTH_BYTES + length], content[_LENGTH_BYTES + length :]
        try:
            turns.append(_decode(record))
        except msgspec.MsgspecError:
            break
    return turns
