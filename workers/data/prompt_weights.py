"""How often a prompt is drawn, by what it has brought: the functions that ship for `dataset.sampler`.

mean rewards of a row's last groups, the oldest first ──► weight, compared with 1.0 of a row that never was drawn

A function of a user's own is of the same form. It is a function of these numbers alone: what it should know of a row
later has to be in them, so that there is nothing of it to be kept, and nothing to be lost.
"""

import math
from collections.abc import Sequence

MOST_REMEMBERED = 16
"""A function receives the mean rewards of at most so many groups of a row."""

_LEAST = 0.05  # of a row that was always or never solved so far: it may be otherwise by now
_SOLVED_FROM = 1.0
_IN_A_ROW = 2


def middling(rewards: Sequence[float]) -> float:
    """Most often what succeeds every second time, from which most is learned where answers are compared: 4 p (1 - p),
    the variance of a success of probability p, with p the mean of the last groups and of one half in their place
    before. Rewards are read as success rates, and clipped to 0 to 1."""
    known = [min(max(reward, 0.0), 1.0) for reward in rewards[-4:]]
    success_rate = (math.fsum(known) + 0.5) / (len(known) + 1)
    return max(4.0 * success_rate * (1.0 - success_rate), _LEAST)


def unsolved(rewards: Sequence[float]) -> float:
    """All alike, until the last two groups of a row were solved as a whole: then it is retired."""
    last = rewards[-_IN_A_ROW:]
    return 0.0 if len(last) == _IN_A_ROW and min(last) >= _SOLVED_FROM else 1.0
