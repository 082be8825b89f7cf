"""Which files a user's code consists of: what this process has loaded, and what it has read on the way.

sys.modules ──┬── in the environment ──► name and version
              └── elsewhere ──► the module, the others in its package, what they opened beside themselves
"""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

from corral.experiments.inputs.users_code import UsedFile

_MAX_DATA_BYTES = 16 * 2**20  # one file; what is larger is no part of a program
_INSTALLED = ("site-packages", "dist-packages")


class UsedFiles:
    """Watches from its creation on what is opened below the import roots."""

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
