"""Attempts: each start of a job gets a record of its own, once, and none when the trial is over."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock

import pytest

from corral.experiments.trial.attempts import (
    AttemptClaim,
    AttemptEnd,
    AttemptRecord,
    AttemptRefusedError,
    EndState,
    WhyNot,
    begin_attempt,
    chain_of,
    last_attempt,
    may_resume,
    read_attempt,
    read_attempts,
    read_claim,
    read_end,
    record_attempt,
    why_not_another,
    write_end,
)
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.trial.log_state import Done, LogState, Stop


@pytest.fixture
def directory(tmp_path: Path) -> TrialDirectory:
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    return directory


def begin(directory: TrialDirectory, job_id: str, restart_count: int = 0) -> AttemptRecord:
    return begin_attempt(directory, job_id=job_id, restart_count=restart_count, mode="slurm")


def submit(directory: TrialDirectory, attempt: int = 0, *, resume: bool = False) -> AttemptRecord:
    return record_attempt(directory, attempt=attempt, resume=resume, mode="slurm")


def commit(directory: TrialDirectory) -> None:
    writer = TrialLog(directory.log_path).claim("master")
    last = writer.state.last_commit
    writer.commit(
        step=last.step + 1 if last else 1,
        directory="checkpoints/x",
        manifest_digest="0",
        ledger_file="x",
        ledger_digest="0",
        trained=1,
        dropped=0,
    )


def test_the_job_of_a_submission_runs_its_attempt_however_often_it_asks(directory: TrialDirectory) -> None:
    submitted = submit(directory)
    assert begin(directory, "7") == begin(directory, "7") == submitted == last_attempt(directory)
    assert read_claim(directory, 0) == AttemptClaim(job_id="7", restart_count=0)


def test_a_requeued_job_and_a_successor_make_attempts_of_their_own(directory: TrialDirectory) -> None:
    submit(directory)
    first, second = begin(directory, "7"), begin(directory, "7", 1)
    commit(directory)
    third = begin(directory, "8")
    assert [record.attempt for record in (first, second, third)] == [0, 1, 2]
    assert [record.is_automatic for record in read_attempts(directory)] == [False, True, True]
    assert (second.resume, second.start_slot) == (True, 1)
    assert third.start_slot == TrialLog(directory.log_path).read().next_slot
    assert begin(directory, "7", 1) == second


def test_a_resubmission_belongs_to_the_job_that_starts_next(directory: TrialDirectory) -> None:
    submit(directory)
    begin(directory, "7")
    TrialLog(directory.log_path).request_stop("me@here")
    with pytest.raises(AttemptRefusedError, match="me@here stopped the trial"):
        begin(directory, "7", 1)
    resumed = submit(directory, 1, resume=True)
    assert begin(directory, "9") == resumed
    assert not resumed.is_automatic


def test_a_start_that_is_refused_leaves_nothing(directory: TrialDirectory) -> None:
    submit(directory)
    for number in range(2):
        begin(directory, "7", number)
        end(directory, number, EndState.TIMED_OUT)
    before = sorted(directory.control_path.iterdir())
    with pytest.raises(AttemptRefusedError, match="attempts 0 and 1 both ended") as refused:
        begin(directory, "8")
    assert refused.value.reason is WhyNot.NO_PROGRESS
    assert sorted(directory.control_path.iterdir()) == before


def test_a_start_that_was_killed_before_its_record_gets_the_same_number_again(directory: TrialDirectory) -> None:
    submit(directory)
    begin(directory, "7")
    begin(directory, "8")
    (directory.control_path / "attempt-1.json").unlink()  # killed between claim and record
    again = begin(directory, "8")
    assert (again.attempt, again.is_automatic) == (1, True)


def test_a_claim_without_a_record_is_in_nobodys_way(directory: TrialDirectory) -> None:
    submit(directory)
    begin(directory, "7")
    begin(directory, "8")
    (directory.control_path / "attempt-1.json").unlink()
    assert begin(directory, "9").attempt == 2
    (directory.control_path / "attempt-2.json").unlink()
    TrialLog(directory.log_path).request_stop("me@here")
    last = last_attempt(directory)
    assert last is not None and last.attempt == 0
    resumed = [submit(directory, number, resume=True) for number in (1, 2)][-1]  # as rl-submit --resume counts
    assert begin(directory, "10") == resumed


def test_of_starts_that_race_each_gets_a_number_of_its_own(directory: TrialDirectory) -> None:
    num_jobs, num_starts = 6, 5
    submit(directory)
    barrier, master = Barrier(num_jobs), Lock()

    def start(job: int) -> list[int]:
        numbers: list[int] = []
        barrier.wait(timeout=120)
        while len(numbers) < num_starts:
            try:
                numbers.append(begin(directory, str(job), len(numbers)).attempt)
            except AttemptRefusedError as error:
                assert "none of them came to a commit" in str(error)
                with master:
                    commit(directory)
        return numbers

    with ThreadPoolExecutor(num_jobs) as pool:
        numbers = [number for result in pool.map(start, range(num_jobs)) for number in result]
    assert sorted(numbers) == list(range(num_jobs * num_starts))
    assert [record.attempt for record in read_attempts(directory)] == sorted(numbers)
    for attempt in numbers:
        claim = read_claim(directory, attempt)
        assert claim is not None and begin(directory, claim.job_id, claim.restart_count).attempt == attempt
    assert not list(directory.control_path.glob(".*"))


RACER = """
import sys, time
from pathlib import Path
from corral.experiments.trial.attempts import begin_attempt
from corral.experiments.trial.directory import TrialDirectory

