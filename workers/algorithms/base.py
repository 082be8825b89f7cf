"""What a model function call runs: an interface, which knows an algorithm, on an engine, which knows a model.

    inference    sample ─► interface.inference(engine, sample)            ─► new keys, one packed array each
    train_step   sample ─► interface.train_step(engine, sample, version=) ─► statistics
    evaluate     sample ─► interface.evaluate(engine, sample)             ─► statistics

    inputs, outputs     which keys each kind of call reads and makes
    state_dict          what a checkpoint keeps of the interface itself: plain numbers, equal on every rank

Everything larger that a checkpoint must keep lives in the engine.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corral.experiments.config.algorithm import PPOConfig
from corral.scheduling.keys import ROUTED_EXPERTS, TEMPERATURES, Key
from corral.scheduling.model_function_call import CallType, ModelFunctionCall
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.backends.base import AnyEngine, LossOutput, Numbers, TokenScores, TrainEngine
from corral.workers.data.sequence_sample import SequenceSample, answer_slices
from corral.workers.requests.messages import TrainNotice

MaskT = TypeVar("MaskT", Tensor, npt.NDArray[np.bool_])
CallKeys = Mapping[CallType, tuple[Key, ...]]
"""Keys by the kind of call that reads or makes them."""


class ModelInterface:
    """An algorithm's side of the model function calls of one model. All ranks of its mesh call it together.

    A subclass overrides the calls that it serves and names their keys in `inputs` (and `outputs`, for inference):

        class Lengths(ModelInterface):
            inputs = {CallType.INFERENCE: built_in("input_ids")}
            outputs = {CallType.INFERENCE: (Key("num_tokens", "per_answer", "float32"),)}

            def inference(self, engine, sample):
                return {"num_tokens": np.array(sample.answer_lengths(), np.float32)}
    """

    @property
    def inputs(self) -> CallKeys:
        """What each kind of call must find in its sample; a kind that is not here is not served."""
        return {}

    @property
    def outputs(self) -> CallKeys:
        """What inference may make; the call says which of it the graph has a use for, and under which name."""
        return {}

    def inference(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, npt.NDArray[Any]]:
        """Keys computed from the sample without changing the model; the call's `output_key_remap` names them."""
        self._refuse(CallType.INFERENCE)

    def train_step(self, engine: AnyEngine, sample: SequenceSample, *, version: int) -> dict[str, float]:
        """Update the model on this rank's shard of a global batch.

        Args:
            sample: numpy arrays of the call's input keys.
            version: policy version before this step; with the seed, it decides the step's random numbers.

        Returns:
            Statistics of the global batch, equal on all ranks.
        """
        self._refuse(CallType.TRAIN_STEP)

    def evaluate(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, float]:
        """Statistics of the ranks' samples together under the present weights, equal on all ranks.

        They are means. `count` says over how many (pairs, tokens), and weighs them where held-out rows take several
        calls; without it, rows do.
        """
        self._refuse(CallType.EVALUATE)

    def take_learned(self) -> SequenceSample | None:
        """What the last train step has learned from, with what it made of it, for people to read; once. None where the
        interface does not tell. It has `old_logprobs`, `versions`, `rewards`, `advantages`."""
        return None

    def take_notices(self) -> list[TrainNotice]:
        """What train steps found out since the last time, for people; equal on all ranks."""
        return []

    def state_dict(self) -> Numbers:
        """Plain numbers that a checkpoint keeps, equal on every rank: normalisers, controllers."""
        return {}

    def load_state_dict(self, state: Numbers) -> None:
        """Go on from what `state_dict` said.

        Raises:
            ValueError: if that was another algorithm's, or one with other settings.
        """
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but the checkpoint holds {sorted(state)} for it")

    def _refuse(self, call_type: CallType) -> NoReturn:
        raise ValueError(f"{type(self).__name__} serves no {call_type.value} call; {_served(self)}")


def check_call(interface: ModelInterface, call: ModelFunctionCall) -> None:
    """See that a call asks for what its interface does, and gives it what that needs.

    Raises:
        ValueError: naming the call, the keys, and what there is.
    """
    name = type(interface).__name__
    if call.call_type not in interface.inputs:
        raise ValueError(
            f"call {call.name!r} is of type {call.call_type.value}, which {name} does not serve; {_served(interface)}"
        )
    given = {call.input_key_remap.get(key, key) for key in call.input_keys}
    if missing := [key.name for key in interface.inputs[call.call_type] if key.name not in given]:
        raise ValueError(
            f"call {call.name!r} does not give {name} the key {', '.join(missing)}; add it to its input_keys "
            f"{list(call.input_keys)}, or change the setting that needs it"
        )
    made = {key.name for key in interface.outputs.get(call.call_type, ())}
    own_name = {graph_name: own for own, graph_name in call.output_key_remap.items()}
    if unmade := [key for key in call.output_keys if own_name.get(key, key) not in made]:
        raise ValueError(
            f"call {call.name!r} wants {', '.join(unmade)}, which {name} does not make; it makes "
            f"{', '.join(sorted(made)) or 'nothing'}"
        )


