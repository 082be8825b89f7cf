"""The versions of a trial's weights that can be evaluated, and the request for one evaluation.

    exports/step-*, final, best    --+
    commits of the trial log       --+--> by step --choose--> [Weights] --write_requests--> eval/step-*.request.json

A running trial removes old commits. So the weights of a commit get a second name under `eval/weights/` when the request
is written; the job removes it when it has its result. Exports stay where they are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corral.experiments.checks.data import check_tasks
from corral.experiments.config.data import DatasetConfig, EvaluationConfig, EvaluationSampling, RowKind
from corral.experiments.config.rollout import EngineConfig, RolloutConfig
from corral.experiments.datasets.dataset import Dataset, Look, dataset_spec
from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, atomic_write, link_files
from corral.experiments.trial.evaluation import BestVersion, EvaluationRequest, progress_path, request_path, result_path
from corral.experiments.trial.log import TrialLog
from corral.experiments.worker_specs import GenerationServerSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.launcher.trial.view import TrialView
from corral.scheduling.policy_version import PolicyVersion
from corral.scheduling.scheduling import Scheduling

_EXPORT = re.compile(r"step-(\d+)", re.ASCII)
_DEFAULT_MAX_NEW_TOKENS = 256
_CACHE_TOKENS = 65536  # of the embedded engine, at 64 answers at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A version of the weights on disk."""

    step: int
    directory: Path
    may_vanish: bool
    """Whether the trial removes it in its own time."""
    is_best: bool = False
    """By the trial's own evaluations, so far."""


def find_weights(directory: TrialDirectory) -> dict[int, Weights]:
    """Every version that a trial has on disk, by step; an export goes before a commit of the same step."""
    found: dict[int, Weights] = {}
    for logged in TrialLog(directory.log_path).read().lineage:
        path = directory.inside(logged.commit.directory) / "weights"
        if path.is_dir():
            found[logged.commit.step] = Weights(step=logged.commit.step, directory=path, may_vanish=True)
    final_step = _step_of_final_export(directory)
    if final_step is not None:
        path = directory.exports_path / "final"
        found[final_step] = Weights(step=final_step, directory=path, may_vanish=False)
    for path in sorted(directory.exports_path.glob("step-*")):
        if match := _EXPORT.fullmatch(path.name):
            found[int(match[1])] = Weights(step=int(match[1]), directory=path, may_vanish=False)
    path = directory.exports_path / "best"
    if (best := BestVersion.read(path)) is not None:
        step = PolicyVersion.parse(best.version).step
        found[step] = replace(found.get(step) or Weights(step=step, directory=path, may_vanish=True), is_best=True)
    return dict(sorted(found.items()))


def choose(found: Mapping[int, Weights], wanted: str) -> list[Weights]:
    """The versions that `latest`, `best`, `all` or a step number (several with commas) mean.

    Raises:
        ConfigError: if there is no such version; lists those that there are.
    """
    if not found:
        hint = "the first one is there after the trial's first commit; rl-status shows how far it is"
        raise ConfigError.of("this trial has no weights to evaluate yet", hint=hint)
    if wanted == "all":
        return list(found.values())
    if wanted == "latest":
        return [found[max(found)]]
    if wanted == "best":
        if not (best := [weights for weights in found.values() if weights.is_best]):
            hint = "evaluation.best says by which number, and an evaluation has to have ended"
            raise ConfigError.of("this trial keeps no best weights", hint=hint)
        return best
    chosen: list[Weights] = []
    for part in wanted.split(","):
        if not part.strip().isdecimal() or int(part) not in found:
            have = ", ".join(map(str, found))
            hint = f"there are {have}, and the words latest, best and all; control.save_every keeps more of them"
            raise ConfigError.of(f"there are no weights of step {part.strip()!r}", hint=hint)
        chosen.append(found[int(part)])
    return chosen


def make_evaluation_config(plan: RunPlan, dataset: Path | None, *, max_new_tokens: int | None) -> EvaluationConfig:
    """The trial's own held-out problems, or a file of the same form.

    Raises:
        ConfigError: if the trial has no held-out problems and no file is named, or its rows are no problems.
    """
    trainer = plan.all_of(ModelWorkerSpec)[0]
    own = trainer.evaluation
    if trainer.dataset is not None and trainer.dataset.row_kind == "preferences":
        hint = "its loss and accuracy on held-out preferences are in metrics.jsonl, as eval/loss and eval/accuracy"
        raise ConfigError.of("this trial learns from preferences, and nobody judges answers in it", hint=hint)
    if dataset is None and own is None:
        hint = "name a file with --dataset FILE: one JSON object a line, as in the trial's own dataset"
        raise ConfigError.of("this trial has no held-out problems (`evaluation.dataset`)", hint=hint)
    if own is None:
        sampling = plan.config.get("rollout", {}).get("sampling", {})
        longest = int(sampling.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS))
        form = DatasetConfig.model_validate(plan.config["dataset"])
        own = EvaluationConfig(dataset=form, sampling=EvaluationSampling(max_new_tokens=longest))
    changes: dict[str, Any] = {}
    if dataset is not None:
        changes["dataset"] = own.dataset.of_file(dataset.absolute())
    if max_new_tokens is not None:
        changes["sampling"] = own.sampling.model_copy(update={"max_new_tokens": max_new_tokens})
    return own.model_copy(update=changes)


