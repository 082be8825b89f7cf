"""Megatron's distributed optimizer: each of d x c ranks keeps and updates its shard of the parameters and moments.

gradients ── added up over the d x c ranks, each gets its shard ──► AdamW ──► parameters, gathered again
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from corral.experiments.config.model import OptimizerConfig
from corral.workers.backends.megatron.model import ScoringModel


def with_gradients(model: ScoringModel, groups: ProcessGroupCollection) -> Any:
    """The model with buffers in which gradients are added up over micro-batches and ranks."""
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        module=model,
        pg_collection=groups,
    )


class StageOptimizer(ChainedOptimizer):  # type: ignore[misc]
    """What a rank keeps of its stage, in one optimizer; and of its experts in another, if other ranks have others.

    The moments of a parameter are shared by the ranks that have it alike: fewer for an expert than for the rest.
    """

    def __init__(self, model: Any, optimizers: Sequence[DistributedOptimizer]) -> None:
        super().__init__(list(optimizers))
        self._model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        """With the buffers in which the model's gradients are added up."""
        self._model.zero_grad_buffer()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def squared_norm(self) -> torch.Tensor:
        """Of the gradients of this rank's shards, each number of which one rank of the mesh counts: a float64 scalar.

        Megatron's own norm takes a collective for each of its optimizers, and a stage without experts has one less.
        """
        gradients = [grad for part in self.chained_optimizers for grad in part.get_main_grads_for_grad_norm()]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self) -> None:
        """Update the shards, then gather all parameters once; each optimizer alone would gather those of the other."""
        for optimizer in self.chained_optimizers:
            MixedPrecisionOptimizer.step_with_ready_grads(optimizer)
        self._model.start_param_sync()

    def take_shards(self) -> None:
        """Copy the shards into the model's parameters, after a state was loaded into the shards."""
        for optimizer in self.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        self._model.start_param_sync(force_sync=True)


def make_optimizer(model: Any, config: OptimizerConfig, groups: ProcessGroupCollection) -> StageOptimizer:
    """AdamW as `optimizers.py` sets it up, over the shards of Megatron's distributed optimizer.

    Megatron's own factory asks all ranks of the world for their parameter groups, which other models' ranks would not
    answer.
    """
    optimizers = []
    for buffers, sharing in ((model.buffers, groups.dp_cp), (model.expert_parallel_buffers, groups.expt_dp)):
        inside = {id(parameter) for buffer in buffers for parameter in buffer.params}
        if own := [parameter for parameter in model.parameters() if id(parameter) in inside]:
            optimizers.append(_distributed(model, own, buffers, sharing, config, groups))
    return StageOptimizer(model, optimizers)


def _distributed(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    buffers: list[Any],
    sharing: dist.ProcessGroup,
    config: OptimizerConfig,
    groups: ProcessGroupCollection,
) -> DistributedOptimizer:
    """Megatron's optimizer of some parameters.

    Args:
        buffers: those in which their gradients are.
        sharing: the ranks that have the same of them.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = DistributedOptimizer(
        _adamw(parameters, config),
        settings,
        None,
        None,
        model_chunks=[model],
        per_model_buffers={0: buffers},
        data_parallel_group=sharing,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups.mp.rank(),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer


def _adamw(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Weight decay for matrices, and not for biases and norms."""
    decaying = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    of_groups = ((decaying, config.weight_decay), (others, 0.0))
    parameter_groups = [{"params": group, "weight_decay": decay} for group, decay in of_groups if group]
    return torch.optim.AdamW(parameter_groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
