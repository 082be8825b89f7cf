"""The result of a step ──► its page: device, command, figures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.steps import Step

MAX_LINES = 80
"""Of what a step has printed: the last ones, which have the tables and the reasons of failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step went."""

    step: Step
    exit_code: int | None
    """None if it was ended at its deadline."""
    seconds: float
    output: Sequence[str]
    """Lines of both of its streams."""

    @property
    def verdict(self) -> str:
        if self.exit_code is None:
            return f"ended after {self.step.timeout_s:.0f} s"
        return "passed" if self.exit_code == 0 else f"failed with {self.exit_code}"


def render(result: Result, *, machine: Mapping[str, str]) -> str:
    """Markdown: the machine, how the step went, and what it has printed.

    Args:
        machine: what there is to know of it, by what it is: {"GPU": "NVIDIA H100 80GB HBM3", ...}.
    """
    lines = [f"## {result.step.name}: {result.step.shows}", ""]
    lines += [*(f"- {what}: {value}" for what, value in machine.items()), ""]
    lines += [f"`{command_line(result.step)}`: {result.verdict}, {result.seconds:.0f} s", "", "```text"]
    return "\n".join([*lines, *_last_lines(result.output), "```"]) + "\n"


def command_line(step: Step) -> str:
    """As one would type it in the repository's root."""
    words = ["python" if word == sys.executable else word for word in step.command]
    return " ".join([*(f"{name}={value}" for name, value in step.environment.items()), shlex.join(words)])


def _last_lines(output: Sequence[str]) -> list[str]:
    hidden = len(output) - MAX_LINES
    return [*([f"... {hidden} lines before"] if hidden > 0 else []), *output[-MAX_LINES:]]
