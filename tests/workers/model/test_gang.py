"""The ranks of one start of the gang find each other, and nobody else."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve import MemoryNameService, TrialKeys
from corral.workers.model.gang import joined_gang, shared_store
from tests.workers.master.trials import UUID, context_of, trial_of
from tests.workers.stream_helpers import LOOPBACK

DEADLINE_S = 60.0


def test_the_ranks_of_one_start_share_a_store_whoever_comes_first() -> None:
    names, key = MemoryNameService(), TrialKeys(UUID).gang_rendezvous("first")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(shared_store, names, key, rank=1, address=LOOPBACK, timeout_s=DEADLINE_S)
        served = shared_store(names, key, rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
        served.set("said by", "rank 0")
        assert early.result(DEADLINE_S).get("said by") == b"rank 0"


def test_a_rank_of_another_start_is_not_met() -> None:
    names, keys = MemoryNameService(), TrialKeys(UUID)
    shared_store(names, keys.gang_rendezvous("first"), rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
    with pytest.raises(TimeoutError, match="model_worker/0 did not register"):
        shared_store(names, keys.gang_rendezvous("second"), rank=1, address=LOOPBACK, timeout_s=0.0)


def test_a_gang_of_one_needs_nobody(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        with joined_gang(context, context.specification(ModelWorkerSpec)) as gang:
            assert (gang.parallel.rank, gang.parallel.world_size, gang.parallel.group) == (0, 1, None)
            assert gang.rendezvous is None
