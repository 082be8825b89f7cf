"""A trial that has weights on disk and nothing that runs: what rl-eval needs, made in no time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.experiments.config.data import DatasetConfig, EvaluationConfig, EvaluationSampling
from corral.experiments.config.model import ModelConfig
from corral.experiments.config.rollout import EXACT_MATCH, RewardConfig, reward_parts
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, link_files
from corral.experiments.trial.journal import Journal
from corral.experiments.trial.log import TrialLog
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.workers.data.arithmetic import make_problems
from tests.launcher.trials import make_plan

NUM_PROBLEMS = 12


def write_problems(path: Path, count: int = NUM_PROBLEMS) -> Path:
    """Held-out additions."""
    path.write_text("".join(json.dumps(row) + "\n" for row in make_problems(seed=1)[-count:]))
    return path


def make_evaluable_trial(
    fileroot: Path,
    model: Path,
    *,
    commits: Sequence[int] = (1, 2),
    exports: Sequence[int] = (),
    final: int | None = None,
    reward: str = EXACT_MATCH,
    **plan: Any,
) -> TrialDirectory:
    """A trial with copies of `model` as the weights of some steps.

    Args:
        reward: import path.
        plan: for `make_plan`.
    """
    directory = TrialDirectory(fileroot / "exp" / "trial")
    directory.create()
    problems = write_problems(fileroot / "held_out.jsonl")
    directory.plan_path.write_bytes(_plan(directory.path, model, problems, reward, plan).to_json())
    writer = TrialLog(directory.log_path).claim("job 1")
    for step in commits:
        name = f"checkpoints/step-{step:08d}-e1-00000000"
        link_files(model, directory.path / name / "weights")
        writer.commit(
            step=step,
            directory=name,
            manifest_digest="0" * 64,
            ledger_file=f"ledger/1-{step}.json",
            ledger_digest="0" * 64,
            trained=1,
            dropped=0,
        )
    for step in exports:
        link_files(model, directory.exports_path / f"step-{step:08d}")
    if final is not None:
        link_files(model, directory.exports_path / "final")
        Journal(directory.journal_path).append(
            "weights_exported", version=f"1.{final}", directory=str(directory.exports_path / "final")
        )
    return directory


def _plan(path: Path, model: Path, problems: Path, reward: str, plan: dict[str, Any]) -> RunPlan:
    made = make_plan(path, model_workers=1, **({"task": {"cpu": 1, "mem": 1500}} | plan))
    spec = ModelWorkerSpec(
        index=0,
        world_size=1,
        roles=[ModelRoleSpec(role="actor", model=ModelConfig(path=model), optimizer=None)],
        calls=[],
        tokenizer=model,
        takes_samples=True,
        dataset=None,
        evaluation=EvaluationConfig(
            dataset=DatasetConfig(path=problems), sampling=EvaluationSampling(max_new_tokens=4)
        ),
        reward=RewardConfig(reward=reward_parts(reward), reward_timeout_s=120.0),
        total_steps=3,
    )
    others = ("model_worker", "generation_server")  # so that the embedded engine answers
    workers = [spec, *(worker for worker in made.workers if worker.kind not in others)]
    return made.model_copy(update={"workers": workers})
