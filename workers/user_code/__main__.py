"""A process of rl-submit for a user's code before a trial starts, without a secret of any trial.

    python -m corral.workers.user_code look QUESTION FINDINGS       imports it, tries it, and says which files it is
    python -m corral.workers.user_code transform SOURCE OUTPUT      has its function make rows of rows

    Question ──► import ──► keys, a sandbox ──► agent's form ──► reward on one row ──► each call once ──► Findings
                   └────────────────────────────────────────────────────┴────────────────────────┴── too late: Findings
                                                                                                     with the line, exit
The parent process reads only the file of findings: the output of the code goes elsewhere. Torch is imported only
where the user's modules do, or an interface is made.

    SourceConfig, as JSON ──► its files and rows ──► function(row) ──► rows, as JSON lines; None leaves a row out
"""

import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from corral.experiments.config.data import SourceConfig
from corral.experiments.datasets.formats import open_rows
from corral.experiments.inputs.users_code import SHIPPED, Declared, Findings, Problem, Question, UsedFile
from corral.experiments.inputs.users_process import check_not_hidden
from corral.experiments.trial.directory import atomic_write
from corral.workers.modules import loading_modules
from corral.workers.sandbox.availability import why_no_sandbox
from corral.workers.sandbox.base import asks_for_sandbox
from corral.workers.user_code.blame import describe_error, watched
from corral.workers.user_code.checks import UnfitError, UntriedError, cause_of, check_agent, fails_on, try_reward
from corral.workers.user_code.loading import NoSuchNameError, configured, load_callable
from corral.workers.user_code.scoring import TRIED_ON, weights_of

_MAX_DATA_BYTES = 16 * 2**20  # one file; what is larger is no part of a program
_INSTALLED = ("site-packages", "dist-packages")
_ONE_IF_RIGHT = tuple(f"corral.workers.rewards:{name}" for name in ("exact_match", "math", "multiple_choice", "Format"))


