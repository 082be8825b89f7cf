"""Extra jobs as the supervisor has them: it waits for no answer, hears news in order, and leaves none behind."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.extra_jobs import ExtraJobs, NodesEvent
from corral.launcher.layout.layout import PlacedTrial, RunningAllocation
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.client import SlurmUnreachableError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.slurm.verdict import Job
from tests.launcher.jobs import job_of
from tests.launcher.trials import make_plan, wait_until

HEAD = RunningAllocation(job_id="1", het_group=None, hosts=("n0",))


class Slurm(SlurmCluster):
    """Starts each job that it is asked for; answers when it is let."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__()
        self.uuid = plan.trial.uuid
        self.allocation_by_job: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.answers = threading.Event()
        self.is_reachable = True

    def jobs(self) -> list[Job]:
        assert self.answers.wait(10.0)
        if not self.is_reachable:
            raise SlurmUnreachableError("squeue did not answer within 20 s")
        return [
            job_of(
                job_id,
                "RUNNING",
                start="t0",
                nodes="n1",
                tag={"corral": 1, "trial_uuid": self.uuid, "allocation": allocation, "attempt": 0},
            )
            for job_id, allocation in self.allocation_by_job.items()
            if job_id not in self.cancelled
        ]

    def submit_extra_job(
        self, trial: PlacedTrial, allocation: int, *, attempt: int, exclude_nodes: Sequence[str]
    ) -> str:
        job_id = str(10 + allocation)
        self.allocation_by_job[job_id] = trial.layout.allocations[allocation].name
        return job_id

    def why_leaving(self, job_id: str) -> str:
        return ""

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def test_the_supervisor_hears_of_its_jobs_without_waiting_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.launcher.extra_jobs._QUICK_LOOK_S", 0.0)
    monkeypatch.setattr("corral.launcher.extra_jobs._SLOW_LOOK_S", 0.0)
    directory = TrialDirectory(tmp_path / "exp" / "trial")
    directory.create()
    plan = make_plan(directory.path, mode="slurm", launch={"layout": "jobs"})
    slurm, told = Slurm(plan), list[tuple[str, dict[str, Any]]]()
    extra_jobs = ExtraJobs(
        cluster=slurm,
        trial=PlacedTrial(plan=plan, layout=plan_layout(plan), directory=directory),
        attempt=0,
        own={0: HEAD},
        record=lambda event, **fields: told.append((event, fields)),
    )
    names = {one.name for one in extra_jobs.trial.layout.allocations if one.is_extra_job}
    events: list[NodesEvent] = []

    def drive() -> None:
        events.extend(extra_jobs.drive(time.monotonic()))

    began = time.monotonic()
    drive()
    assert time.monotonic() - began < 5.0, "it waits for SLURM"
    assert extra_jobs.allocations() == {0: HEAD}
    slurm.answers.set()
    wait_until(lambda: drive() or len(events) == len(names), "the nodes of all extra jobs")
    assert all(event.news == "granted" for event in events) and {event.name for event in events} == names
    assert {one.job_id for one in extra_jobs.allocations().values()} == {"1", *slurm.allocation_by_job}
    events.clear()
    extra_jobs.check_nodes(min(names))
    wait_until(lambda: drive() or events, "an answer about its nodes")
    assert events == [NodesEvent(min(names), "stay")]
    slurm.is_reachable = False
    wait_until(lambda: drive() or told[-1][0] == "extra_jobs_unseen", "the outage")
    slurm.is_reachable = True
    wait_until(lambda: drive() or told[-1][0] == "extra_jobs_seen_again", "its end")
    extra_jobs.close()
    assert {*slurm.cancelled} == {*slurm.allocation_by_job}
    assert [event for event, _ in told if event == "extra_jobs_unseen"] == ["extra_jobs_unseen"]
