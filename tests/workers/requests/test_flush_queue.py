"""Any two workers run the requests that they share in the same order, however the network mixes and repeats them."""

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.requests.flush_queue import FlushQueue
from corral.workers.streams.calls import RequestId

WORKERS = ("model_worker/0", "model_worker/1")


def ids(*sequences: int) -> list[RequestId]:
    return [RequestId(1, sequence) for sequence in sequences]


def test_nothing_runs_before_the_flush() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.add(RequestId(1, 1), "a")
    assert queue.pop_ready() == []
    queue.flush(level=1, request_ids=ids(1))
    assert queue.pop_ready() == ["a"]


def test_a_level_runs_in_the_order_of_request_ids() -> None:
    queue: FlushQueue[str] = FlushQueue()
    for sequence in (10, 9, 11):
        queue.add(RequestId(1, sequence), str(sequence))
    queue.flush(level=1, request_ids=ids(11, 10, 9))
    assert queue.pop_ready() == ["9", "10", "11"]


def test_a_level_waits_for_a_request_that_the_network_lost() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.add(RequestId(1, 2), "b")
    queue.flush(level=1, request_ids=ids(1, 2))
    assert queue.pop_ready() == []
    queue.add(RequestId(1, 1), "a")
    assert queue.pop_ready() == ["a", "b"]


def test_a_later_level_does_not_overtake_an_earlier_one() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.add(RequestId(1, 2), "b")
    queue.flush(level=1, request_ids=ids(1))
    queue.flush(level=2, request_ids=ids(2))
    assert queue.pop_ready() == []
    queue.add(RequestId(1, 1), "a")
    assert queue.pop_ready() == ["a", "b"]


def test_a_repeated_flush_is_ignored() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.add(RequestId(1, 1), "a")
    queue.flush(level=1, request_ids=ids(1))
    queue.flush(level=1, request_ids=ids(1))
    assert queue.pop_ready() == ["a"]
    queue.add(RequestId(1, 2), "b")
    queue.flush(level=2, request_ids=ids(2))
    assert queue.pop_ready() == ["b"]


def test_a_flush_does_not_wait_for_what_was_refused() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.settle(RequestId(1, 1))
    queue.add(RequestId(1, 2), "b")
    queue.flush(level=1, request_ids=ids(1, 2))
    assert queue.pop_ready() == ["b"]


def test_a_new_epoch_starts_empty_and_at_level_one() -> None:
    queue: FlushQueue[str] = FlushQueue()
    queue.add(RequestId(1, 1), "old")
    queue.flush(level=5, request_ids=ids(1))
    queue.reset()
    queue.add(RequestId(2, 1), "new")
    queue.flush(level=1, request_ids=[RequestId(2, 1)])
    assert queue.pop_ready() == ["new"]


@given(st.data())
def test_two_workers_run_what_they_share_in_the_same_order(data: st.DataObject) -> None:
    """Levels of requests to one or both workers; each worker's requests arrive in any order, flushes in order."""
    levels: list[list[tuple[RequestId, tuple[str, ...]]]] = []
    sequence = 0
    for _ in range(data.draw(st.integers(1, 4))):
        level = []
        for targets in data.draw(st.lists(st.sampled_from([WORKERS, WORKERS[:1], WORKERS[1:]]), max_size=4)):
            sequence += 1
            level.append((RequestId(1, sequence), targets))
        levels.append(level)

    executed: dict[str, list[RequestId]] = {}
    for worker in WORKERS:
        queue: FlushQueue[RequestId] = FlushQueue()
        executed[worker] = []
        sent = [request for level in levels for request, targets in level if worker in targets]
        arrivals = data.draw(st.permutations([*sent, *range(len(levels))]))
        next_level = 0
        for arrival in arrivals:
            if isinstance(arrival, RequestId):
                queue.add(arrival, arrival)
            else:  # any flush token stands for the next one in order
                own = [request for request, targets in levels[next_level] if worker in targets]
                next_level += 1
                queue.flush(level=next_level, request_ids=own)
            executed[worker] += queue.pop_ready()
        assert sorted(executed[worker]) == sorted(sent)

    shared = set(executed[WORKERS[0]]) & set(executed[WORKERS[1]])
    order = [[request for request in executed[worker] if request in shared] for worker in WORKERS]
    assert order[0] == order[1]
