"""Asynchronous PPO: rollout workers make answers all the time, and model workers train on them.

    rollout workers ──trajectories (a prompt and the group of its answers)──► calls of policy.py ──► new weights ──┐
           ▲                                                                                                       │
           └── generation servers ◄────────────────────────────────────────────────────────────────────────────────┘

All five kinds of workers take part.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from corral.experiments.config.data import DatasetConfig, RowKind
from corral.experiments.config.model import ModelConfig
from corral.experiments.config.rollout import (
    EngineConfig,
    RolloutConfig,
    SglangConfig,
    WeightsConfig,
)
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.errors import ConfigError
from corral.experiments.host_memory import BESIDE_MB, memory_warning, server_memory
from corral.experiments.inputs.environment_tasks import HELD_OUT, FoundEnvironment, find_environment
from corral.experiments.inputs.other_pythons import environment_python, sglang_python
from corral.experiments.policy import PolicyExperiment
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.worker_specs import (
    TOKEN_TIMEOUT_S,
    BehaviourSpec,
    DatasetSpec,
    EnvironmentSpec,
    GenerationServerSpec,
    GserverManagerSpec,
    HeldOutSpec,
    RolloutWorkerSpec,
    WorkerSpec,
)
from corral.scheduling.errors import message_and_hint
from corral.scheduling.policy_version import INITIAL_VERSION
from corral.scheduling.scheduling import Scheduling
from corral.scheduling.worker_information import WorkerKind

_BASE_OF_ADAPTER = "base"  # no version is written like this


class AsyncPPOExperiment(PolicyExperiment):
    """PPO on answers that the policy, at most `max_head_offpolicyness` versions ago, gave to the dataset's prompts."""

    experiment: str = "async_ppo"
    """Asynchronous PPO and GRPO."""
    allocation: str = "hf:d1+fsdp:d1"
    """Engines that generate and train, each with its GPUs or processes: hf:d2+fsdp:d4."""
    dataset: DatasetConfig = DatasetConfig()
    """The training prompts; leave out their path with rollout.environment, which brings its tasks."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are made and judged."""
    engine: EngineConfig = EngineConfig()
    """The generation engine."""
    sglang: SglangConfig = SglangConfig()
    """Servers of SGLang, where the allocation asks for them: sglang:d2+fsdp:d4."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights get from the trainer to the generation servers."""

    generates: ClassVar[bool] = True

    @cached_property
    def environment(self) -> FoundEnvironment | None:
        """What plays in place of an agent, with the tasks that no file holds.

        Raises:
            ConfigError: if it cannot be loaded.
        """
        if (config := self.rollout.environment) is None:
            return None
        lists = [] if self.dataset.is_named else ["dataset"]
        if self.evaluation is not None and not self.evaluation.dataset.is_named and config.held_out_args is not None:
            lists.append(HELD_OUT)
        try:
            return find_environment(config, lists=lists)
        except ValueError as error:
            message, hint = message_and_hint(error)
            path = ("rollout", "environment", "id" if config.python is None else "python")
            raise ConfigError.of(message, hint=hint, path=path) from error

    @property
    def asks_for_rows(self) -> bool:
        return self.rollout.environment is not None

    @property
    def listed_rows(self) -> Mapping[str, bytes]:
        return {} if self.environment is None else self.environment.rows

    def placed_in(self, directory: Path) -> Self:
        listed, trial, placed = self.listed_rows, TrialDirectory(directory), super().placed_in(directory)
        changes: dict[str, Any] = {}
        if "dataset" in listed:
            changes["dataset"] = placed.dataset.model_copy(update={"path": trial.tasks_path})
        if placed.evaluation is not None and HELD_OUT in listed:
            rows = placed.evaluation.dataset.model_copy(update={"path": trial.held_out_tasks_path})
            changes["evaluation"] = placed.evaluation.model_copy(update={"dataset": rows})
        return placed._with_rows_in(**changes)

    @property
    def writes_deltas(self) -> bool:
        return self.weights.encoding == "delta"

    @property
    def rounding_settings(self) -> tuple[str, ...]:
        """What makes answers those of rounded weights."""
        flags = [f"sglang.flags.{name}" for name in self.sglang.rounding_flags]
        return (*flags, "engine.quantization") if self.engine.quantization is not None else tuple(flags)

    @property
    def max_head_offpolicyness(self) -> int:
        return self.rollout.max_head_offpolicyness

    @property
    def row_kind(self) -> RowKind:
        # An agent may reward without a reference, and an environment does.
        return "prompts" if self.rollout.makes_episodes else super().row_kind

    def rank_settings(self) -> Mapping[str, Any]:
        behaviour = BehaviourSpec(
            sampling=self.rollout.sampling,
            has_row_temperatures=self.dataset.names_temperatures,
            dtype=self.engine.dtype,
            rounded_by=self.rounding_settings,
            keeps_cache=self.weights.update_mode == "in_place",
            keeps_experts=self.routed_experts is not None and self.max_head_offpolicyness > 0,
            routes_anew=self.routes_anew,
        )
        return {**super().rank_settings(), "behaviour": behaviour}

    def generation_side(self, dataset: DatasetSpec) -> list[WorkerSpec]:
        held_out = None
        if self.evaluation is not None:
            named = self.evaluation.datasets.items()
            rows = {"": self.listed_rows.get(HELD_OUT)}
            specs = {name: dataset_spec(one, kind=self.row_kind, content=rows.get(name)) for name, one in named}
            held_out = HeldOutSpec(config=self.evaluation, datasets=specs)
        manager = GserverManagerSpec(
            dataset=dataset,
            train_batch_size=self.train_batch_size,
            total_train_epochs=self.control.total_train_epochs,
            rollout=self.rollout,
            held_out=held_out,
            weights=self.weights,
        )
        return [*self._generation_servers(), manager, *self._rollout_workers(dataset, held_out)]

    def default_scheduling(self, kind: WorkerKind) -> Scheduling:
        """A server of a large model asks for more memory than others do: for its versions."""
        default = super().default_scheduling(kind)
        if kind != "generation_server":
            return default
        needed = max(sum(self._server_memory(default, model).values()) for model in self._served.values())
        return default.model_copy(update={"mem": max(default.mem, needed + BESIDE_MB)})

    @property
    def _served(self) -> dict[str, ModelConfig]:
        """Models that generation servers load, by whose they are."""
        judge = {"a judge": ModelConfig(path=self.rollout.judge.path)} if self.rollout.judge else {}
        return {"a server": self.actor, **judge}

    def _server_memory(self, task: Scheduling, model: ModelConfig) -> dict[str, int]:
        """The least that a server of it with these resources takes, in MB by what for."""
        engine = self.parsed_allocation.generation
        return server_memory(
            model,
            weights=self.weights,
            engine=self.engine,
            backend="hf" if engine is None else engine.backend,
            ranks=self.parsed_allocation.gpus_per_server,
            has_gpus=task.gpu > 0,
        )

    def _generation_servers(self) -> list[GenerationServerSpec]:
        engine = self.parsed_allocation.generation
        uses_sglang = engine is not None and engine.backend == "sglang"
        python = sglang_python(self.sglang) if uses_sglang else None
        group = self.scheduling_setup()["generation_server"]
        judge, count = self.rollout.judge, self.parsed_allocation.num_generation_servers
        servers = [
            GenerationServerSpec(
                index=index,
                backend="sglang" if uses_sglang else "hf",
                tensor_parallel_size=self.parsed_allocation.gpus_per_server,
                initial_weights=self.actor.path,
                initial_version=str(INITIAL_VERSION) if self.actor.starts_as_stored else _BASE_OF_ADAPTER,
                engine=self.engine,
                sglang=self.sglang.model_copy(update={"python": python}),
                weights=self.weights,
                records_experts=self.routed_experts is not None,
                memory_mb=self._server_memory(group.scheduling_of(index), self.actor),
            )
            for index in range(self.num_workers("generation_server"))
        ]
        if judge is None:
            return servers
        first = count - judge.servers  # those behind the planned ones are elastic
        judges = {
            "is_judge": True,
            "initial_weights": judge.path,
            "initial_version": str(INITIAL_VERSION),
            "records_experts": False,
            "memory_mb": self._server_memory(group.scheduling_of(first), self._served["a judge"]),
        }
        return [one.model_copy(update=judges if first <= one.index < count else {}) for one in servers]

    def _rollout_workers(self, dataset: DatasetSpec, held_out: HeldOutSpec | None) -> list[RolloutWorkerSpec]:
        count, found = self.num_workers("rollout_worker"), self.environment
        environment = EnvironmentSpec(packages=dict(found.packages), sha256=found.sha256) if found else None
        return [
            RolloutWorkerSpec(
                index=index,
                num_rollout_workers=count,
                dataset=dataset,
                tokenizer=self.actor.path,
                group_size=self.ppo.group_size,
                teacher_prompt_tokens=self.teacher_prompt_tokens,
                rollout=self.planned_rollout,
                token_timeout_s=max(TOKEN_TIMEOUT_S, self.weights.update_timeout_s),
                experts=self.routed_experts,
                held_out=held_out,
                environment=environment,
            )
            for index in range(count)
        ]

    @property
    def planned_rollout(self) -> RolloutConfig:
        """The settings with how long a sequence of an episode may be: what all that read or make it can take; and with
        the Python of an environment."""
        longest = self.rollout.episode.max_tokens or min(self.episode_bounds().values())
        changes: dict[str, Any] = {"episode": self.rollout.episode.model_copy(update={"max_tokens": longest})}
        if (environment := self.rollout.environment) is not None:
            changes["environment"] = environment.model_copy(update={"python": environment_python(environment)})
        return self.rollout.model_copy(update=changes)

    def episode_bounds(self) -> dict[str, int]:
        """By name; there is one of the actor's micro-batches at least."""
        return {name: limit for name, limit in self.length_bounds().items() if limit is not None}

    @property
    def engine_bounds(self) -> dict[str, int | None]:
        return {"engine.max_total_tokens": self.engine.max_total_tokens}

    def length_bounds(self) -> dict[str, int | None]:
        return self.engine_bounds | super().length_bounds()

    def find_warnings(self) -> Iterator[str]:
        yield from super().find_warnings()
        if not self.rollout.makes_episodes:
            unread = {"agent_settings", "agent_timeout_s", "agent_processes", "episode"}
            for name in sorted(unread & self.rollout.model_fields_set):
                yield f"rollout.{name} has no effect on the single turn; name an agent with rollout.agent"
        if self.writes_deltas and self.actor.dtype != "bfloat16":
            yield (
                f"weights.transport: delta saves nothing with actor.dtype: {self.actor.dtype}, of which a train step "
                "changes every value; set actor.dtype: bfloat16, or weights.transport: shared_memory"
            )
        if self.rounding_settings and not self.ppo.use_decoupled_loss:
            yield (
                f"{' and '.join(self.rounding_settings)}: answers are of rounded weights, and without "
                "ppo.use_decoupled_loss their rounding counts as learning in ppo.eps_clip; set it to true, and "
                "ppo.is_ratio_mode to token_truncate"
            )
        if self.rollout.spare_answers:
            yield (
                f"rollout.spare_answers: {self.rollout.spare_answers}: of {self.ppo.group_size} + "
                f"{self.rollout.spare_answers} answers those that end first are trained on, so the policy learns from "
                "shorter answers than it makes; watch its answers' lengths, or use rollout.reorder_window"
            )
        if self.weights.update_mode == "in_place" and not self.ppo.use_decoupled_loss:
            yield (
                "weights.update_mode: in_place: tokens after an update are made over keys and values of older weights, "
                "and without ppo.use_decoupled_loss that counts as learning in ppo.eps_clip; set it to true, or "
                "weights.update_mode to retract"
            )
        otherwise = (
            ", or keep no version in memory: by weights.transport: disk, or a weights.host_directory on a host's disk"
        )
        group = self.scheduling_setup()["generation_server"]
        asked = {"scheduling": group.scheduling} | (
            {"elastic.scheduling": group.elastic.scheduling} if group.elastic else {}
        )
        for (key, task), (whose, model) in itertools.product(asked.items(), self._served.items()):
            yield from memory_warning(
                self._server_memory(task, model),
                of=whose,
                key=f"groups.generation_server.{key}.mem",
                asked_mb=task.mem,
                otherwise="" if self.weights.place == "shared" else otherwise,
            )
