"""Admission counts what is held, whoever dies in between."""

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.staleness import StalenessGate
from corral.workers.manager.admission import Admission
from corral.workers.requests.manager_messages import Allocation

WORKER = "rollout_worker/0"
MASTER = "master_worker/0"


def fresh(batch_size: int = 2, eta: int = 0, max_concurrent: int = 99) -> Admission:
    gate = StalenessGate(batch_size=batch_size, max_staleness=eta, max_concurrent=max_concurrent)
    return Admission(gate, trainer=MASTER)


def opened(batch_size: int = 2, eta: int = 0) -> Admission:
    admission = fresh(batch_size, eta)
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER])
    admission.report(WORKER, incarnation="a", running={}, finished={})
    return admission


def ask(admission: Admission, worker: str, uid: str, *, incarnation: str = "a") -> Allocation:
    return admission.allocate(worker, uid, incarnation=incarnation)


def test_nothing_starts_before_weights_are_published() -> None:
    admission = fresh()
    assert ask(admission, WORKER, "0:a").order is None
    assert "published" in admission.explain() and admission.opened_by() == (MASTER,)


def test_nothing_starts_before_every_living_rollout_worker_has_reported() -> None:
    admission = fresh()
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER, "rollout_worker/1"])
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission, WORKER, "0:a").waits_for == ["rollout_worker/1"]
    admission.lost("rollout_worker/1")
    assert ask(admission, WORKER, "0:a").order == 0


def test_a_refusal_names_the_workers_that_can_open_the_gate() -> None:
    stale = opened(batch_size=1, eta=0)
    assert stale.opened_by() == ()
    ask(stale, WORKER, "0:a")
    assert ask(stale, WORKER, "0:b").waits_for == [MASTER]
    busy = fresh(batch_size=8, max_concurrent=1)
    busy.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER, "rollout_worker/1"])
    for worker in (WORKER, "rollout_worker/1"):
        busy.report(worker, incarnation="a", running={}, finished={})
    ask(busy, WORKER, "0:a")
    assert ask(busy, "rollout_worker/1", "0:b").waits_for == [WORKER]


def test_the_places_of_a_dead_rollout_worker_are_free_again() -> None:
    admission = opened()
    assert [ask(admission, WORKER, uid).order for uid in ("0:a", "0:b", "0:c")] == [0, 1, None]
    admission.lost(WORKER)
    admission.report(WORKER, incarnation="b", running={}, finished={})
    assert ask(admission, WORKER, "0:a", incarnation="b").order is not None


def test_what_a_process_ran_that_nobody_missed_is_free_when_the_next_one_asks() -> None:
    """It may ask for others first, such as one that is issued again, and the gate is full with what nobody runs."""
    admission = opened(batch_size=2, eta=0)
    assert [ask(admission, WORKER, uid).order for uid in ("0:b", "0:c", "0:a")] == [0, 1, None]
    assert ask(admission, WORKER, "0:a", incarnation="b").must_report
    admission.report(WORKER, incarnation="b", running={}, finished={"0:c": 1})
    assert ask(admission, WORKER, "0:a", incarnation="b").order is not None
    assert ask(admission, WORKER, "0:b", incarnation="b").order is None
    assert ask(admission, WORKER, "0:b").must_report  # what the one before had said late


def test_a_restarted_manager_counts_what_was_finished_and_runs() -> None:
    admission = fresh(batch_size=2, eta=0)
    admission.at_version(PolicyVersion(1, 3), consumed=6, workers=[WORKER])
    admission.report(WORKER, incarnation="a", running={"0:x": 7}, finished={"0:y": 6})
    assert ask(admission, WORKER, "0:z").order is None
    admission.at_version(PolicyVersion(1, 4), consumed=8, workers=[WORKER])
    assert ask(admission, WORKER, "0:z").order == 8


