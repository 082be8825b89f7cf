"""What every rank imports, for the server that ranks are forked from; nothing runs here."""

import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import corral.workers.algorithms.ppo_actor  # noqa: F401
import corral.workers.backends.fsdp.engine  # noqa: F401
