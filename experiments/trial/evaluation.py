"""An evaluation of one version of a trial's weights: what is asked for, what came out, and where both are kept.

    {trial}/eval/step-00000012.json             result       written once, whole
    {trial}/eval/step-00000012.request.json     request      what the job reads; it needs nothing else
    {trial}/eval/step-00000012.progress.json    progress     sums so far; a job that was interrupted goes on from there
    {trial}/eval/on-{name}/...                  the same for another dataset than the trial's own

A request is complete, so that the job does not depend on what happens to the trial meanwhile.
"""

from pathlib import Path

from pydantic import Field

from corral.experiments.config.base import FrozenConfig
from corral.experiments.config.data import EvaluationConfig, EvaluationSampling
from corral.experiments.config.rollout import RolloutConfig
from corral.experiments.trial.directory import atomic_write
from corral.experiments.worker_specs import GenerationServerSpec

_BEST_VERSION = "evaluated.json"


class EvaluationRequest(FrozenConfig):
    """The task of an evaluation job."""

    step: int = Field(ge=0)
    """Policy version of the weights."""
    weights: Path
    """Directory in Hugging Face format."""
    source: str
    """Where the weights came from, as a name in the trial directory: checkpoints/step-..., exports/final."""
    are_weights_ours: bool
    """Whether the directory was made for this evaluation, and is removed after it."""
    evaluation: EvaluationConfig
    """Problems, and how they are answered; how often has no meaning here."""
    dataset_sha256: str
    """Digest of the problems; a file that changed in between would make results that cannot be compared."""
    server: GenerationServerSpec
    """What answers: as the trial's own servers, or, where it has none, the embedded engine."""
    rollout: RolloutConfig
    """Agent and reward; its sampling has no meaning here."""
    seed: int
    """The trial's."""
    batch_size: int = Field(default=256, ge=1)
    """Problems between two writes of the progress file: what an interruption may cost."""
    result: Path
    """Where the result goes."""
    code: Path | None = None
    """Folder of the trial's own code; None where it has none."""
    code_digests: dict[str, str] = {}
    """SHA-256 of the files in it, by name."""


class EvaluationResult(FrozenConfig):
    """The result of an evaluation."""

    step: int
    """Policy version of the weights."""
    accuracy: float
    """Fraction of judged answers with full reward."""
    mean_reward: float
    """Mean over all judged answers."""
    pass_at: dict[int, float] = {}
    """How probable it is that one of so many answers to a problem is correct."""
    majority: float | None = None
    """How often what most answers to a problem say is correct, with `evaluation.vote`."""
    mean_response_tokens: float
    """Mean length of an answer."""
    num_prompts: int
    """Problems that were answered."""
    num_unjudged: int = 0
    """Answers that the reward failed on; accuracy and mean reward leave them out."""
    failure: str = ""
    """Why the first of them has no reward."""
    seconds: float
    """Time that answering and judging took, over all starts of the job."""
    num_starts: int
    """1, unless the job was interrupted."""
    dataset: Path
    """The problems."""
    dataset_sha256: str
    """Their digest."""
    sampling: EvaluationSampling
    """How answers were sampled."""
    answers_per_problem: int = 1
    source: str
    """Where the weights came from, as a name in the trial directory."""


class BestVersion(FrozenConfig):
    """The version of the weights in exports/best, and its score; evaluated.json beside them."""

    version: str
    metric: str
    """By its name in the configuration: without eval/."""
    value: float

    @classmethod
    def read(cls, weights: Path) -> "BestVersion | None":
        """That of a directory of weights; None if it has none."""
        try:
            return cls.model_validate_json((weights / _BEST_VERSION).read_bytes())
        except FileNotFoundError:
            return None

    def write(self, weights: Path) -> None:
        atomic_write(weights / _BEST_VERSION, self.model_dump_json().encode())


class EvaluationProgress(FrozenConfig):
    """How far an evaluation has got."""

    num_done: int
    sums: dict[str, float]
    seconds: float
    num_starts: int
    failure: str = ""
    """Why the first answer without a reward has none."""


def result_path(folder: Path, step: int) -> Path:
    """Where the result of one step is kept."""
    return folder / f"step-{step:08d}.json"


def request_path(result: Path) -> Path:
    """The request that belongs to a result."""
    return result.with_suffix(".request.json")


def progress_path(result: Path) -> Path:
    """The progress on the way to a result."""
    return result.with_suffix(".progress.json")


def read_result(path: Path) -> EvaluationResult | None:
    """A result, or None where there is none (yet)."""
    try:
        return EvaluationResult.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not the result of an evaluation ({error}); delete it and evaluate again") from None
