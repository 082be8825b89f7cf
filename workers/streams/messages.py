"""What the master and the model workers say to each other.

    master --WorkerRequest{request, pre_hooks, post_hooks}--> model worker --Reply--> master

Epoch, request id and deadline travel in the header of every message (`codec.Header`), tensors beside it.

    non-blocking   Spec ModelConfig Fetch ClearDataCache Ping Shutdown            answered at once, by the I/O thread
    blocking       Initialize Inference Generate TrainStep Evaluate SaveCheckpoint PublishWeights RunHooks
                   collectives inside: queued until a Flush names them, run by the main thread in the order of request
                       ids
"""

from typing import NamedTuple

import msgspec

from corral.scheduling.redistribution import Transfer


class VersionSpan(NamedTuple):
    """Tokens [start, end) of one answer were made by policy version `version`, written "epoch.step"."""

    version: str
    start: int
    end: int


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages: a field that the receiver does not know is an error, not a surprise."""


# --- hooks: run inside a request, so that their collectives cannot interleave with others ---------------------------


class DataTransfer(_Message, frozen=True, tag="data_transfer"):
    """Bring keys of samples to the ranks that need them."""

    plan: list[Transfer]
    seqlens: dict[str, dict[str, list[int]]]
    """uid -> key -> lengths, so that receivers know the sizes beforehand."""
    dtypes: dict[str, str]
    """key -> wire dtype."""


class SaveWeights(_Message, frozen=True, tag="save_weights"):
    """Write the role's weights as Hugging Face safetensors."""

    directory: str


class EvaluateHook(_Message, frozen=True, tag="evaluate"):
    """Run the interface's evaluation; its statistics join those of the call."""


class Offload(_Message, frozen=True, tag="offload"):
    """Move the role's parameters to host memory until they are needed again."""

    role: str


Hook = DataTransfer | SaveWeights | EvaluateHook | Offload


# --- requests -------------------------------------------------------------------------------------------------------


class Spec(_Message, frozen=True, tag="spec"):
    """How much data is there? -> SpecReply"""


class ModelConfig(_Message, frozen=True, tag="model_config"):
    """What model is it? -> ModelConfigReply"""

    role: str


class Fetch(_Message, frozen=True, tag="fetch"):
    """New samples, from the dataset or from trajectories -> MetadataReply"""

    max_samples: int | None = None


class ClearDataCache(_Message, frozen=True, tag="clear_data_cache"):
    """These samples are used up -> OkReply"""

    uids: list[str]


class Initialize(_Message, frozen=True, tag="initialize"):
    """Follow the epoch in the header from now on, from this checkpoint -> OkReply

    The only request that raises a worker's epoch.
    """

    checkpoint_directory: str | None
    """None: from the model that the configuration names."""
    manifest_sha256: str | None
    step: int
    seed: int
    total_train_steps: int = 0
    """For learning-rate schedules; 0 if it is not known."""


class Inference(_Message, frozen=True, tag="inference"):
    """Forward pass of one model function call -> MetadataReply"""

    mfc: str
    uids: list[str]
    partition: list[list[str]]
    """The uids of each data-parallel rank."""
    version: int


class Generate(_Message, frozen=True, tag="generate"):
    """Synchronous generation of one model function call -> MetadataReply"""

    mfc: str
    uids: list[str]
    partition: list[list[str]]
    version: int


class TrainStep(_Message, frozen=True, tag="train_step"):
    """One update of one model function call, from `version` to `version + 1` -> StatsReply"""

    mfc: str
    uids: list[str]
    partition: list[list[str]]
    version: int


class Evaluate(_Message, frozen=True, tag="evaluate"):
    """Evaluation of one model function call -> StatsReply"""

    mfc: str
    version: int


class SaveCheckpoint(_Message, frozen=True, tag="save_checkpoint"):
    """Write this worker's shards into the directory -> ManifestReply"""

    directory: str
    step: int


class PublishWeights(_Message, frozen=True, tag="publish_weights"):
    """Write the policy's weights for the generation servers -> ManifestReply"""

    directory: str
    version: int
    epoch: int


class RunHooks(_Message, frozen=True, tag="run_hooks"):
    """Nothing but the hooks -> OkReply"""


class Flush(_Message, frozen=True, tag="flush"):
    """All concurrent requests of this level have been sent: run these -> OkReply

    Sent by `RequestClient.flush`, not by hand.
    """

    level: int
    request_ids: list[str]
    """What the worker must have before it starts any of them; the network may have lost one."""


class Ping(_Message, frozen=True, tag="ping"):
    """-> OkReply"""


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """End the worker after the current request -> OkReply"""

    reason: str


NonBlockingRequest = Spec | ModelConfig | Fetch | ClearDataCache | Ping | Shutdown
BlockingRequest = Initialize | Inference | Generate | TrainStep | Evaluate | SaveCheckpoint | PublishWeights | RunHooks
Request = NonBlockingRequest | BlockingRequest | Flush


class WorkerRequest(_Message, frozen=True, tag="request"):
    """A request with what runs before and after it."""

    request: Request
    pre_hooks: list[Hook] = []
    post_hooks: list[Hook] = []


# --- replies --------------------------------------------------------------------------------------------------------


class SampleMetadata(_Message):
    """What the master knows of a sample; the tensors stay where they are."""

    uid: str
    seqlens: dict[str, list[int]]
    """key -> length of each sequence of the group."""
    version_spans: list[list[VersionSpan]] = []
    """One list per answer; empty for samples that were not generated."""
    dataset_epoch: int = 0
    order: int = 0
    """Birth order: samples are consumed oldest first."""
    scalars: dict[str, float] = {}


class OkReply(_Message, frozen=True, tag="ok"):
    """Done; there is nothing more to say."""


class SpecReply(_Message, frozen=True, tag="spec"):
    """Size of the dataset as this worker sees it."""

    num_samples: int
    max_seqlen: int | None = None


class ModelConfigReply(_Message, frozen=True, tag="model_config"):
    """Shape of a model."""

    architecture: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int


class MetadataReply(_Message, frozen=True, tag="metadata"):
    """Samples, or keys of samples, that this worker now holds."""

    samples: list[SampleMetadata]
    is_end_of_epoch: bool = False
    stats: dict[str, float] = {}


class StatsReply(_Message, frozen=True, tag="stats"):
    """Statistics of a call."""

    stats: dict[str, float]


class ManifestReply(_Message, frozen=True, tag="manifest"):
    """Files that this worker has written and synced."""

    directory: str
    files: list[str]
    manifest_sha256: str | None = None
    """Only from the worker that wrote the manifest."""


class ErrorReply(_Message, frozen=True, tag="error"):
    """The handler raised."""

    error_type: str
    message: str
    traceback: str


class StaleReply(_Message, frozen=True, tag="stale"):
    """The request comes from an epoch that is over."""

    max_epoch: int


ReplyPayload = (
    OkReply | SpecReply | ModelConfigReply | MetadataReply | StatsReply | ManifestReply | ErrorReply | StaleReply
)


class Hello(_Message, frozen=True, tag="hello"):
    """A worker introduces itself, first thing on every connection."""

    worker: str
    """ "model_worker/3" """
    incarnation: str
    """New in every process of this worker."""
    pid: int
    max_epoch: int
    """The newest epoch that it has seen; 0 if none."""


ToWorker = WorkerRequest
FromWorker = (
    Hello
    | OkReply
    | SpecReply
    | ModelConfigReply
    | MetadataReply
    | StatsReply
    | ManifestReply
    | ErrorReply
    | StaleReply
)
