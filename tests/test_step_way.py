"""The page of a step's way is true: its functions exist, and each names the next, or what it leaves for it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "step.md"
ROW = re.compile(r"\| `(?P<file>[^`]+\.py)` \| `(?P<function>[^`]+)` \|(?: `(?P<word>[^`]+)`)? \|")
MOST_FILES = {"A train step": 18, "An asynchronous step": 29}
"""That the ways enter; an asynchronous step enters those of a train step as well, but for its algorithm."""
ALGORITHM_OF_A_TRAIN_STEP = "workers/algorithms/sft.py"
TRAJECTORY, MOST_FILES_OF_A_TRAJECTORY = ("It is delivered", "It is in a batch"), 10


@dataclass(frozen=True)
class Hop:
    """One line of a table."""

    file: str
    function: str
    word: str
    """What leads to the next one; empty in the last line."""

    @property
    def inside(self) -> frozenset[str]:
        """Every name in the function."""
        return names_in(self.file, self.function)

    @property
    def own(self) -> frozenset[str]:
        """What it is called by: its name, and that of its class."""
        return frozenset(self.function.split("."))

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@cache
def names_in(file: str, function: str) -> frozenset[str]:
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in function.split("."):
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == part
        ]
        assert found, f"{file} has no {function}; docs/step.md names it"
        node = found[0]
    return frozenset(
        name
        for child in ast.walk(node)
        for name in (getattr(child, "id", None), getattr(child, "attr", None))
        if isinstance(name, str)
    )


def tables(text: str) -> Iterator[list[Hop]]:
    """The lines of each table."""
    for block in text.split("\n\n"):
        hops = [
            Hop(match["file"], match["function"], match["word"] or "")
            for match in map(ROW.match, block.splitlines())
            if match
        ]
        if hops:
            yield hops


TABLES = list(tables(PAGE.read_text()))


@pytest.mark.parametrize("hops", TABLES, ids=lambda hops: str(hops[0]))
def test_each_function_of_the_way_leads_to_the_next(hops: list[Hop]) -> None:
    for hop, following in zip(hops, hops[1:], strict=False):
        calls_or_leaves = hop.word in hop.inside and hop.word in following.inside | following.own
        is_called = hop.word in hop.own and hop.word in following.inside
        assert calls_or_leaves or is_called, f"{hop} does not lead to {following} by {hop.word!r}"
    assert not hops[-1].word and hops[-1].inside


def test_every_line_with_a_file_is_a_hop() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == sum(map(len, TABLES)) > 0


def test_the_ways_enter_few_files() -> None:
    before, parts = "", PAGE.read_text().split("\n## ")[1:]
    for part in parts:
        before += "\n\n" + part
        title, files = part.splitlines()[0], {hop.file for hops in tables(before) for hop in hops}
        if title == "An asynchronous step":
            files.remove(ALGORITHM_OF_A_TRAIN_STEP)
        print(f"{title}: {len(files)} files")
        assert len(files) <= MOST_FILES[title], f"{len(files)} files: {sorted(files)}"


def test_a_trajectory_enters_few_files_from_finished_to_its_batch() -> None:
    sections = {part.splitlines()[0]: part for part in PAGE.read_text().split("\n### ")[1:]}
    files = {hop.file for title in TRAJECTORY for hops in tables(sections[title]) for hop in hops}
    assert 5 < len(files) <= MOST_FILES_OF_A_TRAJECTORY, f"{len(files)} files: {sorted(files)}"
