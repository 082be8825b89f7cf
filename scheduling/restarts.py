"""How often what has ended is started again, and after what pause. Pure."""

from dataclasses import dataclass


def growing_pause(failures: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many failures in a row, counted from 1: doubles each time, up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 30))


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """Counts ends that came one soon after the other; who ran for long enough has all of the budget back.

    Example:
        budget = RestartBudget(max_restarts=1, healthy_after_s=600.0)
        budget.take(ran_s=5.0)      # True: start it again
        budget.take(ran_s=5.0)      # False: give up
        budget.take(ran_s=3600.0)   # True: that one was well
    """

    max_restarts: int
    healthy_after_s: float
    in_a_row: int = 0
    """Ends, with the last one."""

    def take(self, *, ran_s: float) -> bool:
        """Whether what ended after `ran_s` is started again."""
        self.in_a_row = 1 if ran_s >= self.healthy_after_s else self.in_a_row + 1
        return self.in_a_row <= self.max_restarts
