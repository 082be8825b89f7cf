"""What agents are written with, and those that ship; `rollout.agent` names one by its import path. See docs/agents.md.

rollout:
  agent: my_agents:solve
"""

from corral.workers.agents.contract import (
    Episode,
    EpisodeEndedError,
    JudgeError,
    Outcome,
    RefusedError,
    Task,
    ToolCall,
    Turn,
)
from corral.workers.agents.session import Session
from corral.workers.agents.shipped import feedback, single_turn
from corral.workers.agents.tools import tools

__all__ = [
    "Episode",
    "EpisodeEndedError",
    "JudgeError",
    "Outcome",
    "RefusedError",
    "Session",
    "Task",
    "ToolCall",
    "Turn",
    "feedback",
    "single_turn",
    "tools",
]
