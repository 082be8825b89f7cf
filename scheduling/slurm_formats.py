"""What a user writes for SLURM -> checked text that may reach an sbatch line.

A value that SLURM would reject, or read as something else, is refused here with the rule and the way out: after
`sbatch` the same mistake costs a wait in the queue, and a newline inside a value would start a line of the script.
`MemoryRules` says how SLURM counts the memory that is asked for.
"""

import re
from dataclasses import dataclass

from corral.scheduling.errors import RuleError

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S

_TIME_LIMITS = (
    "MINUTES",
    "MINUTES:SECONDS",
    "HOURS:MINUTES:SECONDS",
    "DAYS-HOURS",
    "DAYS-HOURS:MINUTES",
    "DAYS-HOURS:MINUTES:SECONDS",
)
_UNITS_S = {"DAYS": _DAY_S, "HOURS": _HOUR_S, "MINUTES": _MINUTE_S, "SECONDS": 1}
_UNIT_LIMITS = {"HOURS": 24, "MINUTES": 60, "SECONDS": 60}  # for a unit that has a larger one before it


def parse_time_limit(text: str) -> int:
    """Seconds that a SLURM time limit stands for.

    Example:
        parse_time_limit("90")          # 5400: a bare number is minutes
        parse_time_limit("1:30:00")     # 5400
        parse_time_limit("2-12")        # 216000

    Raises:
        ValueError: if `text` is not one of SLURM's six forms, a later unit overflows, or it is zero (to SLURM: none).
    """
    for form in _TIME_LIMITS:
        later = re.sub("(?<=[-:])[A-Z]+", "([0-9]{1,2})", form)
        match = re.fullmatch(re.sub("[A-Z]+", "([0-9]{1,9})", later), text)
        if match is None:
            continue
        units: dict[str, int] = dict(zip(re.findall("[A-Z]+", form), map(int, match.groups()), strict=True))
        for unit in list(units)[1:]:
            if units[unit] >= _UNIT_LIMITS[unit]:
                raise ValueError(
                    f"time limit {text!r}: {unit.lower()} must be below {_UNIT_LIMITS[unit]}, got {units[unit]}"
                )
        seconds = sum(_UNITS_S[unit] * number for unit, number in units.items())
        if seconds == 0:
            raise RuleError(
                f"time limit {text!r} is zero, which SLURM reads as no limit", "write the longest time to run"
            )
        return seconds
    raise ValueError(f"time limit {text!r} is none of SLURM's forms: {', '.join(_TIME_LIMITS)}")


def format_time_limit(seconds: int) -> str:
    """The SLURM time limit of `seconds`: "HH:MM:SS", with "D-" before it from one day on."""
    if seconds <= 0:
        raise ValueError(f"a time limit must be at least 1 second, got {seconds}")
    days, rest = divmod(seconds, _DAY_S)
    clock = f"{rest // _HOUR_S:02d}:{rest % _HOUR_S // _MINUTE_S:02d}:{rest % _MINUTE_S:02d}"
    return f"{days}-{clock}" if days else clock


_MEMORY = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)\s?(?P<unit>[KMGT]?)(?:i?B)?", re.IGNORECASE)
_MEMORY_UNITS_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}


def parse_memory_mb(text: str) -> int:
    """Megabytes in a SLURM memory size, rounded up: "20G" is 20480, "512" is 512. Units are powers of 1024 there."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise RuleError(f"memory {text!r} is not a size", "write megabytes (20480) or a number with K, M, G or T (20G)")
    megabytes = float(match["number"]) * _MEMORY_UNITS_MB[match["unit"].upper()]
    return int(-(-megabytes // 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """How a site gives out memory."""

    is_counted: bool = True
    """Whether SLURM counts memory; where it does not, jobs ask for none, whatever it says of a node's memory."""
    has_default: bool = False
    """Whether a job that asks for none gets some (DefMemPerCPU, DefMemPerNode)."""
    max_mb_per_node: int | None = None
    """The most that a job may ask for on each node; None is no limit."""
    max_mb_per_cpu: int | None = None
    """The most beside each of its CPUs; None is no limit."""

    def cpus(self, cpus: int, mem_mb: int) -> int:
        """CPUs that a job has to ask for which wants so many beside so much memory."""
        return cpus if self.max_mb_per_cpu is None else max(cpus, -(-mem_mb // self.max_mb_per_cpu))


COUNTED_MEMORY = MemoryRules()
"""Of a site without limits."""


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_plain_text(text: str, *, what: str) -> None:
    """Refuse control characters: a newline inside a value would become a line of the batch script."""
    if match := _CONTROL.search(text):
        raise RuleError(
            f"{what} {text!r} holds the control character {match[0]!r} at position {match.start()}", "remove it"
        )


_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SLURM_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_")
"""Of the variables that SLURM sets, or its commands read."""


def check_environment_name(name: str) -> None:
    """Refuse names that no shell can export, and those by which SLURM's own commands are steered."""
    if not _ENVIRONMENT_NAME.fullmatch(name):
        raise ValueError(
            f"environment variable name {name!r} must consist of letters, digits and _, not starting with a digit"
        )
    if name.startswith(SLURM_PREFIXES):
        raise RuleError(
            f"environment variable {name!r} would change what SLURM's commands do", "use the scheduling fields"
        )


_MAX_RANGE = 1 << 16  # SLURM's own bound of a host list; a mistyped range must not fill the memory
_MAX_DIGITS = 10


def expand_host_list(text: str) -> list[str]:
    """`n[1-3,07],login` -> n1, n2, n3, n07, login; the numbers keep their leading zeros."""
    hosts: list[str] = []
    for item in re.findall(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", text):
        hosts += _expand(item) if item else []
    return hosts


def _expand(item: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if match is None:
        return [item]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        is_range = len(last) < _MAX_DIGITS and first.isdecimal() and last.isdecimal()
        if is_range and int(last) - int(first) < _MAX_RANGE:
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            numbers.append(part)
    return [f"{head}{number}{rest}" for number in numbers for rest in _expand(tail)]
