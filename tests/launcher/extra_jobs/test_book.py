"""The jobs of groups and elastic workers: asked for once, watched, their nodes granted to workers, asked for again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.launcher.extra_jobs import (
    ExtraJobBook,
    GangGuard,
    JobSighting,
    NodesEvent,
)
from corral.launcher.layout.layout import Allocation, AllocationRole, RunningAllocation
from corral.launcher.slurm.client import SlurmError, SlurmUnreachableError
from corral.launcher.slurm.verdict import why_leaving
from tests.launcher.jobs import job_of


def allocation(name: str, role: AllocationRole, *, num_nodes: int, cpus: int) -> Allocation:
    return Allocation(
        name=name, role=role, num_nodes=num_nodes, cpus_per_node=cpus, mem_mb_per_node=1000, gpus_per_node=0
    )


ELASTIC = allocation("generation_server/1", "elastic", num_nodes=1, cpus=8)
TRAINER = allocation("model_worker", "group", num_nodes=2, cpus=16)
SERVERS = allocation("generation_server", "group", num_nodes=2, cpus=8)


@dataclass(frozen=True)
class AskForJob:
    name: str


@dataclass(frozen=True)
class CancelJob:
    job_id: str


@dataclass(frozen=True)
class EndSteps:
    job_id: str


@dataclass(frozen=True)
class News:
    event: str
    fields: dict[str, Any]


Action = AskForJob | CancelJob | EndSteps | News | NodesEvent


class Jobs:
    """A book, and its hands: each call returns what it has them do, in order."""

    def __init__(self, specs: Sequence[Allocation], *, timeout_s: float) -> None:
        required = [spec.name for spec in specs if spec.role == "group"]
        self.gang = GangGuard(required, timeout_s=timeout_s, chance=random.Random(0))
        self.book = ExtraJobBook(specs=specs, attempt=1, gang=self.gang, hands=self)
        self.answers: dict[str, str | SlurmError] = {}
        """Job ids, by allocation."""
        self.leaving: str | None = ""
        self._done: list[Action] = []

    def ask_for(self, name: str) -> str:
        self._done.append(AskForJob(name))
        answer = self.answers.get(name, "7")
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    def cancel(self, job_id: str) -> None:
        self._done.append(CancelJob(job_id))

    def end_steps(self, job_id: str) -> None:
        self._done.append(EndSteps(job_id))

    def why_leaving(self, job_id: str) -> str | None:
        return self.leaving

    def tell(self, event: NodesEvent) -> None:
        self._done.append(event)

    def news(self, event: str, **fields: object) -> None:
        self._done.append(News(event, fields))

    def tick(self, now: float) -> list[Action]:
        return self._after(self.book.tick(now))

    def seen(self, sightings: Sequence[JobSighting], now: float) -> list[Action]:
        return self._after(self.book.seen(sightings, now))

    def check(self, name: str) -> list[Action]:
        return self._after(self.book.check(name))

    def release(self, name: str) -> list[Action]:
        return self._after(self.book.release(name))

    def _after(self, nothing: None) -> list[Action]:
        done, self._done = self._done, []
        return done


def book_of(*specs: Allocation, timeout_s: float = 60.0) -> Jobs:
    return Jobs(specs, timeout_s=timeout_s)


def sighting(
    spec: Allocation, job_id: str, word: str, *, start: str = "t0", attempt: int = 1, reason: str = "None"
) -> JobSighting:
    nodes = ",".join(f"n{index}" for index in range(spec.num_nodes))
    job = job_of(job_id, word, reason=reason, start=start, nodes=nodes)
    return JobSighting(name=spec.name, attempt=attempt, job=job)


def running(spec: Allocation = ELASTIC, job_id: str = "7") -> Jobs:
    """An extra job that runs, with its nodes granted."""
    jobs = book_of(spec)
    jobs.answers[spec.name] = job_id
    jobs.seen([], 0.0)
    assert without_news(jobs.tick(0.0)) == [AskForJob(spec.name)]
    assert NodesEvent(spec.name, "granted") in jobs.seen([sighting(spec, job_id, "RUNNING")], 1.0)
    return jobs


def without_news(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, News)]


def test_nothing_is_asked_for_before_slurm_has_said_what_a_predecessor_asked_for() -> None:
    jobs = book_of(ELASTIC)
    assert jobs.tick(0.0) == []
    jobs.seen([], 1.0)
    assert without_news(jobs.tick(1.0)) == [AskForJob(ELASTIC.name)]
    assert jobs.tick(2.0) == []


def test_the_largest_is_asked_for_first() -> None:
    jobs = book_of(ELASTIC, SERVERS, TRAINER)
    jobs.seen([], 0.0)
    assert without_news(jobs.tick(0.0)) == [AskForJob(spec.name) for spec in (TRAINER, SERVERS, ELASTIC)]


def test_a_job_of_a_predecessor_is_adopted_and_cleared_before_its_nodes_are_granted() -> None:
    jobs = book_of(ELASTIC)
    actions = without_news(jobs.seen([sighting(ELASTIC, "7", "RUNNING")], 0.0))
    assert actions == [EndSteps("7"), NodesEvent(ELASTIC.name, "granted")] and jobs.tick(1.0) == []
    nodes = RunningAllocation(job_id="7", het_group=None, hosts=("n0",))
    assert isinstance(actions[-1], NodesEvent) and actions[-1].nodes == nodes


def test_of_two_jobs_for_one_extra_job_the_one_that_runs_is_kept() -> None:
    jobs = book_of(ELASTIC)
    actions = jobs.seen([sighting(ELASTIC, "7", "PENDING"), sighting(ELASTIC, "8", "RUNNING")], 0.0)
    assert CancelJob("7") in actions and jobs.book.jobs() == ["8"]


def test_jobs_of_an_earlier_attempt_are_cancelled_once() -> None:
    jobs = book_of(ELASTIC)
    old = sighting(ELASTIC, "3", "RUNNING", attempt=0)
    assert without_news(jobs.seen([old], 0.0)) == [CancelJob("3")]
    assert without_news(jobs.seen([old], 1.0)) == []
    assert without_news(jobs.tick(1.0)) == [AskForJob(ELASTIC.name)]


@pytest.mark.parametrize("word", ["CANCELLED by 0", "TIMEOUT", "FAILED", "NODE_FAIL", "PREEMPTED", "COMPLETED"])
def test_an_extra_job_that_ended_is_asked_for_again_after_growing_pauses(word: str) -> None:
    jobs, now = running(), 2.0
    for job_id, pause_s in (("7", 5.0), ("8", 10.0), ("9", 20.0)):
        actions = jobs.seen([sighting(ELASTIC, job_id, word)], now)
        (gone,) = [action for action in actions if isinstance(action, News) and action.event == "extra_job_gone"]
        assert gone.fields["pause_s"] == pause_s
        assert jobs.tick(now + pause_s - 0.1) == []
        now += pause_s
        jobs.answers[ELASTIC.name] = str(int(job_id) + 1)
        assert without_news(jobs.tick(now)) == [AskForJob(ELASTIC.name)]


def test_a_preempted_extra_job_loses_its_nodes_and_gets_them_back_with_the_same_job() -> None:
    jobs = running()
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "COMPLETING")], 2.0)) == [
        NodesEvent(ELASTIC.name, "lost", "its job is ending")
    ]
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "PENDING", reason="BeginTime")], 4.0)) == []
    assert "7" in jobs.book.why_away(ELASTIC.name) and "BeginTime" in jobs.book.why_away(ELASTIC.name)
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "RUNNING", start="t1")], 10.0)) == [
        NodesEvent(ELASTIC.name, "granted")
    ]
    assert jobs.tick(100.0) == []  # nothing was asked for twice


def test_a_requeue_between_two_looks_is_noticed_by_the_start_of_the_job() -> None:
    jobs = running()
    actions = jobs.seen([sighting(ELASTIC, "7", "RUNNING", start="t1")], 10.0)
    assert [action.news for action in actions if isinstance(action, NodesEvent)] == ["lost", "granted"]
    told = [action.event for action in actions if isinstance(action, News)]
    assert told == ["extra_job_gone", "extra_job_running"], "the journal, too, says that it was away"


def test_a_job_in_its_grace_period_is_left_although_it_still_runs() -> None:
    jobs = running()
    jobs.leaving = "its job is being preempted"
    assert jobs.check(ELASTIC.name) == [NodesEvent(ELASTIC.name, "lost", "its job is being preempted")]
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "RUNNING")], 2.0)) == []
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "PENDING")], 4.0)) == []
    assert without_news(jobs.seen([sighting(ELASTIC, "7", "RUNNING", start="t1")], 9.0)) == [
        NodesEvent(ELASTIC.name, "granted")
    ]


def test_nodes_that_stay_are_said_to_stay() -> None:
    jobs = running()
    assert jobs.check(ELASTIC.name) == [NodesEvent(ELASTIC.name, "stay")]
    jobs.leaving = None  # SLURM does not say
    assert jobs.check(ELASTIC.name) == []
    jobs.seen([], 1.0)
    jobs.leaving = "its job has ended"  # which is known
    assert jobs.check(ELASTIC.name) == []


def test_a_job_that_can_never_start_is_reported_once_and_left_alone() -> None:
    jobs = book_of(ELASTIC)
    jobs.seen([], 0.0)
    jobs.tick(0.0)
    blocked = sighting(ELASTIC, "7", "PENDING", reason="PartitionNodeLimit")
    (news,) = jobs.seen([blocked], 1.0)
    assert isinstance(news, News) and news.event == "extra_job_blocked"
    assert jobs.seen([blocked], 2.0) == [] and jobs.tick(1000.0) == []


def test_a_word_that_nobody_knows_changes_nothing() -> None:
    assert running().seen([sighting(ELASTIC, "7", "QUANTUM_FLUX")], 2.0) == []


def test_a_refused_submission_is_tried_again() -> None:
    jobs = book_of(ELASTIC)
    jobs.seen([], 0.0)
    jobs.answers[ELASTIC.name] = SlurmError("sbatch failed with exit 1")
    _, news = jobs.tick(0.0)
    assert isinstance(news, News) and news.fields["cause"] == "sbatch failed with exit 1"
    assert jobs.tick(4.9) == [] and without_news(jobs.tick(5.0)) == [AskForJob(ELASTIC.name)]


def test_a_submission_whose_answer_was_lost_is_found_in_the_queue() -> None:
    jobs = book_of(ELASTIC)
    jobs.seen([], 0.0)
    jobs.answers[ELASTIC.name] = SlurmUnreachableError("sbatch did not answer within 20 s")
    jobs.tick(0.0)
    jobs.seen([sighting(ELASTIC, "7", "PENDING")], 2.0)
    assert jobs.tick(5.0) == [] and jobs.book.jobs() == ["7"]


def test_a_job_that_lost_a_node_is_given_back_whole() -> None:
    jobs = running(SERVERS)
    left = JobSighting(name=SERVERS.name, attempt=1, job=job_of("7", "RUNNING", start="t0", nodes="n1"))
    actions = without_news(jobs.seen([left], 5.0))
    assert (
        actions[0] == CancelJob("7")
        and isinstance(actions[1], NodesEvent)
        and actions[1].news == "lost"
        and "1 of 2 nodes" in actions[1].cause
    )


def test_an_extra_job_that_was_given_up_is_cancelled_and_never_asked_for_again() -> None:
    jobs = running()
    actions = jobs.release(ELASTIC.name)
    assert actions[0] == CancelJob("7") and isinstance(actions[1], NodesEvent) and actions[1].news == "lost"
    assert jobs.seen([sighting(ELASTIC, "7", "COMPLETING")], 1.0) == [] and jobs.tick(1000.0) == []


def test_a_gang_gets_its_nodes_together() -> None:
    jobs = book_of(TRAINER, SERVERS)
    jobs.answers |= {TRAINER.name: "1", SERVERS.name: "2"}
    jobs.seen([], 0.0)
    jobs.tick(0.0)
    half = [sighting(TRAINER, "1", "RUNNING"), sighting(SERVERS, "2", "PENDING")]
    assert without_news(jobs.seen(half, 1.0)) == []
    whole = [sighting(TRAINER, "1", "RUNNING"), sighting(SERVERS, "2", "RUNNING")]
    assert without_news(jobs.seen(whole, 2.0)) == [
        NodesEvent(TRAINER.name, "granted"),
        NodesEvent(SERVERS.name, "granted"),
    ]


def test_half_a_gang_is_given_back_with_the_reason_and_asked_for_after_a_pause() -> None:
    jobs = book_of(TRAINER, SERVERS, ELASTIC, timeout_s=60.0)
    jobs.answers |= {TRAINER.name: "1", SERVERS.name: "2", ELASTIC.name: "3"}
    jobs.seen([], 0.0)
    jobs.tick(0.0)
    half = [
        sighting(TRAINER, "1", "RUNNING"),
        sighting(SERVERS, "2", "PENDING", reason="Resources"),
        sighting(ELASTIC, "3", "RUNNING"),
    ]
    assert without_news(jobs.seen(half, 1.0)) == [NodesEvent(ELASTIC.name, "granted")]
    news, *actions = jobs.tick(61.0)
    assert isinstance(news, News) and news.fields["missing"] == {SERVERS.name: "Resources"}
    assert actions == [CancelJob("1"), CancelJob("2")]
    ending = [sighting(TRAINER, "1", "COMPLETING"), sighting(ELASTIC, "3", "RUNNING")]
    assert without_news(jobs.seen(ending, 62.0)) == []  # the elastic one stays, those that end are not adopted
    assert jobs.tick(63.0) == []
    assert without_news(jobs.tick(71.0)) == [AskForJob(TRAINER.name), AskForJob(SERVERS.name)]


def test_a_job_of_the_gang_that_the_trial_itself_holds_back_is_given_up_after_the_gangs_time() -> None:
    jobs = book_of(TRAINER, SERVERS, timeout_s=60.0)
    jobs.answers |= {TRAINER.name: "1", SERVERS.name: "2"}
    jobs.seen([], 0.0)
    jobs.tick(0.0)
    waits = replace(sighting(SERVERS, "2", "PENDING", reason="QOSMaxJobsPerUserLimit"), never="allows 2 jobs")
    others = replace(waits, never="")
    for start, trainer in ((0.0, "PENDING"), (100.0, "RUNNING")):
        jobs.seen([sighting(TRAINER, "1", trainer), waits], start)
        assert without_news(jobs.tick(start + 59.0)) == []
        # What other jobs are the cause of may be cured by waiting.
        jobs.seen([sighting(TRAINER, "1", trainer), others], start + 59.5)
    jobs.seen([sighting(TRAINER, "1", "PENDING"), waits], 200.0)
    assert without_news(jobs.tick(259.9)) == []
    (end,) = jobs.tick(260.0)
    assert (
        isinstance(end, NodesEvent)
        and end.news == "never come"
        and end.name == SERVERS.name
        and "allows 2 jobs" in end.cause
    )


def test_elastic_workers_make_room_for_a_job_that_the_trial_needs_and_come_back() -> None:
    jobs = book_of(SERVERS, ELASTIC)
    jobs.answers |= {SERVERS.name: "1", ELASTIC.name: "2"}
    jobs.seen([], 0.0)
    jobs.tick(0.0)
    waits = sighting(SERVERS, "1", "PENDING", reason="QOSMaxJobsPerUserLimit")
    jobs.seen([waits, sighting(ELASTIC, "2", "RUNNING")], 1.0)
    actions = jobs.seen([replace(waits, is_crowded_out=True), sighting(ELASTIC, "2", "RUNNING")], 2.0)
    assert without_news(actions) == [
        CancelJob("2"),
        NodesEvent(ELASTIC.name, "lost", f"it made room for {SERVERS.name}"),
    ]
    both = [sighting(SERVERS, "1", "RUNNING"), sighting(ELASTIC, "2", "COMPLETING")]
    assert without_news(jobs.seen(both, 3.0)) == [NodesEvent(SERVERS.name, "granted")]
    assert without_news(jobs.tick(7.0)) == [AskForJob(ELASTIC.name)]


@pytest.mark.parametrize(("is_word", "is_given_up"), [(True, True), (False, False)])
def test_a_job_of_the_gang_that_is_refused_again_and_again_is_given_up(is_word: bool, is_given_up: bool) -> None:
    jobs = book_of(TRAINER, SERVERS, ELASTIC, timeout_s=60.0)
    refusal = (SlurmError if is_word else SlurmUnreachableError)("job submit limit")
    jobs.answers |= {TRAINER.name: "1", SERVERS.name: refusal, ELASTIC.name: refusal}
    jobs.seen([], 0.0)
    ends: list[NodesEvent] = []
    for now in range(100):
        for action in jobs.tick(float(now)):
            if isinstance(action, NodesEvent) and action.news == "never come":
                ends.append(action)
    assert bool(ends) is is_given_up
    assert all(end.name == SERVERS.name for end in ends)


def test_slurm_is_asked_often_only_while_that_may_change_something() -> None:
    jobs = running()
    assert jobs.book.look_interval_s(2.0) == 10.0
    jobs.seen([sighting(ELASTIC, "7", "PENDING")], 2.0)
    assert jobs.book.look_interval_s(3.0) == 2.0
    assert jobs.book.look_interval_s(100.0) == 10.0


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (None, "does not know"),
        ({"JobState": "RUNNING", "PreemptTime": "None"}, ""),
        ({"JobState": "RUNNING"}, ""),
        ({"JobState": "RUNNING", "PreemptTime": "2030-01-01T00:00:00"}, "preempted"),
        *(({"JobState": word}, "") for word in ("SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")),
        ({"JobState": "SUSPENDED", "PreemptTime": "2030-01-01T00:00:00"}, ""),
        ({"JobState": "NEWER_THAN_WE"}, "NEWER_THAN_WE"),
        ({"JobState": "COMPLETING"}, "COMPLETING"),
        ({"JobState": "PENDING"}, "PENDING"),
    ],
)
def test_nodes_stay_only_while_their_job_runs_and_stays(job: dict[str, str] | None, words: str) -> None:
    assert words in why_leaving(job) and bool(why_leaving(job)) is bool(words)


@dataclass
class Job:
    """A job in a SLURM that does what the test wants."""

    spec: Allocation
    word: str = "PENDING"
    start: int = 0


class World:
    """SLURM, and the nodes that the workers have, as the supervisor would know them."""

    def __init__(self, *specs: Allocation) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.machine = book_of(*specs, timeout_s=30.0)
        self.jobs: dict[str, Job] = {}
        self.granted: set[str] = set()
        self.next_id = 0

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case News("extra_job_submitted", {"allocation": name, "job_id": job_id}):
                    alive = [job for job in self.jobs.values() if job.spec.name == name and job.word != "CANCELLED"]
                    assert not alive, f"{name} was asked for while it has a job"
                    self.jobs[job_id] = Job(self.specs[name])
                case CancelJob(job_id):
                    self.jobs[job_id].word = "CANCELLED"
                case NodesEvent(name, "granted"):
                    assert name not in self.granted
                    self.granted.add(name)
                case NodesEvent(name, "lost"):
                    self.granted.remove(name)

    def tick(self, now: float) -> None:
        self.machine.answers |= {name: str(self.next_id + place) for place, name in enumerate(self.specs)}
        self.next_id += len(self.specs)
        self.apply(self.machine.tick(now))

    def look(self, now: float) -> None:
        seen = [sighting(job.spec, job_id, job.word, start=str(job.start)) for job_id, job in self.jobs.items()]
        self.apply(self.machine.seen(seen, now))
        for name in self.granted:
            assert any(job.spec.name == name and job.word == "RUNNING" for job in self.jobs.values())
        granted = self.granted & {TRAINER.name, SERVERS.name}
        assert len(granted) in (0, 2) or self.machine.gang.is_assembled


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "preempt", "cancel", "look", "tick", "pass"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_whatever_slurm_does_no_extra_job_is_there_twice_and_no_nodes_outlive_their_job(
    events: list[tuple[str, int]],
) -> None:
    world, now = World(TRAINER, SERVERS, ELASTIC), 0.0
    for kind, number in events:
        now += 0.5
        alive = [job for job in world.jobs.values() if job.word in ("PENDING", "RUNNING")]
        job = alive[number % len(alive)] if alive else None
        if kind == "start" and job is not None and job.word == "PENDING":
            job.word, job.start = "RUNNING", job.start + 1
        elif kind == "preempt" and job is not None and job.word == "RUNNING":
            job.word = "PENDING"
        elif kind == "cancel" and job is not None:
            job.word = "CANCELLED"
        elif kind == "look":
            world.look(now)
        elif kind == "tick":
            world.tick(now)
        elif kind == "pass":
            now += 20.0 * number
    for _ in range(40):  # SLURM starts whatever is asked for: all are granted in the end
        now += 30.0
        world.tick(now)
        for job in world.jobs.values():
            if job.word == "PENDING":
                job.word, job.start = "RUNNING", job.start + 1
        world.look(now)
    assert world.granted == set(world.specs)
