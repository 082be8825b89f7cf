"""Generation as a call of the graph: prompts of the dataset ──► groups of answers, by a model that this rank holds.

    uids ──► prompts ──► the embedded engine, on the model's present weights ──► the reward function ──► samples
                                                                 failed on every try: dropped, with its reason

What a rollout worker and a generation server do together, in one place and one after the other: the answers to a
prompt follow from the trial's seed, the train step and the weights alone, in both ways alike.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from corral.experiments.config.rollout import functions_of, remarks_size, told_parts
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.datasets.row_parser import DatasetRow
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.trial.spans import Span
from corral.experiments.worker_specs import GenerationSpec, ModelWorkerSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.prompts import BAD_ROW, split_uid
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.data.teacher_prompts import padded_prompt
from corral.workers.engine.batch import generate_all
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import AbortFinish, GenerationRequest, RequestOutput, StopFinish
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.log import Branch
from corral.workers.episodes.partial_answer import PartialAnswer, stopper
from corral.workers.episodes.routed_experts import AnswerExperts
from corral.workers.episodes.stream_events import NOT_FINITE
from corral.workers.episodes.trajectories import group_statistics, make_sample
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.requests.messages import Generate, SampleMetadata
from corral.workers.rollout.judging import (
    MOST_FAILED_IN_A_ROW,
    RewardFailedError,
    RewardJudge,
    judged_answers,
)

REWARD_ERROR = "reward_error"


@dataclass(frozen=True, slots=True)
class Generated:
    """What became of one prompt."""

    described: SampleMetadata
    """For the master."""
    sample: SequenceSample | None
    """None if it was dropped."""
    cause: str = ""
    """What the reward said, where it failed."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    uid: str
    order: int
    row: DatasetRow
    token_ids: list[int]
    teacher_prompt: npt.NDArray[np.int32] | None
    seeds: AnswerSeeds

    def dropped(self, because: str, *, version: str, cause: str = "") -> Generated:
        described = SampleMetadata(self.uid, (), [], (version,), self.order, dropped_because=because)
        return Generated(described, None, cause)

    def answered(self, sample: SequenceSample, *, version: str, statistics: dict[str, float]) -> Generated:
        keys, lengths = tuple(sample.seqlens), sample.answer_lengths()
        return Generated(SampleMetadata(self.uid, keys, lengths, (version,), self.order, scalars=statistics), sample)


