import json
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log_state import Commit
from corral.workers.checkpoint.durable_file import write_durable
from corral.workers.checkpoint.ledger import (
    CorruptLedgerError,
    Ledger,
    LedgerDelta,
    LedgerViolationError,
    read_delta,
    read_ledger,
    write_delta,
)


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
        _commit(trial, LedgerDelta(epoch=2, step=3, trained={3: ["0:e"]}, dropped={})),
    ]
    ledger = Ledger.of(*(read_delta(trial, commit) for commit in commits))
    assert ledger.trained == {"0:a": 1, "0:b": 1, "0:c": 2, "0:e": 3} and ledger.dropped == {"0:d": "stale"}
    assert ledger.trained_count == 4 and ledger.consumed("0:d") and not ledger.consumed("1:a")
    assert commits[0].ledger_file.startswith("ledger/1-2-")


def test_a_sample_in_two_commits_is_a_violation(trial: TrialDirectory) -> None:
    first = _commit(trial, LedgerDelta(epoch=1, step=1, trained={1: ["0:a"]}, dropped={}))
    for second in (
        LedgerDelta(epoch=2, step=2, trained={2: ["0:b", "0:a"]}, dropped={}),
        LedgerDelta(epoch=2, step=2, trained={}, dropped={"0:a": "stale"}),
    ):
        with pytest.raises(LedgerViolationError, match="'0:a'.*step 1 consumed"):
            Ledger.of(read_delta(trial, first), read_delta(trial, _commit(trial, second)))


def test_a_refused_record_changes_nothing() -> None:
    ledger = Ledger()
    ledger.train(1, ["0:a"])
    for again in (["0:b", "0:a"], ["0:c", "0:c"]):
        with pytest.raises(LedgerViolationError):
            ledger.train(2, again)
    with pytest.raises(LedgerViolationError):
        ledger.drop("0:a", "stale")
    with pytest.raises(ValueError, match="reason"):
        ledger.drop("0:z", "")
    assert ledger.trained == {"0:a": 1} and not ledger.dropped
    assert ledger.delta_for(epoch=1, step=1).trained == {1: ["0:a"]}


def test_a_commit_covers_what_was_pending_when_it_was_made(trial: TrialDirectory) -> None:
    ledger = Ledger()
    ledger.train(1, ["0:a"])
    ledger.drop("0:b", "filtered")
    delta = ledger.delta_for(epoch=1, step=1)
    ledger.train(2, ["0:c"])
    ledger.mark_committed(delta)
    assert ledger.delta_for(epoch=1, step=2) == LedgerDelta(epoch=1, step=2, trained={2: ["0:c"]}, dropped={})
    assert ledger.consumed("0:a") and read_delta(trial, _commit(trial, delta)).trained == {1: ["0:a"]}


@given(
    st.lists(
        st.tuples(st.sampled_from(["train", "drop", "commit"]), st.lists(st.integers(0, 30), unique=True, max_size=4)),
        max_size=25,
    )
)
def test_deltas_of_any_history_add_up_to_its_ledger(history: list[tuple[str, list[int]]]) -> None:
    ledger, rebuilt, seen = Ledger(), Ledger(), set[str]()
    for step, (action, numbers) in enumerate([*history, ("commit", [])], start=1):
        uids = [f"0:{number}" for number in numbers if f"0:{number}" not in seen]
        seen |= set(uids) if action != "commit" else set()
        if action == "train":
            ledger.train(step, uids)
        elif action == "drop":
            for uid in uids:
                ledger.drop(uid, "stale")
        else:
            delta = ledger.delta_for(epoch=1, step=step)
            rebuilt.add(delta)
            ledger.mark_committed(delta)
    assert (rebuilt.trained, rebuilt.dropped) == (ledger.trained, ledger.dropped)
    assert rebuilt.trained.keys() | rebuilt.dropped.keys() == seen
    # The whole ledger of the last commit says the same as the deltas of all.
    whole = Ledger.of(ledger.whole(epoch=1, step=len(history) + 1))
    assert (whole.trained, whole.dropped) == (rebuilt.trained, rebuilt.dropped)


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
    ledger = Ledger()
    ledger.train(1, ["0:a"])
    ledger.drop("0:b", "stale")
    write_durable(tmp_path / "ledger.json", [msgspec.json.encode(ledger.whole(epoch=1, step=1))])
    digest = blake3((tmp_path / "ledger.json").read_bytes()).hexdigest()
    assert Ledger.of(read_ledger(tmp_path / "ledger.json", digest=digest)).trained == {"0:a": 1}
    (tmp_path / "ledger.json").unlink()
    write_durable(tmp_path / "ledger.json", [msgspec.json.encode(ledger.whole(epoch=1, step=2))])
    with pytest.raises(CorruptLedgerError, match=f"expected BLAKE3 {digest}"):
        read_ledger(tmp_path / "ledger.json", digest=digest)


def test_a_delta_must_hold_what_its_commit_counts(trial: TrialDirectory) -> None:
    good = _commit(trial, LedgerDelta(epoch=1, step=1, trained={1: ["0:a"]}, dropped={}))
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(CorruptLedgerError, match=r"\(1, 1, 1, 0\)"):
        read_delta(trial, Commit(**{**fields, "trained": 2}))


def test_a_ledger_path_out_of_the_trial_is_not_followed(trial: TrialDirectory) -> None:
    good = _commit(trial, LedgerDelta(epoch=1, step=1, trained={}, dropped={}))
    (trial.path.parent / "evil.json").write_text(json.dumps({}))
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(CorruptLedgerError, match="inside the trial directory"):
        read_delta(trial, Commit(**{**fields, "ledger_file": "../evil.json"}))
