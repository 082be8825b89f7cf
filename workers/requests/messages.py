"""Messages between the master and the model workers.

    master --WorkerRequest{request, riders}--> model worker --Reply--> master

Epoch, request id and deadline travel in the header of every message (`codec.Header`).

    non-blocking   Fetch LoadRows Reject Give ClearDataCache Written
                   answered by the I/O thread, at once; a Fetch that waits, when something has arrived, and a Written,
                       when what was copied is on disk
    blocking       Initialize Generate Inference TrainStep Evaluate Reallocate SaveWeights SaveCheckpoint
                   collectives inside: run by the main thread, one after the other, in the order of request ids

The reference system's `restore` and `reset` are Initialize: it loads what a commit holds, and forgets all that an
earlier epoch left. A worker is not shut down by a request, but through its control channel, as all workers are.
"""

from collections.abc import Iterable
from typing import Literal, Self

import msgspec

from corral.scheduling.redistribution import Transfer
from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.streams.codec import MessageBody
from corral.workers.streams.rpc import ErrorReply, StaleReply

# --- requests -------------------------------------------------------------------------------------------------------


Rejection = Literal["stale", "not_finite", "consumed", "dropped", "duplicate"]
"""stale: generate it again. not_finite: the same, with other answers. consumed: it was trained on. dropped: nobody
trains on its prompt. duplicate: an earlier copy is held."""


class Fetch(MessageBody, frozen=True, tag="fetch"):
    """Trajectories that have arrived -> MetadataReply"""

    max_samples: int
    wait_s: float
    """Answer as soon as something has arrived, and with nothing only after so long."""


class LoadRows(MessageBody, frozen=True, tag="load_rows"):
    """Read these rows of the dataset -> MetadataReply"""

    uids: list[str]


class Reject(MessageBody, frozen=True, tag="reject"):
    """Throw these samples away and tell who sent them -> OkReply"""

    uids: list[str]
    rejection: Rejection


class Give(MessageBody, frozen=True, tag="give"):
    """Send these transfers, of samples that are here, to the ranks that take them -> OkReply"""

    transfers: list[Transfer]


class ClearDataCache(MessageBody, frozen=True, tag="clear_data_cache"):
    """These samples are used up -> OkReply"""

    uids: list[str]


class Initialize(MessageBody, frozen=True, tag="initialize"):
    """Follow the epoch in the header from now on, from this checkpoint -> InitializedReply

    The only request that raises a worker's epoch.
    """

    weights: dict[str, str]
    """Directory with the weights of `step` in Hugging Face format, of every role that is trained."""
    states: dict[str, str]
    """Directory with what the role's training resumes from; a role without one starts with a fresh optimizer."""
    step: int
    """Train steps that the weights have behind them."""


class DataTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take the transfers that come to this rank, and pass on those that it is the source of."""

    transfers: list[Transfer]
    num_tokens: dict[str, list[int]]
    """uid -> tokens of each answer, so that the sizes of what comes are known beforehand."""


class CallRequest(MessageBody, frozen=True, kw_only=True):
    """One slice of a model function call; what runs before and after it does so inside, so that its collectives cannot
    interleave with others."""

    mfc: str
    uids: list[str]
    """The receiver's own shard of the batch; without any it takes part in the collectives, with no rows."""
    take: DataTransfer | None = None
    """Of the inputs, what is not there yet."""
    offloads: bool = False
    """Whether to move the model to host memory afterwards; the next call on it brings it back."""


class Inference(CallRequest, frozen=True, tag="inference"):
    """Forward pass of one model function call -> OkReply"""


class Generate(CallRequest, frozen=True, tag="generate"):
    """Answer prompts of the dataset with the present weights of the call's model -> MetadataReply, or OkReply"""

    orders: list[int]
    """Admission number of each prompt."""
    tries: list[int]
    """How often answers to it have had no finite loss."""
    version: str
    """Tag of the weights, "epoch.step"; every token carries it."""


