"""Checks of the allocation and its generation side -> ConfigProblems, each with the key to change.

allocation "sglang:d4t2" ──► which backend, how many GPUs per server ──┬── groups.generation_server: as many GPUs
                                                                       ├── sglang.flags: they divide these GPUs
                                                                       └── the model: heads that can be divided so
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from corral.experiments.checks.training import check_training_side
from corral.experiments.config.cluster import GroupConfig
from corral.experiments.config.endpoint import JudgeConfig
from corral.experiments.config.rollout import EngineConfig, FlagValue, RolloutConfig, SglangConfig, WeightsConfig
from corral.experiments.errors import ConfigProblem, KeyPath, display_path, show_value
from corral.experiments.inputs.decoder_config import EMBEDDED_ENGINE_MODELS, MIXTURES, decoder_sizes
from corral.experiments.inputs.model_directory import attention_heads, context_length, inspect_model, model_type
from corral.experiments.inputs.other_pythons import sglang_python, sglang_version
from corral.scheduling.allocation import Allocation
from corral.scheduling.errors import message_and_hint

BUILT_GENERATION_BACKENDS = ("hf", "sglang")

_ALIASES = {
    "attention-data-parallel-size": "attn-dp-size",
    "attention-context-parallel-size": "attn-cp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "expert-parallel-size": "ep-size",
    "ep": "ep-size",
    "decode-context-parallel-size": "dcp-size",
    "data-parallel-size": "dp-size",
}
_ATTENTION_SIZES = ("attn-dp-size", "attn-cp-size")
_EXPERT_SIZES = ("moe-dp-size", "ep-size")
_DIVISORS = (_ATTENTION_SIZES, _EXPERT_SIZES, ("dcp-size",))
"""Flags of SGLang whose product divides the GPUs of a server: they say how these share the work."""


def check_allocation(allocation: Allocation, *, roles: Iterable[str], generates: bool) -> list[ConfigProblem]:
    """What an experiment cannot do with an allocation, or this version not at all."""
    problems = [
        *check_generation_side(allocation, generates=generates),
        *check_training_side(allocation, roles=tuple(roles)),
    ]
    return [replace(problem, path=("allocation",)) for problem in problems]


def check_generation_side(allocation: Allocation, *, generates: bool) -> Iterator[ConfigProblem]:
    """What the experiment does not need, or this version cannot do, of who generates."""
    engine = allocation.generation
    if engine is None:
        if generates:
            hint = "add it before the training side: hf:d1+fsdp:d1"
            yield ConfigProblem("the allocation has no generation side, but this experiment generates", hint)
        return
    if not generates:
        message = "the allocation has a generation side, but this experiment generates nothing"
        yield ConfigProblem(message, "leave the training side only: fsdp:d1")
    if engine.backend not in BUILT_GENERATION_BACKENDS:
        message = f"generation backend {engine.backend!r} is not built yet in this version"
        yield ConfigProblem(message, f"use the embedded engine: hf:d{engine.dims.dp}")
    if engine.backend == "hf" and engine.dims.tp > 1:
        yield ConfigProblem(
            f"a server of the embedded engine (hf) takes one GPU, got t{engine.dims.tp}",
            f"use hf:d{engine.dims.world_size} for as many GPUs, or sglang:d{engine.dims.dp}t{engine.dims.tp}",
        )


def check_server_gpus(group: GroupConfig, *, gpus_per_server: int) -> Iterator[ConfigProblem]:
    """Servers that ask for another number of GPUs than the allocation says; with 0 their processes run on CPUs."""
    for key, scheduling in group.given_schedulings():
        if scheduling.gpu not in (0, gpus_per_server):
            yield ConfigProblem(
                f"a generation server asks for {scheduling.gpu} GPUs, and the allocation gives it {gpus_per_server}",
                f"remove gpu; or write t{scheduling.gpu} in the allocation, or gpu: 0 to run on CPUs",
                path=("groups", "generation_server", *key, "gpu"),
            )


def check_sglang(sglang: SglangConfig, *, is_used: bool, is_in_container: bool) -> Iterator[ConfigProblem]:
    """Settings of SGLang that nobody reads, and an interpreter that does not have it.

    Args:
        is_used: whether the allocation asks for it.
        is_in_container: whether its servers start in an image, which cannot be looked into from here.
    """
    if not is_used:
        if sglang != SglangConfig():
            yield ConfigProblem(
                "`sglang` has no effect: the allocation's servers are the embedded engine",
                "remove it, or write sglang:d1 in place of hf:d1 in the allocation",
                path=("sglang",),
            )
        return
    if is_in_container:
        if sglang.python is None:
            yield ConfigProblem(
                "sglang.python is not set, and the servers start in a container",
                "give the path of the Python with SGLang in that image",
                path=("sglang",),
            )
        return
    try:
        sglang_version(sglang_python(sglang))
    except ValueError as error:
        message, hint = message_and_hint(error)
        key: KeyPath = ("allocation",) if sglang.python is None else ("sglang", "python")
        yield ConfigProblem(message, hint, path=key, is_of_running=True)


def check_backend_settings(engine: EngineConfig, weights: WeightsConfig, *, backend: str) -> Iterator[ConfigProblem]:
    """Settings that only the other backend has, or that this one cannot do without."""
    if engine.max_total_tokens is None and backend == "hf":
        yield ConfigProblem(
            "engine.max_total_tokens: null leaves the size of the KV cache to SGLang, and the servers are hf",
            "give the tokens that it holds, such as 65536",
            path=("engine", "max_total_tokens"),
            shown="null",
        )
    if engine.quantization is not None and backend != "hf":
        yield ConfigProblem(
            f"engine.quantization is of the embedded engine, and the allocation's servers are {backend}",
            "remove it; SGLang has flags of its own, such as sglang.flags: {quantization: fp8}",
            path=("engine", "quantization"),
        )
    # SGLang then cannot say which weights have made a token.
    if weights.update_mode == "in_place" and backend == "sglang":
        yield ConfigProblem(
            "weights.update_mode: in_place is of the embedded engine; SGLang has begun the next token of each "
            "answer when it pauses, and says of it that the new weights have made it; and its cache of prompts, which "
            "it cannot flush then, would serve keys and values of any older weights",
            "set it to retract, which reads the answers under way again",
            path=("weights", "update_mode"),
        )


def check_parallel_flags(
    flags: Mapping[str, FlagValue], *, gpus_per_server: int, has_gpus: bool
) -> Iterator[ConfigProblem]:
    """Flags that would take other GPUs than those of the allocation, or that cannot divide these.

    Args:
        has_gpus: whether servers ask for any; else their processes run on CPUs.
    """
    typed = _typed_names(flags)

    def problem(name: str, message: str, hint: str) -> ConfigProblem:
        return ConfigProblem(message, hint, path=("sglang", "flags", typed[name]))

    def shown(name: str) -> str:
        return f"--{typed[name]} {show_value(flags[typed[name]])}"

    if "dp-size" in typed:
        yield problem(
            "dp-size",
            f"--{typed['dp-size']} takes its multiple of the GPUs that the allocation gives a server",
            "raise d in the allocation for more servers; attn-dp-size is data-parallel attention within a server",
        )
    if not has_gpus and "attn-dp-size" in typed and flags[typed["attn-dp-size"]] != 1:
        yield problem(
            "attn-dp-size",
            f"{shown('attn-dp-size')} needs GPUs: what SGLang computes attention with where there are none has no such "
            "mode",
            "remove it, or remove gpu: 0 from groups.generation_server.scheduling",
        )
    fitting = [str(size) for size in range(1, gpus_per_server + 1) if gpus_per_server % size == 0]
    for group in _DIVISORS:
        given = [name for name in group if name in typed]
        if given and not _divide(gpus_per_server, [flags[typed[name]] for name in given]):
            yield problem(
                given[-1],
                f"{' x '.join(map(shown, given))} does not divide the {gpus_per_server} GPUs of a server "
                f"(t{gpus_per_server})",
                f"what divides them is {', '.join(fitting)}; or change t in the allocation",
            )


def _typed_names(flags: Mapping[str, FlagValue]) -> dict[str, str]:
    """How each flag that is given was written, by its first name."""
    typed = {_ALIASES.get(name, name): name for name, value in flags.items() if value is not False}
    if flags.get("enable-dp-attention") is True and "dp-size" in typed:  # an older spelling of data-parallel attention
        typed["attn-dp-size"] = typed.pop("dp-size")
    return typed


def _divide(gpus: int, values: Sequence[FlagValue]) -> bool:
    counts = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return len(counts) == len(values) and min(counts) >= 1 and gpus % prod(counts) == 0


def check_heads(model: Path, flags: Mapping[str, FlagValue], *, gpus_per_server: int) -> Iterator[ConfigProblem]:
    """Attention heads that the GPUs of a server cannot share equally, as SGLang wants it."""
    heads = attention_heads(model)
    if heads is None or any(name in _typed_names(flags) for name in _ATTENTION_SIZES):
        return  # data-parallel attention gives each rank whole requests, and more heads than one in t
    if not _can_share(*heads, gpus_per_server):
        queries, keys = heads
        fitting = [size for size in range(1, queries + 1) if _can_share(queries, keys, size)]
        yield ConfigProblem(
            f"{gpus_per_server} GPUs cannot share the {queries} attention heads ({keys} of keys and values) of "
            f"{display_path(model)} equally",
            f"{' or '.join(f't{size}' for size in fitting)} works",
            path=("allocation",),
        )


def check_embedded_model(model: Path, *, remedy: str) -> Iterator[ConfigProblem]:
    """A model that the embedded engine does not compute, where it is to generate."""
    kind = model_type(model)
    if kind is not None and kind not in EMBEDDED_ENGINE_MODELS:
        yield ConfigProblem(
            f"{display_path(model)} is a {kind}, and the embedded engine runs {', '.join(EMBEDDED_ENGINE_MODELS)}",
            remedy,
            path=("actor", "path"),
        )


def check_judge(judge: JudgeConfig | None, allocation: Allocation) -> Iterator[ConfigProblem]:
    """A judge that the servers of an allocation cannot serve beside the policy."""
    engine = allocation.generation
    if judge is None or engine is None:
        return
    from corral.experiments.prompts.chat_template import has_template  # only who has a judge pays for Jinja

    path: KeyPath = ("rollout", "judge", "path")
    found = [*inspect_model(judge.path)]
    if not found and not has_template(judge.path):
        found.append(ConfigProblem(f"{display_path(judge.path)} has no chat template", "take a model that has one"))
    if not found and context_length(judge.path) is None:
        found.append(ConfigProblem(f"{display_path(judge.path)} does not say max_position_embeddings", "add it"))
    if not found and engine.backend == "sglang":
        found += [*check_heads(judge.path, {}, gpus_per_server=engine.dims.tp), *check_mixture(judge.path)]
    elif not found:
        found += check_embedded_model(judge.path, remedy="use SGLang: sglang:d2 in place of hf:d2")
    yield from (replace(problem, path=path) for problem in found)
    if judge.servers >= engine.dims.dp:
        yield ConfigProblem(
            f"rollout.judge.servers {judge.servers} of {engine.dims.dp} generation servers leave none for the policy",
            f"write {engine.backend}:d{judge.servers + 1} in the allocation, or more",
            path=("allocation",),
        )


def check_mixture(model: Path) -> Iterator[ConfigProblem]:
    """A mixture of which SGLang would compute another model: layers with experts only, and an output of its own."""
    sizes, kind = decoder_sizes(model), model_type(model)
    if sizes is None or kind not in MIXTURES:
        return
    name = display_path(model)
    hint = (
        "use the embedded engine: hf:d1 in place of sglang:d1"
        if kind in EMBEDDED_ENGINE_MODELS
        else "nothing here generates with it"
    )
    dense = sorted(set(range(sizes.num_layers)) - sizes.sparse_layers)
    if dense:
        yield ConfigProblem(
            f"layers {', '.join(map(str, dense[:3]))}{' ...' if len(dense) > 3 else ''} of {name} have no "
            f"experts, and SGLang computes every layer of a {kind} with experts",
            hint,
            path=("allocation",),
        )
    if sizes.is_tied:
        yield ConfigProblem(
            f"the output of {name} is its embedding (tie_word_embeddings), and SGLang gives a {kind} an output "
            "of its own, which no file would fill",
            hint,
            path=("allocation",),
        )


def _can_share(queries: int, keys: int, ranks: int) -> bool:
    """Each rank has as many heads of queries, and as many of keys; where there are more ranks, copies of one."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


