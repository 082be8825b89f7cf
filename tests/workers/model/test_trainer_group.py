"""The ranks of one start of the trainer group find each other, and nobody else."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.worker_specs import ModelWorkerSpec
from corral.name_resolve.keys import TrialKeys
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.lifecycle.worker import Worker, WrongDevicesError, run_to_exit_code
from corral.workers.model.model_worker import RankWaits, joined_trainer_group, shared_store
from tests.name_services import MemoryNameService, NamesAddress, running_names
from tests.workers.backends.trainer_helpers import play
from tests.workers.master.trials import UUID, context_of, trial_of
from tests.workers.stream_helpers import LOOPBACK

DEADLINE_S = 60.0
SETUP_S = 4.0  # of two processes that are there already


def test_the_ranks_of_one_start_share_a_store_whoever_comes_first() -> None:
    names, key = MemoryNameService(), TrialKeys(UUID).trainer_rendezvous("first")
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(shared_store, names, key, rank=1, address=LOOPBACK, timeout_s=DEADLINE_S)
        served = shared_store(names, key, rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
        served.set("said by", "rank 0")
        assert early.result(DEADLINE_S).get("said by") == b"rank 0"


def test_a_rank_of_another_start_is_not_met() -> None:
    names, keys = MemoryNameService(), TrialKeys(UUID)
    shared_store(names, keys.trainer_rendezvous("first"), rank=0, address=LOOPBACK, timeout_s=DEADLINE_S)
    with pytest.raises(TimeoutError, match="model_worker/0 did not register"):
        shared_store(names, keys.trainer_rendezvous("second"), rank=1, address=LOOPBACK, timeout_s=0.0)


def test_a_rank_that_does_not_see_its_gpus_refuses_to_train_and_one_that_is_planned_without_takes_the_cpu(
    tmp_path: Path,
) -> None:
    if (seen := torch.cuda.device_count()) == 1:
        pytest.skip("the one GPU that a rank is planned for is here")
    wants_one = trial_of(tmp_path / "one", "groups.model_worker.scheduling.gpu=1")
    with context_of(*wants_one, "model_worker") as context:
        with (
            pytest.raises(WrongDevicesError, match=f"model_worker/0 1 GPU, and it sees {seen} on"),
            joined_trainer_group(context, context.specification(ModelWorkerSpec)),
        ):
            pass
    with context_of(*trial_of(tmp_path / "none", "groups.model_worker.scheduling.gpu=0"), "model_worker") as context:
        with joined_trainer_group(context, context.specification(ModelWorkerSpec)) as (parallel, _):
            assert parallel.device.type == "cpu"


@pytest.mark.parametrize("seen", [0, 2])
def test_other_gpus_than_planned_end_a_worker_with_an_exit_of_its_own(tmp_path: Path, seen: int) -> None:
    class Computing(Worker):
        def run(self) -> None:
            self.context.check_gpus(seen)

    with context_of(*trial_of(tmp_path, "groups.model_worker.scheduling.gpu=1"), "model_worker") as context:
        assert run_to_exit_code(Computing, context) is WorkerExit.WRONG_DEVICES


def test_a_rank_that_is_slower_than_setup_may_be_ends_no_gang_that_has_joined_and_is_seen(tmp_path: Path) -> None:
    with running_names() as names:
        play(be_slow, tmp_path, names, world_size=2, directory=tmp_path)


def be_slow(world: ParallelContext, folder: Path, address: NamesAddress) -> None:
    """Rank 1 comes to a collective when all time for setting up is over."""
    world.close()
    own = folder / str(world.rank)
    own.mkdir()
    settings = (f"supervision.setup_timeout_s={SETUP_S}", f"supervision.step_timeout_s={DEADLINE_S}")
    trial = trial_of(own, "groups.model_worker.scheduling.gpu=0", *settings)
    with address.connect() as names, context_of(*trial, "model_worker") as context:
        spec = context.specification(ModelWorkerSpec).model_copy(update={"world_size": 2, "index": world.rank})
        with joined_trainer_group(replace(context, names=names), spec) as (parallel, _):
            context.presence.enter("train step", deadline_s=DEADLINE_S)
            waits: list[float] = []
            with RankWaits(waits.append):
                time.sleep(SETUP_S + 1.0 if world.rank == 1 else 0.0)
                assert parallel.sum_over_ranks({"ranks": 1.0}) == {"ranks": 2.0}
            assert (sum(waits) > 1.0) is (world.rank == 0), "the other rank waits for the slow one"


def test_a_gang_of_one_needs_nobody(tmp_path: Path) -> None:
    with context_of(*trial_of(tmp_path), "model_worker") as context:
        with joined_trainer_group(context, context.specification(ModelWorkerSpec)) as (parallel, rendezvous):
            assert (parallel.rank, parallel.mesh.dims.world_size, parallel.group) == (0, 1, None)
            assert rendezvous is None
