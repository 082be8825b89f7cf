"""Prompts are issued in order, again after a failure, and never once they are settled."""

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.data.prompts import ordered_uids, uids_of_share
from corral.workers.rollout.rollout_worker import PromptQueue


def test_settled_prompts_are_skipped_and_failed_ones_come_first() -> None:
    settled = {"0:b"}
    queue = PromptQueue(lambda: ["0:a", "0:b", "0:c", "0:d"], is_settled=settled.__contains__)
    assert queue.take() == "0:a"
    queue.put_back("0:a")
    assert queue.take() == "0:a"
    assert queue.take() == "0:c"
    settled.add("0:d")
    assert queue.take() is None
    queue.put_back("0:c")
    queue.put_back("0:c")
    assert [queue.take(), queue.take()] == ["0:c", None]


def test_what_is_settled_no_longer_is_issued_again() -> None:
    settled = {"0:a", "0:b"}
    queue = PromptQueue(lambda: ["0:a", "0:b", "0:c"], is_settled=settled.__contains__)
    assert [queue.take(), queue.take()] == ["0:c", None]
    settled.update({"0:c"})
    settled.remove("0:b")
    queue.start_over()
    assert [queue.take(), queue.take()] == ["0:b", None]


class Share:
    """A rollout worker's prompts through commits, fall-backs and stale verdicts; a plain account of where each is."""

    def __init__(self, uids: list[str]) -> None:
        self.uids = uids
        self.held: set[str] = set()
        """Running or spooled."""
        self.commits: list[set[str]] = []
        self.queue = PromptQueue(lambda: self.uids, is_settled=lambda uid: uid in self.held or uid in self.covered)

    @property
    def covered(self) -> set[str]:
        return set().union(*self.commits)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["take", "commit", "fall back", "reject"]), st.integers(0, 9)), max_size=40),
)
def test_every_prompt_that_nobody_holds_or_has_trained_on_is_issued(size: int, events: list[tuple[str, int]]) -> None:
    share = Share([f"0:{number}" for number in range(size)])
    for event, choice in events:
        held = sorted(share.held)
        if event == "take" and (uid := share.queue.take()) is not None:
            assert uid not in share.held and uid not in share.covered
            share.held.add(uid)
        elif event == "commit" and held:
            share.commits.append({held[choice % len(held)]})
            share.held -= share.commits[-1]
        elif event == "reject" and held:
            share.held.discard(held[choice % len(held)])
            share.queue.put_back(held[choice % len(held)])
        elif event == "fall back" and share.commits:
            del share.commits[choice % len(share.commits) :]
            share.queue.start_over()
    while (uid := share.queue.take()) is not None:
        assert uid not in share.held
        share.held.add(uid)
    assert share.held | share.covered == set(share.uids)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 3), st.integers(0, 99))
def test_the_shares_of_all_workers_are_every_prompt_of_every_pass_once(
    num_workers: int, num_rows: int, num_epochs: int, seed: int
) -> None:
    rows = [f"row-{number}" for number in range(num_rows)]
    shares = [
        list(uids_of_share(rows, seed=seed, num_epochs=num_epochs, shuffle=True, share=index, num_shares=num_workers))
        for index in range(num_workers)
    ]
    everything = [uid for share in shares for uid in share]
    assert sorted(everything) == sorted(f"{epoch}:{row}" for epoch in range(num_epochs) for row in rows)


def test_each_pass_has_an_order_of_its_own_that_the_seed_decides() -> None:
    rows = [str(number) for number in range(50)]
    first = ordered_uids(rows, seed=1, dataset_epoch=0, shuffle=True)
    assert first == ordered_uids(list(reversed(rows)), seed=1, dataset_epoch=0, shuffle=True)
    second = ordered_uids(rows, seed=1, dataset_epoch=1, shuffle=True)
    assert [uid.split(":")[1] for uid in first] != [uid.split(":")[1] for uid in second]
