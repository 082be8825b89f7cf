"""A user's own code before a trial starts: imported and tried in a process of its own, then kept with the trial.

    RunPlan ──import paths──► python -m corral.workers.user_code ──Findings──► ConfigError with file and line
                                                                └──► KeptCode ──► {trial}/code/, plan.code
    plan.json, {trial}/code/ ──as it was──► nothing to do
                             ──mended by hand──► tried again, new digests

No process is started where a plan names no code but corral's. It runs in this command's Python, as workers do that are
in no container; what that Python lacks, a group in a container may have, so there it is told and not refused.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.experiments.errors import ConfigError, ConfigProblem, KeyPath, display_path, dotted
from corral.experiments.inputs.dataset_file import DatasetReader
from corral.experiments.inputs.users_code import Findings, Problem, Question, TrainQuestion, is_users, users_paths
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory, atomic_write, read_tail
from corral.experiments.worker_specs import DatasetSpec, ModelWorkerSpec, RewardSpec, RolloutWorkerSpec
from corral.launcher.slurm.client import clean_environment
from corral.scheduling.model_function_call import CallType

_IMPORT_TIMEOUT_S = 120.0  # torch from a cold file server takes a good part of it
_GRACE_S = 10.0
_SAYS_SO_AFTER_S = 1.0
_MAX_BYTES = 32 * 2**20
_MAX_FILES = 5000
_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCode:
    """What goes into the folder `code` of a trial."""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    """By name below the folder."""
    packages: Mapping[str, str] = field(default_factory=dict)
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


def look_at_code(plan: RunPlan, *, tries: bool = True, folder: Path | None = None) -> KeptCode:
    """Imports what the plan names of the user's own, tries it, and reads the files that it consists of.

    Args:
        tries: whether a reward, an agent, a loss and an advantage are tried besides.
        folder: where modules are looked for first; None is the current one.

    Raises:
        ConfigError: if the code cannot be imported, does not fit its place, or is too large to be kept.
    """
    paths = users_paths(list(_import_paths(plan)))
    if not paths:
        return KeptCode()
    root = _here() if folder is None else folder
    findings = _ask(_question(plan, paths, root, tries=tries), root)
    contained = [kind for kind, group in plan.scheduling.items() if group.scheduling.container_image]
    excused = [one for one in findings.problems if one.kind == "missing_module" and contained]
    if refused := [one for one in findings.problems if one not in excused]:
        raise ConfigError([_as_problem(plan, one) for one in refused])
    warnings = [f"{one.import_path} was not tried: {one.message}; the containers may have it" for one in excused]
    if findings.not_kept:
        listed = ", ".join(display_path(Path(path)) for path in findings.not_kept[:_LISTED])
        warnings.append(f"files that your code reads are too large to be kept with the trial: {listed}")
    return KeptCode(contents=_read(findings), packages=findings.packages, warnings=tuple(warnings))


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
    return kept if kept.in_plan(plan).code == plan.code else look_at_code(plan, folder=directory.code_path)


def _import_paths(plan: RunPlan) -> Iterator[str]:
    if is_users(experiment := str(plan.config.get("experiment", ""))):
        yield experiment
    for worker in plan.workers:
        if isinstance(worker, RolloutWorkerSpec):
            yield from (worker.rollout.reward, worker.rollout.agent)
        if isinstance(worker, ModelWorkerSpec):
            yield worker.reward.function
            yield from (call.implementation for call in worker.calls)
            for role in worker.roles:
                yield from (role.ppo.loss, role.ppo.advantage) if role.ppo is not None else ()


def _question(plan: RunPlan, paths: tuple[str, ...], root: Path, *, tries: bool) -> Question:
    if not tries:
        return Question(roots=(root,), import_paths=paths, import_timeout_s=_IMPORT_TIMEOUT_S)
    reward, dataset, agent = _judged(plan)
    row = next(iter(DatasetReader(config=dataset.config, kind=dataset.row_kind)), None) if dataset else None
    return Question(
        roots=(root,),
        import_paths=paths,
        import_timeout_s=_IMPORT_TIMEOUT_S,
        reward=reward.function if row is not None and reward.function in paths else None,
        reward_timeout_s=reward.timeout_s,
        problem=row.fields if row else {},
        answers=tuple(dict.fromkeys((*(row.answers if row else ()), row.prompt if row else "", ""))),
        agent=agent if agent in paths else None,
        train=_train_question(plan),
    )


def _judged(plan: RunPlan) -> tuple[RewardSpec, DatasetSpec | None, str | None]:
    """Who judges, answers to what, and the agent."""
    for worker in plan.workers:
        if isinstance(worker, RolloutWorkerSpec):
            rollout = worker.rollout
            spec = RewardSpec(function=rollout.reward, timeout_s=rollout.reward_timeout_s)
            return spec, worker.dataset, rollout.agent
    ranks = [worker for worker in plan.workers if isinstance(worker, ModelWorkerSpec)]
    return ranks[0].reward, ranks[0].dataset, None


def _train_question(plan: RunPlan) -> TrainQuestion | None:
    """A train step of the actor that ships, with a loss or an advantage of the user's own."""
    for worker in plan.workers:
        for role in worker.roles if isinstance(worker, ModelWorkerSpec) else ():
            call = next((one for one in plan.master.calls if _trains_as_actor(one, role.role)), None)
            if call is not None and role.ppo is not None and users_paths([role.ppo.loss, role.ppo.advantage]):
                names = [call.input_key_remap.get(key, key) for key in call.input_keys]
                keys = tuple(name for name in names if name not in ("input_ids", "routed_experts"))
                declared = tuple(key for key in plan.master.declared_keys if key.name in keys)
                return TrainQuestion(ppo=role.ppo, keys=keys, declared=declared)
    return None