class TrainStep(CallRequest, frozen=True, tag="train_step"):
    """One update of one model function call, from `version` to `version + 1` -> TrainReply, or OkReply

    What a train step did is equal on all ranks of the call, so that one of them says it for all.
    """

    version: int
    reports: bool = True
    """Whether this rank answers with the TrainReply; the others answer OkReply."""


class Evaluate(CallRequest, frozen=True, tag="evaluate"):
    """Look at held-out rows with the present weights of the call's model -> StatsReply, or OkReply; HeldOutReply

    Without rows the call has problems of its own.
    """

    reports: bool = True
    """Whether this rank answers with the statistics, which are equal on all ranks; another rank answers OkReply, unless
    some of its problems have no reward."""


class Reallocate(MessageBody, frozen=True, tag="reallocate"):
    """One model takes over the weights of another one; goes to the ranks of both -> OkReply"""

    source: str
    """ "actor/0" """
    target: str
    eta: float
    """target = eta * source + (1 - eta) * target"""


class SaveWeights(MessageBody, frozen=True, tag="save_weights"):
    """Write the role's weights in Hugging Face format, each rank some of the files -> WrittenReply"""

    role: str
    directory: str
    base: str = ""
    """Directory of the version before, where there is one and deltas from it are wanted."""


class SaveCheckpoint(MessageBody, frozen=True, tag="save_checkpoint"):
    """Copy this rank's shard of what a commit has of the role, and write it beside later calls -> OkReply

    The reply says that it is copied, and training may go on; when it is on disk, the reply to `Written` does.
    """

    role: str
    state: str
    """Directory for what training resumes from."""
    weights: str
    """Directory for the weights in Hugging Face format; empty if those that were published are committed."""
    copies: bool
    """Whether to copy: without it, no memory is taken, and this is answered when all is on disk."""


class Written(MessageBody, frozen=True, tag="written"):
    """What has the role's last SaveCheckpoint written, when it has? -> WrittenReply"""

    role: str


NonBlockingRequest = Fetch | LoadRows | Reject | Give | ClearDataCache | Written
BlockingRequest = Initialize | Generate | Inference | TrainStep | Evaluate | Reallocate | SaveWeights | SaveCheckpoint
PiggybackedRequest = ClearDataCache | Give
"""What may go with the next message to the same worker, whose answer says of both whether they could be done."""
Request = NonBlockingRequest | BlockingRequest


class WorkerRequest(MessageBody, frozen=True, tag="request"):
    """A request, and what came with it."""

    request: Request
    piggybacked: tuple[PiggybackedRequest, ...] = ()
    """Done by the I/O thread when this arrives, before it. What answers this answers them; an error of theirs is it."""


# --- replies --------------------------------------------------------------------------------------------------------


class SampleMetadata(msgspec.Struct, frozen=True, gc=False):
    """What the master knows of a sample; the tensors stay where they are."""

    uid: str
    keys: tuple[str, ...]
    """What exists for it."""
    num_tokens: list[int]
    """Of each answer, prompt included."""
    versions: tuple[str, ...] = ()
    """Every policy version that made one of its tokens, "epoch.step"; empty for rows of a dataset."""
    order: int = 0
    """Birth order: samples are consumed oldest first."""
    dropped_because: str = ""
    """Why it has no answers to train on; empty for a sample that has."""
    scalars: dict[str, float] = {}
    """Statistics of its rewards and episodes, which a step's line has the means of."""


class SampleGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """Samples as they travel: by column, and once what all of them have in common.

    A step has thousands of samples, most of them alike. Fields travel without their names, and lengths once: those of
    each key follow from its layout.
    """

    keys: tuple[str, ...]
    versions: tuple[str, ...]
    dropped_because: str
    uids: list[str]
    orders: list[int]
    num_tokens: list[list[int]]
    scalars: list[dict[str, float]] = []
    """Empty if none of them has any."""

    def __post_init__(self) -> None:
        if not len(self.uids) == len(self.orders) == len(self.num_tokens):
            raise ValueError(
                f"each sample has one uid, order and list of lengths, got {len(self.uids)} uids, "
                f"{len(self.orders)} orders and {len(self.num_tokens)} lists"
            )
        if self.scalars and len(self.scalars) != len(self.uids):
            raise ValueError(f"statistics are of all samples or of none, got {len(self.scalars)} of {len(self.uids)}")


