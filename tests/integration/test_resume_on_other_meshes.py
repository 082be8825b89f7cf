"""A trial of four roles goes on from a commit on other meshes with exactly what that holds.

Each attempt has a plan of its own for the same directory, as `rl-submit --resume` makes it for another allocation.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.experiments.exit_codes import WorkerExit
from corral.workers.algorithms.ppo_critic import VALUE_NORM_DECAY
from tests.integration.four_roles import BATCH_SIZE, NUM_ROWS, Group, make_batches
from tests.integration.trainer_half import TrainerTrial
from tests.workers.backends.files.stored_states import whole_state

NUM_STEPS = NUM_ROWS // BATCH_SIZE
TWO, ONE = "fsdp:d2", "fsdp:d1"
SPLIT = "actor,ref=fsdp:c2,critic,reward=fsdp:t2@1"
FIRST_KL_COEFFICIENT = 0.1  # of the experiment
ROLES = ("actor", "critic", "ref")


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(TWO, ONE, marks=pytest.mark.slow), (ONE, SPLIT)], ids=["2 to 1", "1 to 2"]
)
def test_what_a_commit_holds_is_restored_exactly(before: str, after: str, four_roles: Path) -> None:
    batches = make_batches(NUM_STEPS)
    settings = ("ref.dtype=bfloat16", "actor.dtype=bfloat16")  # weights of a commit are rounded, its state must not be
    trial = TrainerTrial(four_roles, f"from {before}")
    assert trial.run(batches, before, *settings, stop_after=2) == WorkerExit.DONE
    # An attempt that trains nothing still commits, because what is left of the prompts is given up.
    given_up = [[Group(uid=group.uid, dropped_because="test") for group in batch] for batch in batches[2:]]
    rest = [*batches[:2], [group for batch in given_up for group in batch]]
    assert trial.run(rest, after, *settings) == WorkerExit.DONE
    saved, restored = trial.commits()[-2:]
    assert (saved.epoch, saved.step, restored.epoch, restored.step) == (1, 2, 2, 2)
    states = [trial.directory.inside(commit.directory) / "state" for commit in (saved, restored)]
    for role in ROLES:
        (tensors, numbers), (same_tensors, same_numbers) = (read_state(state / role) for state in states)
        assert numbers == same_numbers
        assert tensors.keys() == same_tensors.keys()
        assert all(torch.equal(tensor, same_tensors[name]) for name, tensor in tensors.items()), role
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    of_actor, of_critic = (read_state(states[0] / role)[1]["extra"] for role in ("actor", "critic"))
    assert of_actor["ppo_actor/kl_coefficient"] == of_critic["ppo_critic/kl_coefficient"] != FIRST_KL_COEFFICIENT
    assert of_critic["ppo_critic/weight"] == pytest.approx(1 - VALUE_NORM_DECAY**2)
    (trained, _), (trained_by_then, dropped) = (trial.consumed(commit) for commit in (saved, restored))
    assert trained == trained_by_then == {group.uid for batch in batches[:2] for group in batch}
    assert len(dropped) == NUM_ROWS - 2 * BATCH_SIZE


def read_state(directory: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
    """What training resumes from: whole tensors, put together from the pieces of all ranks, and the other numbers."""
    header = json.loads((directory / "train_state.json").read_text())
    return whole_state(directory), {name: value for name, value in header.items() if name != "num_ranks"}
