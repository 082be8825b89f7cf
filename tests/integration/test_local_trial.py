"""A GRPO trial on this machine, from rl-submit to its report: five kinds of real processes, and their own Redis."""

import json
import shlex
import socket
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from corral.experiments.prompts.tokens import encode_prompt, eos_token_ids, load_tokenizer
from corral.launcher.timeline.reader import spans_of, steps_of
from corral.launcher.timeline.sentence import Figures
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_generator_and_trainer_agreed,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.trial_helpers import ROOT, WORKERS, Material, Trial, read_lines, run_program
from tests.launcher.page.page_trials import check_page
from tests.test_docs import table_below
from tests.trace_format import check_format

TORCH_FREE = ("master_worker/0", "gserver_manager/0", "rollout_worker/0")


@pytest.mark.slow  # the trial of test_synchronous_ppo.py is watched the same way
def test_a_trial_trains_every_prompt_once_and_within_the_staleness_bound(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    others = {"control.commit_every": "3 steps", "weights.transport": "broadcast", "actor.shared_prompts": "off"}
    settings = watched_settings(material) | others
    trial = start_trial(**WATCHED, overrides=settings | {"rollout.max_head_offpolicyness": 1})
    check_watched_to_its_end(trial, material, tmp_path, eta=1, shares_prompts=False)


WATCHED: Mapping[str, Any] = {"num_rows": 44, "pause_s": 0.1}  # no multiple of the batch: the last one is smaller
NUM_STEPS = 6


def watched_settings(material: Material) -> dict[str, object]:
    """Of a trial for `check_watched_to_its_end`, beside its eta and whether it shares prompts."""
    return {
        "control.commit_every": "1 step",
        "evaluation.every": "3 steps",
        "evaluation.batch_size": 3,
        "evaluation.more.twice": material.held_out,
        "weights.transport": "shared_memory",
        "actor.shared_prompts": "auto",
        "dataset.columns.temperature": "warmth",
        "evaluation.dataset.columns.temperature": "warmth",  # which is not heeded
    }


def check_watched_to_its_end(
    trial: Trial, material: Material, tmp_path: Path, *, eta: int, shares_prompts: bool
) -> None:
    """Everything that a user sees of a trial from its start to its report."""
    trial.wait_for_steps(1)
    rows = trial.wait_until_running()
    assert set(rows) == set(WORKERS)
    for worker, row in rows.items():
        assert (row["state"], row["restarts"], row["node"]) == ("UP", 0, socket.gethostname()), row
        assert row["pid"] == trial.pid(worker) and row["phase"], row
    holders = set(WORKERS) - {"rollout_worker/0"}  # it holds no weights
    assert {worker for worker in WORKERS if rows[worker]["version"].rpartition(".")[2].isdigit()} == holders
    assert [worker for worker in WORKERS if not _maps_torch(trial.pid(worker))] == sorted(TORCH_FREE, key=WORKERS.index)
    trial.wait_for(
        lambda: _last_update(trial).get("bytes_read", 0) > 0, "a server to say what its new weights have cost"
    )
    assert _last_update(trial)["staged_s"] > 0.0 and _last_update(trial)["stopped_s"] > 0.0
    trial.full_speed()
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    assert check_no_token_was_too_old(trial, eta=eta) == eta  # the bound is met, and made use of
    assert trial.train_steps() == list(range(1, NUM_STEPS + 1))
    compared = check_generator_and_trainer_agreed(trial)
    # What older weights have made is not compared, nor what an update of the same step comes before.
    assert 0 < compared < sum(line.get("train/tokens", 0.0) for line in trial.metrics())
    assert "found      logprob check: OK, max difference " in trial.run("rl-status")
    check_kept_answers(trial)
    check_timeline(trial)
    evaluated = [line for line in trial.metrics() if "eval/accuracy" in line]
    steps = [line["step"] for line in evaluated]
    assert (steps[0], steps[-1]) == (0, NUM_STEPS) and steps == sorted(set(steps)), "one at a time, and each once"
    assert any(3 <= step < NUM_STEPS for step in steps), "beside training"
    for line in evaluated:
        assert line["eval/problems"] == line["eval/twice/problems"] == 8 and line["eval/unjudged"] == 0
        assert line["step"] <= line["eval/version_min"] <= line["eval/version_max"]
    final = trial.directory.exports_path / "final"
    for line, weights in ((evaluated[0], material.model), (evaluated[-1], final)):
        assert line["eval/version_min"] == line["eval/version_max"] == line["step"]
        reward, length = greedy_answers(weights, material.held_out)
        for name in ("eval", "eval/twice"):
            assert line[f"{name}/reward/mean"] == pytest.approx(reward)
            assert line[f"{name}/response_length/mean"] == length
    assert ("answers of one prompt share it" in trial.logs("model_worker/0")) is shares_prompts
    assert [event["code"] for event in trial.events("task_ended") if event["who"] != "redis"] == [0] * len(WORKERS)
    assert (trial.directory.exports_path / "final" / "model.safetensors").exists()
    check_page(trial.directory.page_path, tmp_path, headline=f"COMPLETE step {NUM_STEPS}/{NUM_STEPS}")


def check_kept_answers(trial: Trial) -> None:
    """What people may read is what was trained on: answers of both sides, with what was computed of them."""
    trained = {(line["step"], line["uid"]) for line in read_lines(trial.directory.trajectories_path)}
    rows = [
        json.loads(line) for line in trial.run("rl-samples", "--step", "all", "-n", "9999", "-o", "jsonl").splitlines()
    ]
    assert rows and {(row["step"], row["uid"]) for row in rows} <= trained
    for row in rows:
        assert len(row["ids"]) == len(row["trainer_logprobs"]) == len(row["advantages"])
        assert row["said"] and 0.0 <= row["reward"] <= 1.0
        assert row["staleness"] > 0 or row["gap"] < 1e-3
    check_questions(trial, rows[-1])
    assert rows[-1]["said"][:4] in trial.run("rl-samples", "--show", f"{rows[-1]['uid']}#{rows[-1]['sequence']}")


def check_timeline(trial: Trial) -> None:
    """Every worker is in it, on one clock, and what the master did makes up the time of its steps."""
    folder, lines = trial.directory.timeline_path, [line for line in trial.metrics() if "time/train_s" in line]
    steps = steps_of(folder)
    assert list(steps) == trial.train_steps()
    figures = Figures(spans_of(folder, list(steps)))
    assert sum(figures.master_s.values()) == pytest.approx(figures.wall_s, rel=0.02)
    assert sum(step.seconds for step in steps.values()) == pytest.approx(figures.wall_s, rel=0.02)
    for line in lines:  # a line is written before the end of its step, and not a step before
        step = steps[line["step"]]
        assert step.start_s < line["time"] < step.end_s, line["step"]
    told = figures.master_s["wait for a batch"]
    assert told == pytest.approx(sum(line["time/wait_s"] for line in lines), abs=0.1 * figures.wall_s)
    file = folder / "trace.json"
    assert f"spans of steps 1 to {NUM_STEPS}" in trial.run("rl-trace", "--steps", "all", "-o", str(file))
    check_format(json.loads(file.read_bytes()))
    assert {span.worker for span in figures.spans} == set(WORKERS)
    rooms = {(span.worker.partition("/")[0], span.lane) for span in figures.spans}
    assert {("rollout_worker", "answers"), ("rollout_worker", "rewards"), ("generation_server", "weights")} < rooms
    said = trial.run("rl-trace")
    assert "of " in said and said.splitlines()[0] in trial.run("rl-status", "--explain")


def check_questions(trial: Trial, answer: dict[str, Any]) -> None:
    """The commands that the documents name as answers, on an answer that is kept."""
    row = answer["uid"].partition(":")[2]
    asked = [one[1].strip("`") for one in table_below(ROOT / "docs/view.md", "Questions")[1:]]
    assert len(asked) >= 10
    for command in asked:
        given = {"TRIAL OTHER": "{} {}", "TRIAL": "{}", "problem-17": row}
        given |= {"--step 40": f"--step {answer['step']}", "--steps 77": f"--steps {answer['step']}"}
        for name, value in given.items():
            command = command.replace(name, str(value))
        words = [word.replace("{}", str(trial.directory.path)) for word in shlex.split(command)]
        words = [str(trial.directory.path / word) if word.endswith((".tar.gz", ".html")) else word for word in words]
        said = run_program(words, environment=trial.environment)
        if row in command:
            assert answer["uid"] in said, said


def greedy_answers(weights: Path, problems: Path) -> tuple[float, float]:
    """Mean reward, by `paced_rewards.digits`, and mean tokens of the answers that transformers gives by itself."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    tokenizer, ends = load_tokenizer(weights), eos_token_ids(weights)
    rewards, lengths = [], []
    for line in problems.read_text().splitlines():
        prompt = torch.tensor([encode_prompt(tokenizer, json.loads(line)["prompt"])])
        made = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=list(ends), pad_token_id=0)
        ids = made[0, prompt.shape[1] :].tolist()
        text = tokenizer.decode(ids[:-1] if ids[-1] in ends else ids)
        rewards.append(sum(character.isdigit() for character in text) / max(len(text), 1))
        lengths.append(len(ids))
    return statistics.fmean(rewards), statistics.fmean(lengths)


def _last_update(trial: Trial) -> dict[str, Any]:
    return trial.workers()["generation_server/0"]["weight_update"] or {}


def _maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