class OkReply(MessageBody, frozen=True, tag="ok"):
    """Done; there is nothing more to say."""


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a model, as it was loaded."""

    architecture: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int


class InitializedReply(MessageBody, frozen=True, tag="initialized"):
    """What this rank has loaded."""

    models: dict[str, LoadedModel]
    """By name: "actor/0"."""


class MetadataReply(MessageBody, frozen=True, tag="metadata"):
    """Samples, or keys of samples, that this worker now holds."""

    groups: list[SampleGroup]

    @classmethod
    def of(cls, samples: Iterable[SampleMetadata]) -> Self:
        """The reply that says all of this."""
        alike: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[SampleMetadata]] = {}
        for sample in samples:
            alike.setdefault((sample.keys, sample.versions, sample.dropped_because), []).append(sample)
        return cls(
            groups=[
                SampleGroup(
                    keys=keys,
                    versions=versions,
                    dropped_because=dropped_because,
                    uids=[sample.uid for sample in group],
                    orders=[sample.order for sample in group],
                    num_tokens=[sample.num_tokens for sample in group],
                    scalars=[sample.scalars for sample in group] if any(sample.scalars for sample in group) else [],
                )
                for (keys, versions, dropped_because), group in alike.items()
            ]
        )


class StatsReply(MessageBody, frozen=True, tag="stats"):
    """Statistics of a call."""

    stats: dict[str, float]


class HeldOutReply(MessageBody, frozen=True, tag="held_out"):
    """What came out of a rank's shard of the held-out problems."""

    sums: dict[str, dict[str, float]]
    """As `sums_of` makes them, by name of the data set."""
    failures: dict[str, str] = {}
    """Why answers have no reward: the first failure of each data set that has one."""


class TrainNotice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a train step found out, for people."""

    topic: str
    """What it is about; of several with one topic, the newest holds."""
    is_alarm: bool
    """Whether something is wrong, and somebody should look."""
    text: str
    """The finding, in a line."""
    details: str
    """The numbers that it rests on."""
    causes: list[str]
    """What is likely behind it, likeliest first; none where nothing is wrong."""


class TrainReply(MessageBody, frozen=True, tag="train"):
    """What a train step did to the weights."""

    stats: dict[str, float]
    num_updates: int
    """Optimizer steps that changed the weights."""
    num_nonfinite: int
    """Optimizer steps that were skipped because loss or gradient was not finite."""
    is_damaged: bool = False
    """Whether the weights themselves are no longer finite: only an earlier version can be trained on."""
    notices: list[TrainNotice] = []
    """What it found out."""

    @property
    def is_skipped(self) -> bool:
        """Whether nothing changed: the version stays, and the samples were not trained on."""
        return self.num_updates == 0 and self.num_nonfinite > 0


class WrittenReply(MessageBody, frozen=True, tag="written"):
    """Files that this rank has written, and forced to disk, by path relative to the directory of each kind.

    Nobody has to read them again to know what they hold.
    """

    state: dict[str, FileEntry] = {}
    weights: dict[str, FileEntry] = {}
    failed_because: str = ""
    lacks_room: bool = False
    """Whether that was for want of room on the disk."""
    """What the file system answered instead; the files are of no use then."""


ReplyPayload = (
    OkReply
    | InitializedReply
    | MetadataReply
    | StatsReply
    | HeldOutReply
    | TrainReply
    | WrittenReply
    | ErrorReply
    | StaleReply
)


class Hello(MessageBody, frozen=True, tag="hello"):
    """A worker introduces itself, first thing on every connection."""

    worker: str
    """ "model_worker/3" """
    incarnation: str
    """New in every process of this worker."""
    pid: int
    host: str
    """Equal for workers that may be able to share memory."""


ToWorker = WorkerRequest
FromWorker = Hello | ReplyPayload
