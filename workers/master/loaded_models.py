"""What the ranks have loaded when an epoch begins, held against the plan and against each other.

    Spec ────────► rows that each rank reads ──► as many as the plan counted?
    ModelConfig ─► shape of each model ────────► those that take over each other's weights: are they alike?

What differs would be seen only later, as a row that is missing, or in the middle of a collective whose sizes differ.
"""

from collections.abc import Mapping

from corral.scheduling.dataflow import DataflowGraph
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.requests.messages import ModelConfigReply


def check_rows(rows_by_rank: Mapping[int, int], *, planned: int) -> None:
    """See that every rank reads the rows that steps are counted by.

    Raises:
        BadConfigurationError: naming the rank, its rows, and those of the plan.
    """
    for rank, rows in rows_by_rank.items():
        if rows != planned:
            raise BadConfigurationError(
                f"model_worker/{rank} reads {rows} rows of the dataset, and the plan counts {planned}; "
                "submit the trial again, so that it is planned for the dataset as it is now"
            )


def check_reallocations(graph: DataflowGraph, models: Mapping[str, ModelConfigReply]) -> None:
    """See that models which take over each other's weights have the same parameters.

    Raises:
        BadConfigurationError: naming the call, both models and their shapes.
    """
    for call in graph.calls:
        for source, target in graph.reallocations(call):
            given, taken = models[str(source)], models[str(target)]
            if given != taken:
                raise BadConfigurationError(
                    f"call {call.name!r} hands the weights of {source} ({_shown(given)}) to {target} "
                    f"({_shown(taken)}); start both from models of the same shape"
                )


def _shown(model: ModelConfigReply) -> str:
    return (
        f"{model.architecture or 'a model'} of {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {model.num_parameters:,} parameters"
    )
