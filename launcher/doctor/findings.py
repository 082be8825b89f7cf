"""What rl-doctor found: findings, each with what to do, as text and as data. Pure.

A finding is ok, warn (works, but something costs more or is less safe than it could be) or fail (trials will not run).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    said: str
    advice: str = ""


def ok(check: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, level="ok", said=said)


def warn(check: str, said: str, advice: str) -> Finding:
    """Works, with a cost."""
    return Finding(check=check, level="warn", said=said, advice=advice)


def warn_if(costs: bool, check: str, said: str, advice: str) -> Finding:
    """The same fact with or without a cost."""
    return warn(check, said, advice) if costs else ok(check, said)


def fail(check: str, said: str, advice: str) -> Finding:
    """Trials will not run."""
    return Finding(check=check, level="fail", said=said, advice=advice)


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    levels = {finding.level for finding in findings}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"


def render(findings: Sequence[Finding]) -> str:
    """One line per check, and one more where something is to be done."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.check.ljust(width)}  {finding.said}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    counts = {level: sum(1 for finding in findings if finding.level == level) for level in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", "  ".join(f"{count} {level}" for level, count in counts.items())])