def _served(interface: ModelInterface) -> str:
    return f"it serves {', '.join(kind.value for kind in interface.inputs) or 'nothing'}"


def response_mask(sample: SequenceSample) -> npt.NDArray[np.bool_]:
    """`loss_mask` of all response tokens: False where the predicted token belongs to the prompt."""
    is_first = np.zeros(sample.total_length("input_ids"), dtype=np.bool_)
    ends = np.cumsum(sample.answer_lengths("input_ids"), dtype=np.int64)
    is_first[np.concatenate([[0], ends[:-1]]) if len(ends) else []] = True
    prompt_mask: npt.NDArray[np.bool_] = np.asarray(sample.data["prompt_mask"], dtype=np.bool_)
    return ~prompt_mask[~is_first]


def generated(keys: Mapping[str, Any], mask: MaskT) -> MaskT:
    """The entries of the mask whose tokens the policy generated.

    A demonstration has version -1 and log-probability 0: the 0 is a marker. A comparison with the policy that
    generated, and an estimate from draws of the policy, read these entries alone.

    Args:
        keys: of a sample or a micro-batch; without `versions` there are no demonstrations.
        mask: [T] bool, of response tokens.
    """
    return mask & (keys["versions"] >= 0) if "versions" in keys else mask


def compute_logprobs(
    engine: TrainEngine[TokenScores], sample: SequenceSample, *, temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """Log-probability of every response token under the engine's weights, packed; 0 on prompt tokens.

    Where the sample has `routed_experts`, by those experts; where it has `temperatures`, at these.
    """
    read = [key for key in ("input_ids", ROUTED_EXPERTS, TEMPERATURES) if key in sample.seqlens]
    logprobs = engine.forward(sample.select_keys(read), temperature=temperature)["logprobs"]
    return np.where(response_mask(sample), logprobs, np.float32(0.0))


def sum_over_mask(losses: TokenLosses, loss_mask: Tensor, *, weights: Tensor | None = None) -> LossOutput:
    """Sums of a micro-batch over the True entries of the mask; the loss of each token times its weight."""
    weighted = losses.losses if weights is None else losses.losses * weights
    stats = {
        name: torch.where(loss_mask, values.detach().to(torch.float32), 0.0).sum()
        for name, values in losses.stats.items()
    }
    return LossOutput(torch.where(loss_mask, weighted, 0.0).sum(), stats)


# One train step as several optimizer steps: answers -> mini-batches -> statistics of the step.
#
#     answers ──deal──► parts of pass 0 | parts of pass 1 | ...  ──► one optimizer step each ──merge_stats──► one line
#
# Each rank deals its own answers, so that no sample moves for it. An episode is dealt with all its sequences.

STEPS_SKIPPED_EARLY = "train/skipped_early_stop"

_COUNTS = {"train/tokens", "train/skipped_nonfinite", "train/skipped_empty", STEPS_SKIPPED_EARLY}


def deal_mini_batches(config: PPOConfig, sample: SequenceSample, *, seed: Sequence[int]) -> Iterator[SequenceSample]:
    """`sample_reuse` passes over the answers, each dealt anew into `n_minibatches` parts of equal numbers of answers.

    Answers stay with the others of their prompt in the same part, so that rows may have it once (`shared_prompts`).
    The same seed deals alike: the trial's, the version, and the data-parallel rank. A part may be empty on a rank with
    few answers; every rank deals the same number of parts.
    """
    for reuse in range(config.sample_reuse):
        if config.n_minibatches == 1:
            yield sample
            continue
        sequences = answer_slices(sample.episode_sizes())
        order = np.random.default_rng([*seed, reuse]).permutation(len(sequences))
        numbers = range(sum(sample.num_answers_per_sample()))
        for part in np.array_split(order, config.n_minibatches):
            yield sample.select_answers([number for answer in part for number in numbers[sequences[answer]]])


def merge_stats(stats: Sequence[dict[str, float]], *, loss_name: str) -> dict[str, float]:
    """Means over the mini-batches that made a step; counts of tokens and skipped steps are added up."""
    values: dict[str, list[float]] = defaultdict(list)
    for mini_batch in stats:
        for name, value in mini_batch.items():
            values[loss_name if name == "loss" else name].append(value)
    return {name: sum(v) if name in _COUNTS else sum(v) / len(v) for name, v in values.items()}
