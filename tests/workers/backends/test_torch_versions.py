"""Other versions of torch than the one that is installed have what this repository uses; see tests/torch_names.py."""

from pathlib import Path

import torch
import torch.distributed as dist

from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.backends.torch_versions import new_group
from tests.torch_names import LISTS, mistakes, names_in_use, read_list
from tests.workers.backends.trainer_helpers import play


def test_every_supported_torch_has_the_names_and_keywords_in_use() -> None:
    used = names_in_use()
    assert len(used) > 200
    for version in ("2.11.0", "2.12.0", "2.13.0"):
        assert mistakes(read_list(LISTS / f"{version}.txt"), used) == [], version


def test_a_keyword_or_name_that_an_older_torch_lacks_is_found() -> None:
    known = read_list(LISTS / "2.11.0.txt")
    used = {"torch.distributed.new_group": {"sort_ranks", "timeout"}, "torch.distributed.all_gather_single": set[str]()}
    assert mistakes(known, used) == [
        "torch.distributed.all_gather_single does not exist",
        "torch.distributed.new_group has no keyword sort_ranks",
    ]


def play_orders(world: ParallelContext, directory: Path) -> None:
    for group in (new_group((2, 0, 1), timeout_s=60), new_group((2, 0, 1), timeout_s=60, takes_order=False)):
        assert dist.get_rank(group) == (2, 0, 1).index(world.rank)
        gathered = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(gathered, torch.tensor([float(world.rank)]), group=group)
        assert [int(rank) for rank in gathered] == [2, 0, 1]
        shared = torch.tensor([float(world.rank)])
        dist.broadcast(shared, src=2, group=group)
        assert shared.item() == 2
    (directory / f"rank-{world.rank}").touch()


def test_a_group_has_the_order_of_places_also_by_a_torch_that_sorts_ranks(tmp_path: Path) -> None:
    play(play_orders, tmp_path, world_size=3, directory=tmp_path)
    assert len(list(tmp_path.glob("rank-*"))) == 3
