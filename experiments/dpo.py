"""Direct preference optimisation: a policy that learns from preferences what a reward model would have said.

    preferences ──input_ids, prompt_mask──┬──► ref_inf ──ref_logprobs──┐
                                          └────────────────────────────┴──► actor_train

The reference may have ranks of its own: actor=fsdp:d1,ref=fsdp:d1. It is the same model for held-out rows. A loss that
reads no reference (simpo) has none.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from corral.experiments.config.algorithm import DPOConfig
from corral.experiments.config.data import RowKind
from corral.experiments.config.model import ModelConfig, TrainedModelConfig
from corral.experiments.errors import ConfigProblem
from corral.experiments.row_experiment import ROW_KEYS, RowExperiment
from corral.scheduling.model_function_call import ModelFunctionCall


class DPOExperiment(RowExperiment):
    """Direct preference optimisation, or IPO, SimPO, KTO, on the preferences in a dataset."""

    experiment: str = "dpo"
    """Direct preference optimisation."""
    allocation: str = "fsdp:d1"
    """Who trains, on how many GPUs or processes: fsdp:d4, or actor=fsdp:d2,ref=fsdp:d1."""
    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = None
    """The reference model, usually what the policy starts from; None with dpo.loss: simpo, which reads none."""
    dpo: DPOConfig = DPOConfig()
    """The algorithm."""

    beside_first: ClassVar[frozenset[str]] = frozenset({"ref"})

    @property
    def row_kind(self) -> RowKind:
        return "preferences"

    def calls(self) -> list[ModelFunctionCall]:
        if self.ref is None:
            return [self.train_call("dpo", input_keys=ROW_KEYS)]
        outputs = {"logprobs": "ref_logprobs"}
        return [
            self.inference_call("ref_inf", "ref", "dpo", input_keys=ROW_KEYS, outputs=outputs),
            self.train_call("dpo", input_keys=(*ROW_KEYS, "ref_logprobs")),
        ]

    def find_own_problems(self) -> Iterator[ConfigProblem]:
        yield from super().find_own_problems()
        if self.ref is None and self.dpo.reads_reference:
            yield ConfigProblem(
                f"dpo.loss {self.dpo.loss} compares with a reference model, and there is none",
                "give ref.path (the model that the actor starts from), or set dpo.loss: simpo",
                path=("ref",),
            )
        if self.ref is not None and not self.dpo.reads_reference:
            yield ConfigProblem(f"dpo.loss {self.dpo.loss} reads no reference model", "remove ref", path=("ref",))

    def role_settings(self, role: str) -> Mapping[str, Any]:
        return {"dpo": self.dpo}
