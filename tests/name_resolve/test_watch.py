"""When a watch believes that names are gone."""

from hypothesis import given
from hypothesis import strategies as st

from corral.name_resolve.watch import GoneVerdict, Survey

PRESENT = Survey(num_present=1, incarnation="first")
ABSENT = Survey(num_present=0, incarnation="first")
EMPTIED = Survey(num_present=0, incarnation="second")
REGISTERED_AGAIN = Survey(num_present=1, incarnation="second")
UNREACHABLE = None


def verdicts(*surveys: tuple[float, Survey | None]) -> list[bool]:
    verdict = GoneVerdict(grace_s=10.0)
    return [verdict.observe(survey, now_s=now_s) for now_s, survey in surveys]


def test_absence_in_a_store_that_was_there_all_the_time_is_believed_at_once() -> None:
    assert verdicts((0, PRESENT), (1, ABSENT)) == [False, True]


def test_names_that_were_never_there_are_gone() -> None:
    assert verdicts((0, ABSENT)) == [True]


def test_an_emptied_store_proves_nothing_until_the_grace_is_over() -> None:
    assert verdicts((0, PRESENT), (1, EMPTIED), (10.9, EMPTIED), (11, EMPTIED)) == [False, False, False, True]


def test_an_outage_proves_nothing_until_the_grace_after_it_is_over() -> None:
    surveys = [(0, PRESENT), (1, UNREACHABLE), (60, UNREACHABLE), (61, ABSENT), (70.9, ABSENT), (71, ABSENT)]
    assert verdicts(*surveys) == [False, False, False, False, False, True]


def test_a_store_that_was_away_from_the_beginning_gets_the_grace_too() -> None:
    assert verdicts((0, UNREACHABLE), (1, ABSENT), (11, ABSENT)) == [False, False, True]


def test_names_that_registered_again_within_the_grace_live_and_can_die_later() -> None:
    surveys = [(0, PRESENT), (1, EMPTIED), (5, REGISTERED_AGAIN), (20, REGISTERED_AGAIN), (21, EMPTIED)]
    assert verdicts(*surveys) == [False, False, False, False, True]


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.sampled_from([PRESENT, ABSENT, EMPTIED, REGISTERED_AGAIN, None]))))
def test_a_verdict_needs_a_grace_of_undisturbed_surveys(steps: list[tuple[float, Survey | None]]) -> None:
    verdict, now_s = GoneVerdict(grace_s=10.0), 0.0
    disturbed_at_s, previous = float("-inf"), None
    was_away = False
    for seconds, survey in steps:
        now_s += seconds
        is_gone = verdict.observe(survey, now_s=now_s)
        if survey is None:
            was_away = True
            assert not is_gone
            continue
        if was_away or (previous is not None and previous.incarnation != survey.incarnation):
            disturbed_at_s = now_s
        was_away, previous = False, survey
        assert is_gone == (survey.num_present == 0 and now_s >= disturbed_at_s + 10.0)
