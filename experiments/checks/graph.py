"""Checks of the graph: every call has a model, every key a declaration, and what is trained is published.

All keys that the graph names get layout and type, so that nothing that plans or moves samples has to know who declared
one:

    critic_inf  output_key_remap {"values": "teacher_values"}  ──►  teacher_values is per_token float32, as values is
"""

from collections.abc import Iterable, Mapping, Sequence

from corral.experiments.config.algorithm import INTERFACE_NAMES
from corral.experiments.worker_specs import ModelRoleSpec
from corral.scheduling.dataflow import DataflowGraph
from corral.scheduling.keys import BUILT_IN_KEYS, Key, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName, PublishWeightsHook


def check_models(graph: DataflowGraph, roles: Sequence[ModelRoleSpec]) -> None:
    """See that every call has a model, and every model a call.

    Raises:
        ValueError: naming the one that has none.
    """
    held = {role.model_name for role in roles}
    for call in graph.calls:
        has_interface = call.call_type in (CallType.INFERENCE, CallType.TRAIN_STEP) and ":" not in call.implementation
        if has_interface and call.implementation not in INTERFACE_NAMES:
            raise ValueError(
                f"call {call.name!r} is implemented by {call.implementation!r}, and there is no such interface; there "
                f"are {', '.join(INTERFACE_NAMES)}, and import paths of your own"
            )
        if call.model_name not in held:
            names = ", ".join(map(str, sorted(held)))
            raise ValueError(
                f"call {call.name!r} runs on {call.model_name}, and the models are {names}; "
                "add it to the models, or let the call run on one of them"
            )
    if idle := sorted(held - set(graph.model_names)):
        raise ValueError(f"no call runs on {', '.join(map(str, idle))}; remove what nothing is asked of")


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
                raise ValueError(
                    f"call {call.name!r} makes key {source!r}, whose layout nobody declares; write "
                    f'Key("{source}", "per_answer", "float32"), or what it is, in the file of {call.implementation!r}'
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
            raise ValueError(
                f"call {call.name!r} publishes the weights of {call.model_name}, and those of a trial are the ones of "
                f"{published}, its first model; remove the hook, or name the models in another order"
            )
    training = [call for call in graph.calls if call.call_type is CallType.TRAIN_STEP and call.model_name == published]
    if training and not publishing:
        raise ValueError(
            f"call {training[-1].name!r} trains {published}, and no call publishes its weights: whoever generates "
            "would keep the first ones, and exports would be copies of them; give it a PublishWeightsHook"
        )
