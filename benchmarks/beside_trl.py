"""The same GRPO work as TRL's trainer does it: answer tokens per CPU second, and by the clock, in turns on one machine.

    python3 -m venv build/trl && build/trl/bin/pip install torch==2.13.0 trl
    python benchmarks/beside_trl.py --trl build/trl/bin/python [--rounds 3] [--steps 24]

A Qwen2 of 3 M random weights in float32; a step is 4 prompts with 8 answers of at most 64 tokens, a reward in Python,
and one AdamW step. corral runs as a trial, by rl-submit, with all of its processes: generation and training at the same
time, one thread each, answers at most one version old. TRL takes turns at both in one process, with one thread and
with two. Loading and the first steps are left out. Answers may end early by chance: tokens are counted, not steps.

The targets: 1.1 x the tokens per CPU second, and 1.4 x by the clock, of the better of TRL's two.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from corral.launcher.trial.processes import trial_processes  # noqa: E402 - found through the line above
from corral.workers.data.arithmetic import make_problems, write_model, write_rows  # noqa: E402

PROMPTS, GROUP_SIZE, NEW_TOKENS = 4, 8, 64
WARM_STEPS = 4
DEADLINE_S = 600.0
TARGET_CPU, TARGET_CLOCK = 1.1, 1.4
REWARD = """
def share_of_even_digits(problem, answer):
    return sum(answer.count(digit) for digit in "02468") / max(len(answer), 1)
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """The clock and all CPU seconds and answer tokens so far, right after a step."""

    clock: float
    cpu_s: float
    tokens: float

    def rates_since(self, before: "Moment") -> tuple[float, float]:
        """Tokens per CPU second, and per second."""
        tokens = self.tokens - before.tokens
        return tokens / (self.cpu_s - before.cpu_s), tokens / (self.clock - before.clock)


def main() -> None:
    """Takes turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="a Python that has TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-beside-trl-") as name:
        folder = Path(name)
        _make_material(folder, steps=options.steps)
        rates: dict[str, list[tuple[float, float]]] = {}
        for number in range(options.rounds):
            for threads in (1, 2):
                found = _run_trl(folder, options.trl.absolute(), threads=threads, steps=options.steps)
                rates.setdefault(f"TRL, {threads} thread{'s' * (threads > 1)}", []).append(found)
            rates.setdefault("corral", []).append(_run_corral(folder, f"round-{number}", steps=options.steps))
    _print(rates)


def _print(rates: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    middle = {way: [statistics.median(column) for column in zip(*taken, strict=True)] for way, taken in rates.items()}
    print(f"{'':16}{'tokens per CPU s':>18}{'tokens per s':>14}   (medians of {len(rates['corral'])} rounds)")
    for way, (per_cpu_s, per_s) in middle.items():
        print(f"{way:16}{per_cpu_s:18,.0f}{per_s:14,.0f}")
    best = [
        max(column) for column in zip(*(figures for way, figures in middle.items() if way != "corral"), strict=True)
    ]
    by_cpu, by_clock = (ours / theirs for ours, theirs in zip(middle["corral"], best, strict=True))
    print(f"corral against the better: {by_cpu:.2f} x per CPU second (target {TARGET_CPU}), ", end="")
    print(f"{by_clock:.2f} x by the clock (target {TARGET_CLOCK})")


def _make_material(folder: Path, *, steps: int) -> None:
    model = folder / "model"
    write_model(model, seed=1, hidden_size=256, num_layers=4)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    problems = make_problems(seed=1)[: PROMPTS * steps]
    write_rows(folder / "rows.jsonl", problems)
    (folder / "reward.py").write_text(REWARD)


def _run_trl(folder: Path, python: Path, *, threads: int, steps: int) -> tuple[float, float]:
    given = {
        "reward_folder": str(folder),
        "model": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "output": str(folder / "trl"),
        "prompts": PROMPTS,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "steps": steps,
    }
    ran = subprocess.run(
        [str(python), str(ROOT / "benchmarks" / "trl_trainer.py"), json.dumps(given)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    lines = [json.loads(line.removeprefix("STEP ")) for line in ran.stdout.splitlines() if line.startswith("STEP ")]
    if ran.returncode != 0 or len(lines) < steps:
        raise RuntimeError(
            f"TRL ended with {ran.returncode} after {len(lines)} of {steps} steps:\n{ran.stderr[-2000:]}"
        )
    moments = {line["step"]: Moment(line["clock"], line["cpu_s"], line["tokens"]) for line in lines}
    return moments[steps].rates_since(moments[WARM_STEPS])


def _run_corral(folder: Path, trial: str, *, steps: int) -> tuple[float, float]:
    experiment = folder / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(_experiment()))
    # What runs after the last step that is looked at would be cut off by the end of the trial: two steps are left over.
    last = steps - 2
    command = [str(Path(sys.executable).with_name("rl-submit")), str(experiment), "--local", "--wait"]
    options = ["--trial", trial, "--fileroot", str(folder / "trials")]
    directory = folder / "trials" / "beside-trl" / trial
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, cwd=folder) as submitted:
        _wait(lambda: submitted.poll() is not None or len(_steps(directory)) > 0, f"the first step of {directory}")
        if submitted.poll() is not None:
            raise RuntimeError(f"rl-submit ended with {submitted.returncode} before the first step")
        uuid = json.loads((directory / "plan.json").read_bytes())["trial"]["uuid"]
        first = _moment_of(directory, uuid, WARM_STEPS)
        return _moment_of(directory, uuid, last).rates_since(first)


def _moment_of(directory: Path, uuid: str, step: int) -> Moment:
    """As soon as the step has been told."""
    _wait(lambda: len(_steps(directory)) >= step, f"step {step} of {directory}")
    lines = _steps(directory)
    cpu_s = sum(_cpu_s(trial_processes(uuid)))
    tokens = sum(PROMPTS * GROUP_SIZE * line["response_length/mean"] for line in lines)
    return Moment(time.time(), cpu_s, tokens)


def _steps(directory: Path) -> list[dict[str, Any]]:
    try:
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line for line in map(json.loads, lines) if "time/train_s" in line]


def _cpu_s(pids: Iterator[int] | Sequence[int]) -> Iterator[float]:
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        yield times.user + times.system


def _wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.02)


def _experiment() -> dict[str, Any]:
    return {
        "experiment": "async_ppo",
        "name": "beside-trl",
        "allocation": "hf:d1+fsdp:d1",
        "actor": {"path": "model", "max_tokens_per_micro_batch": 4096, "optimizer": {"lr": 1e-4, "weight_decay": 0.0}},
        "ppo": {"group_size": GROUP_SIZE, "n_minibatches": 1},
        "rollout": {
            "max_head_offpolicyness": 1,
            "reward": "reward:share_of_even_digits",
            "sampling": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
        },
        "dataset": {"path": "rows.jsonl", "max_prompt_tokens": 16},
        "train_batch_size": PROMPTS,
        "control": {"commit_every": "1000 steps"},
        "groups": {
            kind: {"scheduling": {"cpu": 1, "gpu": 0, "mem": "1G"}}
            for kind in ("master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker")
        },
    }


if __name__ == "__main__":
    main()
