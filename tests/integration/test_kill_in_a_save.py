"""kill -9 of a rank in the middle of what it writes beside training leaves the commit before, and nothing is lost."""

from pathlib import Path

from corral.experiments.exit_codes import WorkerExit
from corral.workers.checkpoint.checkpoint import committed_ledger, verify_checkpoint
from tests.integration.four_roles import make_batches
from tests.integration.ppo_loop import PPOLoop, largest_difference
from tests.integration.trainer_half import TrainerTrial, load_four_roles

NUM_STEPS = 3
SETTINGS = (f"control.max_steps={NUM_STEPS}", "supervision.max_restarts=0")


def test_a_rank_that_dies_while_it_saves_leaves_the_commit_before_and_training_goes_on_exactly(
    four_roles: Path,
) -> None:
    batches = make_batches(NUM_STEPS)
    trial = TrainerTrial(four_roles, "killed")
    # Step 3 is trained and published while the disk holds up what step 2 has copied.
    assert trial.run(batches, "fsdp:d2", *SETTINGS, killed_in_save_of=2) == WorkerExit.CANNOT_CONTINUE
    assert [line["step"] for line in trial.metrics()][:2] == [1, 2]
    assert (trial.directory.weights_path / "v00000003-e1" / "manifest.json").exists()
    (commit,) = trial.commits()
    assert commit.step == 1
    verify_checkpoint(trial.directory, commit)
    assert committed_ledger(trial.directory, commit).trained == {group.uid: 1 for group in batches[0]}
    (half,) = trial.directory.checkpoints_path.glob("step-00000002-e1-*")
    assert not (half / "manifest.json").exists()
    whole_of_rank_1 = half / "state" / "actor" / "train_state-00001-of-00002.safetensors"
    assert whole_of_rank_1.stat().st_size > 1000  # it had nobody to wait for

    assert trial.run(batches, "fsdp:d2", *SETTINGS) == WorkerExit.DONE
    assert [commit.step for commit in trial.commits()] == list(range(1, NUM_STEPS + 1))
    assert not half.exists()
    assert {step: set(uids) for step, uids in trial.trained().items()} == {
        step: {group.uid for group in batch} for step, batch in enumerate(batches, 1)
    }
    loop = PPOLoop(load_four_roles(four_roles, *SETTINGS))
    for batch in batches:
        loop.step(batch)
    for role in ("actor", "critic"):
        assert largest_difference(loop.weights(role), trial.weights(role)) < 1e-5, role
