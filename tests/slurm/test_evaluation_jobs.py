"""Evaluations as jobs of a real SLURM without accounting: done, crashed, cancelled, taken away and given back."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.evaluation import progress_path, read_result, result_path
from corral.launcher.evaluation.jobs import (
    EvaluationReader,
    EvaluationResources,
    EvaluationStatus,
    submit_to_slurm,
    wait_for,
)
from corral.launcher.evaluation.plan import choose, find_weights, make_evaluation_config, make_requests
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.trial.view import read_plan
from corral.workers.data.arithmetic import write_model
from tests.integration.trial_helpers import run_program
from tests.launcher.evaluation.evaluable import NUM_PROBLEMS, make_evaluable_trial
from tests.launcher.trials import wait_until
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_model(path, seed=1, hidden_size=32, num_layers=2)
    return path


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, with what an evaluation inherits from whoever asks for it; no job is left behind."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the rewards of tests are
    monkeypatch.setenv("CORRAL_TEST_GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(SlurmClient().states())
    yield cluster
    for job_id in set(SlurmClient().states()) - before:
        cluster.run("scancel", job_id)


def submit(directory: TrialDirectory, step: str = "latest", *, batch_size: int = 256) -> dict[int, str]:
    plan = read_plan(directory)
    evaluation = make_evaluation_config(plan, None, max_new_tokens=None)
    chosen = choose(find_weights(directory), step)
    requests = [
        request.model_copy(update={"batch_size": batch_size})
        for request in make_requests(directory, plan, chosen, evaluation, directory.evaluations_path)
    ]
    return submit_to_slurm(directory, requests, EvaluationResources(plan, minutes=5))


def watched(directory: TrialDirectory) -> EvaluationReader:
    return EvaluationReader(directory.evaluations_path)


def wait_for_state(reader: EvaluationReader, step: int, state: str) -> EvaluationStatus:
    def look() -> EvaluationStatus | None:
        (status,) = reader.read([step])
        return status if status.state == state else None

    return wait_until(look, f"{state} of step {step}: {reader.read([step])}", timeout_s=WAIT_S)


def wait_for_judged(judged: Path, number: int, what: str) -> None:
    wait_until(lambda: judged.exists() and len(judged.read_text().split()) == number, what, timeout_s=WAIT_S)


def test_versions_are_evaluated_as_an_array_interrupted_cancelled_and_asked_for_again_by_the_command(
    site: Cluster, tmp_path: Path, model: Path
) -> None:
    gated = "tests.launcher.evaluation.evaluation_rewards:gated"
    directory = make_evaluable_trial(tmp_path / "a root", model, commits=(1, 2), reward=gated, mode="slurm")
    gate, judged = tmp_path / "gate", tmp_path / "gate.judged"
    gate.write_text("0")
    jobs = submit(directory, "all", batch_size=4)
    array, other_array = (jobs[step].partition("_")[0] for step in (1, 2))
    assert array == other_array and jobs[1].endswith("_0") and jobs[2].endswith("_1")
    wait_for_judged(judged, 8, "the first batches of both")
    assert site.run("scancel", jobs[2]).returncode == 0
    reader = watched(directory)
    wait_for_state(reader, 2, "CANCELLED")

    # Time is up for the other in the middle of its third batch; submitit puts it back into the queue.
    gate.write_text("13")
    wait_for_judged(judged, 16, "the third batch of the other")
    assert json.loads(progress_path(result_path(directory.evaluations_path, 1)).read_text())["num_done"] == 8
    assert site.run("scancel", "--signal=USR2", jobs[1]).returncode == 0
    gate.write_text("1000")
    (status,) = wait_for(reader, [1], timeout_s=WAIT_S)
    assert (status.state, status.job_id) == ("DONE", jobs[1])
    result = read_result(result_path(directory.evaluations_path, 1))
    assert result is not None and (result.num_starts, result.num_prompts) == (2, NUM_PROBLEMS)

    arguments = [str(directory.path), "--step", "all", "--wait", "-o", "json", "--minutes", "5"]
    printed = run_program(["rl-eval", *arguments], environment=os.environ)
    shown, end = json.JSONDecoder().raw_decode(printed)
    assert printed[end:].splitlines()[-1].startswith("step ")  # what happened meanwhile, on the error stream
    assert [(one["step"], one["state"], one["result"]["num_prompts"]) for one in shown] == [
        (1, "DONE", NUM_PROBLEMS),
        (2, "DONE", NUM_PROBLEMS),
    ]
    assert not (directory.evaluations_path / "weights" / "step-00000001").exists()


def test_an_evaluation_asked_for_from_inside_a_job_is_a_job_of_its_own(
    site: Cluster, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "64", "SLURM_GPUS_PER_NODE": "99", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    before: Mapping[str, Any] = dict(os.environ)
    directory = make_evaluable_trial(tmp_path, model, commits=(1,), final=1)
    (job_id,) = submit(directory).values()
    assert dict(os.environ) == before
    facts = SlurmClient().job(job_id)
    assert facts is not None and (facts["NumTasks"], facts["JobName"]) == (
        "1",
        f"eval.{read_plan(directory).trial.trial}",
    )
    site.run("scancel", job_id)


def test_what_slurm_refuses_is_said(site: Cluster, tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(tmp_path, model, launch={"partition": "nosuch"})
    with pytest.raises(SlurmError, match="invalid partition"):
        submit(directory)
    assert watched(directory).read([2])[0].is_final
