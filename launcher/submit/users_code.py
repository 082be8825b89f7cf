"""A user's own code before a trial starts: imported and tried in a process of its own, then kept with the trial.

    RunPlan ──import paths──► python -m corral.workers.user_code ──Findings──► ConfigError with file and line
                                                                └──► KeptCode ──► {trial}/code/, plan.code
    plan.json, {trial}/code/ ──as it was──► nothing to do
                             ──mended by hand──► tried again, new digests

No process is started where a plan names no code but corral's. It runs in this command's Python, as workers do that are
in no container. A package that this Python lacks may exist in a group's container, so it is a warning, not an error.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from corral.experiments.config.data import EvaluationConfig
from corral.experiments.config.rollout import RewardConfig, RolloutConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.errors import ConfigError, display_path
from corral.experiments.inputs.users_code import CallQuestion, Findings, Question, TriedRow, users_paths
from corral.experiments.inputs.users_process import as_problem, ask, importing_from, users_root
from corral.experiments.plan import RunPlan
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.trial.directory import TrialDirectory, atomic_write
from corral.experiments.trial.mode import has_jobs
from corral.experiments.worker_specs import DatasetSpec, ModelRoleSpec, ModelWorkerSpec, RolloutWorkerSpec
from corral.scheduling.model_function_call import CallType, ModelFunctionCall

_MAX_BYTES = 32 * 2**20
_MAX_FILES = 5000
_LISTED = 3
_SANDBOX_HINT = "rl-doctor looks at the nodes; if they can make sandboxes, add --no-checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCode:
    """The files for the folder `code` of a trial."""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    """By name below the folder."""
    packages: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    """The findings, in a few words each."""
    warnings: tuple[str, ...] = ()

    def in_plan(self, plan: RunPlan) -> RunPlan:
        """The plan with the digests by which workers know the code."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in self.contents.items()}
        return plan.model_copy(update={"code": digests, "packages": dict(self.packages)})

    def write(self, directory: TrialDirectory) -> None:
        """Puts the files down."""
        for name, content in self.contents.items():
            path = directory.code_path / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(path, content)


def look_at_code(plan: RunPlan, *, tries: bool = True) -> KeptCode:
    """Imports what the plan names of the user's own, tries it, and reads the files that it consists of.

    Args:
        tries: whether a reward, an agent, and calls with something of the user's own are tried besides.

    Raises:
        ConfigError: if the code cannot be imported, does not fit its place, or is too large to be kept.
    """
    paths = users_paths(_import_paths(plan))
    if not paths:
        return KeptCode()
    findings = ask(_question(plan, paths, tries=tries))
    contained = [kind for kind, group in plan.scheduling.items() if group.scheduling.container_image]
    missing = [one for one in findings.problems if one.kind in ("missing_module", "no_sandbox") and contained]
    untried = [one for one in findings.problems if one.kind == "untried"]
    doubtful = [one for one in findings.problems if one.kind == "doubtful"]
    if refused := [one for one in findings.problems if one not in (*missing, *untried, *doubtful)]:
        hint_by_kind = {"no_sandbox": _SANDBOX_HINT if has_jobs(plan.mode) else ""}
        named = [one.model_copy(update={"hint": one.hint or hint_by_kind.get(one.kind, "")}) for one in refused]
        raise ConfigError([as_problem(plan.config, one) for one in named])
    warnings = [f"{one.import_path} was not tried: {one.message}; the containers may have it" for one in missing]
    warnings += [f"{one.import_path} was not tried to the end: {one.message}" for one in untried]
    warnings += [f"{one.import_path} {one.message}" for one in doubtful]
    if findings.not_kept:
        listed = ", ".join(display_path(Path(path)) for path in findings.not_kept[:_LISTED])
        warnings.append(f"files that your code reads are too large to be kept with the trial: {listed}")
    sandbox = "sandbox ok on this machine, nodes not asked" if has_jobs(plan.mode) else "sandbox ok"
    checks = (sandbox,) if findings.sandboxed else ()
    return KeptCode(contents=_read(findings), packages=findings.packages, checks=checks, warnings=tuple(warnings))


def look_again(plan: RunPlan, directory: TrialDirectory) -> KeptCode:
    """The kept code of a trial that goes on; it is imported and tried where somebody has changed it since.

    Raises:
        ConfigError: if it is not there any more, or what was changed does not work.
    """
    if not plan.code:
        return KeptCode()
    contents: dict[str, bytes] = {}
    for name in plan.code:
        try:
            contents[name] = (directory.code_path / name).read_bytes()
        except OSError as error:
            raise ConfigError.of(
                f"the trial's copy of {name} cannot be read: {error}", hint="put it back; the trial runs no other code"
            ) from error
    kept = KeptCode(contents=contents, packages=plan.packages)
    if kept.in_plan(plan).code == plan.code:
        return kept
    with importing_from(directory.code_path):
        return look_at_code(plan)


def _import_paths(plan: RunPlan) -> Iterator[str]:
    yield str(plan.config.get("experiment", ""))
    yield from plan.tracking.to
    for worker in plan.all_of(RolloutWorkerSpec):
        yield from (part.function for part in worker.rollout.reward.values())
        yield from (worker.rollout.agent, worker.dataset.config.sampler or "")
    for rank in plan.all_of(ModelWorkerSpec):
        yield from (part.function for part in rank.reward.reward.values())
        yield from (call.implementation for call in rank.calls)
        for role in rank.roles:
            yield from (role.ppo.loss, role.ppo.advantage) if role.ppo is not None else ()
            yield role.dpo.loss


