"""A trial of four roles goes on from a commit on other meshes as if it had never stopped, or been killed in a save.

Each attempt has a plan of its own for the same directory, as `rl-submit --resume` makes it for another allocation.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.experiments.exit_codes import WorkerExit
from corral.workers.algorithms.ppo_critic import VALUE_NORM_DECAY
from corral.workers.checkpoint.checkpoint import verify_checkpoint
from tests.integration.four_roles import BATCH_SIZE, NUM_ROWS, Group, make_batches
from tests.integration.trainer_half import TrainerTrial
from tests.workers.backends.files.stored_states import whole_state

NUM_STEPS = NUM_ROWS // BATCH_SIZE
TWO, ONE = "fsdp:d2", "fsdp:d1"
SPLIT = "actor,ref=fsdp:c2,critic,reward=fsdp:t2@1"
FIRST_KL_COEFFICIENT = 0.1  # of the experiment
ROLES = ("actor", "critic", "ref")


@pytest.mark.slow  # states move between all layouts in tests/workers/backends, and a whole commit below
def test_losses_go_on_as_if_nothing_had_happened(four_roles: Path) -> None:
    batches = make_batches(NUM_STEPS)
    uninterrupted, resumed = TrainerTrial(four_roles, "uninterrupted"), TrainerTrial(four_roles, "resumed")
    assert uninterrupted.run(batches, TWO) == WorkerExit.DONE
    # Step 3 is trained and published while a rank's disk holds up what step 2 has copied, until kill -9.
    no_restart = "supervision.max_restarts=0"
    assert resumed.run(batches, TWO, no_restart, killed_in_save_of=2) == WorkerExit.CANNOT_CONTINUE
    half = check_what_a_kill_in_a_save_leaves(resumed, batches)
    assert resumed.run(batches, ONE, stop_after=4) == WorkerExit.DONE
    assert not half.exists()
    assert resumed.run(batches, SPLIT) == WorkerExit.DONE
    assert [(commit.epoch, commit.step) for commit in resumed.commits()] == [
        (1, 1),
        *((2, step) for step in (2, 3, 4)),
        *((3, step) for step in (5, 6)),
    ]
    expected, found = (
        [(line["ppo/loss"], line["critic/loss"], line["ppo/kl_coef"]) for line in trial.metrics()]
        for trial in (uninterrupted, resumed)
    )
    assert len(found) == NUM_STEPS
    assert found == [pytest.approx(each, abs=1e-5) for each in expected]
    # Every sample was delivered to every attempt, and trained on by one.
    assert {step: set(uids) for step, uids in resumed.trained().items()} == {
        step: {group.uid for group in batch} for step, batch in enumerate(batches, 1)
    }


def check_what_a_kill_in_a_save_leaves(trial: TrainerTrial, batches: Sequence[Sequence[Group]]) -> Path:
    """The commit before is whole and the only one; the directory of the other, which nothing names, is given back."""
    assert (trial.directory.weights_path / "v00000003-e1" / "manifest.json").exists()
    (commit,) = trial.commits()
    assert commit.step == 1
    verify_checkpoint(trial.directory, commit)
    assert trial.consumed(commit) == ({group.uid for group in batches[0]}, set())
    (half,) = trial.directory.checkpoints_path.glob("step-00000002-e1-*")
    assert not (half / "manifest.json").exists()
    of_the_other_rank = half / "state" / "actor" / "train_state-00001-of-00002.safetensors"
    assert of_the_other_rank.stat().st_size > 1000  # it waited for nobody
    return half


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