class Generator:
    """Answers prompts of the dataset, and has the answers judged.

    Raises:
        ValueError: if the dataset has changed since it was submitted.
    """

    def __init__(
        self,
        spec: ModelWorkerSpec,
        generation: GenerationSpec,
        *,
        judge: RewardJudge,
        seed: int,
        record: Record = unrecorded,
    ) -> None:
        """record: has how long rewards took."""
        self._record = record
        assert spec.dataset is not None, "the plan has a call that generates, and no dataset to take prompts from"
        self._generation = generation
        self._seed = seed
        self._rows = Dataset.planned(spec.dataset)
        self._max_prompt_tokens = spec.dataset.config.max_prompt_tokens
        self._says_temperature = spec.dataset.config.names_temperatures
        self._prompts = PromptEncoder(spec.tokenizer, spec.dataset.config.chat_template_kwargs)
        self._stop_token_ids = eos_token_ids(spec.tokenizer)
        self._reward = spec.reward
        self._judge = judge
        self._has_judged = False
        self._num_failed = 0

    def generate(self, model: nn.Module, request: Generate) -> list[Generated]:
        """A group of answers for each prompt; every rank that holds a part of the model calls it, be it without any."""
        version, each = request.version, zip(request.uids, request.orders, request.tries, strict=True)
        read = [self._read(uid, order, tries, version=version) for uid, order, tries in each]
        prompts = [one for one in read if isinstance(one, _Prompt)]
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                decoder = Decoder(model)
            groups = self._answers(decoder, prompts, version=version)
        finally:
            model.train(was_training)
        started = time.monotonic()
        made = asyncio.run(self._judge_all(prompts, groups, version=version))
        self._record(Span(lane="rewards", name="reward", start_s=started, end_s=time.monotonic()))
        self._require_a_reward(made, version=version)
        return [*made, *(one for one in read if isinstance(one, Generated))]

    def _read(self, uid: str, order: int, tries: int, *, version: str) -> "_Prompt | Generated":
        """A prompt; dropped, if its row is broken or too long."""
        try:
            row = self._rows[split_uid(uid)[1]]
            ids = self._prompts.encode_within(self._max_prompt_tokens, row.prompt, tools=row.tools)
            size = self._generation.teacher_prompt_tokens
            told = (
                padded_prompt(self._prompts.encode_within(size, row.teacher_prompt, tools=row.tools), size)
                if size
                else None
            )
        except ValueError as error:
            because = f"{BAD_ROW}: {error}"
            return Generated(SampleMetadata(uid, (), [], (version,), order, dropped_because=because), None)
        seeds = AnswerSeeds(self._seed, uid, PolicyVersion.parse(version).step, tries)
        return _Prompt(uid, order, row, ids, told, seeds)

    def _require_a_reward(self, made: Sequence[Generated], *, version: str) -> None:
        """UserCodeError if the reward has failed on everything since the trial began."""
        failures = [one.cause for one in made if one.described.dropped_because == REWARD_ERROR]
        self._num_failed += len(failures)
        self._has_judged |= any(one.sample is not None for one in made)
        is_first = PolicyVersion.parse(version).step == 0
        if (
            is_first
            and failures
            and not self._has_judged
            and self._num_failed >= min(MOST_FAILED_IN_A_ROW, len(self._rows))
        ):
            raise UserCodeError(
                f"{self._num_failed} prompts in a row failed, the last one with {failures[-1]}; mend reward "
                f"{functions_of(self._reward.reward)}, in the trial's folder `code` if it is your own, and rl-submit "
                "--resume it"
            )

    def _answers(
        self, decoder: Decoder, prompts: Sequence[_Prompt], *, version: str
    ) -> list[list[PartialAnswer | None]]:
        generation = self._generation
        requests = [
            GenerationRequest(
                request_id=f"{number}/{answer}",
                prompt=tuple(prompt.token_ids),
                sampling=self._sampling(prompt.row, seed),
                experts_from=None if generation.experts is None else 0,
            )
            for number, prompt in enumerate(prompts)
            for answer, seed in enumerate(prompt.seeds.of_group(generation.group_size))
        ]
        running = generation.max_running_requests
        outputs = generate_all(decoder, requests, batch_size=running, seed=self._seed, version=version)
        size = generation.group_size
        return [
            [self._as_answer(output) for output in outputs[start : start + size]]
            for start in range(0, len(outputs), size)
        ]

    def _temperature(self, row: DatasetRow) -> float:
        return self._generation.sampling.temperature if row.temperature is None else row.temperature

    def _sampling(self, row: DatasetRow, seed: int) -> SamplingParams:
        sampling = self._generation.sampling
        return SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=self._temperature(row),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=frozenset(self._stop_token_ids),
            sampling_seed=seed,
        )

    def _as_answer(self, output: RequestOutput) -> PartialAnswer | None:
        if isinstance(output.finish_reason, AbortFinish):  # of a batch that nobody aborts: no finite number to draw by
            return None
        answer = PartialAnswer(
            max_new_tokens=self._generation.sampling.max_new_tokens,
            output_ids=list(output.output_ids),
            logprobs=list(output.output_logprobs),
            spans=list(output.weight_versions),
            stopped=isinstance(output.finish_reason, StopFinish),
        )
        if cut := stopper(self._prompts.tokenizer, self._generation.sampling.stop):
            cut(answer)
        if self._generation.experts is not None and output.experts is not None:
            rows = output.experts[: len(output.prompt) + len(answer.output_ids) - 1]
            answer.experts = AnswerExperts(self._generation.experts, output.prompt)
            answer.experts.append(rows[:, list(self._generation.experts.expert_layers)])
        return answer

    async def _judge_all(
        self, prompts: Sequence[_Prompt], groups: Sequence[list[PartialAnswer | None]], *, version: str
    ) -> list[Generated]:
        judged = [self._judged(*one, version=version) for one in zip(prompts, groups, strict=True)]
        return list(await asyncio.gather(*judged))

    async def _judged(self, prompt: _Prompt, group: list[PartialAnswer | None], *, version: str) -> Generated:
        answers = [answer for answer in group if answer is not None]
        if len(answers) < len(group):
            return prompt.dropped(NOT_FINITE, version=version)
        try:
            rewards = await self._judge.judge(prompt.row.fields, [answer.output_ids for answer in answers])
        except RewardFailedError as error:
            return prompt.dropped(REWARD_ERROR, version=version, cause=str(error))
        judged = judged_answers([Branch.of(prompt.token_ids, answer) for answer in answers], rewards)
        parts = self._reward.reward
        sample = make_sample(
            prompt.uid,
            judged,
            experts=self._generation.experts,
            parts=told_parts(parts),
            remarks_bytes=remarks_size(parts),
            teacher_prompt=prompt.teacher_prompt,
            temperature=self._temperature(prompt.row) if self._says_temperature else None,
        )
        return prompt.answered(sample, version=version, statistics=group_statistics(judged))
