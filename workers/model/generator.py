"""Groups by a model that this rank holds: of the prompts of a generate call, and of held-out problems.

    uids ─────► GroupMaker.make ────────┐ all at once              ┌──► samples, or why a prompt is dropped
                                        ├──► EmbeddedClient ──► judge
    problems ─► HeldOutProblems.answer ─┘ one batch of the         └──► sums for the master
                                          embedded engine

What a rollout worker and a generation server do together, in one process and one after the other: the answers to a
prompt follow from the trial's seed, the train step and the weights alone, in both ways alike.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corral.experiments.config.rollout import RewardConfig, RolloutConfig, SamplingConfig
from corral.experiments.datasets.dataset import Dataset
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import eos_token_ids
from corral.experiments.worker_specs import GenerationSpec, ModelWorkerSpec, RoutedExpertsSpec
from corral.scheduling.policy_version import PolicyVersion
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.data.held_out import added
from corral.workers.data.prompts import open_problems, split_uid
from corral.workers.engine.batch import generate_all
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import AbortFinish, GenerationRequest, RequestOutput, StopFinish
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.partial_answer import PartialAnswer, stopper
from corral.workers.episodes.routed_experts import AnswerExperts
from corral.workers.episodes.stream_events import NOT_FINITE
from corral.workers.episodes.turn_request import RequestRefusedError
from corral.workers.lifecycle.timeline import Record, unrecorded
from corral.workers.model.data_store import DataStore
from corral.workers.requests.manager_messages import Answered, HeldOutProblem
from corral.workers.requests.messages import Generate, HeldOutReply, SampleMetadata
from corral.workers.rollout.group_maker import GroupMaker, PromptFailedError
from corral.workers.rollout.held_out import HeldOutProblems
from corral.workers.rollout.judging import RewardJudge
from corral.workers.streams.closing import all_or_first_error


@dataclass(slots=True)
class _Batch:
    """The requests of all groups that ask at the same time, answered together."""

    decoder: Decoder | None = None
    version: str = ""
    size: int = 0
    """Answers that are decoded at a time."""
    _asked: list[tuple[Sequence[GenerationRequest], asyncio.Future[list[RequestOutput]]]] = field(default_factory=list)

    @contextmanager
    def answering_by(self, model: nn.Module, *, version: str, size: int) -> Iterator[None]:
        """Answer with the present weights of a model. Sharded weights are gathered: every rank that holds a part of the
        model enters this context, also without prompts."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                self.decoder = Decoder(model)
            self.version, self.size = version, size
            yield
        finally:
            self.decoder = None
            self._asked.clear()
            model.train(was_training)

    async def ask(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """Their outputs, in order."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._generate)  # runs after all groups that were begun together have asked
        outputs: asyncio.Future[list[RequestOutput]] = loop.create_future()
        self._asked.append((requests, outputs))
        return await outputs

    def _generate(self) -> None:
        asked = [(requests, outputs) for requests, outputs in self._asked if not outputs.done()]
        self._asked.clear()
        numbered = [
            replace(request, request_id=str(number))
            for number, request in enumerate(request for requests, _ in asked for request in requests)
        ]
        assert self.decoder is not None, "answers are asked for where no model answers"
        try:
            made = iter(generate_all(self.decoder, numbered, batch_size=self.size, version=self.version))
        except Exception as error:  # the event loop would only log an error of a callback
            for _, outputs in asked:
                outputs.set_exception(error)
            return
        for requests, outputs in asked:
            outputs.set_result(list(islice(made, len(requests))))


@dataclass(frozen=True, slots=True)
class EmbeddedClient:
    """Answers groups with a model of this process, in one batch with all groups that ask at the same time."""

    batch: _Batch
    tokenizer: Any
    _: KW_ONLY
    sampling: SamplingConfig
    stop_token_ids: frozenset[int]
    experts: RoutedExpertsSpec | None = None

    def sampling_by(self, **changes: float) -> "EmbeddedClient":
        return replace(self, sampling=self.sampling.model_copy(update=changes))

    async def sample_group(
        self, uid: str, prompt_ids: Sequence[int], *, seeds: Sequence[int], enough: int | None = None
    ) -> list[PartialAnswer]:
        sampling = self.sampling
        requests = [
            GenerationRequest(
                request_id="",
                prompt=tuple(prompt_ids),
                sampling=SamplingParams(
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    min_p=sampling.min_p,
                    stop_token_ids=self.stop_token_ids,
                    sampling_seed=seed,
                ),
                experts_from=None if self.experts is None else 0,
            )
            for seed in seeds
        ]
        return [self._as_answer(output) for output in await self.batch.ask(requests)][:enough]

    def _as_answer(self, output: RequestOutput) -> PartialAnswer:
        if isinstance(output.finish_reason, AbortFinish):  # nobody aborts a request of such a batch but the engine
            raise RequestRefusedError(output.finish_reason.message, kind=NOT_FINITE)
        answer = PartialAnswer(
            max_new_tokens=self.sampling.max_new_tokens,
            output_ids=list(output.output_ids),
            logprobs=list(output.output_logprobs),
            spans=list(output.weight_versions),
            stopped=isinstance(output.finish_reason, StopFinish),
        )
        if cut := stopper(self.tokenizer, self.sampling.stop):
            cut(answer)
        if self.experts is not None and output.experts is not None:
            rows = output.experts[: len(output.prompt) + len(answer.output_ids) - 1]
            answer.experts = AnswerExperts(self.experts, output.prompt)
            answer.experts.append(rows[:, list(self.experts.expert_layers)])
        return answer


class Generator:
    """Makes the groups of a model worker, and has their answers judged.

    Raises:
        ValueError: if the dataset has changed since it was submitted, or a held-out prompt is too long.
    """

    def __init__(
        self,
        spec: ModelWorkerSpec,
        store: DataStore,
        *,
        seed: int,
        secrets: Sequence[Path],
        evaluates: bool,
        record: Record = unrecorded,
    ) -> None:
        """
        Args:
            evaluates: whether held-out problems are answered here.
            store: gets the samples.
            secrets: folders that a reward is kept from.
            record: has how long rewards took.
        """
        self._store, self._seed, self._batch = store, seed, _Batch()
        # A worker that only evaluates has no prompts of its own, and so takes the settings of the held-out ones.
        generation = spec.generation or GenerationSpec(sampling=SamplingConfig(), group_size=1, max_running_requests=1)
        dataset = spec.dataset if spec.generation else None
        config = dataset.config if dataset else spec.evaluation.dataset if spec.evaluation else None
        assert config is not None, "the plan has a call that answers prompts, and no rows to take them from"
        prompts = PromptEncoder(spec.tokenizer, config.chat_template_kwargs)
        rows = Dataset.planned(dataset) if dataset else {}
        self._max_running_requests = generation.max_running_requests
        client = EmbeddedClient(
            self._batch,
            prompts.tokenizer,
            sampling=generation.sampling,
            stop_token_ids=frozenset(eos_token_ids(spec.tokenizer)),
            experts=generation.experts,
        )
        ends = prompts.answer_ends
        self._judge = RewardJudge(spec.reward, prompts.tokenizer, stop_token_ids=ends, hidden=secrets, record=record)
        reward = {name: getattr(spec.reward, name) for name in RewardConfig.model_fields}
        self._groups = GroupMaker(
            self._judge,
            client,
            prompts,
            None,
            rows=rows,
            config=RolloutConfig(**reward, sampling=generation.sampling),
            group_size=generation.group_size,
            max_prompt_tokens=config.max_prompt_tokens,
            num_prompts=len(rows),
            takes_temperatures=config.names_temperatures,
            teacher_prompt_tokens=generation.teacher_prompt_tokens,
        )
        if evaluates and spec.evaluation is not None:
            held_out = spec.evaluation.datasets.items()
            self._held_out = {name: open_problems(dataset, prompts) for name, dataset in held_out}
            asks = replace(client, sampling=spec.evaluation.sampling, experts=None)
            self._problems = HeldOutProblems(spec.evaluation, self._held_out, self._groups, asks, seed=seed)

    def close(self) -> None:
        """End the processes of the reward."""
        self._judge.close()

    def generate(self, model: nn.Module, request: Generate, *, context: ParallelContext) -> list[SampleMetadata]:
        """Answer prompts, and keep the groups of this data-parallel rank; every rank that holds a part of the model
        calls it, also without prompts."""
        version, step = request.version, PolicyVersion.parse(request.version).step
        asked = list(zip(request.uids, request.orders, request.tries, strict=True)) if context.is_dp_head else []
        self._groups.has_judged |= step > 0
        with self._batch.answering_by(model, version=version, size=self._max_running_requests):
            seeds = {uid: AnswerSeeds(self._seed, uid, step, tries) for uid, _, tries in asked}
            made = asyncio.run(self._groups.make([(uid, split_uid(uid)[1], seeds[uid]) for uid, _, _ in asked]))
        described = []
        for (uid, order, _), one in zip(asked, made, strict=True):
            if isinstance(one, PromptFailedError):
                reason, stats = one.reason, dict(one.statistics)
                described.append(SampleMetadata(uid, (), [], (version,), order, dropped_because=reason, scalars=stats))
            else:
                self._store.put(one.sample)
                keys, lengths = tuple(one.sample.seqlens), one.sample.answer_lengths()
                scalars = dict(one.statistics)
                described.append(SampleMetadata(uid, keys, lengths, (version,), order, scalars=scalars))
        return described

    def evaluate(self, model: nn.Module, *, context: ParallelContext, batch_size: int) -> HeldOutReply:
        """What comes out of this rank's shard of the held-out problems, of which all ranks together answer `batch_size`
        at a time; every rank that holds a part of the model calls it."""
        sums, failures, num_shards = dict[str, dict[str, float]](), dict[str, str](), context.mesh.dims.dp
        with self._batch.answering_by(model, version="", size=-(-batch_size // num_shards)):
            for name, rows in self._held_out.items() if context.is_dp_head else ():
                row_ids = list(rows)[context.dp_rank :: num_shards]
                asked = (self._problems.answer(HeldOutProblem(0, "", name, row_id)) for row_id in row_ids)
                answered: list[Answered] = asyncio.run(all_or_first_error(*asked))
                sums[name] = reduce(added, (one.sums for one in answered), {})
                if failure := next((one.failure for one in answered if one.failure), ""):
                    failures[name] = failure
        return HeldOutReply(sums=sums, failures=failures)
