"""What every rank imports, for the server that ranks are forked from; nothing runs here."""

from importlib.util import find_spec

from corral.workers.modules import loading_modules

with loading_modules():
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import corral.workers.algorithms.ppo_actor  # noqa: F401
    import corral.workers.backends.fsdp.engine  # noqa: F401

    if find_spec("megatron") is not None:
        import corral.workers.backends.megatron.engine  # noqa: F401
