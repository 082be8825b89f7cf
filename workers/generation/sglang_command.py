"""What an SGLang server is started with: command line, settings that hold secrets, environment. Pure.

GenerationServerSpec ──► sglang_command ──► argv            anybody on the machine can read it
keys of the server ────► secret_settings ──► a file of mode 0600, which `--config` names
environment ───────────► sglang_environment ──► + the stand-ins for what a GPU would bring, where there is none
CUDA_VISIBLE_DEVICES ──► has_gpu, check_gpus    as the launcher has set it: the server takes these GPUs and no others
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from corral.experiments.config.rollout import FlagValue
from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.lifecycle.worker import BadConfigurationError

STAND_INS = Path(__file__).parent / "cpu_stand_ins"
_ENTRY = Path(__file__).parent / "sglang_entry"


def sglang_command(
    spec: GenerationServerSpec,
    *,
    host: str,
    port: int,
    seed: int,
    descriptor: int,
    identity: Path,
    secrets_file: Path,
    has_gpu: bool,
) -> list[str]:
    """The command line; the user's own flags come last, so that they also replace what is only a default here.

    Args:
        descriptor: inherited; of a socket that is bound to `host` and `port`.
        identity: `Trust.path`, by which the server proves itself.
        secrets_file: what `secret_settings` gives, as a file that only its owner can read.
    """
    engine, sglang = spec.engine, spec.sglang
    assert sglang.python is not None  # the plan says which
    ours: dict[str, FlagValue] = {
        "config": str(secrets_file),
        "model-path": str(spec.initial_weights),
        "weight-version": spec.initial_version,
        "host": host,
        "port": port,
        "ssl-keyfile": str(identity),
        "ssl-certfile": str(identity),
        "dtype": engine.dtype,  # never `auto`, which makes float16 of float32
        "max-running-requests": engine.max_running_requests,
        "max-total-tokens": False if engine.max_total_tokens is None else engine.max_total_tokens,
        "random-seed": seed,
        "tp-size": spec.tensor_parallel_size,
        "skip-tokenizer-init": True,  # token ids in, token ids out
        "skip-server-warmup": True,  # it would ask without a key; the first request warms up as well
        "enable-metrics": True,
        "incremental-streaming-output": True,  # each token once, and not with all before it
        "log-level-http": "warning",  # else a line for every request
        "sleep-on-idle": True,  # an idle scheduler would otherwise keep a core busy
    }
    if spec.records_experts:
        ours["enable-return-routed-experts"] = True
    if not has_gpu:
        ours |= {"device": "cpu", "attention-backend": "torch_native"}
    flags = ours | sglang.flags
    return [str(sglang.python), str(_ENTRY), str(descriptor), *_arguments(flags)]


def _arguments(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    for name, value in flags.items():
        if value is False:
            continue
        yield f"--{name}"
        if value is not True:
            yield from (str(item) for item in (value if isinstance(value, list) else [value]))


def secret_settings(*, api_key: str, admin_key: str) -> str:
    """YAML for `--config`: what no other user of the machine may read in the list of its processes.

    With an admin key SGLang takes pauses, updates and aborts from its holder only, and not from those who generate.
    """
    return json.dumps({"api-key": api_key, "admin-api-key": admin_key})


def sglang_environment(
    inherited: Mapping[str, str], *, has_gpu: bool, num_ranks: int, cpus: Sequence[int]
) -> dict[str, str]:
    """Without a network, and on a CPU with what SGLang imports of a GPU's packages and then does not use.

    Args:
        num_ranks: its tensor-parallel processes.
        cpus: those that this process may use.
    """
    # Its own processes begin with `python -c`, which would search the current folder first.
    environment = {**inherited, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if not has_gpu:
        path = [str(STAND_INS), *filter(None, [inherited.get("PYTHONPATH")])]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": ":".join(path)}
        if num_ranks > 1:  # else SGLang gives each rank a NUMA node, and ends where there are fewer
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cpus_by_rank(cpus, num_ranks)
    return environment


def cpus_by_rank(cpus: Sequence[int], num_ranks: int) -> str:
    """The CPUs of each rank, as SGLang reads them: "0,1|2,3". Equally many and none twice, but where there are fewer
    CPUs than ranks."""
    each = max(1, len(cpus) // num_ranks)
    shares = [[cpus[(rank * each + number) % len(cpus)] for number in range(each)] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def check_gpus(environment: Mapping[str, str], *, num_ranks: int) -> None:
    """BadConfigurationError if fewer GPUs are visible than there are ranks; where none is, they run on CPUs."""
    visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if visible and len(visible) < num_ranks:
        raise BadConfigurationError(
            f"the allocation gives this server {num_ranks} GPUs (t{num_ranks}), and its task has {len(visible)}: "
            f"CUDA_VISIBLE_DEVICES={','.join(visible)}; set groups.generation_server.scheduling.gpu to {num_ranks}, or "
            "leave it out"
        )


def has_gpu(environment: Mapping[str, str], *, driver: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """Whether a process with this environment sees a GPU; asked without torch, which takes seconds to import."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return bool(visible.strip()) if visible is not None else driver.is_dir() and any(driver.iterdir())