class _Look:
    """One question, from the first import to the findings."""

    def __init__(self, question: Question, findings: Path) -> None:
        self._question = question
        self._path = findings
        self._problems: list[Problem] = []
        self._failures: dict[str, str] = {}
        """How a reward fails on an answer that models give, by import path."""
        self._judged: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)
        """By place of the row, name of the part, and answer."""
        self._declared: dict[str, Declared] = {}
        self._sandboxed: tuple[str, ...] = ()
        self._used = _UsedFiles(question.roots)

    def run(self) -> None:
        """Everything, as far as the imports carry it."""
        question = self._question
        with self._deadline("importing it", question.import_timeout_s, question.import_paths[0]):
            loaded = {path: found for path in question.import_paths if (found := self._load(path)) is not None}
        for path, found in loaded.items() if question.interfaces is not None else ():
            self._try(path, partial(self._note_keys, path, found))
        has_sandbox = not question.tries_sandbox or self._try_sandbox(loaded)
        if question.agent in loaded:
            self._try(question.agent, lambda: check_agent(loaded[str(question.agent)], question.agent_settings))
        if question.sampler in loaded:
            with self._deadline("one call of it", question.reward_timeout_s, str(question.sampler)):
                self._try(question.sampler, lambda: weights_of(loaded[str(question.sampler)], TRIED_ON))
        for name, part in question.rewards.items():
            if part.function in loaded and (has_sandbox or not asks_for_sandbox(loaded[part.function])):
                self._try(part.function, partial(self._try_reward, name, loaded[part.function]))
        for call in question.calls if not self._problems else ():
            with self._deadline("one call with it", question.import_timeout_s, call.import_path):
                algorithms = _algorithms()
                self._try(call.import_path, partial(algorithms.try_call, call), partial(algorithms.blamed, call))
        self._note_doubts()
        self._write()

    def _try_reward(self, name: str, found: Any) -> None:
        part = self._question.rewards[name]
        try:
            reward = configured(found, part.settings, key="settings")
        except ValueError as error:
            raise UnfitError(str(error)) from error
        timeout_s = self._question.reward_timeout_s
        for row in self._question.rows:
            with self._deadline("one call of it", timeout_s, part.function):
                judged = try_reward(reward, row, is_weighed=part.weight != 0.0, timeout_s=timeout_s)
            if not asks_for_sandbox(reward):  # a row's answer is no program
                self._judged[row.place][name] = judged
        for row in self._question.rows[:1]:
            with self._deadline("one call of it", timeout_s, part.function):
                failure = "" if asks_for_sandbox(reward) else fails_on(reward, row, timeout_s=timeout_s)
            if failure:
                self._failures[part.function] = failure

    def _note_doubts(self) -> None:
        """Rewards by which a row's own answer is not right, which nobody notices while a trial runs."""
        parts, correct, doubts = self._question.rewards, self._question.correct, dict[str, str]()
        counted = {correct: 1.0} if isinstance(correct, str) else {name: part.weight for name, part in parts.items()}
        least = correct if isinstance(correct, float) else 1.0
        for row in self._question.rows if parts else ():
            judged, own = self._judged[row.place], f"the own answer {(*row.right, '')[0]!r:.40} of {row.place}"
            for name, part in parts.items():
                if part.function in SHIPPED:
                    with suppress(KeyError):
                        reward = load_callable(part.function)
                        judged[name] = {answer: reward(row.problem, answer) for answer in row.right}
                rewards = [judged[name][answer] for answer in row.right if answer in judged.get(name, {})]
                if part.function in _ONE_IF_RIGHT and rewards and max(rewards) <= 0.0:
                    doubts.setdefault(part.function, f"gives 0 to {own}, however it is spelled")
            known = [answer for answer in row.right if all(answer in judged.get(name, {}) for name in counted)]
            sums = [sum(weight * judged[name][answer] for name, weight in counted.items()) for answer in known]
            if correct is not None and sums and max(sums) < least:
                doubts.setdefault(
                    parts[next(iter(counted))].function,
                    f"gives {own} at most {max(sums):g}, and right answers are those from {least:g} on: accuracy may "
                    "be 0 whatever the model says; let evaluation.correct name the part of the reward that says what "
                    "is right, or a number that right answers have",
                )
        for import_path, message in (self._failures | doubts).items():
            self._note(import_path, message, "doubtful")

    def _try_sandbox(self, loaded: Mapping[str, Any]) -> bool:
        """Makes a sandbox where something runs in one; whether none is missing."""
        asking = tuple(path for path, found in loaded.items() if asks_for_sandbox(found))
        reason = why_no_sandbox() if asking else ""
        for path in asking if reason else ():
            self._note(path, f"it runs in a sandbox, and this machine can make none: {reason}", "no_sandbox")
        self._sandboxed = () if reason else asking
        return not reason

    def _note_keys(self, import_path: str, found: Any) -> None:
        """Of an interface as it is made, and of a loss or an advantage that is wrapped."""
        if import_path in (self._question.interfaces or ()):
            self._declared[import_path] = _algorithms().keys_of_interface(import_path, self._question.ppo)
        else:
            tables = {name: {"": tuple(getattr(found, name, ()))} for name in ("inputs", "outputs")}
            self._declared[import_path] = Declared(**tables)

    def _load(self, import_path: str) -> Any:
        try:
            for root in self._question.roots:
                check_not_hidden(import_path, root)
            return load_callable(import_path)
        except BaseException as error:  # SystemExit too: nothing that a module does ends the look
            is_missing = isinstance(error, ModuleNotFoundError) and not self._used.is_own(error.name or "")
            kind = "missing_module" if is_missing else "code"
            hint = error.hint if isinstance(error, NoSuchNameError) else ""
            self._note(import_path, f"cannot be imported: {describe_error(error)}", kind, hint)
            return None

    def _try(self, import_path: str | None, call: Any, blamed: Callable[[BaseException], str] | None = None) -> None:
        try:
            call()
        except BaseException as error:
            kind = "untried" if isinstance(error, UntriedError) else "code"
            self._note(blamed(error) if blamed else str(import_path), cause_of(error), kind)

    def _note(self, import_path: str, message: str, kind: Any = "code", hint: str = "") -> None:
        self._problems.append(Problem(import_path=import_path, message=message, kind=kind, hint=hint))

    @contextmanager
    def _deadline(self, what: str, timeout_s: float, import_path: str) -> Iterator[None]:
        """When the time is up the process ends, with the line where it stands."""

        def give_up(place: str) -> None:
            self._note(import_path, f"{what} took more than {timeout_s:g} s{place}")
            self._write()
            os._exit(0)

        with watched(timeout_s, give_up):
            yield

    def _write(self) -> None:
        findings = Findings(
            problems=tuple(self._problems),
            sandboxed=self._sandboxed,
            declared=self._declared,
            files=self._used.files(),
            not_kept=self._used.too_large(),
            packages=self._used.packages(),
        )
        atomic_write(self._path, findings.model_dump_json().encode())


def _algorithms() -> Any:
    """Not at the top: only who trains with something of his own waits for torch."""
    with loading_modules():
        return import_module("corral.workers.algorithms.call_trial")