def test_when_commits_are_rejected_the_gate_forgets_what_it_counted_for_them() -> None:
    # The trainer dies after it has committed step 1 and before it publishes it; the commit then proves damaged, and
    # the next epoch publishes the version that the manager knows already.
    admission = opened(batch_size=2, eta=0)
    for uid in ("0:a", "0:b"):
        ask(admission, WORKER, uid)
        admission.finish(WORKER, uid, delivered=True)
    admission.consumed(["0:a", "0:b"])
    assert ask(admission, WORKER, "0:a").order is None
    admission.at_version(PolicyVersion(0, 0), consumed=0, workers=[WORKER], starts_over=True)
    admission.report(WORKER, incarnation="a", running={}, finished={})
    assert ask(admission, WORKER, "0:a").order is not None


def test_a_rejected_sample_may_start_again() -> None:
    admission = opened()
    ask(admission, WORKER, "0:a")
    admission.finish(WORKER, "0:a", delivered=True)
    admission.finish(WORKER, "0:a", delivered=False)
    assert ask(admission, WORKER, "0:a").order == 1
    assert admission.running == 1


def test_going_back_to_an_earlier_commit_asks_everybody_again() -> None:
    admission = opened(batch_size=1, eta=0)
    ask(admission, WORKER, "0:a")
    admission.finish(WORKER, "0:a", delivered=True)
    admission.at_version(PolicyVersion(1, 1), consumed=1, workers=[WORKER])
    ask(admission, WORKER, "0:b")
    admission.at_version(PolicyVersion(2, 0), consumed=0, workers=[WORKER])
    assert ask(admission, WORKER, "0:c").must_report
    admission.report(WORKER, incarnation="a", running={"0:b": 1}, finished={"0:a": 0})
    assert ask(admission, WORKER, "0:c").order is None


def test_a_version_that_was_lost_and_made_again_leaves_no_place_taken() -> None:
    admission = opened(batch_size=1, eta=0)
    for step, uid in enumerate(["0:a", "0:b"]):  # 1.1 was published, then lost before its commit
        admission.at_version(PolicyVersion(1, step), consumed=0, workers=[WORKER])
        assert ask(admission, WORKER, uid).order == step
        admission.finish(WORKER, uid, delivered=True)
    # The manager was busy while the trainer stood at step 0 again: it sees 2.1 next.
    admission.at_version(PolicyVersion(2, 1), consumed=0, workers=[WORKER])
    assert ask(admission, WORKER, "0:c").order is None
    assert ask(admission, WORKER, "0:b").order == 2  # what 1.1 has made was rejected: its prompt comes again
    assert ask(admission, WORKER, "0:c").order is None


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "finish", "drop", "die", "step"]), st.integers(0, 9)), max_size=60)
)
def test_no_more_than_the_bound_is_ever_admitted_and_no_place_leaks(events: list[tuple[str, int]]) -> None:
    batch_size, eta = 2, 1
    admission = opened(batch_size, eta)
    running: set[str] = set()
    finished: dict[str, int] = {}
    orders: dict[str, int] = {}
    consumed, step, incarnation, is_heard = 0, 0, "a", True
    for event, number in events:
        uid = f"0:{number}-{consumed}-{step}"
        if event == "allocate" and uid not in finished:
            allocation = ask(admission, WORKER, uid, incarnation=incarnation)
            if allocation.must_report:
                assert not is_heard
                admission.report(WORKER, incarnation=incarnation, running={}, finished=finished)
                is_heard = True
                allocation = ask(admission, WORKER, uid, incarnation=incarnation)
            order = allocation.order
            if order is not None:
                running.add(uid)
                orders[uid] = order
                assert consumed + len(running) + len(finished) <= (eta + step + 1) * batch_size
        elif event == "finish" and running:
            done = sorted(running)[number % len(running)]
            running.discard(done)
            finished[done] = orders[done]
            admission.finish(WORKER, done, delivered=True)
        elif event == "drop" and running:
            done = sorted(running)[number % len(running)]
            running.discard(done)
            admission.finish(WORKER, done, delivered=False)
        elif event == "die":
            incarnation += "a"
            running.clear()
            is_heard = False
        elif event == "step" and len(finished) >= batch_size:
            batch = sorted(finished, key=finished.__getitem__)[:batch_size]
            for uid in batch:
                del finished[uid]
            admission.consumed(batch)
            consumed += batch_size
            step += 1
            admission.at_version(PolicyVersion(1, step), consumed=consumed, workers=[WORKER])
        assert admission.running == len(running) or not is_heard
