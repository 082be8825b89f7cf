"""The memory plan beside what real engines allocate at real sizes, on a device that counts and computes nothing."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 800.0
NUMBERS = range(20)
"""Of the cases, which are not imported before a test runs: they bring all engines."""
PLAIN = 0
"""Number of the case with the tightest plan."""

pytestmark = pytest.mark.gpu


def see(numbers: Sequence[int], directory: Path, *, has_mask: bool = False) -> list[float]:
    """What is planned over what was allocated, of cases in a process of its own, which has no way back.

    Args:
        has_mask: whether they follow once more, with a mask made.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.pretended_gpu.installed", "tests.workers.backends.imports_of_a_rank"])
    process = context.Process(target=_see, args=(numbers, directory, has_mask))
    process.start()
    process.join(DEADLINE_S)
    process.kill()
    assert process.exitcode == 0
    ratios: list[float] = json.loads((directory / "seen.json").read_text())
    return ratios


def _see(numbers: Sequence[int], directory: Path, has_mask: bool) -> None:
    from tests.pretended_gpu import ghost

    ghost.become_ghost()
    cases = [ghost.CASES[number] for number in numbers]
    seen = [one for _, one in ghost.rows(cases, directory=directory)]
    if has_mask:
        _have_a_mask_made()
        seen += [one for _, one in ghost.rows(cases, directory=directory)]
    (directory / "seen.json").write_text(json.dumps([one.plan / one.peak for one in seen]))


def _have_a_mask_made() -> None:
    import torch

    from corral.workers.backends.fsdp.engine import FSDPEngine

    own = FSDPEngine._own_scores

    def with_mask(self: Any, micro_batch: Any) -> Any:
        width = len(micro_batch.input_ids)
        self.mask = torch.zeros(2, width, width, device="cuda")  # for each head of keys
        return own(self, micro_batch)

    FSDPEngine._own_scores = with_mask  # type: ignore[method-assign]


def test_a_mask_of_all_pairs_that_the_plan_forgets_is_found(tmp_path: Path) -> None:
    without, with_mask = see([PLAIN], tmp_path, has_mask=True)
    assert with_mask < 1.0 <= without <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_plan_is_never_below_what_an_engine_takes_and_at_most_a_tenth_above(number: int, tmp_path: Path) -> None:
    from tests.pretended_gpu.ghost import CASES, TOLERANCE

    assert len(CASES) == len(NUMBERS)
    [ratio] = see([number], tmp_path)
    assert 1.0 <= ratio <= TOLERANCE, f"{CASES[number]}: plan / ghost {ratio:.3f}"
