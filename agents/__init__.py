"""What agents are written with, and those that ship; `rollout.agent` names one by its import path. See docs/agents.md.

rollout:
  agent: my_agents:solve
"""

# ruff: noqa: I001  (it would give each name that is handed on a statement of its own)

from corral.workers.agents.contract import (
    Endpoint as Endpoint,
    Episode as Episode,
    EpisodeEndedError as EpisodeEndedError,
    JudgeError as JudgeError,
    Outcome as Outcome,
    RefusedError as RefusedError,
    Task as Task,
    ToolCall as ToolCall,
    Turn as Turn,
)
from corral.workers.agents.shipped import program as program
from corral.workers.agents.session import Session as Session
from corral.workers.agents.shipped import feedback as feedback, single_turn as single_turn
from corral.workers.agents.shipped import tools as tools
