"""What a user writes for SLURM -> checked text that may reach an sbatch line.

A value that SLURM would reject, or read as something else, is refused here with the rule and the way out: after
`sbatch` the same mistake costs a wait in the queue, and a newline inside a value would start a line of the script.
"""

import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from typing import NamedTuple

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_DAY_S = 24 * _HOUR_S

TIME_LIMIT_GRAMMAR = (
    "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS"
)

_TIME_LIMITS = (
    re.compile(r"(?P<minutes>[0-9]{1,9})"),
    re.compile(r"(?P<minutes>[0-9]{1,9}):(?P<seconds>[0-9]{1,2})"),
    re.compile(r"(?P<hours>[0-9]{1,9}):(?P<minutes>[0-9]{1,2}):(?P<seconds>[0-9]{1,2})"),
    re.compile(r"(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,2})"),
    re.compile(r"(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{1,2})"),
    re.compile(r"(?P<days>[0-9]{1,6})-(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{1,2}):(?P<seconds>[0-9]{1,2})"),
)
_UNITS_S = {"days": _DAY_S, "hours": _HOUR_S, "minutes": _MINUTE_S, "seconds": 1}
_UNIT_LIMITS = {"hours": 24, "minutes": 60, "seconds": 60}  # for a unit that has a larger one before it


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
        match = form.fullmatch(text)
        if match is None:
            continue
        units = {unit: int(digits) for unit, digits in match.groupdict().items()}
        for unit in list(units)[1:]:
            if units[unit] >= _UNIT_LIMITS[unit]:
                raise ValueError(f"time limit {text!r}: {unit} must be below {_UNIT_LIMITS[unit]}, got {units[unit]}")
        seconds = sum(_UNITS_S[unit] * number for unit, number in units.items())
        if seconds == 0:
            raise ValueError(
                f"time limit {text!r} is zero, which SLURM reads as no limit; write the longest time to run"
            )
        return seconds
    raise ValueError(f"time limit {text!r} is none of SLURM's forms: {TIME_LIMIT_GRAMMAR}")


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
        raise ValueError(f"memory {text!r} is not a size; write megabytes (20480) or a number with K, M, G or T (20G)")
    megabytes = float(match["number"]) * _MEMORY_UNITS_MB[match["unit"].upper()]
    return int(-(-megabytes // 1))


_CLOCK = r"(?P<clock>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?)(?:\s?(?P<half>[AaPp][Mm]))?"
_POINTS_IN_TIME = {
    "clock": re.compile(_CLOCK),
    "iso": re.compile(r"(?P<iso>[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)?)"),
    "calendar": re.compile(
        r"(?P<month>[0-9]{2})(?P<separator>[/.]?)(?P<day>[0-9]{2})(?:(?P=separator)(?P<year>[0-9]{2}))?(?:-"
        + _CLOCK
        + ")?"
    ),
    "now": re.compile(r"now(?:\+[0-9]{1,9}(?:seconds?|minutes?|hours?|days?|weeks?)?)?"),
}
_HOUR_BY_WORD = {"today": 0, "tomorrow": 0, "midnight": 0, "noon": 12, "elevenses": 11, "fika": 15, "teatime": 16}
POINT_IN_TIME_GRAMMAR = (
    "HH:MM[:SS] [AM|PM], YYYY-MM-DD[THH:MM[:SS]], MM/DD[/YY][-HH:MM[:SS]], "
    "now[+COUNT[seconds|minutes|hours|days|weeks]], or a word: " + ", ".join(sorted(_HOUR_BY_WORD))
)


def check_point_in_time(text: str) -> str:
    """`text` if it is a time that `sbatch --begin` and `--deadline` understand; the time itself may be past.

    Raises:
        ValueError: naming the forms, or the part that no calendar has (a 13th month, 25:00).
    """
    if text in _HOUR_BY_WORD:
        return text
    for form in _POINTS_IN_TIME.values():
        match = form.fullmatch(text)
        if match is None:
            continue
        parts = match.groupdict()
        try:
            _check_calendar(parts)
        except ValueError as error:
            raise ValueError(f"time {text!r} does not exist: {error}") from error
        return text
    raise ValueError(f"time {text!r} is none of SLURM's forms: {POINT_IN_TIME_GRAMMAR}")


def _check_calendar(parts: dict[str, str | None]) -> None:
    if iso := parts.get("iso"):
        datetime.fromisoformat(iso)
    if month := parts.get("month"):
        # A leap year where none is given: 02/29 exists in some of the years that SLURM may mean.
        date(2000 + int(parts.get("year") or 0), int(month), int(parts.get("day") or 0))
    _clock(parts)


_UNITS_OF_NOW_S = {"second": 1, "minute": _MINUTE_S, "hour": _HOUR_S, "day": _DAY_S, "week": 7 * _DAY_S}


def parse_point_in_time(text: str, *, now: datetime) -> datetime:
    """The moment that `text` stands for, as SLURM reads it: a clock without a date is the next time it shows that.

    Example:
        parse_point_in_time("now+2hours", now=noon)     # 14:00 today
        parse_point_in_time("11:00", now=noon)          # 11:00 tomorrow

    Raises:
        ValueError: as `check_point_in_time`.
    """
    check_point_in_time(text)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if text.startswith("now"):
        match = re.fullmatch(r"now(?:\+([0-9]+)([a-z]*))?", text)
        count, unit = (match[1], match[2]) if match else (None, "")
        seconds = int(count or 0) * _UNITS_OF_NOW_S[(unit or "second").rstrip("s")]
        return now + timedelta(seconds=min(seconds, 1000 * 365 * _DAY_S))
    if text == "today":
        return midnight
    if text in _HOUR_BY_WORD:
        moment = midnight + timedelta(hours=_HOUR_BY_WORD[text])
        return moment if moment > now else moment + timedelta(days=1)
    parts = next(match.groupdict() for form in _POINTS_IN_TIME.values() if (match := form.fullmatch(text)))
    if iso := parts.get("iso"):
        return datetime.fromisoformat(iso).replace(tzinfo=now.tzinfo)
    clock = _clock(parts)
    if not parts.get("month"):
        moment = datetime.combine(now.date(), clock, tzinfo=now.tzinfo)
        return moment if moment > now else moment + timedelta(days=1)
    return _calendar_moment(parts, clock, now)


def _clock(parts: dict[str, str | None]) -> time:
    hour, minute, second = (*(int(number) for number in (parts.get("clock") or "0:0").split(":")), 0)[:3]
    half = (parts.get("half") or "").upper()
    if half and not 1 <= hour <= 12:
        raise ValueError(f"with AM or PM the hour must be 1 to 12, got {hour}")
    return time(hour % 12 + (12 if half == "PM" else 0) if half else hour, minute, second)


def _calendar_moment(parts: dict[str, str | None], clock: time, now: datetime) -> datetime:
    month, day = int(parts.get("month") or 1), int(parts.get("day") or 1)
    if parts.get("year"):
        return datetime.combine(date(2000 + int(parts["year"] or 0), month, day), clock, tzinfo=now.tzinfo)
    # Without a year it is the next such day; 02/29 may be some years away.
    for year in range(now.year, now.year + 9):
        try:
            moment = datetime.combine(date(year, month, day), clock, tzinfo=now.tzinfo)
        except ValueError:
            continue
        if moment > now:
            return moment
    raise ValueError(f"time {month}/{day} does not come within eight years")


class _Owned(NamedTuple):
    """An option of sbatch that is not the user's."""

    instead: str = ""
    """What to do about the same thing; "" if nothing."""
    why: str = "corral sets it for every trial"


_ANSWER = _Owned(why="corral reads sbatch's answer, which this option changes")
_PROTECTED_OPTIONS: dict[str, _Owned] = {
    "job-name": _Owned("choose experiment and trial names"),
    "output": _Owned(why="logs are in the trial directory"),
    "error": _Owned(why="logs are in the trial directory"),
    "input": _Owned(),
    "open-mode": _Owned(),
    "chdir": _Owned(),
    "comment": _Owned(),
    "signal": _Owned(),
    "requeue": _Owned(),
    "no-requeue": _Owned(),
    "no-kill": _Owned(),
    "dependency": _Owned(),
    "export": _Owned("use the group's env_vars"),
    "export-file": _Owned("use the group's env_vars"),
    "array": _Owned("submit one trial per point of a sweep", why="a trial is one job"),
    "wrap": _Owned(),
    "clusters": _Owned(why="a trial runs on one cluster, that of $SLURM_CONF"),
    "nodes": _Owned(why="it follows from the groups' counts, cpu, gpu and mem"),
    "use-min-nodes": _Owned(why="it follows from the groups' counts, cpu, gpu and mem"),
    "ntasks": _Owned("use the group's count"),
    "ntasks-per-node": _Owned("use the group's count"),
    "ntasks-per-gpu": _Owned("use the group's count"),
    "ntasks-per-core": _Owned("use the group's count"),
    "ntasks-per-socket": _Owned("use the group's count"),
    "cpus-per-task": _Owned("use the field cpu"),
    "cpus-per-gpu": _Owned("use the field cpu"),
    "mem": _Owned("use the field mem"),
    "mem-per-cpu": _Owned("use the field mem, and cluster.mem_request: cpu where jobs have to ask for it per CPU"),
    "mem-per-gpu": _Owned("use the field mem"),
    "gres": _Owned("use the fields gpu and gpu_type"),
    "gpus": _Owned("use the fields gpu and gpu_type"),
    "gpus-per-node": _Owned("use the fields gpu and gpu_type"),
    "gpus-per-task": _Owned("use the fields gpu and gpu_type"),
    "gpus-per-socket": _Owned("use the fields gpu and gpu_type"),
    "gpu-bind": _Owned(),
    "tres-per-task": _Owned("use the fields cpu, gpu and gpu_type"),
    "nodefile": _Owned("use the field nodelist"),
    "container-image": _Owned("use the field container_image"),
    "container-mounts": _Owned("use the field container_mounts"),
    "parsable": _ANSWER,
    "test-only": _ANSWER._replace(instead="rl-submit --dry-run checks without submitting"),
    "wait": _ANSWER,
    "quiet": _ANSWER,
    "verbose": _ANSWER,
    "help": _ANSWER,
    "usage": _ANSWER,
    "version": _ANSWER,
}
_OPTION = re.compile(r"--(?P<name>[A-Za-z][A-Za-z0-9-]*)(?:=(?P<value>.*))?")


def check_sbatch_argument(argument: str, *, field_by_option: Mapping[str, str]) -> None:
    """Refuse a further option of sbatch that corral owns.

    Args:
        argument: "--option" or "--option=value".
        field_by_option: options that a field of the configuration stands for.
    """
    owned_options = _PROTECTED_OPTIONS | {name: _Owned(f"use the field {it}") for name, it in field_by_option.items()}
    match = _OPTION.fullmatch(argument)
    if match is None:
        raise ValueError(
            f"extra sbatch argument {argument!r} must be one long option with its value; write --name=value"
        )
    name = match["name"].lower()
    # getopt accepts any unambiguous beginning: --job-n is --job-name too.
    beginnings = [name] if name in owned_options else [owned for owned in owned_options if owned.startswith(name)]
    if beginnings:
        owned = min(beginnings)
        why, instead = owned_options[owned].why, owned_options[owned].instead
        remedy = f"leave it out: {instead}" if instead else "leave it out"
        raise ValueError(f"extra sbatch argument {argument!r} may not be given (--{owned}), {why}; {remedy}")


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_plain_text(text: str, *, what: str) -> None:
    """Refuse control characters: a newline inside a value would become a line of the batch script."""
    if match := _CONTROL.search(text):
        raise ValueError(
            f"{what} {text!r} holds the control character {match[0]!r} at position {match.start()}; remove it"
        )


_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SLURM_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_")


def check_environment_name(name: str) -> None:
    """Refuse names that no shell can export, and those by which SLURM's own commands are steered."""
    if not _ENVIRONMENT_NAME.fullmatch(name):
        raise ValueError(
            f"environment variable name {name!r} must consist of letters, digits and _, not starting with a digit"
        )
    if name.startswith(_SLURM_PREFIXES):
        raise ValueError(
            f"environment variable {name!r} would change what SLURM's commands do; use the scheduling fields"
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