def _question(plan: RunPlan, paths: tuple[str, ...], *, tries: bool) -> Question:
    if not tries:
        return Question(roots=(users_root(),), import_paths=paths)
    judge, dataset, rollout = _judged(plan)
    evaluation = plan.all_of(ModelWorkerSpec)[0].evaluation
    rewards = judge.reward if any(part.function in paths for part in judge.reward.values()) else {}
    return Question(
        roots=(users_root(),),
        import_paths=paths,
        rewards=rewards,
        reward_timeout_s=judge.reward_timeout_s,
        rows=tuple(_tried_rows(plan, dataset, evaluation)) if rewards else (),
        correct=evaluation.correct if evaluation is not None else None,
        agent=rollout.agent if rollout is not None and rollout.agent in paths else None,
        agent_settings=rollout.agent_settings if rollout is not None else {},
        sampler=dataset.config.sampler if dataset is not None else None,
        tries_sandbox=True,
        calls=tuple(_call_questions(plan)),
    )


def _tried_rows(plan: RunPlan, dataset: DatasetSpec | None, evaluation: EvaluationConfig | None) -> Iterator[TriedRow]:
    """The first row of the data set, and of each set of held-out problems."""
    opens: dict[str, Callable[[], Dataset]] = {}
    if dataset is not None:
        opens["the data set"] = partial(Dataset.planned, dataset)
    if evaluation is not None:
        for name, config in evaluation.datasets.items():
            place = f"evaluation.more.{name}" if name else "evaluation.dataset"
            opens[place] = partial(Dataset.open, config, kind="prompts")
    prompts = PromptEncoder(plan.all_of(ModelWorkerSpec)[0].tokenizer)
    for place, open_rows in opens.items():
        try:
            row = next(iter(open_rows().values()), None)
        except (OSError, ConfigError):
            continue  # tasks that were listed, and are not in their file yet
        if row is not None:
            prompt = (row.prompt,) if isinstance(row.prompt, str) else ()
            answers = [answer for answer in row.answers if isinstance(answer, str)]
            yield TriedRow(
                place=f"the first row of {place}",
                problem=dict(row.fields),
                right=tuple(dict.fromkeys(spelled for answer in answers for spelled in _spellings(answer, prompts))),
                others=tuple(dict.fromkeys((*prompt, ""))),
            )


def _spellings(answer: str, prompts: PromptEncoder) -> Iterator[str]:
    """An answer as models are asked to write it, alone and behind reasoning as the model's own template writes it."""
    spelled = [
        answer,
        f"\\boxed{{{answer}}}",
        f"#### {answer}",
        f"The answer is {answer}",
        f"<answer>{answer}</answer>",
    ]
    yield from spelled
    try:
        begin, end = prompts.chat.reasoning or ("<think>", "</think>")
        begin = "" if prompts.chat.begins_reasoning else begin
    except (ValueError, OSError):  # no template
        begin, end = "<think>", "</think>"
    yield from (f"{begin}\nSo it is.\n{end}\n\n{each}" for each in spelled)


def _judged(plan: RunPlan) -> tuple[RewardConfig, DatasetSpec | None, RolloutConfig | None]:
    """Who judges, answers to what, and how they are made."""
    for worker in plan.all_of(RolloutWorkerSpec):
        return worker.rollout, worker.dataset, worker.rollout
    rank = plan.all_of(ModelWorkerSpec)[0]
    return rank.reward, rank.dataset, None


def _call_questions(plan: RunPlan) -> Iterator[CallQuestion]:
    """Calls with an interface of the user's own, and train steps with such a loss or advantage."""
    roles = {role.role: role for role in plan.roles.values()}
    for call in plan.master.calls:
        role = roles[call.role]
        own = users_paths(_code_of(call, role))
        if own and call.call_type is not CallType.GENERATE:
            yield CallQuestion(
                import_path=own[0],
                call=call,
                head=role.head,
                ppo=role.ppo,
                dpo=role.dpo,
                declared=plan.master.declared_keys,
            )


def _code_of(call: ModelFunctionCall, role: ModelRoleSpec) -> tuple[str, ...]:
    """The names of what runs in a call, the user's own or not."""
    read = {"ppo_actor": (role.ppo.loss, role.ppo.advantage) if role.ppo else (), "dpo": (role.dpo.loss,)}
    trains = call.call_type is CallType.TRAIN_STEP
    return (call.implementation, *(read.get(call.implementation, ()) if trains else ()))


def _read(findings: Findings) -> dict[str, bytes]:
    size_bytes = sum(file.size_bytes for file in findings.files)
    if size_bytes > _MAX_BYTES or len(findings.files) > _MAX_FILES:
        largest = sorted(findings.files, key=lambda file: -file.size_bytes)[:_LISTED]
        raise ConfigError.of(
            f"your code is {len(findings.files)} files of {size_bytes / 2**20:.0f} MiB, and a trial keeps at most "
            f"{_MAX_FILES} of {_MAX_BYTES // 2**20} MiB together; the largest are "
            + ", ".join(display_path(file.path) for file in largest),
            hint="install what is large as a package into the environment: of packages the version is noted",
        )
    return {file.name: file.path.read_bytes() for file in findings.files}
