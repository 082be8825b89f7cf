"""rl-eval: which weights it finds, and what becomes of evaluations on this machine."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import pytest

from corral.experiments.config.cluster import ClusterConfig, LaunchConfig
from corral.experiments.config.rollout import SglangConfig
from corral.experiments.errors import ConfigError
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.inputs.other_pythons import sglang_python
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, link_files
from corral.experiments.trial.evaluation import BestVersion, EvaluationRequest, progress_path, read_result, result_path
from corral.experiments.worker_specs import ModelWorkerSpec
from corral.launcher.evaluation import jobs
from corral.launcher.evaluation.jobs import (
    EvaluationReader,
    EvaluationResources,
    JobRecord,
    evaluation_command,
    jobs_folder,
    record_path,
)
from corral.launcher.evaluation.plan import (
    choose,
    find_weights,
    make_evaluation_config,
    make_requests,
    scheduling_of,
    write_request,
)
from corral.launcher.slurm.client import SlurmClient, SlurmUnreachableError
from corral.launcher.trial.view import read_plan
from corral.scheduling.scheduling import Scheduling
from corral.workers.data.arithmetic import write_model
from tests.integration.trial_helpers import make_material, submit
from tests.launcher.evaluation.evaluable import NUM_PROBLEMS, make_evaluable_trial, write_problems
from tests.launcher.trials import make_plan, wait_until

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_model(path, seed=1, hidden_size=32, num_layers=2)
    return path


def environment_of(fileroot: Path) -> dict[str, str]:
    return os.environ | {
        "CORRAL_FILEROOT": str(fileroot),
        "CORRAL_TEST_GATE": str(fileroot / "gate"),
        "PYTHONPATH": str(Path(__file__).parents[3]),  # where the rewards of tests are
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def rl_eval(fileroot: Path, *arguments: str, exit_code: int = 0) -> str:
    done = subprocess.run(
        [str(BIN / "rl-eval"), *arguments], env=environment_of(fileroot), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout + (done.stderr if exit_code else "")


def resources_of(
    scheduling: Scheduling, launch: LaunchConfig, cluster: ClusterConfig, **asked: Any
) -> EvaluationResources:
    """Of a trial whose servers have this scheduling; nothing else of its plan is looked at."""
    groups = {"generation_server": SimpleNamespace(scheduling=scheduling)}
    plan = SimpleNamespace(trial=SimpleNamespace(trial="t"), launch=launch, cluster=cluster, scheduling=groups)
    return EvaluationResources(cast(RunPlan, plan), minutes=7, **asked)


def steps_of(directory: TrialDirectory, wanted: str) -> Sequence[tuple[int, str]]:
    return [
        (weights.step, directory.relative(weights.directory)) for weights in choose(find_weights(directory), wanted)
    ]


def test_weights_are_found_in_exports_and_commits(tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(tmp_path, model, commits=(5, 6), exports=(2, 5), final=7)
    assert steps_of(directory, "all") == [
        (2, "exports/step-00000002"),
        (5, "exports/step-00000005"),  # an export stays, a commit would be removed one day
        (6, "checkpoints/step-00000006-e1-00000000/weights"),
        (7, "exports/final"),
    ]
    assert steps_of(directory, "latest") == [(7, "exports/final")]
    assert [step for step, _ in steps_of(directory, "6,2")] == [6, 2]
    with pytest.raises(ConfigError, match="keeps no best weights"):
        steps_of(directory, "best")
    best = directory.exports_path / "best"
    for version, found in (("1.6", "checkpoints/step-00000006-e1-00000000/weights"), ("1.4", "exports/best")):
        best.mkdir(exist_ok=True)
        BestVersion(version=version, metric="accuracy", value=0.5).write(best)
        assert steps_of(directory, "best") == [(int(version[2:]), found)]


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(tmp_path, model, commits=(3,))
    with pytest.raises(ConfigError, match=r"no weights of step '4'\n  hint: there are 3, "):
        choose(find_weights(directory), "4")
    with pytest.raises(ConfigError, match="no weights of step 'newest'"):
        choose(find_weights(directory), "newest")
    assert "no weights to evaluate yet" in rl_eval(
        tmp_path / "empty", str(make_evaluable_trial(tmp_path / "empty", model, commits=()).path), exit_code=2
    )


def test_other_problems_are_read_in_the_form_of_the_trials_own(tmp_path: Path, model: Path) -> None:
    plan = read_plan(make_evaluable_trial(tmp_path, model))
    other = write_problems(tmp_path / "other.jsonl", count=2)
    config = make_evaluation_config(plan, other, max_new_tokens=None)
    own = plan.all_of(ModelWorkerSpec)[0].evaluation
    assert own is not None and config == own.model_copy(update={"dataset": config.dataset})
    assert (config.dataset.path, config.sampling.max_new_tokens) == (other, 4)
    assert make_evaluation_config(plan, other, max_new_tokens=9).sampling.max_new_tokens == 9


def test_problems_without_answers_are_refused_before_anything_is_written(tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(tmp_path, model)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1+1="}\n')
    said = rl_eval(tmp_path, "trial", "--local", "--dataset", str(bad), exit_code=2)
    assert "bad.jsonl" in said and "answer" in said
    assert not directory.evaluations_path.exists()


def test_several_versions_are_evaluated_here_by_the_code_that_the_trial_keeps_and_then_known(
    tmp_path: Path, model: Path
) -> None:
    directory = make_evaluable_trial(tmp_path, model, commits=(1, 2), reward="own:digits")
    directory.code_path.mkdir()
    own = directory.code_path / "own.py"
    own.write_text("def digits(problem, answer):\n    return sum(map(str.isdigit, answer)) / max(len(answer), 1)\n")
    code = {own.name: hashlib.sha256(own.read_bytes()).hexdigest()}
    plan = RunPlan.from_json(directory.plan_path.read_bytes()).model_copy(update={"code": code})
    directory.plan_path.write_bytes(plan.to_json())
    shown = json.loads(rl_eval(tmp_path, "trial", "--local", "--step", "all", "-o", "json"))
    assert [(one["step"], one["state"], one["result"]["num_prompts"]) for one in shown] == [
        (1, "DONE", NUM_PROBLEMS),
        (2, "DONE", NUM_PROBLEMS),
    ]
    first, second = (read_result(result_path(directory.evaluations_path, step)) for step in (1, 2))
    assert first is not None and second is not None
    assert first.mean_reward == second.mean_reward > 0.0  # the same weights
    assert not (directory.evaluations_path / "weights" / "step-00000001").exists()
    assert not list(directory.evaluations_path.glob("*.progress.json"))
    assert (directory.evaluations_path / "jobs").stat().st_mode & 0o777 == 0o700

    written_at = result_path(directory.evaluations_path, 1).stat().st_mtime_ns
    assert "DONE" in rl_eval(tmp_path, "trial", "--local", "--step", "1")
    assert result_path(directory.evaluations_path, 1).stat().st_mtime_ns == written_at  # nothing ran again


@pytest.mark.slow
def test_an_evaluation_agrees_with_what_the_trial_found_itself(tmp_path: Path) -> None:
    trial = submit("sft", tmp_path, make_material(tmp_path), num_rows=16, overrides={"control.save_every": "1 step"})
    try:
        trial.wait_for_end()
        trial.run("rl-eval", "--local", "--step", "all")
        found = {line["step"]: line for line in trial.metrics() if "eval/accuracy" in line}
        results = [read_result(path) for path in sorted(trial.directory.evaluations_path.glob("step-????????.json"))]
        assert [result.step for result in results if result is not None] == [1, 2]
        last = results[-1]
        assert last is not None and last.source in ("exports/final", "exports/step-00000002")
        assert last.accuracy == found[2]["eval/accuracy"]
        assert last.mean_response_tokens == pytest.approx(found[2]["eval/response_length/mean"])
    finally:
        trial.close()


@pytest.mark.slow  # SGLang takes its time to start
def test_a_job_starts_a_server_of_the_trials_own_kind(tmp_path: Path, model: Path) -> None:
    reward = "tests.launcher.evaluation.evaluation_rewards:digits"
    directory = make_evaluable_trial(tmp_path, model, commits=(1,), reward=reward)
    embedded = EvaluationRequest.model_validate_json(request_in_batches(directory, batch_size=8).read_bytes())
    sglang = SglangConfig(python=sglang_python(SglangConfig()))
    server = embedded.server.model_copy(update={"backend": "sglang", "sglang": sglang})
    evaluation = embedded.evaluation.model_copy(update={"answers_per_problem": 2, "vote": "(.+)"})
    results = []
    for step, update in ((1, {}), (2, {"server": server}), (3, {"evaluation": evaluation})):
        asked = embedded.model_copy(update={"result": result_path(directory.evaluations_path, step), **update})
        request = tmp_path / f"{step}.json"
        request.write_text(asked.model_dump_json())
        command = [sys.executable, "-m", "corral.workers.evaluation", str(request)]
        environment = environment_of(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}
        if not asked.weights.exists():  # the job before has removed them
            link_files(model, asked.weights)
        subprocess.run(command, env=environment, check=True, timeout=600)
        result = read_result(asked.result)
        assert result is not None and (result.num_prompts, result.num_unjudged) == (NUM_PROBLEMS, 0)
        results.append(result)
    by_embedded, by_sglang, of_two = results
    assert 0.0 < by_embedded.mean_reward == pytest.approx(by_sglang.mean_reward)
    assert of_two.mean_reward == pytest.approx(by_embedded.mean_reward), "greedy answers are one answer"
    assert of_two.pass_at == {2: of_two.accuracy} and of_two.majority == of_two.accuracy


def test_an_evaluation_that_crashes_says_so(tmp_path: Path, model: Path) -> None:
    make_evaluable_trial(tmp_path, model, commits=(1,), reward="tests.launcher.evaluation.evaluation_rewards:crash")
    shown = rl_eval(tmp_path, "trial", "--local", exit_code=6)
    assert "FAILED" in shown and "the evaluation ended with -9" in shown
    make_evaluable_trial(tmp_path / "other", model, commits=(1,), reward="no_such_module:score")
    shown = rl_eval(tmp_path / "other", "trial", "--local", exit_code=6)
    assert f"the evaluation ended with {WorkerExit.USER_CODE:d}: " in shown
    assert "ERROR: no_such_module:score cannot be imported: ModuleNotFoundError" in shown


def test_a_trial_of_this_machine_is_evaluated_here_and_answers_without_a_reward_are_explained(
    tmp_path: Path, model: Path
) -> None:
    reward = "tests.launcher.evaluation.evaluation_rewards:wants_result"
    make_evaluable_trial(tmp_path, model, commits=(1,), reward=reward, mode="local")
    shown = rl_eval(tmp_path, "trial", exit_code=6)
    assert f"the answers to all {NUM_PROBLEMS} problems have no reward" in shown
    assert "KeyError: 'result'" in shown and "evaluation_rewards.py:" in shown


@pytest.mark.slow  # tests/slurm/test_evaluation_jobs.py interrupts one, too
def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(
        tmp_path, model, commits=(1,), exports=(1,), reward="tests.launcher.evaluation.evaluation_rewards:gated"
    )
    request = request_in_batches(directory, batch_size=4)
    command = [sys.executable, "-m", "corral.workers.evaluation", str(request)]
    gate, judged = tmp_path / "gate", tmp_path / "gate.judged"
    gate.write_text("5")
    first = subprocess.Popen(command, env=environment_of(tmp_path))
    try:
        wait_until(lambda: judged.exists() and len(judged.read_text().split()) == 8, "the second batch", timeout_s=60)
    finally:
        first.kill()
        first.wait()
    gate.write_text("1000")
    subprocess.run(command, env=environment_of(tmp_path), check=True, timeout=240)
    result = read_result(result_path(directory.evaluations_path, 1))
    assert result is not None and (result.num_starts, result.num_prompts) == (2, NUM_PROBLEMS)
    assert len(judged.read_text().split()) == 8 + NUM_PROBLEMS - 4  # the first batch of four was kept
    assert not progress_path(result_path(directory.evaluations_path, 1)).exists()


def test_an_evaluation_that_sees_no_gpu_of_those_it_was_given_answers_nothing(tmp_path: Path, model: Path) -> None:
    directory = make_evaluable_trial(tmp_path, model, commits=(1,))
    request = request_in_batches(directory, batch_size=4)
    launch, cluster, scheduling = LaunchConfig(), ClusterConfig(), Scheduling(cpu=1, mem=1, gpu=1)
    asked = resources_of(scheduling, launch, cluster)
    command = evaluation_command(request, asked, directory)
    environment = environment_of(tmp_path) | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == WorkerExit.WRONG_DEVICES
    assert "the plan gives the evaluation 1 GPU, and it sees 0" in done.stderr and "set gpu: 0" in done.stderr
    assert not result_path(directory.evaluations_path, 1).exists()


def request_in_batches(directory: TrialDirectory, *, batch_size: int) -> Path:
    plan = read_plan(directory)
    evaluation = make_evaluation_config(plan, None, max_new_tokens=None)
    chosen = choose(find_weights(directory), "latest")
    (request,) = make_requests(directory, plan, chosen, evaluation, directory.evaluations_path)
    return write_request(directory, request.model_copy(update={"batch_size": batch_size}))


class FakeQueue(SlurmClient):
    """What squeue shows, set by the test; None is a controller that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[str, tuple[str, str]] | None = {}

    def states(self) -> dict[str, tuple[str, str]]:
        if self.shown is None:
            raise SlurmUnreachableError("squeue did not answer within 20 s")
        return self.shown


