"""Experiment -> the specification of every worker, after checks that calls, models and keys fit each other.

    Experiment ──calls, models───► graph ──checked──► MasterWorkerSpec, a ModelWorkerSpec for each training rank
               ──generation_side─► servers, manager, rollout workers

All keys that the graph names get layout and type, so that nothing that plans or moves samples has to know who declared
one:

    critic_inf  output_key_remap {"values": "teacher_values"}  ──►  teacher_values is per_token float32, as values is
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from corral.experiments.config.algorithm import INTERFACE_NAMES
from corral.experiments.config.model import ReferenceModelConfig
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.experiment import Experiment
from corral.experiments.inputs.model_directory import transformer_shape
from corral.experiments.inputs.parameters import count_parameters
from corral.experiments.worker_specs import DatasetSpec, MasterWorkerSpec, ModelRoleSpec, ModelWorkerSpec, WorkerSpec
from corral.scheduling.cadence import Frequency
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.errors import RuleError
from corral.scheduling.keys import BUILT_IN_KEYS, Key, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PublishWeightsHook

_OF_TRAINING = ("optimizer", "lora", "recompute", "gradient_sums")
"""Settings in the specification of trained models only."""


def worker_specs(experiment: Experiment) -> list[WorkerSpec]:
    """Every worker's specification.

    Raises:
        ConfigError: if the dataset cannot be read any more.
        ValueError: if calls, models and keys do not fit each other.
    """
    dataset = read_dataset(experiment)
    return [*_trainer_specs(experiment, dataset), *experiment.generation_side(dataset)]


def read_dataset(experiment: Experiment) -> DatasetSpec:
    """Facts of the dataset as it is now; ConfigError if it cannot be used."""
    too_long, rows = experiment.checked_dataset.too_long, experiment.listed_rows.get("dataset")
    return dataset_spec(experiment.dataset, kind=experiment.row_kind, too_long=too_long, content=rows)


def role_specs(experiment: Experiment) -> list[ModelRoleSpec]:
    """The specification of each role and of replicas, for model workers."""
    specs = []
    for role, model in experiment.models.items():
        head, backend = experiment.heads.get(role, "lm"), experiment.parsed_allocation.training_of(role).backend
        settings: dict[str, Any] = {
            "head": head,
            **{name: getattr(model, name) for name in _OF_TRAINING if hasattr(model, name)},
            **experiment.role_settings(role),
        }
        spec = ModelRoleSpec(
            role=role,
            model=model.weights_alone(),
            backend="megatron" if backend == "megatron" else "fsdp",
            is_averaged=isinstance(model, ReferenceModelConfig) and model.ema is not None,
            num_parameters=count_parameters(model, head=head),
            **settings,
        )
        specs.append(spec)
    return [*specs, *experiment.replicas(specs[0])]


def _trainer_specs(experiment: Experiment, dataset: DatasetSpec) -> Iterator[WorkerSpec]:
    """The master and every model worker, each with the models that it holds a part of."""
    graph, roles = experiment.graph, role_specs(experiment)
    check_models(graph, roles)
    check_publication(graph, ModelName(experiment.roles[0]))
    declared = experiment.declared(experiment.own_code, interfaces=[call.implementation for call in graph.calls])
    keys = {name: found.keys for name, found in declared.items()}
    shapes = {role.role: transformer_shape(role.model.path) for role in roles}
    changed = {name.role for call in graph.calls for name in graph.changed_by(call)}
    held_out = None
    if experiment.evaluation is not None and any(call.input_keys for call in graph.evaluate_calls):
        held_out = dataset_spec(experiment.evaluation.dataset, kind=experiment.held_out_kind)
    master = MasterWorkerSpec(
        calls=list(graph.calls),
        train_batch_size=experiment.train_batch_size,
        num_prompts=dataset.num_rows,
        source=experiment.source,
        max_head_offpolicyness=experiment.max_head_offpolicyness,
        control=experiment.control,
        initial_weights={role.role: role.model.path for role in roles if role.role in changed},
        published_role=experiment.roles[0],
        writes_deltas=experiment.writes_deltas,
        writes_first_version=experiment.generates and not experiment.trained.starts_as_stored,
        shape_by_role={role: shape for role, shape in shapes.items() if shape is not None},
        declared_keys=graph_keys(graph.calls, keys, graph.dataset_keys, given=experiment.model_keys),
        meshes={str(name): experiment.mesh_of(name) for name in graph.model_names},
        # At the heads of the trained policy, which reads most of the keys of a sample.
        sample_ranks=list(experiment.meshes[experiment.roles[0]].dp_heads),
        evaluate_every=experiment.evaluation.frequency if experiment.evaluation is not None else Frequency(),
    )
    yield master
    for rank in range(experiment.num_training_ranks):
        yield ModelWorkerSpec(
            index=rank,
            world_size=experiment.num_training_ranks,
            roles=[role for role in roles if rank in master.mesh(role.model_name)],
            calls=master.calls,
            declared_keys=master.declared_keys,
            tokenizer=experiment.trained.path,
            takes_samples=rank in master.sample_ranks and experiment.source != "prompts",
            dataset=None if experiment.generates else dataset,
            evaluation=experiment.evaluation,
            held_out=held_out,
            total_steps=master.total_steps,
            **experiment.rank_settings(),
        )


def check_models(graph: DataflowGraph, roles: Sequence[ModelRoleSpec]) -> None:
    """See that every call has a model, and every model a call.

    Raises:
        ValueError: naming the one that has none.
    """
    held = {role.model_name for role in roles}
    for call in graph.calls:
        has_interface = call.call_type in (CallType.INFERENCE, CallType.TRAIN_STEP) and ":" not in call.implementation
        if has_interface and call.implementation not in INTERFACE_NAMES:
            raise RuleError(
                f"call {call.name!r} is implemented by {call.implementation!r}, and there is no such interface",
                f"there are {', '.join(INTERFACE_NAMES)}, and import paths of your own",
            )
        if call.model_name not in held:
            names = ", ".join(map(str, sorted(held)))
            raise RuleError(
                f"call {call.name!r} runs on {call.model_name}, and the models are {names}",
                "add it to the models, or let the call run on one of them",
            )
    if idle := sorted(held - set(graph.model_names)):
        raise RuleError(f"no call runs on {', '.join(map(str, idle))}", "remove what nothing is asked of")


def graph_keys(
    calls: Sequence[ModelFunctionCall],
    declared: Mapping[str, Iterable[Key]],
    dataset_keys: Iterable[str] = (),
    *,
    given: Iterable[Key] = (),
) -> tuple[Key, ...]:
    """The keys of the graph that are not built in, each once.

    Args:
        declared: keys by the implementation that declares them.
        dataset_keys: keys that no call makes.
        given: keys that every implementation knows besides those that are built in.

    Raises:
        ValueError: if nobody declares a key, or two do so in different ways.
    """
    known = tuple(given)
    everything = merge_keys([*known, *(key for keys in declared.values() for key in keys)])
    found = {name: everything[name] for name in dataset_keys if name in everything}
    for call in calls:
        own = merge_keys([*known, *declared.get(call.implementation, ())])
        own_name = {graph_name: name for name, graph_name in call.output_key_remap.items()}
        for name in call.output_keys:
            source = own_name.get(name, name)
            if source not in own:
                raise RuleError(
                    f"call {call.name!r} makes key {source!r}, whose layout nobody declares",
                    f"write "
                    f'Key("{source}", "per_answer", "float32"), or what it is, in the file of {call.implementation!r}',
                )
            found[name] = Key(name, own[source].layout, own[source].dtype, own[source].shape)
    for name in (name for call in calls for name in call.input_keys if name not in found):
        if name not in everything:
            raise ValueError(f"the graph reads key {name!r}, whose layout nobody declares")
        found[name] = everything[name]
    merge_keys(found.values())
    return tuple(key for name, key in found.items() if name not in BUILT_IN_KEYS)


def check_publication(graph: DataflowGraph, published: ModelName) -> None:
    """See that what is published and exported is what the graph trains: the other hooks would have no effect.

    Raises:
        ValueError: naming the call whose hooks have to change.
    """
    publishing = [call for call in graph.calls if any(isinstance(hook, PublishWeightsHook) for hook in call.post_hooks)]
    for call in publishing:
        if call.model_name != published:
            raise RuleError(
                f"call {call.name!r} publishes the weights of {call.model_name}, and those of a trial are the ones of "
                f"{published}, its first model",
                "remove the hook, or name the models in another order",
            )
    training = [call for call in graph.calls if call.call_type is CallType.TRAIN_STEP and call.model_name == published]
    if training and not publishing:
        raise RuleError(
            f"call {training[-1].name!r} trains {published}, and no call publishes its weights: the generators "
            "would keep the first ones, and exports would be copies of them",
            "give it a PublishWeightsHook",
        )
