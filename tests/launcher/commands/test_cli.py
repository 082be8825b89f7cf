"""The commands as users run them: real processes, real exit codes, and nothing left behind by a mistake."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.plan import RunPlan
from corral.experiments.trial.attempts import AttemptEnd, EndState, record_attempt, write_end
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.worker_specs import RolloutWorkerSpec
from corral.launcher.commands.submit import create_under_a_free_name
from corral.launcher.commands.submit import main as submit_main
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.client import SlurmClient, SlurmError
from corral.launcher.slurm.cluster import SlurmCluster
from corral.launcher.submit import prepare, start
from corral.launcher.submit.users_code import KeptCode
from corral.launcher.terminal import fold
from corral.launcher.trial.processes import process_start_ticks, trial_processes
from corral.launcher.trial.view import read_facts
from tests.experiments.broken_yaml import BROKEN_CASES, VALID_PPO, BrokenCase, write_inputs
from tests.launcher.conftest import MakeTrial
from tests.launcher.stub_supervisor import COMMAND
from tests.launcher.trials import end_trials, wait_until

BIN = Path(sys.executable).parent


def run(command: str, *arguments: str, fileroot: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / command), *arguments],
        env=os.environ | {"CORRAL_FILEROOT": str(fileroot), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Path]:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_PPO)
    yield path
    end_trials(tmp_path / "trials")


@pytest.mark.parametrize("case", BROKEN_CASES[::60], ids=lambda case: case.name)
def test_a_refusal_needs_no_more_than_a_message_on_stderr(case: BrokenCase, tmp_path: Path) -> None:
    file = case.write(tmp_path / "input")
    overrides = [part for override in case.overrides for part in ("-s", override)]
    refused = run("rl-submit", str(file), "--local", *overrides, fileroot=tmp_path / "trials")
    assert refused.returncode == 2
    assert refused.stdout == "" and refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
    assert all(word in refused.stderr for word in case.words)
    assert not (tmp_path / "trials").exists()


def test_dry_run_shows_the_plan_and_writes_nothing(experiment: Path, tmp_path: Path) -> None:
    shown = run("rl-submit", str(experiment), "--local", "--dry-run", fileroot=tmp_path / "trials")
    assert shown.returncode == 0, shown.stderr
    assert "small-grpo/trial-1" in shown.stdout and "rollout_worker" in shown.stdout and "checks" in shown.stdout
    graph = run("rl-submit", str(experiment), "--local", "--dry-run=graph", fileroot=tmp_path / "trials")
    assert graph.stdout.startswith("flowchart LR\n") and "actor_train" in graph.stdout
    assert graph.stderr.partition("checks")[0] == shown.stdout.partition("checks")[0]
    assert not (tmp_path / "trials").exists()


def test_the_graph_of_a_trial_for_a_cluster_is_drawn_where_there_is_none(experiment: Path, tmp_path: Path) -> None:
    gpus = [
        part for kind in ("model_worker", "generation_server") for part in ("-s", f"groups.{kind}.scheduling.gpu=1")
    ]
    environment = {"CORRAL_FILEROOT": str(tmp_path / "trials"), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [str(BIN / "rl-submit"), str(experiment), "--dry-run=graph", *gpus]
    drawn = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.startswith("flowchart LR\n") and "actor_train" in drawn.stdout
    assert "nodes      not planned" in drawn.stderr and "no cluster asked" in drawn.stderr


@pytest.mark.parametrize("name", ["a/b", "../up", "-n", "a;b", "", "a\nb"])
def test_a_trial_name_that_is_no_file_name_is_refused(name: str, experiment: Path, tmp_path: Path) -> None:
    with pytest.raises(prepare.ConfigError, match="trial name"):
        prepare.prepare(experiment, [f"cluster.fileroot={tmp_path / 'trials'}"], trial_name=name, mode="local")


def test_a_missing_gpu_is_refused_with_both_numbers(experiment: Path, tmp_path: Path) -> None:
    more = "groups.model_worker.scheduling.gpu=1"
    refused = subprocess.run(
        [str(BIN / "rl-submit"), str(experiment), "--local", "-s", more],
        env=os.environ | {"CORRAL_FILEROOT": str(tmp_path / "trials"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 2
    assert "needs 1 GPUs" in refused.stderr and "has 0" in refused.stderr
    assert not (tmp_path / "trials").exists()


def test_elastic_workers_count_among_the_gpus_of_this_machine(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "visible_gpus", lambda: ["0"])
    elastic = "groups.generation_server.elastic={count: 2, scheduling: {cpu: 1, gpu: 1, mem: 1G}}"
    with pytest.raises(prepare.ConfigError, match="needs 2 GPUs .* this machine has 1"):
        prepare.prepare(experiment, [f"cluster.fileroot={tmp_path / 'trials'}", elastic], trial_name=None, mode="local")


def test_a_container_that_a_local_trial_would_not_use_is_warned_about(experiment: Path, tmp_path: Path) -> None:
    image = ["cluster.container_runtime=apptainer", "groups.rollout_worker.scheduling.container_image=i.sif"]
    overrides = [f"cluster.fileroot={tmp_path / 'trials'}", *image]
    prepared = prepare.prepare(experiment, overrides, trial_name=None, mode="local")
    assert any("no effect with --local (rollout_worker)" in warning for warning in prepared.warnings)


def test_slurm_commands_that_are_missing_are_named(experiment: Path, tmp_path: Path) -> None:
    refused = subprocess.run(
        [str(BIN / "rl-submit"), str(experiment), "-s", "cluster.cpus_per_node=64"],
        env={"CORRAL_FILEROOT": str(tmp_path / "trials"), "PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 4, refused.stderr
    assert "--local" in refused.stderr
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("rl-status", ["-o", "xml"], "'xml' is not one of 'table', 'wide', 'json', 'name'"),
        ("rl-status", ["--wait"], "--wait needs the name of one trial"),
        ("rl-stop", [], "missing argument 'TRIAL'"),
        ("rl-stop", ["t", "--now", "--requeue"], "--now ends a trial at once"),
        ("rl-stop", ["t", "--undo"], "name the group"),
        ("rl-logs", ["t", "-n", "-1"], "'-n' / '--lines'"),
        ("rl-submit", [], "name an experiment file"),
        ("rl-submit", ["e.yaml", "--layout", "x"], "'x' is not one of 'auto', 'packed', 'hetjob', 'jobs'"),
        ("rl-submit", ["e.yaml", "--shape", "4x8x80G"], "nothing can run; add --dry-run"),
        ("rl-submit", ["e.yaml", "--shape", "4x8x80G", "--dry-run", "--local"], "leave --local and --resume out"),
        ("rl-doctor", ["--nosuch"], "--nosuch"),
        ("rl-submit", ["x.yaml", "--dryrun"], "did you mean --dry-run?"),
        ("rl-eval", ["t", "-o", "x"], "'x' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line_is_an_error_like_all_others(
    command: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    with pytest.raises(SystemExit) as refused:
        import_module(f"corral.launcher.commands.{command.removeprefix('rl-')}").main()
    printed = capsys.readouterr()
    assert refused.value.code == 2 and printed.out == ""
    message, hint = printed.err.splitlines()
    assert message.startswith("error: ") and words in printed.err
    assert hint in (f"  hint: {command} --help shows what there is", f"  hint: {words}")


def test_a_reader_that_has_seen_enough_is_no_error(make_trial: MakeTrial, tmp_path: Path) -> None:
    make_trial(trial="one")
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `head` does once it has its lines
    with os.fdopen(write_end, "w") as output:
        ended = subprocess.run(
            [str(BIN / "rl-status"), "--fileroot", str(tmp_path)], stdout=output, stderr=subprocess.PIPE, timeout=120
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_long_lines_are_folded_below_their_column() -> None:
    line = "plan       packed: 1 job, 3 nodes (all groups can share one allocation)"
    assert fold(line, None) == line
    folded = fold(line, 40).splitlines()
    assert all(len(part) <= 40 for part in folded) and len(folded) > 1
    assert all(part.startswith(" " * 11) and part[11] != " " for part in folded[1:])
    assert " ".join(part.strip() for part in folded) == line
    assert fold("x" * 60, 40) == "x" * 60  # a path is not broken: it is there to be copied


def test_unknown_trials_get_the_closest_name(make_trial: MakeTrial, tmp_path: Path) -> None:
    make_trial(trial="gsm8k-a")
    missing = run("rl-status", "gsm8k-b", fileroot=tmp_path)
    assert missing.returncode == 3
    assert "gsm8k-a" in missing.stderr


def test_an_experiment_lists_its_trials_and_every_trial_has_one_form_of_name(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    for experiment, trial in (("gsm", "fast"), ("gsm", "trial-1"), ("sums", "trial-1")):
        make_trial(experiment=experiment, trial=trial)
    names = [line.split()[0] for line in run("rl-status", fileroot=tmp_path).stdout.splitlines()[1:]]
    assert sorted(names) == ["gsm/fast", "gsm/trial-1", "sums/trial-1"]
    listed = run("rl-status", "gsm", fileroot=tmp_path)
    assert sorted(line.split()[0] for line in listed.stdout.splitlines()[1:]) == ["gsm/fast", "gsm/trial-1"]
    assert run("rl-status", "gsm", "--check", fileroot=tmp_path).returncode == 3
    assert f"no trials in {tmp_path / 'none'}" in run("rl-status", fileroot=tmp_path / "none").stdout


def test_a_name_that_two_experiments_use_is_refused_with_both(make_trial: MakeTrial, tmp_path: Path) -> None:
    make_trial(experiment="one", trial="same")
    make_trial(experiment="two", trial="same")
    ambiguous = run("rl-logs", "same", fileroot=tmp_path)
    assert ambiguous.returncode == 3
    assert "one/same" in ambiguous.stderr and "two/same" in ambiguous.stderr


def test_rl_stop_keeps_a_group_down_until_it_is_undone_and_checkpoints_before_the_end(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    trial = make_trial({"master_worker/0": ["master 3"], "generation_server/0": ["linger 1", "wait"]})
    trial.start()
    trial.wait_for_workers()
    stopped = run("rl-stop", "trial", "--group", "generation_server", fileroot=tmp_path)
    assert stopped.returncode == 0 and stopped.stderr == "", stopped.stderr
    shown = run("rl-status", "trial", "-o", "wide", fileroot=tmp_path).stdout
    assert any(line.startswith("generation_server/0") and "KEPT DOWN" in line for line in shown.splitlines()), shown
    assert len(trial.starts("generation_server/0")) == 1
    assert len(trial.events("task_ended")) == 1
    undone = run("rl-stop", "trial", "--group", "generation_server", "--undo", fileroot=tmp_path)
    assert undone.returncode == 0, undone.stderr
    wait_until(lambda: len(trial.starts("generation_server/0")) == 2, "the server to be started again")
    assert not trial.events("unit_restarting")
    stopped = run("rl-stop", "trial", fileroot=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "exp/trial STOPPED: checkpointed at step 3" in stopped.stdout
    assert trial.wait() == 0
    again = run("rl-stop", "exp/trial", fileroot=tmp_path)
    assert again.returncode == 0 and "STOPPED" in again.stdout
    (status,) = json.loads(run("rl-status", "-o", "json", fileroot=tmp_path).stdout)
    assert (status["state"], status["step"], status["total_steps"]) == ("STOPPED", 3, 3)


def test_rl_logs_shows_lines_paths_and_the_first_failure(make_trial: MakeTrial, tmp_path: Path) -> None:
    trial = make_trial(
        {"master_worker/0": ["master"], "gserver_manager/0": ["exit 9"]}, supervision={"max_restarts": 0}
    )
    assert trial.run() == 1
    shown = run("rl-logs", "trial", "gserver_manager", "-n", "1", fileroot=tmp_path)
    assert shown.stdout == "gserver_manager/0 | ValueError: told to exit with 9\n"
    path = run("rl-logs", "trial", "master_worker/0", "--path", fileroot=tmp_path)
    assert path.stdout.strip() == str(trial.directory.worker_log(0, "master_worker", 0))
    errors = run("rl-logs", "trial", "--errors", fileroot=tmp_path)
    assert errors.stdout.startswith("ended by: gserver_manager/0") and "exit 9" in errors.stdout
    nobody = run("rl-logs", "trial", "critic", fileroot=tmp_path)
    assert nobody.returncode == 3 and "gserver_manager/0" in nobody.stderr


def test_a_local_trial_survives_the_terminal_that_started_it(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup, or a CI, may have had it ignored
        "import sys; from pathlib import Path; from corral.launcher.submit import prepare, start\n"
        f"s = prepare.prepare(Path({str(experiment)!r}), {_small(tmp_path)!r}, trial_name='t', mode='local')\n"
        "start.create(s)\n"
        "(s.directory.path / 'stub.json').write_text('{\"master_worker/0\": [\"finish 1.0\"]}')\n"
        f"start.SUPERVISOR_COMMAND = {list(COMMAND)!r}\n"
        "print(start.start(s), flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    terminal = subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert terminal.stdout is not None
    supervisor = int(terminal.stdout.readline())
    os.killpg(terminal.pid, signal.SIGHUP)  # what a closed terminal sends
    terminal.wait(10)
    facts = read_facts(TrialDirectory(tmp_path / "trials" / "small-grpo" / "t"))
    assert facts is not None
    assert os.getsid(supervisor) == supervisor
    ended = wait_until(lambda: _status_when_final(facts.name, tmp_path / "trials"), "the end of the trial")
    assert ended["state"] == "COMPLETE"
    assert list(trial_processes(facts.uuid)) == []


def test_wait_tells_progress_and_ends_and_resume_does_nothing_for_a_trial_that_is_done(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "trials"
    _use_stub_workers(monkeypatch, {"master_worker/0": ["exit 2", "finish 0.2 3"]})
    assert _submit(monkeypatch, experiment, "--local", "--wait", "-n", "f", fileroot=root) == 6
    assert "FAILED: master_worker/0 exit 2" in capsys.readouterr().out
    assert _submit(monkeypatch, "--resume", "f", "-s", "seed=4", fileroot=root) == 2
    assert "leave out -s seed: " in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert _submit(monkeypatch, "--resume", "f", "--local", "--layout", "jobs", fileroot=root) == 2
    assert "leave out --layout, --local: " in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert _submit(monkeypatch, "--resume", "f", "-s", "allocation=hf:d1+fsdp:d2", "--wait", fileroot=root) == 0
    output = capsys.readouterr().out
    for words in ("step 3/", "reward 0.75", "small-grpo/f COMPLETE", "page.html", "rl-status small-grpo/f"):
        assert words in output, output
    assert len(list(root.glob("*/f/logs/attempt-1/model_worker-*"))) == 2
    assert "attempt 1" in run("rl-status", "f", fileroot=root).stdout
    assert _submit(monkeypatch, "--resume", "f", fileroot=root) == 0
    assert "is complete; there is nothing to resume" in capsys.readouterr().out
    assert _submit(monkeypatch, experiment, "--local", "-n", "f", fileroot=root) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(("slot", "content"), [(1, None), (2, b'{"kind":'), (3, b"")])
def test_a_damaged_trial_log_is_refused_in_one_line_before_anything_is_asked_for(
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slot: int,
    content: bytes | None,
) -> None:
    trial = prepare.prepare(experiment, _small(tmp_path), trial_name="d", mode="local")
    start.create(trial)
    for _ in range(3):
        TrialLog(trial.directory.log_path).claim("job")
    path = trial.directory.log_path / f"{slot:08d}"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(prepare, "_LOG_PATIENCE_S", 0.0)
    attempts = sorted(trial.directory.control_path.iterdir())
    assert _submit(monkeypatch, "--resume", "d", fileroot=tmp_path / "trials") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: trial small-grpo/d cannot be resumed: ") and f"{slot:08d}" in line
    assert sorted(trial.directory.control_path.iterdir()) == attempts


def test_of_those_who_submit_at_once_each_gets_a_name_unless_it_was_chosen(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(plan: RunPlan, *, tries: bool) -> KeptCode:
        looks.append(plan.trial.trial)
        return KeptCode(contents={"own.py": b"x = 1\n"})

    monkeypatch.setattr(prepare, "look_at_code", look)

    def make(name: str | None = None, **tried: KeptCode) -> prepare.Submission:
        return prepare.prepare(experiment, _small(tmp_path), trial_name=name, mode="local", **tried)

    together = [make() for _ in range(3)]
    made = [create_under_a_free_name(submission, make) for submission in together]
    assert [submission.plan.trial.trial for submission in made] == ["trial-1", "trial-2", "trial-3"]
    assert len({submission.plan.trial.uuid for submission in (*together, *made)}) == 5
    assert looks == ["trial-1"] * 3, "what was tried under one name is not tried again under the next"
    assert all((submission.directory.code_path / "own.py").exists() for submission in made)
    chosen = [make("mine"), make("mine")]
    create_under_a_free_name(chosen[0], make)
    with pytest.raises(prepare.NameTakenError):
        create_under_a_free_name(chosen[1], make)


def test_a_job_that_was_taken_keeps_its_folder_though_the_journal_cannot_be_written(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Taken(SlurmClient):
        def submit(self, options: Sequence[str], script: Path) -> str:
            return "7"

    prepared = prepare.prepare(experiment, _small(tmp_path), trial_name="q", mode="local")
    plan = prepared.plan.model_copy(update={"mode": "slurm"})
    submission = replace(prepared, plan=plan, layout=plan_layout(plan))
    start.create(submission)
    submission.directory.journal_path.mkdir()
    monkeypatch.setattr(start, "SlurmCluster", lambda: SlurmCluster(Taken()))
    assert start.start(submission) == "7"
    assert submission.directory.plan_path.exists() and "could not be written" in caplog.text
    submission.directory.journal_path.rmdir()


def files_of(directory: TrialDirectory) -> dict[str, bytes]:
    """All that is in a trial's folder, but for locks and what the journal adds."""
    found = {path.relative_to(directory.path).as_posix(): path for path in directory.path.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else os.readlink(path).encode() if path.is_symlink() else b""
        for name, path in found.items()
        if not name.endswith((".lock", "events.jsonl"))
    }


