"""Numbers that stay not finite in one of several roles end a trial with its reason; its last commit stays as it is."""

from dataclasses import replace
from pathlib import Path

import pytest

from corral.experiments.exit_codes import WorkerExit
from corral.experiments.loading import validation
from corral.workers.checkpoint.checkpoint import verify_checkpoint
from corral.workers.master.step import MAX_NONFINITE_STEPS
from tests.integration.four_roles import POISON, Group, blind_to_poison, make_batches, write_experiment
from tests.integration.ppo_loop import PPOLoop, largest_difference
from tests.integration.trainer_half import TrainerTrial, load_four_roles

DISJOINT = "actor,ref=fsdp:d1,critic,reward=fsdp:d1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment and its models."""
    write_experiment(tmp_path)
    return tmp_path


def test_rewards_that_stay_not_finite_train_no_role_and_end_the_trial(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blind_to_poison(folder / "reward")
    good, bad = make_batches(2)
    trial = TrainerTrial(folder, "rewards")
    assert trial.run([good, [poisoned(group) for group in bad]], DISJOINT) == WorkerExit.NOT_FINITE == 77
    check_only_the_first_step_counts(trial, good)
    # As often as allowed, then from the commit on once more; each time both roles skipped, so that no state was torn.
    causes = [event["cause"] for event in trial.events("step_not_finite")]
    assert len(causes) == 2 * MAX_NONFINITE_STEPS
    assert not any("learned nothing" in cause for cause in causes)
    assert "master_worker/0 gives up: train step 2 had a loss or gradient that is not finite" in caplog.text
    loop = PPOLoop(load_four_roles(folder))
    loop.step(good)
    for role in ("actor", "critic", "ref"):
        assert largest_difference(loop.weights(role), trial.weights(role)) < 1e-5, role


def test_a_role_that_alone_learned_nothing_takes_training_back_at_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_LARGEST", 10**31)  # a user may write no number that overflows float32
    good, bad = make_batches(2)
    # Their squares overflow in the critic's loss; the actor's advantages are normalised, and stay finite.
    huge = [rewarded(group, 1e25) for group in bad]
    settings = ("reward_model=null", "critic.value_norm=none")
    trial = TrainerTrial(folder, "torn")
    assert trial.run([good, huge], DISJOINT.replace(",reward", ""), *settings) == WorkerExit.NOT_FINITE
    check_only_the_first_step_counts(trial, good)
    causes = [event["cause"] for event in trial.events("step_not_finite")]
    assert len(causes) == 2  # once, and once more from the commit on
    assert all("(critic_train learned nothing, the others did), number 1 in a row" in cause for cause in causes)
    assert [event["epoch"] for event in trial.events("epoch_lost")] == [1, 2]
    assert "master_worker/0 gives up: train step 2" in caplog.text


def check_only_the_first_step_counts(trial: TrainerTrial, batch: list[Group]) -> None:
    """Its commit is whole and the only one, and no other sample was trained on or given up."""
    (commit,) = trial.commits()
    assert (commit.epoch, commit.step) == (1, 1)
    verify_checkpoint(trial.directory, commit)
    assert trial.consumed(commit) == ({group.uid for group in batch}, set())
    assert [line["step"] for line in trial.metrics()] == [1]
    assert {step: set(uids) for step, uids in trial.trained().items()} == {1: {group.uid for group in batch}}
    assert {event["step"] for event in trial.events("step_not_finite")} == {2}
    assert not trial.directory.exports_path.exists()


def poisoned(group: Group) -> Group:
    """The same, with a last token that some models cannot bear."""
    return replace(group, answers=[replace(answer, ids=[*answer.ids[:-1], POISON]) for answer in group.answers])


def rewarded(group: Group, reward: float) -> Group:
    """The same, each answer with this reward."""
    return replace(group, answers=[replace(answer, reward=reward) for answer in group.answers])
