"""A finished turn is found again by whoever plays the episode, once, and only as an answer to the same question."""

from pathlib import Path

import pytest

from corral.experiments.config.rollout import SamplingConfig
from corral.scheduling.policy_version import VersionSpan
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.rollout.turn_journal import TurnJournal, question_of

SAMPLING = SamplingConfig()


def answer_of(*ids: int) -> PartialAnswer:
    spans = [VersionSpan("1.2", 0, len(ids))]
    return PartialAnswer(9, list(ids), [-float(token) for token in ids], spans, stopped=True)


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_a_turn_is_taken_once_and_for_the_same_question_alone(is_on_disk: bool, tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "turns" if is_on_disk else None)
    question = question_of([1, 2], SAMPLING, ["\n"])
    journal.open("0:a/b", 3).append(question, answer_of(5, 6))
    journal.open("0:a/b", 3).append(question, answer_of(7))
    again = journal.open("0:a/b", 3)
    for other in (question_of([1, 2], SAMPLING, []), question_of([1], SAMPLING, ["\n"])):
        assert not again.take(other, PartialAnswer(9))
    assert not journal.open("0:a/b", 2).take(question, PartialAnswer(9))
    taken = [PartialAnswer(9) for _ in range(3)]
    assert [again.take(question, each) for each in taken] == [True, True, False]
    assert taken == [answer_of(5, 6), answer_of(7), PartialAnswer(9)]
    journal.discard("0:a/b")
    assert not journal.open("0:a/b", 3).take(question, PartialAnswer(9))


@pytest.mark.parametrize("lost", [1, 10])
def test_a_torn_end_costs_no_more_than_itself(tmp_path: Path, lost: int) -> None:
    journal, question = TurnJournal(tmp_path), question_of([1], SAMPLING, [])
    for token in (5, 6):
        journal.open("0:a", 0).append(question, answer_of(token))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-lost])
    again = journal.open("0:a", 0)
    assert [again.take(question, PartialAnswer(9)) for _ in range(2)] == [True, False]
