"""Megatron's distributed optimizer: each of d x c ranks keeps and updates its share of the parameters and moments.

gradients ── added up over the d x c ranks, each gets its share ──► AdamW ──► parameters, gathered again
"""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
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


def make_optimizer(model: Any, config: OptimizerConfig, groups: ProcessGroupCollection) -> Any:
    """AdamW as `optimizers.py` sets it up, over the shares of Megatron's distributed optimizer.

    Megatron's own factory asks all ranks of the world for their parameter groups, which other models' ranks would not
    answer.
    """
    decaying: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        decays = parameter.ndim >= 2 or config.decays_biases_and_norms
        (decaying if decays else others).append(parameter)
    parameter_groups = [
        {"params": parameters, "weight_decay": weight_decay}
        for parameters, weight_decay in ((decaying, config.weight_decay), (others, 0.0))
        if parameters
    ]
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
    )
    inner = torch.optim.AdamW(
        parameter_groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
    )
    optimizer = DistributedOptimizer(
        inner,
        settings,
        None,
        None,
        model_chunks=[model],
        per_model_buffers={0: model.buffers},
        data_parallel_group=groups.dp_cp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups.mp.rank(),
        distributed_optimizer_instance_id=0,
    )
    optimizer.grad_stats_parallel_group = groups.intra_dist_opt
    optimizer.tp_group = groups.tp
    return optimizer
