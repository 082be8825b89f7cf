"""How the ranks of one start of the gang meet.

    rank 0:       host_store ──► its address ──► name-resolve, under the gang's incarnation
    other ranks:  name-resolve ──wait──► the address ──► connect_store
    every rank:   init_parallel ──► ParallelContext of all ranks; left again when the worker leaves
                  mesh_contexts ──► one of each model, and of the ranks that a model's weights travel between
                  the store, in which the data plane meets, too

The incarnation in the name is what keeps two starts of the gang apart: a rank of an earlier one, which may still be on
its way out, looks under another name.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._distributed_c10d import Store  # re-exported by torch.distributed, but not for type checkers

from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve.base import NameService
from corral.workers.backends.parallel_context import ParallelContext, connect_store, host_store, init_parallel
from corral.workers.lifecycle.worker import WorkerContext


@contextmanager
def joined_gang(context: WorkerContext, spec: ModelWorkerSpec) -> Iterator[tuple[ParallelContext, Store | None]]:
    """This rank's place among the others, and the store in which all of them meet, for as long as the block runs.

    A gang of one has no store.

    Guarantee: once all have joined, a rank waits for another one as long as a phase may last, and no less: one that
    loads or writes slowly ends nothing before its own deadline does.

    Raises:
        WrongDevicesError: if this rank does not see the GPUs that the plan gives it.
        TimeoutError: if the other ranks do not come within `supervision.setup_timeout_s`.
    """
    device = torch.device("cuda", 0) if context.check_gpus(torch.cuda.device_count()) else torch.device("cpu")
    if spec.world_size == 1:
        yield init_parallel(device=device), None
        return
    timeout_s = context.plan.supervision.setup_timeout_s
    peers = [worker for worker in context.workers("model_worker") if worker != context.worker_id]
    context.presence.enter("join the gang", waits_for=peers, is_setting_up=True, deadline_s=timeout_s)
    key = context.keys.gang_rendezvous(context.incarnation)
    store = shared_store(context.names, key, rank=spec.index, address=context.address, timeout_s=timeout_s)
    parallel = init_parallel(
        rank=spec.index,
        world_size=spec.world_size,
        store=store,
        device=device,
        timeout_s=context.plan.supervision.step_timeout_s,
        join_timeout_s=timeout_s,
    )
    try:
        yield parallel, store
    finally:
        parallel.close()


def shared_store(names: NameService, key: str, *, rank: int, address: str, timeout_s: float) -> Store:
    """The store that all ranks of a gang share: rank 0 listens on `address` and says where under `key`.

    Raises:
        TimeoutError: if rank 0 does not show up, or does not answer.
    """
    if rank == 0:
        store, serves_at = host_store(address, timeout_s=timeout_s)
        names.add(key, serves_at)
        return store
    served_at = names.wait(key, timeout_s=timeout_s, waiting_for="model_worker/0")
    return connect_store(served_at, timeout_s=timeout_s)
