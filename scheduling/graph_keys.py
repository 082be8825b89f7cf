"""Calls and the keys that their implementations declare -> every key that the graph names, with layout and type.

    critic_inf  output_key_remap {"values": "teacher_values"}  ──►  teacher_values is per_token float32, as values is

The result is part of the plan: nothing that plans or moves samples has to know who declared a key.
"""

from collections.abc import Iterable, Mapping, Sequence

from corral.scheduling.keys import BUILT_IN_KEYS, Key, merge_keys
from corral.scheduling.model_function_call import ModelFunctionCall


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
