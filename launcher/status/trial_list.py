"""Which trials there are below a fileroot. Those that have ended are read once, then remembered.

fileroot/*/*/plan.json  --unchanged since its end was read--> row from $XDG_CACHE_HOME/corral/finished-*.json
                        --else--> facts of its plan --has it ended--> remembered
                        --damaged, or no answer--> what is wrong
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.cluster.cached_queue import cache_folder, write_cache
from corral.launcher.files.lookout import Lookout, Unanswered
from corral.launcher.status.judge import TrialStatus
from corral.launcher.status.reader import TrialRead
from corral.launcher.trial.find import PlanDamagedError, TrialFacts, load_facts


class FinishedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a trial that has ended, and by what one sees that nothing has changed since."""

    fingerprint: tuple[int, ...]
    uuid: str
    status: TrialStatus
    """Without workers, groups and numbers."""


Found = FinishedTrial | TrialFacts | str
"""A trial whose end is remembered, one that is to be read, or what is wrong."""


def list_trials(fileroot: Path, memory: Mapping[str, FinishedTrial], lookout: Lookout[Path]) -> dict[Path, Found]:
    """The trials below a fileroot, the newest last; folders that do not answer come first.

    Args:
        memory: what is known of those that have ended, by directory.

    Raises:
        TimeoutError: if the file system of the fileroot does not answer.
    """
    experiments = lookout.look_once(fileroot, partial(_folders, fileroot))
    if isinstance(experiments, Unanswered):
        raise TimeoutError(experiments.about(fileroot))
    found: dict[Path, tuple[float, Found]] = {}
    paths: list[Path] = []
    for experiment, folders in lookout.look({path: partial(_folders, path) for path in experiments}).items():
        if isinstance(folders, Unanswered):
            found[experiment] = 0.0, folders.about(experiment)
        else:
            paths += folders
    for path, look in lookout.look({path: partial(_look_at, path, memory.get(str(path))) for path in paths}).items():
        if look is not None:
            found[path] = (0.0, look.about(path)) if isinstance(look, Unanswered) else look
    return {path: found[path][1] for path in sorted(found, key=lambda path: (found[path][0], path))}


def to_remember(reads: Iterable[TrialRead]) -> dict[str, FinishedTrial]:
    """The trials whose end was read, by directory; not those that something still lives of."""
    return {
        status.directory: FinishedTrial(
            fingerprint=_fingerprint(Path(status.directory)),
            uuid=evidence.facts.uuid,
            status=replace(status, metrics={}, workers=(), groups=(), waits=(), history=()),
        )
        for status, evidence in reads
        if evidence is not None and evidence.ended is not None and not evidence.zombies
    }


def finished_path(fileroot: Path) -> Path:
    """The file that remembers the trials below a fileroot."""
    name = hashlib.sha256(os.fsencode(fileroot.absolute())).hexdigest()[:12]
    return cache_folder() / f"finished-{name}.json"


def read_finished(path: Path) -> dict[str, FinishedTrial]:
    """By trial directory; a file that cannot be read is as good as none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FinishedTrial])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def write_finished(path: Path, trials: Mapping[str, FinishedTrial]) -> None:
    """Remembers; where that is not possible the trials are read again the next time."""
    with contextlib.suppress(OSError):
        write_cache(path, trials)


def _folders(path: Path) -> list[Path]:
    """What is in a folder; nothing if it is none. Whether these are folders is not asked: that may hang."""
    try:
        return [path / name for name in sorted(os.listdir(path))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _look_at(path: Path, remembered: FinishedTrial | None) -> tuple[float, Found] | None:
    """When the plan was written, and what a first look finds; None if there is no plan."""
    directory = TrialDirectory(path)
    try:
        created_at = directory.plan_path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    if remembered is not None and _fingerprint(path) == remembered.fingerprint:
        return created_at, remembered
    try:
        facts = load_facts(directory)
    except PlanDamagedError:
        return created_at, f"its plan.json is damaged; rl-status {path.parent.name}/{path.name} says what to do"
    return None if facts is None else (created_at, facts)


def _fingerprint(path: Path) -> tuple[int, ...]:
    """A new attempt makes a file in control/; everything that happens is in the journal."""
    directory = TrialDirectory(path)
    try:
        journal, control = directory.journal_path.stat(), directory.control_path.stat()
    except FileNotFoundError:
        return ()
    return journal.st_size, journal.st_mtime_ns, control.st_mtime_ns
