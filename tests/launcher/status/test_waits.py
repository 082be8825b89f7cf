"""Who waits for whom: chains end at the one that everything hangs on, whatever the workers say."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.status.evidence import WorkerRow
from corral.launcher.status.waits import describe_wait, find_waits, render_chain
from corral.launcher.trial.words import WorkerState

KINDS = ("master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker")


SERVERS = ("generation_server/0", "generation_server/1")
RANKS = ("model_worker/0", "model_worker/1")
ROLLOUTS = ("rollout_worker/0", "rollout_worker/1")
MASTER = ("master_worker/0",)


def row(
    worker: str,
    phase: str = "",
    waits_for: Sequence[str] = (),
    *,
    words: str = "",
    works_with: Sequence[str] = (),
    state: str = WorkerState.UP,
    since_s: float = 5.0,
) -> WorkerRow:
    return WorkerRow(
        worker=worker,
        state=WorkerState(state),
        pid=1,
        node="n1",
        phase=phase,
        phase_s=since_s,
        version="",
        restarts=0,
        last_seen_s=since_s if state == "SILENT" else 0.5,
        waiting_for=words,
        waits_for=tuple(waits_for),
        works_with=tuple(works_with),
    )


def shown(*rows: WorkerRow) -> list[str]:
    return [render_chain(chain) for chain in find_waits(rows)]


def test_a_train_step_hangs_on_the_rank_that_is_silent() -> None:
    assert shown(
        row("master_worker/0", "train step", RANKS, since_s=12.0),
        row("model_worker/0", "train_step", since_s=12.0),
        row("model_worker/1", "train_step", state="SILENT", since_s=11.0),
    ) == ["master_worker/0: train step 12s -> model_worker/1: silent 11s"]


def test_a_batch_hangs_on_a_server_that_is_silent_though_nobody_says_so() -> None:
    (line,) = shown(
        row("master_worker/0", "wait for a batch", ROLLOUTS, words="3 more of 8 trajectories", since_s=40.0),
        row("rollout_worker/0", "generate", works_with=SERVERS, since_s=38.0),
        row("rollout_worker/1", "idle", words="requests of nobody"),
        row("generation_server/0", "generate", state="SILENT", since_s=37.0),
        row("generation_server/1", "idle", words="requests of rollout workers"),
    )
    assert line == (
        "master_worker/0: wait for a batch 40s (3 more of 8 trajectories)"
        " -> rollout_worker/0: generate 38s -> generation_server/0: silent 37s"
    )


def test_a_closed_gate_hangs_on_the_trainer_and_workers_at_it_share_a_line() -> None:
    gate = "closed: accepted 8 + running 8 >= (eta 0 + version 1 + 1) x 8"
    (line,) = shown(
        row("master_worker/0", "train step", RANKS, since_s=9.0),
        row("model_worker/0", "train_step", since_s=8.0),
        row("rollout_worker/0", "wait for admission", MASTER, words=gate, since_s=30.0),
        row("rollout_worker/1", "wait for admission", MASTER, words=gate, since_s=20.0),
    )
    assert line.startswith("rollout_worker/0 and 1 more: wait for admission 30s (closed: accepted 8")
    assert line.endswith("-> master_worker/0: train step 9s -> model_worker/0: train_step 8s")


def test_one_that_should_work_and_is_idle_is_the_root() -> None:
    (line,) = shown(
        row("master_worker/0", "train step", RANKS),
        row("model_worker/0", "idle", words="requests of the master"),
    )
    assert line.endswith("-> model_worker/0: idle 5s (requests of the master)")


def test_a_circle_is_called_one() -> None:
    (line,) = shown(
        row("master_worker/0", "wait for a batch", ROLLOUTS, words="8 more of 8 trajectories"),
        row("rollout_worker/0", "wait for admission", MASTER, words="closed: accepted 8 + running 0 >= 8"),
    )
    assert line.endswith("(they wait for each other)")


def test_nobody_waits_where_all_work_or_idle() -> None:
    assert shown(row("master_worker/0", "train"), row("model_worker/0", "idle", words="requests of the master")) == []


@pytest.mark.parametrize("words", ["3 of 8 trajectories", "3 of 8 samples of the batch", "", "the manager"])
def test_who_is_waited_for_does_not_depend_on_the_words(words: str) -> None:
    master = row("master_worker/0", "wait for a batch", ROLLOUTS, words=words)
    (chain,) = find_waits([master, row("rollout_worker/0", state="SILENT"), row("gserver_manager/0", "route")])
    assert [step.worker for step in chain.steps] == ["master_worker/0", "rollout_worker/0"]
    assert find_waits([row("master_worker/0", "wait for a batch", words=words), row("rollout_worker/0")]) == []


def test_a_wait_is_told_in_words_and_workers() -> None:
    assert describe_wait(row("master_worker/0", "train step", RANKS)) == "model_worker x2"
    assert (
        describe_wait(row("master_worker/0", "", ROLLOUTS[:1], words="3 more of 8")) == "3 more of 8 (rollout_worker/0)"
    )
    assert describe_wait(row("model_worker/0", "idle", words="requests")) == "requests"
    assert describe_wait(row("model_worker/0", "train step")) == ""


WORKERS = st.builds(lambda kind, index: f"{kind}/{index}", st.sampled_from(KINDS), st.integers(0, 3))


@given(
    st.lists(
        st.tuples(
            WORKERS,
            st.sampled_from(["generate", "idle", "", "train step"]),
            st.lists(WORKERS | st.text(max_size=20), max_size=4),
            st.lists(WORKERS, max_size=4),
            st.sampled_from(["UP", "SILENT", "STARTING", "AWAY", "MISSING"]),
        ),
        max_size=12,
        unique_by=lambda one: one[0],
    )
)
def test_chains_end_whatever_the_workers_say(workers: list[tuple[str, str, list[str], list[str], str]]) -> None:
    rows = [
        row(worker, phase, waits_for, works_with=works_with, state=state)
        for worker, phase, waits_for, works_with, state in workers
    ]
    for chain in find_waits(rows):
        names = [step.worker for step in chain.steps]
        assert len(set(names)) == len(names)
        assert render_chain(chain)


def test_nobody_waits_for_a_server_whose_node_was_taken_while_another_serves() -> None:
    master = row("master_worker/0", "wait for a batch", ROLLOUTS, words="3 more of 8 trajectories")
    rollout = row("rollout_worker/0", "generate", works_with=SERVERS, since_s=90.0)
    away = row("generation_server/1", state="AWAY")
    (line,) = shown(master, rollout, row("generation_server/0", "generate"), away)
    assert line.endswith("-> rollout_worker/0: generate 1m30s")
    (line,) = shown(master, rollout, away)
    assert "-> generation_server/1: away" in line
