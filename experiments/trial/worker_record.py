"""A worker's record: its state, which it publishes in name-resolve and rl-status reads there.

worker --Presence, at most twice a second--> workers/{kind}/{index}, JSON --rl-status--> a row, and who waits for whom

Presence is in workers/lifecycle/presence.py. In launcher/status/, reader.py gathers the records, workers.py makes the
rows, waits.py the chains of who waits for whom, and text.py prints both.

Times are durations of the worker's own, or of the service's clock: no two machines need to agree about the time.
"""

import msgspec

LEASE_TTL_S = 10.0
"""Time to live of a worker's record, which is refreshed three times in it."""
MASTER = "master_worker/0"
MANAGER = "gserver_manager/0"


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of the last change of weights for a generation server."""

    version: str
    """The policy version that it was brought to, as its tag."""
    bytes_read: int
    """From the shared file system by its worker; 0 where another worker of the host has read them."""
    bytes_received: int = 0
    """By its worker from other hosts."""
    staged_s: float
    """How long the files took to arrive on the host and to be checked, while the server generated."""
    prepared_s: float
    """How long the embedded engine then read them into its own memory, while it generated."""
    stopped_s: float
    """How long the server stood still: the embedded engine, as long as the change kept it from its next step; SGLang,
    from the order to pause to the answer of the order to go on."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why another worker does not do its part."""

    worker: str
    text: str
    """The reason, for people."""
    for_s: float
    """How long that has lasted at the beat."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a worker, and its state at the moment of its heartbeat."""

    kind: str = ""
    index: int = 0
    pid: int = 0
    host: str = ""
    node: str = ""
    attempt: int = 0
    incarnation: str = ""
    """Random; new at each start, and shared by the ranks of one trainer group start."""
    phase: str = "starting"
    """A word or two for people."""
    in_phase_s: float = 0.0
    """How long it had been in this phase at the beat."""
    waiting_for: str = ""
    """What it waits for, in words, where the workers that it waits for do not say it all. For people only."""
    waits_for: tuple[str, ...] = ()
    """Workers (kind/index) without which it stands still."""
    works_with: tuple[str, ...] = ()
    """Workers without which it would soon stand still, while it works."""
    is_setting_up: bool = False
    """Whether it is not ready yet; an import may then hold its interpreter for long."""
    version: str = ""
    """Tag of the policy version that it holds."""
    weight_update: WeightUpdate | None = None
    """Of a generation server, the last one."""
    troubles: tuple[Trouble, ...] = ()
    """Of the manager: why generation servers get no requests, or do not take over weights."""
    restarts: int = 0
    """How often its process has started anew what it serves by."""
    progress: int = 0
    """Counts up with all that it does."""
    beat: float = 0.0
    """When this was published, by the clock of the name service."""
