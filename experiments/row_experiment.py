"""RowExperiment: what experiments share that learn from rows of a dataset and generate nothing.

    rows ──► calls of a step, on the roles' models ──► new weights
    held-out rows ──► the same interface, by the same keys ──► loss and what else it says

Workers: the master and the model workers; the latter read the rows themselves.
"""

from corral.experiments.experiment import Experiment
from corral.experiments.inputs.model_directory import context_length
from corral.experiments.prompts.length_limits import LengthLimits
from corral.scheduling.model_function_call import CallType, ModelFunctionCall

ROW_KEYS = ("input_ids", "prompt_mask")


class RowExperiment(Experiment):
    """Learns from rows: problems with their answers, or preferences."""

    @property
    def sample_keys(self) -> tuple[str, ...]:
        return ROW_KEYS

    def evaluate_calls(self) -> list[ModelFunctionCall]:
        """Held-out rows go through what trains, but that nothing is learned from them."""
        if self.evaluation is None:
            return []
        trains = self.calls()[-1]  # the last one does
        on_rows = ModelFunctionCall(
            name="evaluate_rows",
            model_name=trains.model_name,
            call_type=CallType.EVALUATE,
            implementation=trains.implementation,
            n_seqs=self.evaluation.batch_size,
            input_keys=trains.input_keys,
            micro_batches=self.trained.micro_batches,
        )
        return [on_rows, *super().evaluate_calls()]

    def length_limits(self) -> LengthLimits:
        contexts = [context_length(model.path) for model in self.models.values()]
        return LengthLimits(
            self.trained.path,
            max_prompt_tokens=self.dataset.max_prompt_tokens,
            template_arguments=self.dataset.chat_template_kwargs,
            max_row_tokens=min(model.max_tokens_per_micro_batch for model in self.models.values()),
            max_sequence_tokens=min((length for length in contexts if length is not None), default=None),
        )
