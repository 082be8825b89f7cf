"""The driver of everything that needs a GPU: no GPU, no run; each step is told of, whatever becomes of it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu.report import MAX_LINES, Result, render
from benchmarks.gpu.steps import Step, steps
from benchmarks.run_recipes import all_recipes, gpu_settings

ROOT = Path(__file__).parents[2]


def step(
    code: str, *, name: str = "one", timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
) -> Step:
    command = [sys.executable, "-c", code]
    return Step(name=name, shows="it", command=command, timeout_s=timeout_s, environment=environment or {})


def result(output: Sequence[str], *, exit_code: int | None = 0) -> Result:
    return Result(step=step("pass"), exit_code=exit_code, seconds=1.4, output=output)


def test_without_a_gpu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--reports", str(reports)])
    assert driver.main() == 2
    assert "no GPU" in capsys.readouterr().err and not reports.exists()


def test_a_step_that_fails_leaves_the_next_to_be_run_and_both_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = [step("raise SystemExit('broken')", name="first"), step("print('figures', 1 + 1)", name="second")]
    monkeypatch.setattr(driver, "steps", lambda **_: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--reports", str(tmp_path)])
    assert driver.main() == 1
    first, second = ((tmp_path / f"{name}.md").read_text() for name in ("first", "second"))
    assert "failed with 1" in first and "broken" in first
    assert "figures 2" in second and "passed" in second


def test_a_step_that_hangs_is_ended_at_its_deadline() -> None:
    hanging = step("print('begun', flush=True)\nimport signal; signal.pause()", timeout_s=1.0)
    ended = driver.run(hanging)
    assert ended.exit_code is None and ended.verdict == "ended after 1 s"
    assert ended.output == ["begun"]


def test_a_step_has_its_own_environment() -> None:
    shown = driver.run(step("import os; print(os.environ['SHOWN'])", environment={"SHOWN": "this"}))
    assert shown.output == ["this"] and shown.verdict == "passed"


def test_a_report_names_machine_command_and_figures_and_the_end_of_long_output() -> None:
    text = render(result([f"line {n}" for n in range(MAX_LINES + 5)]), machine={"GPU": "NVIDIA H100"})
    assert "- GPU: NVIDIA H100" in text
    assert "`python -c pass`" in text
    assert "... 5 lines before\nline 5\n" in text and f"line {MAX_LINES + 4}\n```" in text


def test_the_most_worth_comes_first_and_no_step_takes_longer_than_eight_minutes() -> None:
    chosen = steps(device="cuda", sizes=["0.5B", "1.5B"], visible=["0"], fileroot="x")
    assert [one.name for one in chosen][:5] == ["tests", "training-0.5B", "training-1.5B", "sglang", "trial"]
    assert {one.timeout_s for one in chosen} == {480.0}


def test_one_gpu_is_shared_by_trainer_and_generation_server() -> None:
    def trial(visible: Sequence[str]) -> Step:
        return next(s for s in steps(device="cuda", sizes=["0.5B"], visible=visible, fileroot="x") if s.name == "trial")

    assert trial(["3"]).environment == {"CUDA_VISIBLE_DEVICES": "3,3"}
    assert trial(["3", "5", "7"]).environment == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert "--gpu" in trial(["3"]).command


def test_on_a_gpu_each_worker_of_a_recipe_that_computes_gets_one() -> None:
    settings = {path.name: gpu_settings(path) for path in all_recipes()}
    assert settings["arithmetic_sft.yaml"] == ["groups.model_worker.scheduling.gpu=1"]
    assert settings["arithmetic_grpo.yaml"] == [
        "groups.model_worker.scheduling.gpu=1",
        "groups.generation_server.scheduling.gpu=1",
    ]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_lock_holds_a_version_in_range_of_each_dependency_and_carried_wheels_are_of_these_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = {canonicalize_name(name): version for name, version in pins("lock.txt").items()}
    for requirement in map(Requirement, [*project["dependencies"], *extras["megatron"], *extras["dev"]]):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement
    carried = {canonicalize_name(name): version for name, version in pins("gpu-wheels.txt").items()}
    assert carried == {name: locked[name] for name in carried}
    assert {Requirement(text).name for text in extras["megatron"]} <= carried.keys()
    assert "torch" not in carried, "a machine with a GPU has the torch that fits its driver"


def test_an_environment_with_a_version_out_of_range_is_refused_with_both(tmp_path: Path) -> None:
    old = tmp_path / "torch-2.10.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    command = [sys.executable, ROOT / ".ci/check-gpu-venv", "cpu"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert found.returncode == 2
    assert "torch is 2.10.0, and corral needs <2.14,>=2.11" in found.stderr
    assert subprocess.run(command).returncode == 0