def make_requests(
    directory: TrialDirectory, plan: RunPlan, chosen: Sequence[Weights], evaluation: EvaluationConfig, folder: Path
) -> list[EvaluationRequest]:
    """The requests for the jobs; writes nothing.

    Raises:
        ConfigError: if the problems are no good.
    """
    server, rollout = _how_to_answer(plan, evaluation)
    if rollout.asks_judge:
        hint = "with evaluation.dataset the trial itself evaluates"
        raise ConfigError.of("a reward asks the trial's own judge, which is there while the trial runs", hint=hint)
    compares = rollout.compares and not rollout.makes_episodes
    kind: RowKind = "answers" if compares else "prompts"
    Look(Dataset.open(evaluation.dataset, kind=kind)).check()
    digest = dataset_spec(evaluation.dataset, kind=kind).sha256
    if rollout.environment is not None and (problems := list(check_tasks(evaluation.dataset, ()))):
        raise ConfigError(problems)
    held = {
        weights.step: folder / "weights" / f"step-{weights.step:08d}" if weights.may_vanish else weights.directory
        for weights in chosen
    }
    return [
        EvaluationRequest(
            step=weights.step,
            weights=held[weights.step],
            source=directory.relative(weights.directory),
            are_weights_ours=weights.may_vanish,
            evaluation=evaluation,
            dataset_sha256=digest,
            server=server.model_copy(
                update={"initial_weights": held[weights.step], "initial_version": f"0.{weights.step}"}
            ),
            rollout=rollout,
            seed=plan.seed,
            result=result_path(folder, weights.step),
            code=directory.code_path if plan.code else None,
            code_digests=plan.code,
        )
        for weights in chosen
    ]


def write_request(directory: TrialDirectory, request: EvaluationRequest) -> Path:
    """Puts down what a job has to do, removes what an earlier request left, and holds on to the weights.

    Raises:
        ConfigError: if the trial has removed the weights in this moment.
    """
    request.result.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in (request.result, progress_path(request.result)):
        leftover.unlink(missing_ok=True)
    if request.are_weights_ours and not request.weights.is_dir():
        try:
            link_files(directory.inside(request.source), request.weights)
        except FileNotFoundError:
            hint = "ask for latest; control.save_every keeps weights for longer"
            raise ConfigError.of(f"the trial has just removed {request.source}", hint=hint) from None
    path = request_path(request.result)
    atomic_write(path, request.model_dump_json(indent=1).encode())
    return path


def evaluation_folder(directory: TrialDirectory, dataset: Path | None) -> Path:
    """Where results are kept: apart for problems that are not the trial's own."""
    if dataset is None:
        return directory.evaluations_path
    return directory.evaluations_path / f"on-{re.sub(r'[^A-Za-z0-9._-]', '_', dataset.stem)}"


def _how_to_answer(plan: RunPlan, evaluation: EvaluationConfig) -> tuple[GenerationServerSpec, RolloutConfig]:
    """As the trial's own servers and rollout workers do; where it has none, the embedded engine, and one answer."""
    if servers := plan.all_of(GenerationServerSpec):
        return servers[0].model_copy(update={"records_experts": False}), plan.all_of(RolloutWorkerSpec)[0].rollout
    spec = plan.all_of(ModelWorkerSpec)[0]
    role = spec.roles[0]
    engine = EngineConfig(
        dtype="bfloat16" if role.model.dtype == "bfloat16" else "float32",
        max_total_tokens=max(_CACHE_TOKENS, evaluation.dataset.max_prompt_tokens + evaluation.sampling.max_new_tokens),
    )
    server = GenerationServerSpec(index=0, initial_weights=role.model.path, engine=engine)
    return server, RolloutConfig(**dict(spec.reward))


def scheduling_of(plan: RunPlan) -> Scheduling:
    """The resources of a job: those of a generation server, or, if there is none, of a training rank, on one GPU."""
    if (group := plan.scheduling.get("generation_server")) is not None:
        return group.scheduling
    rank = plan.scheduling["model_worker"].scheduling
    return rank.model_copy(update={"gpu": min(rank.gpu, 1)})


def _step_of_final_export(directory: TrialDirectory) -> int | None:
    """The journal says which version `exports/final` is."""
    if not (directory.exports_path / "final").is_dir():
        return None
    exported = TrialView.open(directory).named("weights_exported")
    versions = [event["version"] for event in exported if Path(str(event["directory"])).name == "final"]
    return PolicyVersion.parse(versions[-1]).step if versions else None
