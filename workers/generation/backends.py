"""Which backend a plan asks for, made with the worker's keys and places; nothing is started or loaded yet.

GenerationServerSpec.backend ──► "hf": EmbeddedBackend      "sglang": SglangBackend
"""

from functools import partial

from corral.experiments.worker_specs import GenerationServerSpec
from corral.workers.generation.backend import GenerationBackend
from corral.workers.generation.server_client import GenerationServerClient
from corral.workers.lifecycle.worker import WorkerContext


def make_backend(
    spec: GenerationServerSpec, context: WorkerContext, *, client: GenerationServerClient
) -> GenerationBackend:
    """
    Args:
        client: by which a server in another process is told to take over weights.
    """
    seed = context.plan.seed * 1009 + spec.index
    if spec.backend == "sglang":
        return _sglang(spec, context, seed=seed, client=client)
    return _embedded(spec, context, seed=seed)


def _embedded(spec: GenerationServerSpec, context: WorkerContext, *, seed: int) -> GenerationBackend:
    import torch  # which takes seconds

    from corral.workers.generation.embedded import EmbeddedBackend, load_engine

    device = "cuda" if context.check_gpus(torch.cuda.device_count()) else "cpu"
    return EmbeddedBackend(
        partial(load_engine, spec, device=device, seed=seed),
        api_key=context.secrets.http_api_key.reveal(),
        admin_key=context.secrets.http_admin_key.reveal(),
        address=context.address,
        tls=context.trust.server(),
    )


def _sglang(
    spec: GenerationServerSpec, context: WorkerContext, *, seed: int, client: GenerationServerClient
) -> GenerationBackend:
    from corral.workers.generation.sglang import SglangBackend, SglangSettings

    settings = SglangSettings(
        spec=spec,
        address=context.address,
        api_key=context.secrets.http_api_key,
        admin_key=context.secrets.http_admin_key,
        trust=context.trust,
        log_path=context.trial.worker_log(context.attempt, "sglang", spec.index),
        seed=seed,
        version=spec.initial_version,
        start_timeout_s=context.plan.supervision.setup_timeout_s,
    )
    return SglangBackend(settings, client=client)
