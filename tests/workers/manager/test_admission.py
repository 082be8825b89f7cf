"""Prompts are dealt in order, each until it is settled, within the gate's bound, whoever dies in between."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.data.prompts import ordered_uids, uids_of_passes
from corral.workers.manager.admission import RECORD_GRACE_S, SPOOL_GRACE_S, Admission, PromptQueue
from corral.workers.requests.manager_messages import Allocation

WORKER, OTHER = "rollout_worker/0", "rollout_worker/1"
MASTER = "master_worker/0"
PROMPTS = [f"0:{number}" for number in range(8)]


def fresh(
    batch_size: int = 2,
    eta: int = 0,
    max_concurrent: int = 99,
    prompts: Iterable[str] = PROMPTS,
    committed: Iterable[str] = (),
) -> Admission:
    gate = StalenessGate(batch_size=batch_size, max_staleness=eta, max_concurrent=max_concurrent)
    return Admission(gate, passes=lambda: prompts, is_committed=frozenset(committed).__contains__, trainer=MASTER)


def opened(*workers: str, batch_size: int = 2, eta: int = 0, max_concurrent: int = 99) -> Admission:
    admission = fresh(batch_size, eta, max_concurrent)
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=workers or (WORKER,))
    for worker in workers or (WORKER,):
        admission.report(worker, incarnation="a", running={}, finished={})
    return admission


HEARD = -1


def ask(admission: Admission, worker: str = WORKER, *, incarnation: str = "a", last: int | None = HEARD) -> Allocation:
    """What a worker is answered at once, or is dealt now, or why it is not; as a rule it heard its last answer."""
    if last == HEARD:
        holder = admission._holders.get(worker)
        last = holder.last.order if holder and holder.last else None
    answer = admission.ask(worker, incarnation=incarnation, last=last)
    if answer is None:
        answer = dict(admission.deal()).get(worker) or admission.refusal()
        admission.leave(worker)
    return answer


def take_all(admission: Admission, worker: str = WORKER) -> dict[str, int]:
    """Order by uid, of all that can be dealt to a worker now."""
    taken: dict[str, int] = {}
    while (answer := ask(admission, worker)).order is not None:
        taken[answer.uid] = answer.order
    return taken


def test_nothing_starts_before_weights_are_published() -> None:
    admission = fresh()
    admission.report(WORKER, incarnation="a", running={}, finished={})
    answer = ask(admission)
    assert (answer.order, answer.waiting_for, answer.waits_for) == (None, "weights", [MASTER])


def test_nothing_starts_before_every_living_rollout_worker_has_reported() -> None:
    admission = fresh()
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER, OTHER])
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission).waits_for == [OTHER]
    assert admission.look([WORKER], now=0.0) == []
    assert admission.look([WORKER], now=RECORD_GRACE_S) == [OTHER]
    assert ask(admission).order == 0


def test_prompts_are_dealt_in_order_and_those_issued_again_first() -> None:
    admission = opened(batch_size=3)
    assert take_all(admission) == {"0:0": 0, "0:1": 1, "0:2": 2}
    admission.finish(WORKER, "0:0", order=0, outcome="again")
    admission.finish(WORKER, "0:1", order=1, outcome="dropped")
    assert take_all(admission) == {"0:0": 3, "0:3": 4}


def test_answers_to_a_prompt_that_was_dealt_anew_since_do_not_take_the_place_of_those_that_are_made_now() -> None:
    admission = opened(WORKER, OTHER)
    assert ask(admission).uid == "0:0"
    admission.finish(WORKER, "0:0", order=0, outcome="finished")
    admission.look([OTHER], now=0.0)
    assert admission.look([OTHER], now=SPOOL_GRACE_S) == [WORKER]
    assert (ask(admission, OTHER).uid, ask(admission, OTHER).uid) == ("0:0", "0:1")
    admission.report(WORKER, incarnation="b", running={}, finished={"0:0": 0})
    admission.finish(OTHER, "0:0", order=1, outcome="finished")
    admission.finish(WORKER, "0:0", order=0, outcome="again")
    admission.finish(OTHER, "0:0", order=1, outcome="again")
    again = ask(admission, OTHER)
    assert (again.uid, again.order) == ("0:0", 3)


def test_a_prompt_that_is_issued_again_gets_other_answers_only_if_the_first_had_no_finite_loss() -> None:
    admission = opened(batch_size=2)
    assert take_all(admission) == {"0:0": 0, "0:1": 1}
    admission.finish(WORKER, "0:0", order=0, outcome="again")
    again = ask(admission)
    assert (again.uid, again.order, again.due_step, again.tries) == ("0:0", 2, 0, 0)
    admission.finish(WORKER, "0:0", order=2, outcome="otherwise")
    otherwise = ask(admission)
    assert (otherwise.uid, otherwise.order, otherwise.due_step, otherwise.tries) == ("0:0", 3, 0, 1)


def test_a_prompt_that_one_worker_finished_and_another_gave_up_has_no_place_once_it_is_committed_as_dropped() -> None:
    committed = set[str]()
    gate = StalenessGate(batch_size=1, max_staleness=0, max_concurrent=9)
    admission = Admission(gate, passes=lambda: PROMPTS, is_committed=committed.__contains__, trainer=MASTER)
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER])
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission).uid == "0:0"
    admission.report(OTHER, incarnation="b", running={}, finished={}, dropped=["0:0"])
    admission.finish(WORKER, "0:0", order=0, outcome="finished")
    committed.add("0:0")
    admission.note_commit([], ["0:0"])
    assert ask(admission, OTHER, incarnation="b", last=None).uid == "0:1"


def test_who_runs_least_is_served_first() -> None:
    admission = opened(WORKER, OTHER, batch_size=8)
    assert ask(admission).uid == "0:0"
    for worker, last in ((WORKER, 0), (OTHER, None)):
        assert admission.ask(worker, incarnation="a", last=last) is None
    assert [worker for worker, _ in admission.deal()] == [OTHER, WORKER]


def test_a_refusal_names_the_workers_that_can_open_the_gate() -> None:
    stale = opened(batch_size=1)
    ask(stale)
    answer = ask(stale)
    assert (answer.waiting_for, answer.waits_for) == ("staleness", [MASTER])
    busy = opened(WORKER, OTHER, batch_size=8, max_concurrent=1)
    ask(busy)
    answer = ask(busy, OTHER)
    assert (answer.waiting_for, answer.waits_for) == ("concurrency", [WORKER])
    done = opened(batch_size=99)
    assert len(take_all(done)) == len(PROMPTS)
    answer = ask(done)
    assert (answer.waiting_for, answer.waits_for) == ("prompts", [MASTER])


def test_an_answer_that_was_lost_is_given_again() -> None:
    admission = opened(batch_size=8)
    first = ask(admission)
    assert ask(admission, last=None) == first, "it did not hear of the first one"
    assert ask(admission).order == 1


def test_an_answer_that_was_lost_is_not_given_again_once_others_have_made_its_prompt() -> None:
    committed = set[str]()
    gate = StalenessGate(batch_size=8, max_staleness=0, max_concurrent=9)
    admission = Admission(gate, passes=lambda: PROMPTS, is_committed=committed.__contains__, trainer=MASTER)
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER])
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission).uid == "0:0"
    admission.report(OTHER, incarnation="b", running={}, finished={"0:0": 0})
    committed.add("0:0")
    admission.note_commit(["0:0"])
    assert ask(admission, last=None).uid == "0:1"
    assert (admission.running, [*admission._holders[WORKER].running]) == (1, ["0:1"])


def test_what_a_dead_rollout_worker_ran_goes_on_elsewhere_and_so_does_what_it_never_delivers() -> None:
    admission = opened(WORKER, OTHER, batch_size=3)
    assert list(take_all(admission)) == ["0:0", "0:1", "0:2"]
    admission.finish(WORKER, "0:0", order=0, outcome="finished")
    admission.finish(WORKER, "0:1", order=1, outcome="dropped")
    admission.look([OTHER], now=0.0)
    assert take_all(admission, OTHER) == {"0:3": 3}, "of the one that was given up"
    admission.look([OTHER], now=RECORD_GRACE_S)
    assert list(take_all(admission, OTHER)) == ["0:2"], "what it has finished it may deliver yet"
    admission.look([OTHER], now=SPOOL_GRACE_S)
    assert list(take_all(admission, OTHER)) == ["0:0"], "the gate counts it no longer"


def test_what_was_made_anew_after_its_drop_had_arrived_gives_its_place_to_the_next_prompt() -> None:
    """At eta 0 and one prompt a step, nothing would ever be trained again while it kept its place."""
    admission = opened(WORKER, OTHER, batch_size=1)
    assert take_all(admission) == {"0:0": 0}
    admission.finish(WORKER, "0:0", order=0, outcome="dropped")  # whose record the trainer has
    admission.look([OTHER], now=0.0)
    admission.look([OTHER], now=SPOOL_GRACE_S)
    assert take_all(admission, OTHER) == {"0:0": 1}
    admission.finish(OTHER, "0:0", order=1, outcome="finished")
    assert take_all(admission, OTHER) == {}
    admission.finish(OTHER, "0:0", order=1, outcome="dropped")  # the trainer's verdict
    assert take_all(admission, OTHER) == {"0:1": 2}


def test_a_name_service_that_forgets_everybody_for_a_while_takes_nothing_from_anybody() -> None:
    admission = opened(WORKER, OTHER)
    take_all(admission)
    assert admission.look([], now=0.0) == [] == admission.look([OTHER], now=RECORD_GRACE_S - 0.1)
    assert admission.look([WORKER, OTHER], now=RECORD_GRACE_S) == []
    assert admission.look([], now=RECORD_GRACE_S + 0.1) == [], "time is counted anew"
    assert admission.running == 2


def test_what_a_process_ran_that_nobody_missed_is_dealt_when_the_next_one_has_reported() -> None:
    admission = opened(batch_size=2)
    assert list(take_all(admission)) == ["0:0", "0:1"]
    assert ask(admission, incarnation="b").must_report
    admission.report(WORKER, incarnation="b", running={}, finished={"0:1": 1})
    assert ask(admission, incarnation="b").uid == "0:0"
    assert ask(admission, incarnation="b").order is None
    assert ask(admission).must_report  # what the one before had said late


def test_a_restarted_manager_counts_what_was_finished_and_runs() -> None:
    admission = fresh(batch_size=3, committed=["0:0", "0:1", "0:2"])
    admission.at_version(PolicyVersion(1, 1), consumed=3, workers=[WORKER])
    admission.report(WORKER, incarnation="a", running={"0:4": 4}, finished={"0:2": 2, "0:3": 3}, dropped=["0:5"])
    assert take_all(admission) == {"0:6": 5}
    admission.at_version(PolicyVersion(1, 2), consumed=6, workers=[WORKER])
    assert take_all(admission) == {"0:7": 6}


def test_when_commits_are_rejected_the_gate_forgets_what_it_counted_for_them() -> None:
    # The trainer dies after it has committed step 1 and before it publishes it; the commit then proves damaged, and
    # the next epoch publishes the version that the manager knows already.
    admission = opened(batch_size=2)
    for uid, order in take_all(admission).items():
        admission.finish(WORKER, uid, order=order, outcome="finished")
    admission.note_commit(["0:0", "0:1"])
    assert ask(admission).order is None
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER], starts_over=True)
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission).uid == "0:0"


def test_a_rejected_sample_is_dealt_again_and_late_news_of_the_first_one_change_nothing() -> None:
    admission = opened(WORKER, OTHER)
    ask(admission)
    admission.finish(WORKER, "0:0", order=0, outcome="finished")
    admission.finish(WORKER, "0:0", order=0, outcome="again")
    assert ask(admission, OTHER).order == 1
    admission.finish(WORKER, "0:0", order=0, outcome="again")
    assert ask(admission).uid == "0:1", "the other one still runs it"
    assert admission.running == 2


def test_going_back_to_an_earlier_commit_asks_everybody_again_those_who_wait_too() -> None:
    admission = opened(batch_size=1)
    ask(admission)
    admission.finish(WORKER, "0:0", order=0, outcome="finished")
    admission.at_version(PolicyVersion(1, 1), consumed=1, workers=[WORKER])
    assert ask(admission).uid == "0:1"
    assert admission.ask(WORKER, incarnation="a", last=1) is None
    admission.at_version(PolicyVersion(2, 0), consumed=0, workers=[WORKER])
    assert [answer.must_report for _, answer in admission.deal()] == [True]
    admission.report(WORKER, incarnation="a", running={"0:1": 1}, finished={"0:0": 0})
    assert ask(admission).order is None


def test_a_version_that_was_lost_and_made_again_leaves_no_place_taken() -> None:
    admission = opened(batch_size=1)
    for step in range(2):  # 1.1 was published, then lost before its commit
        admission.at_version(PolicyVersion(1, step), consumed=0, workers=[WORKER])
        dealt = ask(admission)
        assert dealt.order == step
        admission.finish(WORKER, dealt.uid, order=step, outcome="finished")
    # The manager was busy while the trainer stood at step 0 again: it sees 2.1 next.
    admission.at_version(PolicyVersion(2, 1), consumed=0, workers=[WORKER])
    assert ask(admission).order is None
    admission.finish(WORKER, "0:1", order=1, outcome="again")  # what 1.1 has made was rejected
    assert (ask(admission).uid, admission.running) == ("0:1", 1)
    assert ask(admission).order is None


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_passes_are_walked_through_each_in_an_order_that_the_seed_decides(shuffle: bool) -> None:
    rows = [str(number) for number in range(50)]
    uids = list(uids_of_passes(rows, seed=1, num_epochs=2, shuffle=shuffle))
    assert uids == list(uids_of_passes(list(reversed(rows)), seed=1, num_epochs=2, shuffle=shuffle))
    assert sorted(uids) == sorted(f"{epoch}:{row}" for epoch in range(2) for row in rows)
    first, second = (ordered_uids(rows, seed=1, dataset_epoch=epoch, shuffle=shuffle) for epoch in range(2))
    assert uids == first + second
    assert ([uid[1:] for uid in first] == [uid[1:] for uid in second]) is not shuffle


@given(
    st.lists(st.tuples(st.sampled_from(["deal", "settle", "put back", "start over"]), st.integers(0, 9)), max_size=40)
)
def test_the_queue_gives_every_prompt_that_is_not_settled_and_no_other(events: list[tuple[str, int]]) -> None:
    uids = [f"0:{number}" for number in range(5)]
    settled: set[str] = set()
    queue = PromptQueue(lambda: uids, is_settled=settled.__contains__)
    for event, choice in events:
        if event == "deal" and (uid := queue.peek()) is not None:
            assert uid not in settled
            settled.add(uid)
        elif event == "settle":
            settled.add(uids[choice % len(uids)])
        elif event == "put back" and settled:
            uid = sorted(settled)[choice % len(settled)]
            settled.discard(uid)
            queue.put_back(uid)
        elif event == "start over":
            settled.clear()
            queue.start_over()
    given_out = []
    while (uid := queue.peek()) is not None:
        given_out.append(uid)
        settled.add(uid)
    assert settled == set(uids) and len(given_out) == len(set(given_out))
