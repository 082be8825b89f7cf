"""RestartBudget: how often a server is started again before its worker gives up. Pure.

started ──ran for long──► the whole budget again
   └──died early, again and again──► spent
"""

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBudget:
    """Counts deaths that came one soon after the other.

    Example:
        budget = RestartBudget(max_restarts=1, healthy_after_s=600.0)
        budget.take(ran_s=5.0)      # True: start it again
        budget.take(ran_s=5.0)      # False: give up
        budget.take(ran_s=3600.0)   # True: that one was well
    """

    max_restarts: int
    healthy_after_s: float
    num_used: int = 0

    def take(self, *, ran_s: float) -> bool:
        """Whether a server that died after `ran_s` is started again."""
        if ran_s >= self.healthy_after_s:
            self.num_used = 0
        if self.num_used >= self.max_restarts:
            return False
        self.num_used += 1
        return True
