"""Direct preference optimisation: a policy that learns from preferences what a reward model would have said.

    preferences ──input_ids, prompt_mask──┬──► ref_inf ──ref_logprobs──┐
                                          └────────────────────────────┴──► actor_train

The reference may have ranks of its own: actor=fsdp:d1,ref=fsdp:d1. It is the same model for held-out rows.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from corral.experiments.config.algorithm import DPOConfig
from corral.experiments.config.data import RowKind
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.row_experiment import ROW_KEYS, RowExperiment
from corral.scheduling.model_function_call import ModelFunctionCall


class DPOExperiment(RowExperiment):
    """Direct preference optimisation on the preferences in a dataset."""

    experiment: str = "dpo"
    """Direct preference optimisation."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4, or actor=fsdp:d2,ref=fsdp:d1."""
    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig
    """The reference model; usually what the policy starts from."""
    dpo: DPOConfig = DPOConfig()
    """The algorithm."""

    beside_first: ClassVar[frozenset[str]] = frozenset({"ref"})

    @property
    def row_kind(self) -> RowKind:
        return "preferences"

    def calls(self) -> list[ModelFunctionCall]:
        outputs = {"logprobs": "ref_logprobs"}
        return [
            self.inference_call("ref_inf", "ref", "dpo", input_keys=ROW_KEYS, outputs=outputs),
            self.train_call("dpo", input_keys=(*ROW_KEYS, "ref_logprobs")),
        ]

    def role_settings(self, role: str) -> Mapping[str, Any]:
        return {"dpo": self.dpo}
