import json
import random
import tracemalloc
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import Commit
from corral.workers.checkpoint.ledger import (
    DROPPED,
    TRAINED,
    CorruptLedgerError,
    Ledger,
    LedgerDelta,
    LedgerStates,
    LedgerViolationError,
    numbers_of,
    read_delta,
    read_ledger,
    write_delta,
    write_ledger,
)
from tests.workers.checkpoint.rows import ROWS, dropped, trained


@pytest.fixture
def trial(tmp_path: Path) -> TrialDirectory:
    trial = TrialDirectory(tmp_path / "trial")
    trial.create()
    return trial


def _commit(trial: TrialDirectory, delta: LedgerDelta) -> Commit:
    file, digest = write_delta(trial, delta)
    return Commit(
        epoch=delta.epoch,
        step=delta.step,
        parent=0,
        directory="checkpoints/x",
        manifest_digest="0" * 64,
        ledger_file=file,
        ledger_digest=digest,
        trained=delta.trained_count,
        dropped=len(delta.dropped),
        nonce="n",
    )


def test_the_ledger_is_the_union_of_the_commits_deltas(trial: TrialDirectory) -> None:
    commits = [
        _commit(trial, LedgerDelta(epoch=1, step=2, trained={1: ["0:a", "0:b"], 2: ["0:c"]}, dropped={"0:d": "stale"})),
        _commit(trial, LedgerDelta(epoch=2, step=3, trained={3: ["1:a"]}, dropped={})),
    ]
    ledger = Ledger(ROWS)
    for commit in commits:
        ledger.add(read_delta(trial, commit))
    assert trained(ledger) == {"0:a", "0:b", "0:c", "1:a"} and dropped(ledger) == {"0:d"}
    assert (ledger.trained_count, ledger.dropped_count, ledger.consumed_count) == (4, 1, 5)
    assert ledger.consumed("0:d") and not ledger.consumed("1:b") and not ledger.has_pending
    assert commits[0].ledger_file.startswith("ledger/1-2-")


def test_a_sample_in_two_commits_is_a_violation() -> None:
    for second in (
        LedgerDelta(epoch=2, step=2, trained={2: ["0:b", "0:a"]}, dropped={}),
        LedgerDelta(epoch=2, step=2, trained={}, dropped={"0:a": "stale"}),
    ):
        ledger = Ledger(ROWS)
        ledger.add(LedgerDelta(epoch=1, step=1, trained={1: ["0:a"]}, dropped={}))
        with pytest.raises(LedgerViolationError, match="the commit of epoch 2, step 2 consumes '0:a', .* trained on"):
            ledger.add(second)
        assert trained(ledger) == {"0:a"}


def test_a_refused_record_changes_nothing() -> None:
    ledger = Ledger(ROWS)
    ledger.train(1, ["0:a"])
    ledger.drop("0:d", "stale")
    for again, why in (
        (["0:b", "0:a"], "'0:a' was trained on before"),
        (["0:b", "0:d"], "'0:d' was dropped before"),
        (["0:c", "0:c"], "more than once"),
        (["0:b", "0:zebra"], "'0:zebra', of no row of the trial's data set"),
    ):
        with pytest.raises(LedgerViolationError, match=why):
            ledger.train(2, again)
    with pytest.raises(LedgerViolationError):
        ledger.drop("0:a", "stale")
    with pytest.raises(ValueError, match="reason"):
        ledger.drop("0:e", "")
    assert trained(ledger) == {"0:a"} and dropped(ledger) == {"0:d"} and ledger.consumed_count == 2
    assert ledger.delta_for(epoch=1, step=1).trained == {1: ["0:a"]}


def test_what_no_pass_has_is_not_consumed() -> None:
    ledger = Ledger(ROWS)
    ledger.train(1, ["0:a"])
    assert not any(map(ledger.consumed, ["1:a", "-3:a", "0:zebra", "-3:zebra"]))


def test_a_commit_covers_what_was_pending_when_it_was_made(trial: TrialDirectory) -> None:
    ledger = Ledger(ROWS)
    ledger.train(1, ["0:a"])
    ledger.drop("0:b", "filtered")
    delta = ledger.delta_for(epoch=1, step=1)
    ledger.train(2, ["0:c"])
    ledger.mark_committed(delta)
    assert ledger.delta_for(epoch=1, step=2) == LedgerDelta(epoch=1, step=2, trained={2: ["0:c"]}, dropped={})
    assert ledger.consumed("0:a") and read_delta(trial, _commit(trial, delta)).trained == {1: ["0:a"]}


SOME_ROWS = [*list(ROWS)[:4], *list(ROWS)[1022:1026], list(ROWS)[-1]]
"""Of each part of the ledger, and beside their borders."""


