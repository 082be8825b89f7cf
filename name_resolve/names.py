"""Names: '/'-separated segments, and what lies in a subtree. Pure.

    "workers/rollout_worker/0"     a name
    "workers"                      a root: contains "workers" and "workers/...", never "workers2"
    ""                             the root of everything

The alphabet has no glob character, no quote, no blank and no '~', so a name means the same in a Redis key and in an
ACL rule, and the service can keep its own keys where no name can reach.
"""

import re

_SEGMENT = re.compile(r"[A-Za-z0-9._:-]+")
_MAX_NAME_LENGTH = 240
_ALPHABET_RULE = "segments of [A-Za-z0-9._:-]+ joined by single '/', without a leading or trailing '/'"


def check_name(name: str) -> str:
    """Return `name` unchanged, or raise ValueError that says which rule it breaks."""
    if len(name) > _MAX_NAME_LENGTH:
        raise ValueError(f"name {name[:40]!r}... has {len(name)} characters; names have at most {_MAX_NAME_LENGTH}")
    for segment in name.split("/"):
        if not segment:
            raise ValueError(f"name {name!r} has an empty segment; names are {_ALPHABET_RULE}")
        if segment in (".", ".."):
            raise ValueError(f"name {name!r} has the segment {segment!r}, which is a path; choose another word")
        if not _SEGMENT.fullmatch(segment):
            raise ValueError(f"name {name!r} has the segment {segment!r}; names are {_ALPHABET_RULE}")
    return name


def check_root(root: str) -> str:
    """Like `check_name`, but "" is allowed and stands for all names."""
    return check_name(root) if root else root


def check_prefix(prefix: str) -> str:
    """A prefix is a name followed by '/': `corral/3f2a.../`."""
    if not prefix.endswith("/"):
        raise ValueError(f"prefix {prefix!r} must end in '/', so that it cannot be the start of another trial's prefix")
    check_name(prefix[:-1])
    return prefix


def check_ttl(ttl_s: float) -> float:
    """A time to live is at least one millisecond, the resolution of Redis."""
    if not 0.001 <= ttl_s < float("inf"):
        raise ValueError(f"ttl_s must be a finite number of seconds >= 0.001, got {ttl_s}")
    return ttl_s
