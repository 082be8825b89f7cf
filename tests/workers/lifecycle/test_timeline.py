"""What a worker keeps of when it did what: bounded, private, on the trial's clock, and in nobody's way."""

import stat
import time
from pathlib import Path

import pytest

from corral.experiments.trial.spans import PHASES, STEPS, Clock, Span, spans_path
from corral.experiments.trial.worker_record import MASTER, WorkerRecord
from corral.launcher.timeline.reader import spans_of, steps_of
from corral.workers.lifecycle import timeline as timeline_module
from corral.workers.lifecycle.presence import Presence
from corral.workers.lifecycle.timeline import Timeline
from tests.name_services import MemoryNameService, MemoryStore

WORKER = "rollout_worker/0"


def clock(**changes: object) -> Clock:
    known = {"worker": WORKER, "attempt": 0, "incarnation": "a", "offset_s": 0.0, "error_s": 60.0}
    return Clock(**(known | changes))  # type: ignore[arg-type]


def span(start_s: float, end_s: float, *, lane: str = "rewards", step: int | None = None) -> Span:
    return Span(lane=lane, name="x", start_s=start_s, end_s=end_s, step=step)


def test_phases_follow_each_other_without_gaps_and_say_whom_they_waited_for(tmp_path: Path) -> None:
    names = MemoryNameService(MemoryStore())
    began = names.clock()
    with (
        Timeline(tmp_path / "timeline", clock(), max_mb=1) as timeline,
        Presence(names, "w", owner="a", ttl_s=10, identity=WorkerRecord(), timeline=timeline) as presence,
    ):
        presence.enter("wait for a batch", waiting_for="8 more", waits_for=[WORKER])
        presence.enter("wait for a batch", waiting_for="3 more", waits_for=[WORKER])
        with presence.during("commit", deadline_s=None):
            presence.note_among_ranks(0.25)
        presence.record(Span(lane="rewards", name="reward", start_s=1.0, end_s=2.0))
    spans = spans_of(tmp_path / "timeline")
    phases = [one for one in spans if one.lane == PHASES]
    assert [one.name for one in phases] == ["starting", "wait for a batch", "commit", "wait for a batch"]
    assert all(before.end_s == after.start_s for before, after in zip(phases, phases[1:], strict=False))
    assert (phases[1].waits_for, phases[1].about, phases[2].among_ranks_s) == ((WORKER,), "3 more", 0.25)
    assert began - 1.0 < phases[0].start_s < phases[-1].end_s < began + 600.0, "the service's clock"
    assert {one.name for one in spans} > {"reward"} and {one.worker for one in spans} == {WORKER}


def test_the_clock_that_is_least_wrong_holds_until_it_may_have_drifted_or_was_set(tmp_path: Path) -> None:
    def offset_after(*answers: tuple[float, float, float]) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with Timeline(folder, clock(), max_mb=1) as timeline:
            for asked_s, answered_s, clock_s in answers:
                timeline.note_clock(asked_s=asked_s, answered_s=answered_s, clock_s=clock_s)
            timeline.record(span(0.0, 1.0))
        return spans_of(folder)[0].start_s

    exact, vague = (10.0, 10.002, 110.001), (11.0, 11.4, 111.3)
    assert offset_after(exact, vague) == pytest.approx(100.0)
    assert offset_after(vague, exact) == pytest.approx(100.0)
    assert offset_after(exact, (3000.0, 3000.2, 3100.15)) == pytest.approx(100.05), "an hour is long for a clock"
    assert offset_after(exact, (11.0, 11.4, 511.2)) == pytest.approx(500.0), "another machine's clock"


def test_what_is_kept_is_private_and_has_a_bound_and_the_newest_stays(tmp_path: Path) -> None:
    folder = tmp_path / "timeline"
    for start in range(6):
        with Timeline(folder, clock(incarnation=str(start)), max_mb=1) as timeline:
            for number in range(5000):
                timeline.record(span(start * 5000.0 + number, start * 5000.0 + number + 1))
    spans = spans_of(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2 * 1024 * 1024
    assert spans[-1].start_s == 29999.0 and spans[0].start_s >= 5000.0 and len(spans) > 5000
    assert {one.incarnation for one in spans} <= {"1", "2", "3", "4", "5"}, "starts are kept apart"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
    assert modes == [0o700, *[0o600] * (len(modes) - 1)]


def test_half_a_line_of_a_process_that_died_harms_no_other(tmp_path: Path) -> None:
    for start in ("a", "b"):
        with Timeline(tmp_path, clock(incarnation=start), max_mb=1) as timeline:
            timeline.record(span(1.0, 2.0))
        with spans_path(tmp_path, WORKER).open("ab") as file:
            file.write(b'{"type":"span","lane":"rew')
    assert [one.incarnation for one in spans_of(tmp_path)] == ["a", "b"]


def test_a_disk_that_refuses_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    monkeypatch.setattr(timeline_module, "_FLUSH_S", 0.01)
    with Timeline(tmp_path / "file", clock(), max_mb=1) as timeline:
        timeline.record(span(0.0, 1.0))
        while not caplog.records:
            time.sleep(0.01)
        (tmp_path / "file").unlink()  # there is room again
        while not spans_path(tmp_path / "file", WORKER).exists():
            timeline.record(span(2.0, 3.0))
            time.sleep(0.01)
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"the timeline of {WORKER} lacks spans from now on")
    assert {one.start_s for one in spans_of(tmp_path / "file")} == {0.0, 2.0}, "what waited was not lost"


def test_spans_belong_to_the_step_in_which_they_began_as_it_was_trained_last(tmp_path: Path) -> None:
    with Timeline(tmp_path, clock(worker=MASTER), max_mb=1) as timeline:
        for number, start_s in ((1, 0.0), (2, 10.0), (2, 30.0), (3, 40.0)):  # step 2 was taken back, and came again
            timeline.record(span(start_s, start_s + 10.0, lane=STEPS, step=number))
        for start_s in (5.0, 15.0, 25.0, 35.0, 38.0, 55.0):
            timeline.record(span(start_s, start_s + 4.0))
    spans = [one for one in spans_of(tmp_path) if one.lane != STEPS]
    assert [one.step for one in spans] == [1, None, None, 2, 2, None]
    within = spans_of(tmp_path, [3])
    assert [(one.start_s, one.step) for one in within] == [(38.0, 2), (40.0, 3)], "one reaches into step 3"
    assert list(steps_of(tmp_path)) == [1, 2, 3] and not steps_of(tmp_path / "elsewhere")