def _trains_as_actor(call: Any, role: str) -> bool:
    return call.call_type is CallType.TRAIN_STEP and call.role == role and call.implementation == "ppo_actor"


def _ask(question: Question, root: Path) -> Findings:
    """The answer of a process that is ended, with all that it started, when its time is up."""
    with tempfile.TemporaryDirectory(prefix="corral-code-") as folder:
        asked, answered, said = (Path(folder) / name for name in ("question.json", "findings.json", "said"))
        asked.write_bytes(question.model_dump_json().encode())
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "corral.workers.user_code", str(asked), str(answered)],
                cwd=root,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait(process, question)
        finally:
            _end(process)
        try:
            return Findings.model_validate_json(answered.read_bytes())
        except FileNotFoundError:
            words = read_tail(said, 2000).decode(errors="replace").strip() or "it said nothing"
            raise ConfigError.of(
                f"the process that looks at {', '.join(question.import_paths)} ended with {process.returncode} before "
                f"it could say what it found: {words}",
                hint="import it in a Python of this environment; --no-checks tries no function of it",
            ) from None


def _wait(process: "subprocess.Popen[bytes]", question: Question) -> None:
    try:
        process.wait(_SAYS_SO_AFTER_S)
        return
    except subprocess.TimeoutExpired:
        print(f"looking at {', '.join(question.import_paths)} ...", file=sys.stderr, flush=True)
    try:
        process.wait(2 * question.import_timeout_s + question.reward_timeout_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        return  # it holds the interpreter's lock, or its thread would have said where it hangs


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Its group is its own while it is not reaped; afterwards the id may be anybody's."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _as_problem(plan: RunPlan, problem: Problem) -> ConfigProblem:
    path = next(_keys_with(plan.config, problem.import_path), ())
    what = dotted(path) or "a call of the graph"
    hint = "mend it there and submit again; --no-checks imports it and tries no function of it"
    if problem.kind == "missing_module":
        hint = "install it into this environment, or run rl-submit in the folder that holds the module"
    return ConfigProblem(message=f"{what}: {problem.message}", hint=hint, path=path, shown=problem.import_path)


def _keys_with(content: Any, value: str, path: KeyPath = ()) -> Iterator[KeyPath]:
    if content == value:
        yield path
    elif isinstance(content, dict):
        for key, below in content.items():
            yield from _keys_with(below, value, (*path, key))


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


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigError.of(
            "the current folder has been removed, and your own modules are looked for in it", hint="cd to another one"
        ) from None
