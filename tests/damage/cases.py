"""What can happen to the files of a trial directory, and what must follow: a table without any process.

case = file x which of them x damage --> expected outcome
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Outcome(Enum):
    """What became of a trial that was resumed on a damaged directory."""

    GOES_ON = "goes on"
    FALLS_BACK = "falls back"
    REFUSED = "refused, with the file and a way out"
    LOST = "SAMPLES LOST OR TWICE"
    UNCLEAR = "FAILED WITHOUT NAMING THE FILE"
    LOOP = "RESTART LOOP"
    TRACEBACK = "TRACEBACK"
    HANG = "HANG"


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """The second half is missing."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def gone(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "gone": gone}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    file: str
    which: str
    damage: str
    paths: Callable[[Path], Sequence[Path]]
    """The files to damage, from the directory of a trial that was killed."""
    expected: frozenset[Outcome]

    @property
    def name(self) -> str:
        return f"{self.file}, {self.which}, {self.damage}" if self.which else f"{self.file}, {self.damage}"

    def apply(self, trial: Path) -> None:
        paths = self.paths(trial)
        if not paths:
            raise ValueError(f"{self.name}: the trial has no such file")
        for path in paths:
            DAMAGES[self.damage](path)


def all_cases() -> list[Case]:
    """Every file that a trial that was killed leaves behind."""
    return [*_checkpoint_cases(), *_ledger_cases(), *_log_cases(), *_other_cases()]


def one_case_per_file() -> list[Case]:
    """The first case of each file."""
    cases = all_cases()
    return [case for place, case in enumerate(cases) if case.file not in {before.file for before in cases[:place]}]


# What a commit stands for

_WHICH: dict[str, slice] = {"newest": slice(-1, None), "older": slice(None, -1), "all": slice(None)}


def _checkpoint_cases() -> Iterator[Case]:
    expected = {"newest": Outcome.FALLS_BACK, "older": Outcome.GOES_ON, "all": Outcome.REFUSED}
    for pattern in (
        "state/actor/train_state-*.safetensors",
        "weights/model.safetensors",
        "ledger.msgpack",
        "manifest.json",
    ):
        for which, place in _WHICH.items():
            for damage in DAMAGES:
                yield Case(
                    file=f"checkpoints/{pattern}",
                    which=which,
                    damage=damage,
                    paths=lambda trial, place=place, pattern=pattern: [  # type: ignore[misc]
                        next(folder.glob(pattern)) for folder in _checkpoints(trial)[place]
                    ],
                    expected=frozenset({expected[which]}),
                )
    for which, place in _WHICH.items():
        yield Case(
            file="checkpoints/step-*",
            which=which,
            damage="gone",
            paths=lambda trial, place=place: _checkpoints(trial)[place],  # type: ignore[misc]
            expected=frozenset({expected[which]}),
        )


def _ledger_cases() -> Iterator[Case]:
    for which, place in _WHICH.items():
        for damage in DAMAGES:
            yield Case(
                file="ledger/*",
                which=which,
                damage=damage,
                paths=lambda trial, place=place: [trial / c["ledger_file"] for c in _commits(trial)][place],  # type: ignore[misc]
                expected=frozenset({Outcome.GOES_ON}),
            )


def _log_cases() -> Iterator[Case]:
    for which, place in {"first": 0, "middle": 2, "last": -1}.items():
        for damage in DAMAGES:
            yield Case(
                file="log/*",
                which=which,
                damage=damage,
                paths=lambda trial, place=place: [_slots(trial)[place]],  # type: ignore[misc]
                expected=_expected_of_log(which, damage),
            )
    yield Case(file="log/*", which="all", damage="gone", paths=_slots, expected=frozenset({Outcome.REFUSED}))


def _expected_of_log(which: str, damage: str) -> frozenset[Outcome]:
    if damage == "flipped":
        # A bit of a text for people changes nothing; one of a checksum makes its commit one that cannot be loaded.
        return frozenset({Outcome.GOES_ON, Outcome.FALLS_BACK, Outcome.REFUSED})
    # Without the last entry, a commit, the trial stands where it stood before.
    return frozenset({Outcome.GOES_ON if (which, damage) == ("last", "gone") else Outcome.REFUSED})


# What is made anew, or only told

_TOLD = (
    "config.yaml",
    "events.jsonl",
    "metrics.jsonl",
    "trajectories.jsonl",
    "rdzv.json",
    "control/attempt-0.json",
    "control/claim-0.json",
    "secrets/*",
    "spool/*/*",
    "logs/attempt-0/*.log",
)


def _other_cases() -> Iterator[Case]:
    for damage in DAMAGES:
        # Commits hold the same bytes under a second name.
        expected = Outcome.GOES_ON if damage == "gone" else Outcome.REFUSED
        yield Case(
            file="weights/*/model.safetensors",
            which="all",
            damage=damage,
            paths=lambda trial: list(trial.glob("weights/*/model.safetensors")),
            expected=frozenset({expected}),
        )
    for damage in DAMAGES:
        yield Case(
            file="plan.json",
            which="",
            damage=damage,
            paths=lambda trial: [trial / "plan.json"],
            expected=frozenset({Outcome.REFUSED}),
        )
    for pattern in _TOLD:
        for damage in DAMAGES:
            yield Case(
                file=pattern,
                which="all" if "*" in pattern else "",
                damage=damage,
                paths=lambda trial, pattern=pattern: [p for p in trial.glob(pattern) if p.stat().st_size],  # type: ignore[misc]
                expected=frozenset({Outcome.GOES_ON}),
            )


# Where things are, read without the code that wrote them


def _slots(trial: Path) -> list[Path]:
    return sorted(path for path in (trial / "log").iterdir() if path.name.isdecimal())


def _commits(trial: Path) -> list[dict[str, str]]:
    entries = [json.loads(path.read_bytes()) for path in _slots(trial)]
    return [entry for entry in entries if entry["kind"] == "commit"]


def _checkpoints(trial: Path) -> list[Path]:
    """Folders of the commits that are still there, the newest last."""
    folders = [trial / commit["directory"] for commit in _commits(trial)]
    return [folder for folder in folders if folder.is_dir()]