def check_admission(rollout: RolloutConfig, *, train_batch_size: int) -> Iterator[ConfigProblem]:
    """More prompts in flight than the staleness bound ever admits, or fewer than a batch."""
    eta, overtaking = rollout.max_head_offpolicyness, rollout.overtaking
    if overtaking > eta * train_batch_size:
        yield ConfigProblem(
            f"rollout.reorder_window {rollout.reorder_window} leaves no batch within the staleness bound: what may be "
            f"overtaken by {overtaking} prompts has to be admitted so much earlier, and max_head_offpolicyness {eta} x "
            f"train_batch_size {train_batch_size} = {eta * train_batch_size} are there for it",
            f"at most {eta * train_batch_size + 1}, or raise max_head_offpolicyness",
            path=("rollout", "reorder_window"),
        )
        return
    most = (eta + 1) * train_batch_size - overtaking
    if rollout.max_concurrent_rollouts is not None and rollout.max_concurrent_rollouts > most:
        yield ConfigProblem(
            f"rollout.max_concurrent_rollouts {rollout.max_concurrent_rollouts} can never be reached: "
            f"the staleness bound admits (max_head_offpolicyness {eta} + 1) x train_batch_size {train_batch_size}"
            + (f" - (reorder_window {rollout.reorder_window} - 1)" if overtaking else "")
            + f" = {most}",
            f"at most {most}, or leave it out; raise max_head_offpolicyness for more",
            path=("rollout", "max_concurrent_rollouts"),
        )
