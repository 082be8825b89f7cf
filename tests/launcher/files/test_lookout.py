"""Many looks at once: what hangs costs its own answer and no other."""

import threading
import time

import pytest

from corral.launcher.files.lookout import Lookout, Unanswered


def test_what_hangs_is_left_behind_and_the_others_are_answered() -> None:
    released = threading.Event()
    calls = {number: (released.wait if number % 3 == 0 else lambda number=number: number) for number in range(60)}
    lookout: Lookout[int] = Lookout(max_at_once=4)  # fewer than those that hang
    answers = lookout.look(calls, patience_s=0.1)
    assert {number for number, answer in answers.items() if isinstance(answer, Unanswered)} == set(range(0, 60, 3))
    assert all(answers[number] == number for number in range(60) if number % 3)
    # Asked again while it hangs, it is not waited for, and nothing new is left behind.
    before = threading.active_count()
    assert isinstance(lookout.look({3: lambda: 3}, patience_s=3600.0)[3], Unanswered)
    assert threading.active_count() == before
    released.set()
    deadline = time.monotonic() + 20.0
    while isinstance(answer := lookout.look({3: lambda: 3})[3], Unanswered):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert answer == 3


def test_errors_of_the_system_are_answers_and_others_are_raised() -> None:
    def refused() -> None:
        raise PermissionError("not yours")

    lookout: Lookout[str] = Lookout()
    assert lookout.look({"a": refused, "b": lambda: None}) == {"a": Unanswered("not yours"), "b": None}
    with pytest.raises(ZeroDivisionError):
        lookout.look({"a": lambda: 1 // 0})
    assert lookout.look({}) == {}


def test_looks_that_wait_for_their_file_systems_do_so_side_by_side() -> None:
    all_look = threading.Barrier(8)  # which nobody passes before all are there
    answers = Lookout[int]().look(dict.fromkeys(range(8), lambda: all_look.wait(timeout=20.0)), patience_s=30.0)
    assert sorted(answers.values()) == list(range(8))
