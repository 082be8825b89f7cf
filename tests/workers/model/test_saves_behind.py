"""What a rank writes beside its requests is told once it is there, or why it is not, and ends with its epoch."""

import threading
from collections.abc import Callable, Iterator

import pytest

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.model.model_worker import SavesBehind
from corral.workers.requests.messages import WrittenReply

DONE = WrittenReply(state={"state": FileEntry(digest="0" * 64, size=7)}, weights={})
NOTHING = WrittenReply(state={}, weights={})
_DEADLINE_S = 60.0


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def saves(told: threading.Event) -> Iterator[SavesBehind]:
    with SavesBehind() as saves:
        saves.announce_to(told.set)
        yield saves


def at_once(*, on_progress: Callable[[], None]) -> WrittenReply:
    return DONE


def full(*, on_progress: Callable[[], None]) -> WrittenReply:
    raise OSError(28, "No space left on device", "/w/state")


def wrong(*, on_progress: Callable[[], None]) -> WrittenReply:
    raise ValueError("tensor w is of complex64")


def test_a_full_disk_is_an_answer_and_the_next_save_is_made(saves: SavesBehind, told: threading.Event) -> None:
    saves.begin("actor", full)
    assert told.wait(_DEADLINE_S)
    why = "OSError: [Errno 28] No space left on device: '/w/state'"
    assert saves.written("actor") == WrittenReply(state={}, weights={}, failed_because=why, lacks_room=True)
    told.clear()
    saves.begin("actor", at_once)
    assert told.wait(_DEADLINE_S)
    assert saves.written("actor") == DONE


def test_what_no_disk_is_to_blame_for_is_raised(saves: SavesBehind, told: threading.Event) -> None:
    saves.begin("actor", wrong)
    assert told.wait(_DEADLINE_S)
    with pytest.raises(ValueError, match="complex64"):
        saves.written("actor")


def test_roles_are_written_one_after_the_other_and_told_apart(saves: SavesBehind, told: threading.Event) -> None:
    may_end = threading.Event()

    def slow(*, on_progress: Callable[[], None]) -> WrittenReply:
        assert may_end.wait(_DEADLINE_S)
        return NOTHING

    saves.begin("actor", slow)
    saves.begin("critic", at_once)
    assert saves.written("actor") is None and saves.written("critic") is None
    both = threading.Semaphore(0)
    saves.announce_to(both.release)
    may_end.set()
    assert both.acquire(timeout=_DEADLINE_S) and both.acquire(timeout=_DEADLINE_S)
    assert saves.written("actor") == NOTHING and saves.written("critic") == DONE


def test_the_next_epoch_ends_what_the_last_one_was_writing(saves: SavesBehind, told: threading.Event) -> None:
    has_begun, pieces = threading.Event(), 0

    def endless(*, on_progress: Callable[[], None]) -> WrittenReply:
        nonlocal pieces
        while True:
            pieces += 1
            has_begun.set()
            on_progress()

    saves.begin("actor", endless)
    assert has_begun.wait(_DEADLINE_S)
    saves.begin("critic", at_once)  # it waits behind the other, and is not begun any more
    saves.forget()
    before = pieces
    told.clear()
    saves.begin("actor", at_once)
    assert told.wait(_DEADLINE_S)
    assert saves.written("actor") == DONE and pieces == before


def test_what_is_written_first_is_told_when_it_is_asked_for(saves: SavesBehind) -> None:
    beats: list[int] = []

    def write(*, on_progress: Callable[[], None]) -> WrittenReply:
        on_progress()
        assert threading.current_thread() is threading.main_thread()  # it may consist of collectives
        return DONE

    saves.write_now("actor", write, on_progress=lambda: beats.append(1))
    assert saves.written("actor") == DONE and beats == [1]
    saves.write_now("actor", full, on_progress=lambda: None)
    assert saves.written("actor") == WrittenReply(
        state={}, weights={}, failed_because="OSError: [Errno 28] No space left on device: '/w/state'", lacks_room=True
    )
