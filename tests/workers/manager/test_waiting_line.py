"""Who waits for a server: the oldest prompts first, and until somebody lets them go."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.manager.gserver_manager import Waiting, WaitingLine
from corral.workers.requests.manager_messages import Schedule


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=20),
    st.lists(st.sampled_from(["take", 2, 5, 8]), max_size=6),
)
def test_a_line_is_a_sorted_list(added: list[tuple[int, int]], events: list[str | int]) -> None:
    loop = asyncio.new_event_loop()
    line = WaitingLine()
    listed = list[Waiting]()
    for number, (order, until) in enumerate(added):
        waiting = Waiting(loop.create_future(), Schedule(uid=f"0:{number}", tokens=1, order=order), float(until))
        line.add(waiting)
        listed.append(waiting)
    loop.close()
    listed.sort(key=lambda waiting: waiting.request.order)
    for event in events:
        assert line.first() is (listed[0] if listed else None)
        if event == "take":
            if listed:
                assert line.take() is listed.pop(0)
        else:
            gone = [waiting for waiting in listed if waiting.until <= int(event)]
            listed = [waiting for waiting in listed if waiting.until > int(event)]
            assert line.let_go(lambda waiting, now=int(event): waiting.until <= now) == gone
        assert len(line) == len(listed)
