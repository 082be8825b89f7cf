"""Messages between the generation-server manager and rollout workers, and between it and the master.

    Allocate --> Allocation     a prompt, as soon as it may start. Its admission number is its birth order.
    Schedule --> Route          which server makes the next tokens? As soon as one may.
    Finish   --> Ok             it is in the spool, or to be issued again: its slot is free
    Report   --> Ok             what I have, for a manager that has restarted and knows nothing

    EvaluateVersion --> Evaluation  the master: how far is this version's evaluation? The first question begins it.
    Allocate --> Allocation     a held-out problem of it
    Answered --> Ok             what came out of one

Every request names what it is about by uid and can be repeated without harm, because the manager may have restarted in
between.
"""

from typing import Final, Literal

import msgspec

from corral.workers.streams.codec import MessageBody

LONGEST_TURN_S: Final = 10.0
"""The manager lets a rollout worker wait so long for a prompt, and the master for news of an evaluation; then they hear
how far it is."""
LONGEST_WAIT_FOR_SERVER_S: Final = 45.0
"""It lets an answer wait so long for a server: there may be a hundred thousand that wait."""
LATE_BY_S: Final = 5.0
"""So much later rl-status says that its answer is waited for."""
REQUEST_DEADLINE_S: Final = 60.0
"""After so long a request is sent again."""
assert LONGEST_TURN_S <= LONGEST_WAIT_FOR_SERVER_S < LONGEST_WAIT_FOR_SERVER_S + LATE_BY_S < REQUEST_DEADLINE_S


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A prompt that was admitted, and its admission number."""

    uid: str
    order: int
    due_step: int = 0
    """See `Allocation`."""


WaitingFor = Literal["weights", "reports", "prompts", "staleness", "concurrency"]
"""The trainer's first weights; what other rollout workers have; a prompt, all being dealt; the gate's two limits."""

Outcome = Literal["finished", "dropped", "again", "otherwise"]
"""In the spool with answers; in the spool as given up; nowhere, and to be issued again, or so with other answers."""


class HeldOutProblem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A held-out problem of one evaluation."""

    epoch: int
    """The trainer epoch that has asked for it."""
    version: str
    """That is evaluated, of the form 1.20: no older weights than these may answer."""
    dataset: str
    """As `EvaluationConfig.datasets` names it."""
    row_id: str

    @property
    def uid(self) -> str:
        """What servers are asked for under; no prompt has one like it, since prompts begin with a whole number."""
        return f"{self.version}:{self.epoch}:{self.dataset}:{self.row_id}"


class Allocate(MessageBody, frozen=True, tag="allocate"):
    """-> Allocation, when a prompt may start, or what that waits for has become something else; or after a while."""

    worker: str
    incarnation: str
    last: int | None
    """Admission number of the prompt that this process was given last."""
    knows: WaitingFor | Literal[""] = ""
    """What prompts wait for, as of the last reply."""
    held_out: list[HeldOutProblem] = []
    """All held-out problems that it is answering."""


class Schedule(MessageBody, frozen=True, tag="schedule"):
    """-> Route, when a server may make it, or why none may has become something else; or after a while."""

    uid: str
    tokens: int
    """That its answers are expected to come to, with what they go on from."""
    order: int
    """Its admission number: who was admitted before waits in front of it."""
    due_step: int = 0
    """See `Allocation`."""
    oldest_version: str = ""
    """Of the tokens that it has; empty if it has none."""
    failed_url: str = ""
    """Server that has just failed this prompt; empty if none has."""
    lost_url: str = ""
    """Server that could not be reached; empty if none was."""
    busy_url: str = ""
    """Server that had no room for this prompt; it is well, but another one may have room."""
    knows: str = ""
    """Why no prompt may start, as of the last reply."""
    worker: str = ""
    """Who has it."""


class Finish(MessageBody, frozen=True, tag="finish"):
    """-> Ok"""

    worker: str
    uid: str
    order: int
    outcome: Outcome


class Report(MessageBody, frozen=True, tag="report"):
    """-> Ok"""

    worker: str
    incarnation: str
    running: list[Admitted]
    finished: list[Admitted]
    """In the spool, not covered by a commit yet."""
    dropped: list[str]
    """In the spool as given up."""


class Answered(MessageBody, frozen=True, tag="answered"):
    """-> Ok"""

    problem: HeldOutProblem
    sums: dict[str, float]
    """As `sums_of` makes them."""
    versions: list[str] = []
    """That made tokens of the answers."""
    failure: str = ""
    """Why the answers have no reward."""


class EvaluateVersion(MessageBody, frozen=True, tag="evaluate_version"):
    """-> Evaluation, when it is complete, or after a while."""

    epoch: int
    """The trainer's."""
    version: str


ManagerRequest = Allocate | Schedule | Finish | Report | Answered | EvaluateVersion


class Allocation(MessageBody, frozen=True, tag="allocation"):
    """A prompt, or why there is none; then it is asked for again."""

    uid: str = ""
    order: int | None = None
    """Admission number; None: there is no prompt."""
    due_step: int = 0
    """The train step, from 0, which trains on it at the latest, if in order."""
    tries: int = 0
    """How often answers to it have had no finite loss."""
    waiting_for: WaitingFor | Literal[""] = ""
    reason: str = ""
    """Why not, for `rl-status`."""
    waits_for: list[str] = []
    """The workers that open the gate."""
    held_out: HeldOutProblem | None = None
    """A held-out problem in place of a prompt."""
    must_report: bool = False
    """The manager does not know what this process of the worker has: it must report first."""


class Route(MessageBody, frozen=True, tag="route"):
    """Where to generate."""

    url: str | None
    """None: no server is ready; ask again."""
    server: str = ""
    """Whose that is, for the timeline."""
    groups: int = 0
    """That are there now, with this one."""
    kv_share: float = 0.0
    """Of its KV cache, that they are expected to take; 0 if it does not say how much it has."""
    reason: str = ""
    """Why there is none, for `rl-status`."""
    lacks_room: bool = False
    """Whether that is room on servers which are ready."""
    waits_for: list[str] = []
    """The workers that one could come from."""


class Evaluation(MessageBody, frozen=True, tag="evaluation"):
    """What is known of an evaluation; what another master asks for may have taken its place."""

    epoch: int
    version: str
    num_problems: int
    num_done: int
    sums: dict[str, dict[str, float]]
    """Over the problems that are done, by name of the data set."""
    versions: list[str]
    """That made tokens of the answers."""
    failures: dict[str, str] = {}
    """Why answers have no reward: the first failure of each data set that has one."""

    @property
    def is_complete(self) -> bool:
        return self.num_done == self.num_problems


class Ok(MessageBody, frozen=True, tag="ok"):
    """Noted."""


ManagerReply = Allocation | Route | Evaluation | Ok
