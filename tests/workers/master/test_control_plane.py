"""What the master sends and hears for a step grows with the batch, not with the batch times the ranks.

The benchmark's own master and ranks: real requests over real sockets, and no computing.
"""

from pathlib import Path

import pytest

from benchmarks.control_plane import Cost, Load, measure
from tests.experiments.broken_yaml import write_inputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    return tmp_path


def cost_of(folder: Path, *, ranks: int, samples: int) -> Cost:
    return measure(Load(ranks, samples, answers=2), folder, num_steps=1)


def test_the_same_batch_on_more_ranks_costs_a_few_hundred_bytes_a_rank(folder: Path) -> None:
    few, many = cost_of(folder, ranks=2, samples=512), cost_of(folder, ranks=16, samples=512)
    for on_few, on_many in ((few.sent_bytes, many.sent_bytes), (few.received_bytes, many.received_bytes)):
        assert 0 < (on_many - on_few) / 14 < 4096  # a step has eight messages a rank; a uid twice would be 7 KB a rank
        assert on_many < 2 * on_few
    assert many.sent_bytes < 512 * 200  # each sample is named in each call, and cleared, once


def test_a_batch_that_grows_grows_the_bytes_alike(folder: Path) -> None:
    small, large = cost_of(folder, ranks=4, samples=128), cost_of(folder, ranks=4, samples=512)
    assert 2 < large.sent_bytes / small.sent_bytes <= 4
    assert 2 < large.received_bytes / small.received_bytes <= 4
