"""The driver of everything that needs a GPU: no GPU, no run; each step is told of, whatever becomes of it."""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu.report import MAX_LINES, Result, render
from benchmarks.gpu.steps import Step, steps
from corral.experiments.recipes.run_all import all_recipes, gpu_settings

ROOT = Path(__file__).parents[2]


def step(code: str, *, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None) -> Step:
    command = [sys.executable, "-c", code]
    return Step(name="one", shows="it", command=command, timeout_s=timeout_s, environment=environment or {})


def result(output: Sequence[str], *, exit_code: int | None = 0) -> Result:
    return Result(step=step("pass"), exit_code=exit_code, seconds=1.4, output=output)


def test_without_a_gpu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.md"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--report", str(report)])
    assert driver.main() == 2
    assert "no GPU" in capsys.readouterr().err and not report.exists()


def test_a_step_that_fails_leaves_the_next_to_be_run_and_both_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "report.md"
    chosen = [step("raise SystemExit('broken')"), step("print('figures', 1 + 1)")]
    monkeypatch.setattr(driver, "steps", lambda **_: chosen)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--report", str(report)])
    assert driver.main() == 1
    text = report.read_text()
    assert "failed with 1" in text and "broken" in text
    assert "figures 2" in text and "passed" in text


def test_a_step_that_hangs_is_ended_at_its_deadline() -> None:
    hanging = step("print('begun', flush=True)\nimport signal; signal.pause()", timeout_s=1.0)
    ended = driver.run(hanging)
    assert ended.exit_code is None and ended.verdict == "ended after 1 s"
    assert ended.output == ["begun"]


def test_a_step_has_its_own_environment() -> None:
    shown = driver.run(step("import os; print(os.environ['SHOWN'])", environment={"SHOWN": "this"}))
    assert shown.output == ["this"] and shown.verdict == "passed"


def test_a_report_names_machine_command_and_figures_and_the_end_of_long_output() -> None:
    text = render([result([f"line {n}" for n in range(MAX_LINES + 5)])], machine={"GPU": "NVIDIA H100"})
    assert "- GPU: NVIDIA H100" in text
    assert "`python -c pass`" in text
    assert "... 5 lines before\nline 5\n" in text and f"line {MAX_LINES + 4}\n```" in text


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


def test_carried_wheels_are_of_the_versions_that_corral_depends_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["megatron"]}
    pins = dict(requirement.split("==") for requirement in wanted)
    carried = dict(
        line.split("==") for line in (ROOT / ".ci/gpu-wheels.txt").read_text().splitlines() if not line.startswith("#")
    )
    assert {name: version for name, version in carried.items() if name in pins} == {
        name: pins[name] for name in carried.keys() & pins.keys()
    }
    assert set(project["optional-dependencies"]["megatron"]) <= {f"{name}=={carried[name]}" for name in carried}
    assert "torch" not in carried, "a machine with a GPU has the torch that fits its driver"