def watch(folder: Path, *looks: dict[str, tuple[str, str]] | None) -> list[tuple[str, bool]]:
    """(state, is_final) of the evaluation of step 3, which is job 7, after each look."""
    queue, seen = FakeQueue(), []
    jobs_folder(folder).mkdir(parents=True)
    record_path(folder, 3).write_bytes(msgspec.json.encode(JobRecord(job_id="7")))
    reader = EvaluationReader(folder, client=queue)
    for shown in looks:
        queue.shown = shown
        (one,) = reader.read([3])
        seen.append((one.state, one.is_final))
    return seen


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on its way."""
    monkeypatch.setattr(jobs, "_RESULT_VISIBLE_S", 0.0)


@pytest.mark.usefixtures("in_no_time")
def test_the_reader_tells_what_squeue_shows(tmp_path: Path) -> None:
    running, failed = {"7": ("RUNNING", "None")}, {"7": ("FAILED", "NonZeroExitCode")}
    assert watch(tmp_path / "1", running, failed) == [("RUNNING", False), ("FAILED", True)]
    assert watch(tmp_path / "2", {"7": ("CANCELLED by 1000", "None")}) == [("CANCELLED", True)]


@pytest.mark.usefixtures("in_no_time")
def test_a_job_that_slurm_has_forgotten_has_ended(tmp_path: Path) -> None:
    assert watch(tmp_path / "1", {"7": ("RUNNING", "None")}, {}) == [("RUNNING", False), ("FAILED", True)]
    # Asked about for the first time.
    assert [is_final for _, is_final in watch(tmp_path / "2", {}, {})] == [False, True]


@pytest.mark.usefixtures("in_no_time")
def test_no_answer_is_no_end(tmp_path: Path) -> None:
    running = {"7": ("RUNNING", "None")}
    assert watch(tmp_path, running, None, None, running) == [("RUNNING", False)] * 4


@pytest.mark.usefixtures("in_no_time")
def test_a_word_that_nobody_knows_is_no_end(tmp_path: Path) -> None:
    ((_, is_final),) = watch(tmp_path, {"7": ("RESIZING+NEW", "None")})
    assert not is_final


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", "FAILED"),
        ("OUT_OF_MEMORY", "OOM"),
        ("TIMEOUT", "TIMED_OUT"),
        ("LAUNCH_FAILED", "NODE_FAILED"),
        ("REVOKED", "PREEMPTED"),
        ("CANCELLED by 1000", "CANCELLED"),
    ],
)
def test_a_job_that_ended_without_a_result_says_how(word: str, state: str, tmp_path: Path) -> None:
    assert watch(tmp_path, {"7": (word, "None")}) == [(state, True)]


def test_an_evaluation_gets_what_a_server_has_or_a_training_rank_and_one_gpu(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, task={"cpu": 3}, gpu=4)
    assert scheduling_of(plan) == plan.scheduling["generation_server"].scheduling
    plan = make_plan(tmp_path, task={"cpu": 3}, gpu=4, servers=0)
    rank = scheduling_of(plan)
    assert (rank.cpu, rank.gpu, plan.scheduling["model_worker"].scheduling.gpu) == (3, 1, 4)


def test_an_evaluation_asks_slurm_for_what_it_gets() -> None:
    scheduling = Scheduling(cpu=3, mem=2048, gpu=1, gpu_type="a100", account="lab", extra_sbatch_arguments=("--hold",))
    launch = LaunchConfig(partition="gpu", account="mine", extra_sbatch_arguments=("--licenses=x:1",))
    asked = resources_of(scheduling, launch, ClusterConfig())
    assert asked.slurm == {
        "partition": "gpu",
        "account": "lab",  # the group's own value goes before that of the whole trial
        "gres": "gpu:a100:1",
        "additional_parameters": {"requeue": True, "licenses": "x:1", "hold": True},
    }
    for gpu_request, wanted in (("gpus", {"gpus_per_node": "a100:1"}), ("none", {"exclusive": True})):
        cluster = ClusterConfig.model_validate({"gpu_request": gpu_request})
        elsewhere = resources_of(scheduling, launch, cluster, partition="spot").slurm
        assert elsewhere["partition"] == "spot" and wanted.items() <= elsewhere.items() and "gres" not in elsewhere


def test_an_evaluation_runs_in_the_image_of_the_training_ranks(tmp_path: Path) -> None:
    directory = TrialDirectory(tmp_path / "trial")
    scheduling = Scheduling(cpu=1, mem=1, container_image="/images/a.sif")

    def contained(runtime: Literal["apptainer", "pyxis"]) -> Sequence[str]:
        cluster = ClusterConfig(container_runtime=runtime, container_python="python3.11")
        asked = resources_of(scheduling, LaunchConfig(), cluster)
        return evaluation_command(tmp_path / "r.json", asked, directory)

    assert contained("apptainer")[:2] == ("apptainer", "exec")
    evaluation = ("python3.11", "-P", "-u", "-m", "corral.workers.evaluation", str(tmp_path / "r.json"), "--gpus", "0")
    assert contained("apptainer")[-8:] == evaluation
    with pytest.raises(ConfigError, match="pyxis"):
        contained("pyxis")