directory, job_id = TrialDirectory(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
while not (directory.path / "go").exists():
    time.sleep(0.0005)
print(begin_attempt(directory, job_id=job_id, restart_count=0, mode="slurm").attempt)
"""


def test_of_processes_that_race_for_one_submission_one_wins_and_the_others_follow(directory: TrialDirectory) -> None:
    submit(directory)
    commit(directory)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(directory.path), str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    time.sleep(0.01)
    (directory.path / "go").touch()
    numbers = [int(racer.communicate(timeout=120)[0]) for racer in racers]
    assert sorted(numbers) == [0, 1, 2]


def record(attempt: int, *, start_slot: int = 1, is_automatic: bool = True) -> AttemptRecord:
    return AttemptRecord(
        attempt=attempt,
        resume=is_automatic,
        mode="slurm",
        start_slot=start_slot,
        submitted_at=0.0,
        is_automatic=is_automatic,
    )


def committed(slot: int) -> LogState:
    return LogState(commit_slot=slot)


def stopped(then: str = "", slot: int = 0) -> LogState:
    stop = Stop(nonce="0", epoch=None, by="me@here", reason="", then="requeue" if then else "")
    return LogState(commit_slot=slot, stop=stop)


BY_HAND = record(0, is_automatic=False)
DONE = LogState(done=Done(nonce="0", epoch=1))


@pytest.mark.parametrize(
    ("attempts", "state", "why"),
    [
        ([BY_HAND], LogState(), None),
        ([BY_HAND], DONE, WhyNot.COMPLETE),
        ([BY_HAND], stopped(), WhyNot.STOPPED),
        ([BY_HAND], stopped("requeue"), None),
        # One attempt without progress may be bad luck; the next one is not.
        ([BY_HAND, record(1)], LogState(), WhyNot.NO_PROGRESS),
        ([BY_HAND, record(1, start_slot=5)], committed(3), None),
        ([BY_HAND, record(1, start_slot=5), record(2, start_slot=5)], committed(3), WhyNot.NO_PROGRESS),
        ([BY_HAND, record(1, start_slot=5), record(2, start_slot=5)], committed(6), None),
        # A submission by hand starts anew.
        ([BY_HAND, record(1, start_slot=5), record(2, start_slot=5, is_automatic=False)], committed(3), None),
    ],
)
def test_why_no_further_attempt_begins_by_itself(
    attempts: list[AttemptRecord], state: LogState, why: WhyNot | None
) -> None:
    found = why_not_another(attempts, state)
    assert (found.reason if found else None) is why


def test_attempts_that_the_cluster_took_away_do_not_count_as_without_progress(directory: TrialDirectory) -> None:
    submit(directory)
    states = [EndState.PREEMPTED, EndState.NODE_FAILED, None, EndState.REQUEUED, EndState.PREEMPTED, EndState.TIMED_OUT]
    for number, state in enumerate(states):
        assert begin(directory, "7", number).attempt == number
        if state is not None:  # the node was lost with whoever would have put it down
            end(directory, number, state)
    assert begin(directory, "7", len(states)).attempt == len(states)
    end(directory, len(states), EndState.TIMED_OUT)
    with pytest.raises(AttemptRefusedError, match="attempts 5 and 6 both ended before their first commit"):
        begin(directory, "7", 7)


def test_a_chain_that_the_cluster_never_lets_commit_ends_all_the_same(directory: TrialDirectory) -> None:
    submit(directory)
    for number in range(4):
        begin(directory, "7", number)
    commit(directory)
    for number in range(4, 14):
        begin(directory, "7", number)
    with pytest.raises(AttemptRefusedError, match="most of the last 10 attempts, and none of them came to a commit"):
        begin(directory, "7", 14)


def end(directory: TrialDirectory, attempt: int, state: EndState) -> None:
    write_end(directory, AttemptEnd(attempt=attempt, state=state, cause="", then="requeue"))


def test_a_chain_goes_on_as_long_as_it_makes_progress(directory: TrialDirectory) -> None:
    submit(directory)
    for number in range(12):
        assert begin(directory, "7", number).attempt == number
        commit(directory)
        end(directory, number, EndState.TIMED_OUT)
    # One attempt that ends before its first commit costs nothing, however long the chain; a second one ends it.
    for number in (12, 13):
        assert begin(directory, "7", number).attempt == number
        end(directory, number, EndState.TIMED_OUT)
    with pytest.raises(AttemptRefusedError, match="attempts 12 and 13 both ended before their first commit"):
        begin(directory, "7", 14)


@pytest.mark.parametrize(
    ("kinds", "length"), [("", 0), ("h", 1), ("haa", 3), ("hah", 1), ("haaha", 2), ("aa", 2), ("hhh", 1)]
)
def test_a_chain_begins_with_the_last_attempt_that_a_human_asked_for(kinds: str, length: int) -> None:
    records = [record(place, is_automatic=kind == "a") for place, kind in enumerate(kinds)]
    assert chain_of(records) == records[len(records) - length :]


def test_only_a_stop_since_its_submission_keeps_an_attempt_from_resuming(directory: TrialDirectory) -> None:
    log = TrialLog(directory.log_path)
    submit(directory)
    log.request_stop("me@here")
    submit(directory, 1, resume=True)
    assert not may_resume(directory, 0, log) and may_resume(directory, 1, log)
    log.claim("master", resume=True)
    log.request_stop("me@here")
    assert not may_resume(directory, 1, log)


def cut(path: Path) -> None:
    """As a full disk or a crash leaves it."""
    path.write_bytes(path.read_bytes()[:20])


def test_a_cut_record_is_named_with_the_way_out(directory: TrialDirectory) -> None:
    submit(directory)
    cut(directory.control_path / "attempt-0.json")
    with pytest.raises(ValueError, match=r"attempt-0\.json is damaged .* then rl-submit --resume starts the next one"):
        read_attempt(directory, 0)
    last = last_attempt(directory)
    assert last is not None and (last.attempt, read_attempts(directory)) == (0, [])
    assert "attempt-0.json is damaged" in last.damage


def test_what_follows_a_cut_record_is_the_next_attempt(directory: TrialDirectory) -> None:
    submit(directory)
    begin(directory, "7")
    cut(directory.control_path / "attempt-0.json")
    requeued = begin(directory, "7", 1)
    assert (requeued.attempt, requeued.resume) == (1, True)
    resumed = submit(directory, 2, resume=True)
    assert begin(directory, "8") == resumed == last_attempt(directory)


def test_a_record_that_was_cut_before_its_job_started_is_written_again(directory: TrialDirectory) -> None:
    submit(directory)
    cut(directory.control_path / "attempt-0.json")
    assert begin(directory, "7") == begin(directory, "7") == last_attempt(directory)
    assert [record.attempt for record in read_attempts(directory)] == [0]


def test_a_claim_that_cannot_be_read_is_somebody_elses(directory: TrialDirectory) -> None:
    submit(directory)
    begin(directory, "7")
    cut(directory.control_path / "claim-0.json")
    assert read_claim(directory, 0) == AttemptClaim(job_id="", restart_count=0)
    assert begin(directory, "7").attempt == 1


def test_the_last_word_about_an_end_stays_and_what_is_no_end_is_none(directory: TrialDirectory) -> None:
    assert read_end(directory, 0) is None
    ends = [
        AttemptEnd(attempt=0, state=EndState.TIMED_OUT, cause="the time limit is near", then="successor"),
        AttemptEnd(attempt=0, state=EndState.STOPPED, cause="me@here", then=""),
    ]
    for end in ends:
        write_end(directory, end)
        assert read_end(directory, 0) == end
    assert [end.is_final for end in ends] == [False, True]
    cut(directory.control_path / "end-0.json")
    assert read_end(directory, 0) is None


def test_failed_nodes_are_noted_once_each(directory: TrialDirectory) -> None:
    assert directory.failed_nodes() == []
    for node in ("n3", "n2", "n3"):
        directory.note_failed_node(node)
    assert directory.failed_nodes() == ["n2", "n3"]
