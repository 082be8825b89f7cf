"""A finished turn is found again by whoever plays the episode, once, and only as an answer to the same question."""

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.turn_journal import EpisodeJournal, TurnJournal, question_of

SAMPLING = SamplingConfig()


def answer_of(*ids: int) -> PartialAnswer:
    spans = [VersionSpan("1.2", 0, len(ids))]
    return PartialAnswer(9, list(ids), [-float(token) for token in ids], spans, stopped=True)


def opened(
    journal: TurnJournal, uid: str, episode: int, *, keep: Sequence[tuple[bytes, PartialAnswer]] = ()
) -> EpisodeJournal:
    async def run() -> EpisodeJournal:
        found = await journal.open(uid, episode)
        for question, answer in keep:
            await found.append(question, answer)
        return found

    return asyncio.run(run())


def test_a_turn_is_taken_once_and_for_the_same_question_alone(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "turns")
    question = question_of([1, 2], SAMPLING, ["\n"])
    opened(journal, "0:a/b", 3, keep=[(question, answer_of(5, 6))])
    opened(journal, "0:a/b", 3, keep=[(question, answer_of(7))])
    again = opened(journal, "0:a/b", 3)
    for other in (question_of([1, 2], SAMPLING, []), question_of([1], SAMPLING, ["\n"])):
        assert not again.take(other, PartialAnswer(9))
    assert not opened(journal, "0:a/b", 2).take(question, PartialAnswer(9))
    taken = [PartialAnswer(9) for _ in range(3)]
    assert [again.take(question, each) for each in taken] == [True, True, False]
    assert taken == [answer_of(5, 6), answer_of(7), PartialAnswer(9)]
    asyncio.run(journal.discard("0:a/b"))
    assert not opened(journal, "0:a/b", 3).take(question, PartialAnswer(9))


@pytest.mark.parametrize("lost", [1, 10])
def test_a_torn_end_costs_no_more_than_itself(tmp_path: Path, lost: int) -> None:
    journal, question = TurnJournal(tmp_path), question_of([1], SAMPLING, [])
    for token in (5, 6):
        opened(journal, "0:a", 0, keep=[(question, answer_of(token))])
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-lost])
    again = opened(journal, "0:a", 0)
    assert [again.take(question, PartialAnswer(9)) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_system_that_fails_costs_the_journal_and_no_turn(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, "the disk")

    journal, question = TurnJournal(tmp_path / "turns"), question_of([1], SAMPLING, [])
    for name in ("open", "mkdir", "read_bytes", "glob"):
        monkeypatch.setattr(Path, name, fail)
    for _ in range(2):
        assert not opened(journal, "0:a", 0, keep=[(question, answer_of(5))]).take(question, PartialAnswer(9))
        asyncio.run(journal.discard("0:a"))
    monkeypatch.undo()
    assert journal.num_passed_over == 6 and len(caplog.records) == 1
    opened(journal, "0:a", 0, keep=[(question, answer_of(5))])
    assert opened(journal, "0:a", 0).take(question, PartialAnswer(9)), "there is room again"
