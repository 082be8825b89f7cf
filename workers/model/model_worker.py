"""The model worker: one training rank. Requests of the master in, outputs and statistics out; tensors stay here.

                     ┌── non-blocking (stream thread): fetch, load_rows, reject, clear_data_cache, spec, model_config
    master ─requests─┤
                     └── blocking (main thread, after flush): [pre-hooks: data transfer] ─► initialize | inference |
                         train_step | evaluate | save_weights | save_checkpoint ─► reply
    rollout workers ──trajectories──► TrajectoryInbox ──► DataStore ──► the calls' inputs

All ranks of the gang run the same blocking requests in the same order, so that their collectives meet.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from corral.experiments.config import EvaluationConfig
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.dataflow import ModelFunctionCall
from corral.workers.algorithms.base import ModelInterface
from corral.workers.algorithms.ppo import PPOActorInterface
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.fsdp import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext, connect_store, host_store, init_parallel
from corral.workers.data.sequence_sample import SequenceSample, key_spec
from corral.workers.delivery.receiver import TrajectoryReceiver
from corral.workers.evaluation.held_out import Evaluator
from corral.workers.lifecycle.worker import BadConfigurationError, GangBrokenError, Worker, WorkerContext
from corral.workers.model.data_store import DataStore
from corral.workers.model.row_loader import RowLoader
from corral.workers.model.trajectory_inbox import TrajectoryInbox
from corral.workers.model.transfer import DataManager, TransferError
from corral.workers.requests.handler import Envelope, WorkerRequestStream
from corral.workers.requests.messages import (
    ClearDataCache,
    DataTransfer,
    Evaluate,
    Fetch,
    Inference,
    Initialize,
    LoadRows,
    MetadataReply,
    ModelConfig,
    ModelConfigReply,
    NonBlockingRequest,
    OkReply,
    Ping,
    Reject,
    ReplyPayload,
    Request,
    SampleMetadata,
    SaveCheckpoint,
    SaveWeights,
    Shutdown,
    Spec,
    SpecReply,
    StatsReply,
    TrainReply,
    TrainStep,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_TRAJECTORY_CAPACITY_BYTES = 2**30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RequestNotServedError(ValueError):
    """A model worker does not know this kind of request; it has done nothing for it."""


class ModelWorker(Worker):
    """Holds the models of one rank and serves the master."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._spec = context.specification(ModelWorkerSpec)
        self._calls = {call.name: call for call in self._spec.calls}
        self._roles = {role.role: role for role in self._spec.roles}
        self._engines: dict[str, FSDPEngine] = {}
        self._interfaces: dict[str, ModelInterface] = {}
        self._store = DataStore()
        self._inbox: TrajectoryInbox | None = None
        self._rows: RowLoader | None = None
        self._evaluator: Evaluator | None = None

    def run(self) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            self._parallel = self._join_gang(stack)
            self._transfer = DataManager(self._store, self._parallel)
            self._prepare(stack)
            stream = stack.enter_context(
                WorkerRequestStream(
                    self.context.security,
                    lambda: self.context.names.get(self.context.keys.master_stream()),
                    worker_id=self.context.worker_id,
                    incarnation=self.context.incarnation,
                    non_blocking=self._answer_now,
                )
            )
            while not self.context.stopping.is_set():
                self._idle()
                envelope = stream.next_blocking(_POLL_S)
                if envelope is not None:
                    self._serve(stream, envelope)

    def status(self) -> dict[str, Any]:
        return {"samples": len(self._store), "bytes": self._store.size_bytes}

    # Setting up

    def _join_gang(self, stack: ExitStack) -> ParallelContext:
        """Meet the other ranks of this start of the gang."""
        rank, world_size = self._spec.index, self._spec.world_size
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        if world_size == 1:
            return init_parallel(device=device)
        timeout_s = self.context.plan.supervision.setup_timeout_s
        key = self.context.keys.gang_rendezvous(self.context.incarnation)
        peers = [worker for worker in self.context.workers("model_worker") if worker != self.context.worker_id]
        self.context.presence.enter("join the gang", waits_for=peers, is_setting_up=True, deadline_s=timeout_s)
        if rank == 0:
            hosted = host_store(self.context.address, timeout_s=timeout_s)
            self.context.names.add(key, hosted.address, replace=True)
            store = hosted.store
        else:
            store = connect_store(
                self.context.names.wait(key, timeout_s=timeout_s, waiting_for="model_worker/0"), timeout_s=timeout_s
            )
        parallel = init_parallel(rank=rank, world_size=world_size, store=store, device=device, timeout_s=timeout_s)
        stack.callback(parallel.close)
        return parallel

    def _prepare(self, stack: ExitStack) -> None:
        for role in self._spec.roles:
            self._interfaces[role.role] = self._make_interface(role)
        trained = self._trained_role()
        if self._spec.dataset is not None:
            self._rows = RowLoader(self._spec.dataset, trained.model.path)
        else:
            self._inbox = self._open_inbox(stack)
        if self._spec.evaluation is not None:
            self._evaluator = self._make_evaluator(self._spec.evaluation, trained)

    def _make_evaluator(self, evaluation: EvaluationConfig, trained: ModelRoleSpec) -> Evaluator:
        try:
            return Evaluator(evaluation, trained.model.path, reward=self._spec.reward, context=self._parallel)
        except ValueError as error:
            raise BadConfigurationError(str(error)) from error

    def _open_inbox(self, stack: ExitStack) -> TrajectoryInbox:
        batch = max(call.n_seqs for call in self._spec.calls)
        receiver = stack.enter_context(
            TrajectoryReceiver(
                self.context.security,
                address=self.context.address,
                capacity_records=8 * batch,
                capacity_bytes=_TRAJECTORY_CAPACITY_BYTES,
            )
        )
        lease = self.context.names.lease(
            self.context.keys.trajectory_receiver(self._spec.index),
            receiver.endpoint,
            ttl_s=self.context.plan.supervision.lease_ttl_s,
            owner=self.context.incarnation,
            take_over=True,
        )
        stack.callback(lease.release)
        return TrajectoryInbox(receiver, self._store)

    def _make_interface(self, role: ModelRoleSpec) -> ModelInterface:
        if role.interface == "sft":
            return SFTInterface()
        if role.ppo is None:
            raise BadConfigurationError(f"role {role.role!r} runs ppo_actor, but the plan has no PPO settings for it")
        return PPOActorInterface(role.ppo, temperature=self._spec.temperature, seed=self.context.plan.seed)

    def _trained_role(self) -> ModelRoleSpec:
        for role in self._spec.roles:
            if role.optimizer is not None:
                return role
        raise BadConfigurationError("the plan gives this model worker no role with an optimizer")

    # Requests that are answered at once, in the stream's thread

    def _answer_now(self, request: NonBlockingRequest, tensors: Mapping[str, NDArray[Any]]) -> ReplyPayload:
        match request:
            case Fetch():
                return MetadataReply(samples=self._inbox.fetch(request.max_samples or 1024) if self._inbox else [])
            case LoadRows():
                return MetadataReply(samples=[self._load(sample) for sample in self._row_loader().load(request.uids)])
            case Reject():
                if self._inbox is not None:
                    self._inbox.reject(request.uids, request.verdict)
                return OkReply()
            case ClearDataCache():
                self._store.drop(request.uids)
                if self._inbox is not None:
                    self._inbox.clear(request.uids)
                return OkReply()
            case Spec():
                return SpecReply(num_samples=self._spec.dataset.num_rows if self._spec.dataset else 0)
            case ModelConfig():
                return self._describe(request.role)
            case Ping():
                return OkReply()
            case Shutdown():
                self.context.stopping.set()
                return OkReply()
        raise _not_served(request)

    def _row_loader(self) -> RowLoader:
        if self._rows is None:
            raise ValueError("this trial's samples come from rollout workers; there are no rows to load")
        return self._rows

    def _load(self, sample: SequenceSample) -> SampleMetadata:
        self._store.put(sample)
        return SampleMetadata(uid=sample.uids[0], seqlens={key: lengths[0] for key, lengths in sample.seqlens.items()})

    def _describe(self, role: str) -> ModelConfigReply:
        config = json.loads((self._roles[role].model.path / "config.json").read_text())
        engine = self._engines.get(role)
        return ModelConfigReply(
            architecture=str(config.get("model_type", "")),
            num_parameters=sum(parameter.numel() for parameter in engine.model.parameters()) if engine else 0,
            num_layers=int(config.get("num_hidden_layers", 0)),
            hidden_size=int(config.get("hidden_size", 0)),
            vocab_size=int(config.get("vocab_size", 0)),
        )

    # Requests that the main thread runs, in the order of the master

    def _idle(self) -> None:
        self.context.presence.enter("idle", waiting_for="requests of the master")

    def _serve(self, stream: WorkerRequestStream, envelope: Envelope) -> None:
        name = _words(type(envelope.request).__name__)
        self.context.presence.enter(name, deadline_s=self.context.plan.supervision.step_timeout_s)
        started = time.monotonic()
        try:
            for hook in envelope.pre_hooks:
                if isinstance(hook, DataTransfer):
                    self._move(hook)
            payload = self._run(envelope)
        except (TransferError, torch.distributed.DistError) as error:
            stream.reply_error(envelope, error)
            raise GangBrokenError(f"{name} failed because another rank is gone: {error}") from error
        except RequestNotServedError as error:
            stream.reply_error(envelope, error)
            return  # all ranks refuse it alike, so none of them is left behind in a collective
        except Exception as error:
            stream.reply_error(envelope, error)
            raise
        stream.reply(envelope, payload)
        logger.debug("%s took %.3f s", name, time.monotonic() - started)

    def _move(self, hook: DataTransfer) -> None:
        uids = sorted(hook.seqlens)
        keys = sorted(hook.dtypes)
        seqlens = {key: [hook.seqlens[uid].get(key, []) for uid in uids] for key in keys}
        self._transfer.execute(hook.plan, SequenceSample(uids, seqlens))

    def _run(self, envelope: Envelope) -> ReplyPayload:
        request = envelope.request
        match request:
            case Initialize():
                self._initialize(request, epoch=envelope.epoch)
                return OkReply()
            case Inference():
                self._inference(self._calls[request.mfc], request)
                return OkReply()
            case TrainStep():
                return self._train_step(self._calls[request.mfc], request)
            case Evaluate():
                return StatsReply(stats=self._evaluate())
            case SaveWeights():
                self._engines[request.role].save_weights(Path(request.directory))
                return OkReply()
            case SaveCheckpoint():
                self._engines[self._trained_role().role].save_state(Path(request.directory))
                return OkReply()
        raise _not_served(request)

    def _initialize(self, request: Initialize, *, epoch: int) -> None:
        """Load weights and optimizer state; what an earlier epoch left here is forgotten."""
        self._store.drop(self._store.uids)
        for role in self._spec.roles:
            if role.optimizer is not None or role.role not in self._engines:
                directory = Path(request.weights_directory) if role.optimizer is not None else role.model.path
                self._engines[role.role] = self._make_engine(role, directory, seed=request.seed)
        if request.state_directory is not None:
            self._engines[self._trained_role().role].load_state(
                Path(request.state_directory), on_progress=self.context.presence.beat
            )
        if self._inbox is not None:
            self._inbox.start_session(f"{epoch}-{self.context.incarnation}")
        self.context.presence.beat(version=str(request.step))

    def _make_engine(self, role: ModelRoleSpec, directory: Path, *, seed: int) -> FSDPEngine:
        n_minibatches = role.ppo.n_minibatches if role.ppo is not None else 1
        return FSDPEngine(
            directory,
            context=self._parallel,
            optimizer=role.optimizer,
            total_steps=self._spec.total_steps * n_minibatches,
            max_tokens_per_micro_batch=role.model.max_tokens_per_micro_batch,
            seed=seed,
            compute_dtype=_DTYPES[role.model.dtype],
        )

    def _inputs(self, call: ModelFunctionCall, request: Inference | TrainStep) -> SequenceSample:
        uids = request.partition[self._parallel.dp_rank]
        if uids:
            return self._store.gather(uids, call.input_keys).remap_keys(call.input_key_remap)
        # A rank without samples still takes part in every collective, with no rows of the same keys.
        empty = {key: np.empty(0, key_spec(key).dtype) for key in call.input_keys}
        return SequenceSample([], {key: [] for key in empty}, dict(empty)).remap_keys(call.input_key_remap)

    def _inference(self, call: ModelFunctionCall, request: Inference) -> None:
        sample = self._inputs(call, request)
        outputs = self._interfaces[call.role].inference(self._engines[call.role], sample)
        for name, values in outputs.items():
            key = call.output_key_remap.get(name, name)
            if sample.uids:
                self._store.put(sample.select_keys(["input_ids"]).with_key(key, values).select_keys([key]))

    def _train_step(self, call: ModelFunctionCall, request: TrainStep) -> TrainReply:
        sample, engine = self._inputs(call, request), self._engines[call.role]
        steps_before, nonfinite_before = engine.step, engine.num_nonfinite
        stats = self._interfaces[call.role].train_step(engine, sample, version=request.version)
        reply = TrainReply(
            stats=stats,
            num_updates=engine.step - steps_before,
            num_nonfinite=engine.num_nonfinite - nonfinite_before,
            is_damaged=engine.is_damaged,
        )
        self.context.presence.beat(version=str(request.version + (not reply.is_skipped)))
        return reply

    def _evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            raise ValueError("the plan has no held-out problems to evaluate on")
        return self._evaluator.evaluate(self._engines[self._trained_role().role].model)


def _not_served(request: Request) -> RequestNotServedError:
    return RequestNotServedError(f"request {type(request).__name__} is not served by this model worker")


def _words(name: str) -> str:
    """TrainStep -> train step"""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