ENDS_AFTER_IT_HAS_THE_LOCK = (
    "import sys; from pathlib import Path; from corral.experiments.trial.directory import TrialDirectory; "
    "from corral.launcher.trial.lock import lock_supervisor; "
    "lock_supervisor(TrialDirectory(Path(sys.argv[2])), patience_s=5.0, claim_decides=False, job_id=''); "
    "raise SystemExit('no SimpleQueue')"
)


def test_a_resume_that_does_not_start_or_has_other_data_changes_nothing(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "trials"
    _use_stub_workers(monkeypatch, {"master_worker/0": ["exit 2"]})
    assert _submit(monkeypatch, experiment, "--local", "--wait", "-n", "f", fileroot=root) == 6
    directory = TrialDirectory(root / "small-grpo" / "f")
    before, status = files_of(directory), _status_when_final("f", root)
    for code in ("raise SystemExit('no SimpleQueue')", ENDS_AFTER_IT_HAS_THE_LOCK):
        monkeypatch.setattr(start, "SUPERVISOR_COMMAND", [sys.executable, "-c", code])
        assert _submit(monkeypatch, "--resume", "f", "-s", "allocation=hf:d1+fsdp:d2", fileroot=root) == 1
        assert "the supervisor ended at once: no SimpleQueue" in capsys.readouterr().err
        assert files_of(directory) == before, code
    after = _status_when_final("f", root)
    assert status is not None and after is not None
    assert [(one["state"], one["note"], one["attempt"]) for one in (status, after)] == [
        ("FAILED", "master_worker/0 exit 2 (it refused its configuration)", 0)
    ] * 2
    (spec,) = RunPlan.from_json(directory.plan_path.read_bytes()).all_of(RolloutWorkerSpec)
    (data,) = spec.dataset.sources[""].files
    data.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    for arguments in (("--dry-run",), ()):
        assert _submit(monkeypatch, "--resume", "f", *arguments, fileroot=root) == 2
        assert "has changed since the trial was submitted" in capsys.readouterr().err
    assert files_of(directory) == before


def test_a_resume_that_the_cluster_refuses_changes_nothing(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(SlurmClient):
        def submit(self, options: Sequence[str], script: Path) -> str:
            raise SlurmError("sbatch failed with exit 1: QOSMaxSubmitJobPerUserLimit")

    prepared = prepare.prepare(experiment, _small(tmp_path), trial_name="q", mode="local")
    plan = prepared.plan.model_copy(update={"mode": "slurm"})
    submission = replace(prepared, plan=plan, layout=plan_layout(plan))
    directory = submission.directory
    start.create(submission)
    record_attempt(directory, attempt=0, resume=False, mode="slurm")
    directory.start_attempt_logs(0)
    write_end(directory, AttemptEnd(attempt=0, state=EndState.FAILED, cause="boom", then=""))
    before = files_of(directory)
    monkeypatch.setattr(start, "SlurmCluster", lambda: SlurmCluster(Refusing()))
    monkeypatch.setattr(start, "refuse_living", lambda plan, directory: None)
    with pytest.raises(SlurmError, match="QOSMaxSubmit"):
        start.start(submission, resume=True)
    assert files_of(directory) == before


def test_a_supervisor_that_cannot_start_leaves_no_trial(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", [sys.executable, "-c", "raise SystemExit('no such thing')"])
    assert _submit(monkeypatch, experiment, "--local", "-n", "x", fileroot=tmp_path / "trials") == 1
    assert "no such thing" in capsys.readouterr().err
    assert list((tmp_path / "trials" / "small-grpo").iterdir()) == []


@pytest.mark.usefixtures("obeys_ctrl_c")
def test_a_start_that_is_interrupted_ends_the_supervisor_before_its_folder_goes(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "pid"
    told_by = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", [sys.executable, "-c", told_by])
    submission = prepare.prepare(experiment, _small(tmp_path), trial_name="t", mode="local")
    start.create(submission)

    def interrupt() -> None:
        wait_until(lambda: told.exists() and told.read_text(), "the supervisor's process")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        start.start(submission)
    interrupter.join()
    assert process_start_ticks(int(told.read_text())) is None
    assert not submission.directory.path.exists()


@pytest.mark.usefixtures("obeys_ctrl_c")
def test_an_interrupt_that_comes_while_the_supervisor_is_being_started_ends_it(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", [sys.executable, "-c", "import time; time.sleep(600)"])
    started: list[subprocess.Popen[bytes]] = []
    start_process = start.start_process

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(start_process(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(start, "start_process", interrupted)
    submission = prepare.prepare(experiment, _small(tmp_path), trial_name="t", mode="local")
    start.create(submission)
    with pytest.raises(KeyboardInterrupt):
        start.start(submission)
    assert started[0].returncode is not None
    assert not submission.directory.path.exists()


@pytest.mark.slow
def test_a_supervisor_that_takes_long_to_start_is_waited_for_as_long_as_it_lives(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_stub_workers(monkeypatch, {"master_worker/0": ["finish 0.2"]})
    late = [
        sys.executable,
        "-c",
        f"import os, sys, time; time.sleep(21); os.execv({COMMAND[0]!r}, [*{COMMAND!r}, *sys.argv[1:]])",
    ]
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", late)
    assert _submit(monkeypatch, experiment, "--local", "-n", "x", fileroot=tmp_path / "trials") == 0
    trials = tmp_path / "trials"
    assert wait_until(lambda: _status_when_final("small-grpo/x", trials), "the end of the trial")["state"] == "COMPLETE"


def _small(tmp_path: Path) -> list[str]:
    return [f"cluster.fileroot={tmp_path / 'trials'}"]


def _use_stub_workers(monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, list[str]]) -> None:
    """Starts are those of the product, but for the workers' program."""
    monkeypatch.setattr(start, "SUPERVISOR_COMMAND", COMMAND)
    create = start.create

    def create_with_behaviour(submission: prepare.Submission) -> None:
        create(submission)
        (submission.directory.path / "stub.json").write_text(json.dumps(behaviour))

    monkeypatch.setattr(start, "create", create_with_behaviour)


def _submit(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, fileroot: Path) -> int:
    monkeypatch.setenv("CORRAL_FILEROOT", str(fileroot))
    monkeypatch.setattr(sys, "argv", ["rl-submit", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        submit_main()
    return int(ended.value.code or 0)


def _status_when_final(trial: str, fileroot: Path) -> dict[str, str] | None:
    shown = run("rl-status", trial, "-o", "json", fileroot=fileroot)
    (status,) = json.loads(shown.stdout)
    return status if status["state"] in ("COMPLETE", "FAILED", "LOST", "STOPPED") else None


def test_a_folder_that_is_gone_is_an_error_with_a_way_out(experiment: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone}; exec {BIN / 'rl-submit'} {experiment} --local"
    ended = subprocess.run(["sh", "-c", command], cwd=gone, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "is not there any more" in ended.stderr and "cd to one that is" in ended.stderr