class Books(RuleBasedStateMachine):
    """A trainer that trains, drops, commits, dies and falls back, beside dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.step = Ledger(ROWS), 0
        self.model: dict[str, str] = {}
        self.commits: list[tuple[dict[str, str], LedgerStates, LedgerDelta]] = []
        """What the dict was, the states and the delta, of each commit of the lineage."""

    def uids(self, seed: int) -> list[str]:
        draw = random.Random(seed)
        return [f"{draw.randrange(3)}:{draw.choice(SOME_ROWS)}" for _ in range(draw.randrange(1, 5))]

    @rule(seed=st.integers(0, 10**6))
    def train(self, seed: int) -> None:
        uids, self.step = self.uids(seed), self.step + 1
        if len(set(uids)) == len(uids) and not self.model.keys() & uids:
            self.ledger.train(self.step, uids)
            self.model.update(dict.fromkeys(uids, f"step {self.step}"))
        else:
            with pytest.raises(LedgerViolationError):
                self.ledger.train(self.step, uids)

    @rule(seed=st.integers(0, 10**6))
    def drop(self, seed: int) -> None:
        uid = self.uids(seed)[0]
        if uid not in self.model:
            self.ledger.drop(uid, "stale")
            self.model[uid] = "stale"

    @rule()
    def commit(self) -> None:
        delta = self.ledger.delta_for(epoch=1, step=self.step)
        self.commits.append((dict(self.model), self.ledger.states(), delta))
        self.ledger.mark_committed(delta)

    @rule(seed=st.integers(0, 10**6))
    @precondition(lambda self: self.commits)
    def fall_back(self, seed: int) -> None:
        del self.commits[random.Random(seed).randrange(len(self.commits)) + 1 :]
        model, states, _ = self.commits[-1]
        before, self.ledger = self.ledger, Ledger(ROWS, states)
        assert set(before.beyond(self.ledger, TRAINED, DROPPED)) == self.model.keys() - model.keys()
        self.model = dict(model)

    @invariant()
    def it_holds_what_the_dict_does(self) -> None:
        in_steps = {uid for uid, became in self.model.items() if became.startswith("step")}
        assert (trained(self.ledger), dropped(self.ledger)) == (in_steps, self.model.keys() - in_steps)
        assert (self.ledger.trained_count, self.ledger.consumed_count) == (len(in_steps), len(self.model))
        assert all(map(self.ledger.consumed, self.model))

    @invariant()
    def the_deltas_of_the_lineage_say_the_same_as_its_last_file(self) -> None:
        rebuilt, became = Ledger(ROWS), dict[str, str]()
        for _, _, delta in self.commits:
            rebuilt.add(delta)
            became |= {uid: f"step {step}" for step, uids in delta.trained.items() for uid in uids} | delta.dropped
        if self.commits:
            model, states, _ = self.commits[-1]
            read = Ledger(ROWS, states)
            assert became == model
            assert (trained(rebuilt), dropped(rebuilt)) == (trained(read), dropped(read))


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_ledger_holds_what_a_dict_would = Books.TestCase


def test_samples_take_a_byte_each_in_memory_and_less_in_a_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(numbers_of(map(str, range(10_000))))
    tracemalloc.start()
    try:
        for number in range(10):
            ledger.add(
                LedgerDelta(epoch=1, step=1, trained={1: [f"{number}:{row}" for row in range(10_000)]}, dropped={})
            )
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ledger.trained_count == 10**5 and held < 1.5 * 10**5  # a dict: 75; other threads count, too
    assert write_ledger(tmp_path / "ledger", ledger.states()).size < 0.01 * 10**5


def test_the_passes_of_a_small_source_take_no_room_for_the_rows_of_a_large_one(tmp_path: Path) -> None:
    rows = [*(f"large/{row}" for row in range(200_000)), *(f"small/{row}" for row in range(10))]
    ledger, passes = Ledger(numbers_of(rows)), 3000
    tracemalloc.start()
    try:
        for number in range(passes):
            ledger.train(1, [f"{number}:small/{row}" for row in range(10)])
            ledger.mark_committed(ledger.delta_for(epoch=1, step=1))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ledger.trained_count == 10 * passes and held < passes * 1500
    assert write_ledger(tmp_path / "ledger", ledger.states()).size < passes * 50


def test_a_delta_file_changed_at_any_byte_is_refused(trial: TrialDirectory) -> None:
    commit = _commit(trial, LedgerDelta(epoch=1, step=1, trained={1: ["0:a"]}, dropped={"0:b": "stale"}))
    path = trial.path / commit.ledger_file
    whole = path.read_bytes()
    for index in range(len(whole)):
        for damaged in (whole[:index], whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CorruptLedgerError, match="1-1-"):
                read_delta(trial, commit)
    path.unlink()
    with pytest.raises(CorruptLedgerError, match="cannot be read"):
        read_delta(trial, commit)


def test_the_whole_ledger_of_a_checkpoint_is_that_which_its_manifest_names(tmp_path: Path) -> None:
    path, ledger = tmp_path / "ledger.msgpack", Ledger(ROWS)
    ledger.train(1, ["0:a"])
    ledger.drop("0:b", "stale")
    digest = write_ledger(path, ledger.states()).digest
    assert digest == blake3(path.read_bytes()).hexdigest()
    found = read_ledger(path, ROWS, digest=digest)
    assert (trained(found), dropped(found)) == ({"0:a"}, {"0:b"}) and not found.has_pending
    with pytest.raises(CorruptLedgerError, match="it is of 2508 rows, and the data set has 2"):
        read_ledger(path, numbers_of("ab"), digest=digest)
    ledger.train(2, ["0:c"])
    path.unlink()
    write_ledger(path, ledger.states())
    with pytest.raises(CorruptLedgerError, match=f"expected BLAKE3 {digest}"):
        read_ledger(path, ROWS, digest=digest)
    path.write_bytes(b"null")
    with pytest.raises(CorruptLedgerError, match="cannot be used"):
        read_ledger(path, ROWS, digest=blake3(b"null").hexdigest())


def test_a_ledger_path_out_of_the_trial_is_not_followed(trial: TrialDirectory) -> None:
    good = _commit(trial, LedgerDelta(epoch=1, step=1, trained={}, dropped={}))
    (trial.path.parent / "evil.json").write_text(json.dumps({}))
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(CorruptLedgerError, match="inside the trial directory"):
        read_delta(trial, Commit(**{**fields, "ledger_file": "../evil.json"}))
