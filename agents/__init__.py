"""What agents are written with, and those that ship; `rollout.agent` names one by its import path. See docs/agents.md.

rollout:
  agent: my_agents:solve
"""

from corral.workers.agents.contract import (
    Endpoint,
    Episode,
    EpisodeEndedError,
    JudgeError,
    Outcome,
    RefusedError,
    Task,
    ToolCall,
    Turn,
)
from corral.workers.agents.program import program
from corral.workers.agents.session import Session
from corral.workers.agents.shipped import feedback, single_turn
from corral.workers.agents.tools import tools

__all__ = [
    "Endpoint",
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
    "program",
    "single_turn",
    "tools",
]
