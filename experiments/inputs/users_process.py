"""The process that imports a user's own code at submission, and its report on the keys.

    Question ──► python -m corral.workers.user_code look, in users_root() ──► Findings ──► problems under keys
                                                                                 └──► Declared: the plan, the calls

It is this command's Python, as that of workers is which are in no container. Its imports may take torch, so nothing of
it happens in this process; an experiment of one's own, which has to answer here, is the one exception.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.errors import ConfigError, ConfigProblem, dotted, leaves
from corral.experiments.inputs.users_code import Declared, Findings, Problem, Question
from corral.experiments.own_python import own_python, python_path
from corral.experiments.trial.leftovers import temporary_folder
from corral.experiments.trial.tether import die_with_parent
from corral.scheduling.errors import RuleError

_GRACE_S = 10.0
_SAYS_SO_AFTER_S = 1.0
_root: ContextVar[Path | None] = ContextVar("users_root", default=None)


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Modules of the user's own are those that a trial keeps in this folder, and not those in the current one."""
    token = _root.set(folder)
    try:
        yield
    finally:
        _root.reset(token)


def add_users_root() -> None:
    """Has this process import the user's modules, too.

    A trial's kept code comes first. The current folder comes last: it may hold any file, and one that is named like a
    module of Python or of a library must not replace that.
    """
    sys.path.insert(0 if _root.get() else len(sys.path), str(users_root()))


def check_not_hidden(import_path: str, root: Path) -> None:
    """
    Raises:
        ValueError: if the user's folder has a module of this name, and Python finds another one first.
    """
    name = import_path.partition(":")[0].partition(".")[0]
    own = [path.resolve() for path in (root / f"{name}.py", root / name / "__init__.py") if path.is_file()]
    spec = find_spec(name) if own else None
    found = spec.origin if spec is not None else None
    if found is not None and Path(found).resolve() not in own:
        raise RuleError(
            f"{own[0]} is not what Python imports as {name}: the environment has a module of this name ({found})",
            "rename yours",
        )


def users_root() -> Path:
    """The folder that modules of the user's own are looked for in.

    Raises:
        ConfigError: if it is the current one, and that is not there any more.
    """
    try:
        return _root.get() or Path.cwd()
    except FileNotFoundError:
        raise ConfigError.of(
            "the current folder has been removed, and your own modules are looked for in it", hint="cd to another one"
        ) from None


@contextmanager
def users_process(task: str, *arguments: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this Python that imports the user's modules; it is ended, with its group, behind the block.

    Args:
        task: what `python -m corral.workers.user_code` does.
        log: where what it prints goes.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            own_python("-m", "corral.workers.user_code", task, *arguments),
            cwd=users_root(),
            env=os.environ | python_path(os.environ, *([kept] if (kept := _root.get()) else [])),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process
    finally:
        # Its group is its own while it is not reaped; afterwards the id may be anybody's.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(question: Question) -> Findings:
    """The answer of a process that is ended, with all that it started, when its time is up.

    Raises:
        ConfigError: if it ends without one.
    """
    with temporary_folder("corral-code-") as folder:
        asked, answered, log = (folder / name for name in ("question.json", "findings.json", "log"))
        asked.write_bytes(question.model_dump_json().encode())
        with users_process("look", str(asked), str(answered), log=log) as process:
            _wait(process, question)
        try:
            return Findings.model_validate_json(answered.read_bytes())
        except FileNotFoundError:
            words = log.read_bytes()[-2000:].decode(errors="replace").strip() or "it said nothing"
            raise ConfigError.of(
                f"the process that looks at {', '.join(question.import_paths)} ended with {process.returncode} before "
                f"it could say what it found: {words}",
                hint="import it in a Python of this environment; --no-checks tries no function of it",
            ) from None


def ask_keys(
    import_paths: Sequence[str], *, interfaces: Sequence[str], ppo: PPOConfig | None, config: Mapping[str, Any]
) -> Mapping[str, Declared]:
    """What each of them says it reads and makes.

    Args:
        interfaces: those of them that make an interface, which is made to be asked.
        config: the experiment file as data, where the paths stand.

    Raises:
        ConfigError: naming file and line of what cannot be imported, or declares a key that there cannot be.
    """
    findings = ask(
        Question(roots=(users_root(),), import_paths=tuple(import_paths), interfaces=tuple(interfaces), ppo=ppo)
    )
    if findings.problems:
        raise ConfigError([as_problem(config, problem) for problem in findings.problems])
    return findings.declared


def as_problem(config: Mapping[str, Any], problem: Problem) -> ConfigProblem:
    """What is wrong with a user's code, under the key that names it."""
    path = next((path for path, value in leaves(config) if value == problem.import_path), ())
    what = dotted(path) or "a call of the graph"
    hint = problem.hint or "correct it there and submit again; on a cluster, --no-checks submits without this check"
    if problem.kind == "missing_module":
        hint = "install it into this environment, or run rl-submit in the folder that holds the module"
    if problem.kind == "no_sandbox":
        hint = problem.hint or "make one possible, or name a reward that runs nothing"
    if ".py:" in problem.import_path:
        hint = f"leave out .py: {problem.import_path.replace('.py:', ':')}"
    return ConfigProblem(f"{what}: {problem.message}", hint, path=path, shown=problem.import_path)


def _wait(process: "subprocess.Popen[bytes]", question: Question) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SAYS_SO_AFTER_S)
        return
    print(f"looking at {', '.join(question.import_paths)} ...", file=sys.stderr, flush=True)
    # One that still hangs then holds the interpreter's lock, or its thread would have said where.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2 * question.import_timeout_s + question.reward_timeout_s + _GRACE_S)