class _UsedFiles:
    """Which files the user's code consists of: what this process has loaded, and what it has read on the way.

    sys.modules ──┬── in the environment ──► name and version
                  └── elsewhere ──► the module, the others in its package, what they opened beside themselves

    It watches from its creation on what is opened below the import roots.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in roots]
        self._environment = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
        self._before = set(sys.modules)
        self._opened: set[str] = set()
        sys.addaudithook(self._on_event)

    def is_own(self, module: str) -> bool:
        """Whether a module would lie in one of the roots, by its first name."""
        first = module.partition(".")[0]
        return any((root / first).is_dir() or (root / f"{first}.py").is_file() for root in self._roots)

    def files(self) -> tuple[UsedFile, ...]:
        """What is to be kept, each file once, by its name below its root."""
        found: dict[str, Path] = {}
        for root, path in self._own_modules():
            for one in {path, *(path.parent.glob("*.py") if path.parent != root else ())}:
                found.setdefault(one.relative_to(root).as_posix(), one)
        for root, path in self._data():
            if path.stat().st_size <= _MAX_DATA_BYTES:
                found.setdefault(path.relative_to(root).as_posix(), path)
        return tuple(
            UsedFile(name=name, path=path, size_bytes=path.stat().st_size) for name, path in sorted(found.items())
        )

    def too_large(self) -> tuple[str, ...]:
        return tuple(sorted(str(path) for _, path in self._data() if path.stat().st_size > _MAX_DATA_BYTES))

    def packages(self) -> dict[str, str]:
        """Versions of what is installed and was loaded since."""
        by_module = packages_distributions()
        firsts = {name.partition(".")[0] for name in set(sys.modules) - self._before} - {"corral"}
        names = {distribution for first in firsts for distribution in by_module.get(first, ())}
        return {name: version(name) for name in sorted(names)}

    def _own_modules(self) -> Iterator[tuple[Path, Path]]:
        """(root, file) of each module that is neither installed nor corral's."""
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] in ("corral", "__main__") or not isinstance(module, ModuleType):
                continue
            file = getattr(module, "__file__", None)
            if not file or not (path := Path(file)).is_file() or self._is_installed(path):
                continue
            depth = name.count(".") + (path.name == "__init__.py")
            root = path.absolute().parents[depth]
            if path.absolute().relative_to(root).with_suffix("").parts[0] == name.partition(".")[0]:
                yield root, path.absolute()

    def _is_installed(self, path: Path) -> bool:
        real = path.resolve()
        return bool(set(_INSTALLED) & set(real.parts)) or any(folder in real.parents for folder in self._environment)

    def _data(self) -> Iterator[tuple[Path, Path]]:
        roots = [root for root, _ in self._own_modules()]
        for name in self._opened:
            path = Path(name).absolute()
            root = next((root for root in roots if root in path.parents), None)
            if root is not None and path.is_file() and path.suffix not in (".py", ".pyc", ".so"):
                if not self._is_installed(path):
                    yield root, path

    def _on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[1] in ("r", "rb", "rt"):
            self._opened.add(arguments[0])


def _transform_rows(function: Any, files: tuple[Path, ...], wanted: slice, output: Path) -> None:
    """
    Raises:
        ValueError: naming the row that the function makes no row of.
    """
    rows, encode = open_rows(files), msgspec.json.Encoder().encode
    with output.open("wb") as stream:
        for number in range(len(rows))[wanted]:
            if (row := rows[number]) is None:
                continue
            try:
                made = function(row)
            except Exception as error:
                raise ValueError(f"{rows.place(number)}: {describe_error(error)}") from error
            if made is None:
                continue
            if not isinstance(made, dict):
                raise ValueError(
                    f"{rows.place(number)}: it returned {type(made).__name__}, and a row is a dict or None"
                )
            stream.write(encode(made) + b"\n")


def _look(question_path: str, findings: str) -> int:
    """Answers the question in the first file, in the second file."""
    question = Question.model_validate_json(Path(question_path).read_bytes())
    sys.path += [str(root) for root in question.roots]
    _Look(question, Path(findings)).run()
    return 0


def _transform(source: str, output: str) -> int:
    """Ends with 1 and the reason if the function fails, or returns what is no row."""
    asked = SourceConfig.model_validate_json(source)
    sys.path.append(os.getcwd())
    try:
        check_not_hidden(str(asked.transform), Path.cwd())
        function = load_callable(str(asked.transform))
        _transform_rows(function, asked.files, asked.first_and_last, Path(output))
    except Exception as error:  # whatever a user's module raises when it is imported
        print(error if isinstance(error, ValueError) else describe_error(error))
        return 1
    return 0


if __name__ == "__main__":
    status = {"look": _look, "transform": _transform}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(status)  # threads of a user's module must not keep it
