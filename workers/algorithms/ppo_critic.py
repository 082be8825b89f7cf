"""The PPO critic: what reward is to be expected after each token.

inference    input_ids ─► values in units of reward

train_step   rewards, values ─► GAE ─► returns ─┬─► running mean and deviation
                                                └─► in the head's units ─► mini-batches ─► engine.train_batch

The head works in units of mean 0 and deviation 1, if `value_norm` is set; keys are in units of reward, so that nobody
else has to know. The old values go back with the moments that they came with, the returns with the new ones.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from corral.experiments.config.algorithm import CriticConfig, PPOConfig
from corral.scheduling.keys import built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.advantage import GAE
from corral.workers.algorithms.base import CallKeys, ModelInterface, deal_mini_batches, merge_stats, sum_over_mask
from corral.workers.algorithms.functional.losses import value_loss
from corral.workers.algorithms.functional.normalization import RunningMoments
from corral.workers.algorithms.ppo_batch import KLController, advantage_batch, measure_batch, with_loss_weights
from corral.workers.backends.base import LossOutput, Numbers, TrainEngine
from corral.workers.backends.micro_batches import MicroBatch
from corral.workers.data.sequence_sample import SequenceSample

VALUE_NORM_DECAY = 0.99995
"""What the running means of `value_norm: exponential` keep of the past in one train step."""


class PPOCriticInterface(ModelInterface):
    """Value updates, on an engine with a value head.

    See `CriticConfig` for the settings, and `PPOConfig` for those of rewards and mini-batches.
    """

    outputs = {CallType.INFERENCE: built_in("values")}

    def __init__(self, config: PPOConfig, critic: CriticConfig, *, seed: int = 0) -> None:
        """
        Args:
            seed: decides, with the policy version, which answers share a mini-batch.
        """
        self._config = config
        self._critic = critic
        self._seed = seed
        self._kl = KLController.at_start(config.kl)
        self._has_units = critic.value_norm != "none"
        """Whether the head works in units of its own; without, the moments stay as they are and change nothing."""
        self._moments = RunningMoments(decay=VALUE_NORM_DECAY if critic.value_norm == "exponential" else None)

    @property
    def inputs(self) -> CallKeys:
        needed = ["input_ids", "prompt_mask", "rewards", "values", "seq_no_eos_mask"]
        if self._config.kl.is_charged:
            needed += ["old_logprobs", "ref_logprobs"]
        return {CallType.INFERENCE: built_in("input_ids"), CallType.TRAIN_STEP: built_in(*needed)}

    def inference(self, engine: TrainEngine[Tensor], sample: SequenceSample) -> dict[str, npt.NDArray[np.float32]]:
        """`values` after every token, in units of reward."""
        values = engine.forward(sample.select_keys(["input_ids"]))["values"]
        return {"values": self._moments.denormalize(values)}

    def train_step(self, engine: TrainEngine[Tensor], sample: SequenceSample, *, version: int) -> dict[str, float]:
        """As many optimizer steps as the actor's, on returns that all of them share."""
        config, context = self._config, engine.context
        facts = measure_batch(sample, context)
        batch = advantage_batch(config, sample, kl_coefficient=self._kl.coefficient)
        responses = batch.response_mask.numpy()
        returns = GAE(batch, config)["returns"].numpy()
        values = np.asarray(sample.data["values"], dtype=np.float32)
        wide = returns[responses].astype(np.float64)
        local = {"count": wide.size, "total": wide.sum(), "square_total": np.square(wide).sum()}
        totals = context.sum_over_ranks({name: float(value) for name, value in local.items()})
        if self._has_units and facts.is_finite:
            before, self._moments = self._moments, self._moments.updated(**totals)
            values, returns = before.normalize(values), self._moments.normalize(returns)
        prepared = with_loss_weights(
            sample.with_key("values", values).with_key("returns", returns).with_key("loss_mask", responses),
            is_finite=facts.is_finite,
        )
        stats = [
            engine.train_batch(mini_batch, loss_fn=self._loss)
            for mini_batch in deal_mini_batches(config, prepared, seed=(self._seed, version, context.dp_rank))
        ]
        self._kl = self._kl.after(facts)
        return merge_stats(stats, loss_name="critic/loss") | _stats(totals)

    def state_dict(self) -> Numbers:
        return self._kl.state_dict() | (self._moments.state_dict() if self._has_units else {})

    def load_state_dict(self, state: Numbers) -> None:
        self._kl = self._kl.with_state(state)
        if self._has_units:
            self._moments = self._moments.with_state(state)

    def _loss(self, values: Tensor, micro_batch: MicroBatch) -> LossOutput:
        keys = micro_batch.tensors
        predicted = values[micro_batch.predicting]
        losses = value_loss(
            predicted,
            old_values=keys["values"][micro_batch.predicting],
            returns=keys["returns"],
            value_eps_clip=self._critic.value_eps_clip,
        )
        return sum_over_mask(losses, keys["loss_mask"], weights=keys["loss_weights"])


def _stats(totals: Mapping[str, float]) -> dict[str, float]:
    """Mean and deviation of the batch's returns, in units of reward."""
    count = max(totals["count"], 1.0)
    mean = totals["total"] / count
    variance = totals["square_total"] / count - mean**2
    return {"returns/mean": mean, "returns/std": math.sqrt(variance) if variance > 0.0 else 0.0}
