"""A call before there is a trial: on made-up answers, and an engine without a model behind it.

    keys of the graph ──► two prompts, two answers each ──► interface.inference ──► the keys that the call makes
                                                          ► interface.train_step, evaluate ──► a gradient, statistics

An interface, a loss or an advantage of the user's own finds what the trial would give it, and nothing else.
"""

import traceback
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.inputs.users_code import CallQuestion, Declared
from corral.experiments.worker_specs import Head
from corral.scheduling.keys import EPISODES, merge_keys
from corral.scheduling.model_function_call import CallType
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.advantage import AdvantageEstimator
from corral.workers.algorithms.base import check_call
from corral.workers.algorithms.interfaces import InterfaceSettings, make_interface
from corral.workers.algorithms.policy_loss import PolicyLoss
from corral.workers.backends.base import LOSS_MASK, TokenScores
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.user_code.checks import UntriedError

_LENGTHS = ((5, 7), (6, 5))
_EPISODES = ((0, 0), (0, 1))
"""What is tried where an answer may be several sequences: the first prompt's two are of one."""
_PROMPT_TOKENS = 2


class CallTrialError(ValueError):
    """A loss gives nothing that a model could be trained by, or an interface not what it declares."""


def keys_of_interface(import_path: str, ppo: PPOConfig | None) -> Declared:
    """What an interface says it reads and makes; raises whatever making it raises."""
    interface = make_interface(import_path, InterfaceSettings(ppo=ppo))
    inputs, outputs = (
        {CallType(kind).value: tuple(keys) for kind, keys in table.items()}
        for table in (interface.inputs, interface.outputs)
    )
    return Declared(inputs=inputs, outputs=outputs)


def try_call(question: CallQuestion) -> None:
    """One run of the call, as a model worker runs it.

    Raises:
        CallTrialError: if the loss has no gradient or is not finite, or a key is not made as it is declared.
        UntriedError: if it asks the engine for what only a model has.
        Exception: whatever the user's functions raise.
    """
    call, engine = question.call, _TrialEngine(question.head)
    interface = make_interface(call.implementation, InterfaceSettings(ppo=question.ppo, dpo=question.dpo))
    check_call(interface, call)
    sample = _sample(question)
    if call.call_type is CallType.TRAIN_STEP:
        interface.train_step(engine, sample, version=1)
    elif call.call_type is CallType.EVALUATE:
        interface.evaluate(engine, sample)
    else:
        made = interface.inference(engine, sample)
        own_name = {graph_name: own for own, graph_name in call.output_key_remap.items()}
        declared = {key.name: key for key in interface.outputs[CallType.INFERENCE]}
        for name in (own_name.get(key, key) for key in call.output_keys):
            if name not in made:
                raise CallTrialError(f"inference made {', '.join(made) or 'nothing'}, and not {name}, as it declares")
            sample.with_key(declared[name], made[name])


def blamed(question: CallQuestion, error: BaseException) -> str:
    """Of functions of the user's that are called together, the import path of the one that an error came out of."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    wrapped = {AdvantageEstimator.__call__.__code__: "advantage", PolicyLoss.__call__.__code__: "loss"}
    paths = [str(getattr(question.ppo, wrapped[code])) for code in codes if code in wrapped]
    return next((path for path in reversed(paths) if ":" in path), question.import_path)


def _sample(question: CallQuestion) -> SequenceSample:
    """What the graph gives the call, by the interface's names."""
    specs = merge_keys(question.declared)
    names = {key: question.call.input_key_remap.get(key, key) for key in ("input_ids", *question.call.input_keys)}
    rng = np.random.default_rng(0)
    groups = [
        SequenceSample.from_group(
            f"0:{number}",
            {
                key: _EPISODES[number] if key == EPISODES else [_values(key, specs[key], n, rng) for n in lengths]
                for key in names
            },
            specs=specs,
        )
        for number, lengths in enumerate(_LENGTHS)
    ]
    return SequenceSample.gather(groups).remap_keys({key: name for key, name in names.items() if key != name})


def _values(key: str, spec: Any, length: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """An answer's values of a key, of its type."""
    if key == "prompt_mask":
        return np.arange(length) < _PROMPT_TOKENS
    count: int = spec.length(length)
    if spec.dtype == np.bool_:
        return rng.integers(0, 2, count).astype(np.bool_)
    if np.issubdtype(spec.dtype, np.integer):
        return rng.integers(0, 2, count).astype(spec.dtype)
    return (-2.0 + 0.1 * rng.normal(size=count)).astype(spec.dtype)


class _TrialEngine:
    """What a call asks of an engine, with scores that are parameters themselves."""

    def __init__(self, head: Head) -> None:
        self.context = ParallelContext()
        self.micro_batches = MicroBatchSpec()
        self.step = 0
        self._head = head

    def __getattr__(self, name: str) -> Any:
        raise UntriedError(f"it asks its engine for {name!r}, which only one with a model has")

    def forward(
        self, sample: SequenceSample, *, temperature: float = 1.0, top_k: int = 0
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Scores of every answer, packed."""
        num_tokens, lengths = sample.total_length("input_ids"), sample.answer_lengths()
        if self._head == "scalar":
            return {"scores": np.full(len(lengths), 0.5, np.float32)}
        if self._head == "value":
            return {"values": np.full(num_tokens, 0.5, np.float32)}
        count = num_tokens - len(lengths)
        if top_k:
            ids = np.zeros(count * top_k, np.float32)
            return {"topk_ids": ids, "topk_logprobs": np.full(len(ids), -2.1, np.float32)}
        return {"logprobs": np.full(count, -2.1, np.float32), "entropy": np.ones(count, np.float32)}

    def train_batch(
        self, sample: SequenceSample, *, loss_fn: Any, counted: str = LOSS_MASK, keeps_groups: bool = False, **_: Any
    ) -> dict[str, float]:
        """The loss and its gradient, of each micro-batch and of padding; statistics that early stop may read."""
        sums: dict[str, float] = {"loss": 0.0}
        count = max(float(np.count_nonzero(sample.data[counted])), 1.0)
        plan = plan_micro_batches(sample, self.micro_batches, keeps_groups=keeps_groups)
        for micro_batch in make_micro_batches(sample, plan, count=len(plan) + 1, device=torch.device("cpu")):
            output = loss_fn(self._scores(micro_batch), micro_batch)
            if not bool(torch.isfinite(output.loss_sum.detach()).all()):
                raise CallTrialError("the loss is not finite on scores of an untrained model")
            if not micro_batch.is_padding and not output.loss_sum.requires_grad:
                raise CallTrialError("the loss has no gradient: it has to be computed from the scores")
            if output.loss_sum.requires_grad:
                output.loss_sum.backward()
            sums["loss"] += float(output.loss_sum.detach()) / count
            for name, value in output.stats.items():
                sums[name] = sums.get(name, 0.0) + float(value) / count
        self.step += 1
        done = {"train/skipped_nonfinite": 0.0, "train/skipped_early_stop": 0.0, "train/tokens": count}
        return sums | done

    def _scores(self, micro_batch: MicroBatch) -> Any:
        if self._head == "lm":
            logprobs = torch.full((micro_batch.labels.shape[0],), -2.1, requires_grad=True)
            asked = None if micro_batch.asked is None else logprobs[:, None].expand(micro_batch.asked.shape)
            return TokenScores(logprobs * 1.0, torch.full_like(logprobs, 1.0), asked)
        count = len(micro_batch.segment_lengths) if self._head == "scalar" else micro_batch.input_ids.shape[0]
        return torch.full((count,), 0.5, requires_grad=True) * 1.0
