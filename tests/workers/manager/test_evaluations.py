"""Held-out problems are dealt until each has been answered, and each counts once, whoever dies or says things twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corral.workers.manager.evaluations import HeldOutBook
from corral.workers.requests.manager_messages import Answered, EvaluateVersion, HeldOutProblem

ROWS = {"": ["a", "b", "c"], "hard": ["a"]}
FIRST, NEXT = EvaluateVersion(epoch=1, version="1.20"), EvaluateVersion(epoch=1, version="1.40")
ONE = {"problems": 1.0}


def begun(asked: EvaluateVersion = FIRST, *, most_out: int = 9) -> HeldOutBook:
    book = HeldOutBook(ROWS, most_out=most_out)
    assert book.begin(asked)
    return book


def dealt(book: HeldOutBook, worker: str = "w") -> HeldOutProblem:
    problem = book.deal(worker)
    assert problem is not None
    return problem


def test_nothing_is_dealt_before_it_is_asked_for_and_no_more_than_may_be_out() -> None:
    book = HeldOutBook(ROWS, most_out=2)
    assert book.deal("w") is None
    book.begin(FIRST)
    first, _ = dealt(book), dealt(book)
    assert book.deal("w") is None and book.version is None
    book.answered(Answered(problem=first, sums=ONE, versions=["1.20"]))
    assert dealt(book).dataset == ""


def test_a_problem_counts_once_and_what_is_complete_says_which_versions_made_it() -> None:
    book = begun()
    problems = [dealt(book) for _ in range(4)]
    for problem in problems:
        assert not book.reply().is_complete
        book.answered(Answered(problem=problem, sums=ONE, versions=["1.21" if problem.row_id == "b" else "1.20"]))
        book.answered(Answered(problem=problem, sums={"problems": 7.0}, versions=["1.30"]))
    assert book.is_done and book.reply().is_complete
    assert book.reply().sums == {"": {"problems": 3.0}, "hard": ONE}
    assert book.reply().versions == ["1.20", "1.21"]


def test_the_first_failure_of_each_data_set_is_in_the_reply() -> None:
    book = begun()
    for problem in [dealt(book) for _ in range(4)]:
        failure = "" if problem.row_id == "c" else f"{problem.dataset or 'own'}/{problem.row_id} fails"
        book.answered(Answered(problem=problem, sums=ONE, versions=[], failure=failure))
    assert book.reply().failures == {"": "own/a fails", "hard": "hard/a fails"}
    book.begin(NEXT)
    assert book.reply().failures == {}


def test_an_evaluation_takes_the_place_of_another_and_that_of_an_earlier_epoch_of_none() -> None:
    book = begun()
    late = dealt(book)
    assert book.begin(NEXT) and not book.begin(NEXT)
    book.answered(Answered(problem=late, sums=ONE, versions=["1.20"]))
    assert (book.reply().version, book.reply().num_done) == ("1.40", 0)
    # The next trainer epoch goes on from an earlier commit, and the master before it still asks.
    assert book.begin(EvaluateVersion(epoch=2, version="1.20")) and not book.begin(NEXT)
    assert (book.reply().epoch, book.reply().version) == (2, "1.20")


def test_a_manager_that_has_just_started_learns_who_has_what() -> None:
    before = begun()
    held = dealt(before)
    book = begun()
    book.has("w", [held])
    assert [dealt(book, "other").row_id for _ in range(3)] == ["b", "c", "a"]
    assert book.deal("other") is None


class Fleet(RuleBasedStateMachine):
    """Workers that lose answers, die, and say the same twice; a book that is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.book = begun(most_out=2)
        self.held: dict[str, set[HeldOutProblem]] = {"w": set(), "x": set()}
        self.counted: set[HeldOutProblem] = set()

    @rule(worker=st.sampled_from("wx"), is_heard=st.booleans())
    def asks(self, worker: str, is_heard: bool) -> None:
        self.book.has(worker, self.held[worker])
        problem = self.book.deal(worker)
        if problem is not None and is_heard:
            self.held[worker].add(problem)

    @rule(worker=st.sampled_from("wx"), is_told_twice=st.booleans())
    def ends(self, worker: str, is_told_twice: bool) -> None:
        for problem in sorted(self.held[worker], key=lambda one: one.uid)[:1]:
            for _ in range(1 + is_told_twice):
                self.book.answered(Answered(problem=problem, sums=ONE, versions=[]))
            self.held[worker].discard(problem)
            self.counted.add(problem)

    @rule(worker=st.sampled_from("wx"))
    def dies(self, worker: str) -> None:
        self.held[worker].clear()
        self.book.lose(worker)

    @rule()
    def is_forgotten(self) -> None:
        self.book = begun(most_out=2)
        self.counted.clear()

    @invariant()
    def each_counts_once(self) -> None:
        assert sum(sums.get("problems", 0.0) for sums in self.book.reply().sums.values()) == len(self.counted)
        assert self.book.reply().num_done == len(self.counted)

    def teardown(self) -> None:
        while not self.book.is_done:
            self.book.has("w", [])
            self.book.has("x", [])
            problem = dealt(self.book)
            assert problem not in self.counted
            self.book.answered(Answered(problem=problem, sums=ONE, versions=[]))
            self.counted.add(problem)
        assert len(self.counted) == 4


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
