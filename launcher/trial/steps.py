"""Train steps as users name them on a command line."""

from collections.abc import Collection

from corral.experiments.errors import ConfigError


def chosen_steps(wanted: str, there: Collection[int], *, option: str, limit: str) -> list[int]:
    """Those of some steps that `latest`, `all`, a number or a span such as 40:50, its end included, mean.

    Args:
        there: at least one.
        limit: the setting that says for how long steps are kept.

    Raises:
        ConfigError: if none of them is there.
    """
    first, last = min(there), max(there)
    begin, colon, end = {"latest": f"{last}", "all": ":"}.get(wanted, wanted).partition(":")
    if not all(part.isdecimal() for part in (begin, end) if part):
        hint = "a number, a span such as 40:50, latest, or all"
        raise ConfigError.of(f"{option} {wanted!r} is no train step", hint=hint)
    low = int(begin) if begin else first
    high = int(end) if end else last if colon else low
    if not (found := sorted(step for step in there if low <= step <= high)):
        hint = f"there are {len(there)} steps from {first} to {last}; {limit} says for how long"
        raise ConfigError.of(f"nothing of step {wanted} is kept", hint=hint)
    return found
