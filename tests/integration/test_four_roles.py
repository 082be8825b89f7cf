"""PPO with actor, critic, reference and reward model, on any meshes, does what a loop over answers does."""

from pathlib import Path

import pytest

from corral.experiments.async_ppo import AsyncPPOExperiment
from corral.experiments.exit_codes import WorkerExit
from tests.integration.four_roles import make_batches
from tests.integration.ppo_loop import PPOLoop, largest_difference
from tests.integration.trainer_half import TrainerTrial, load_four_roles

NUM_STEPS = 4
TOLERANCE = 1e-5  # rounding makes up to 3e-6
ROLES = ("actor", "critic", "ref")


@pytest.mark.parametrize(
    ("allocation", "num_minibatches"),
    [
        pytest.param("fsdp:d1", 2, id="one rank"),
        pytest.param("actor=megatron:t2,ref=fsdp:d1@2,critic,reward=fsdp:d2@1", 1, id="both backends"),
        # Meshes that share all ranks, some, or none are in those above.
        pytest.param("fsdp:d2", 1, id="shared", marks=pytest.mark.slow),
        pytest.param("actor,ref=fsdp:d2,critic,reward=fsdp:d1@1", 1, id="overlapping", marks=pytest.mark.slow),
        pytest.param("actor,ref=fsdp:d1,critic,reward=fsdp:d2", 1, id="disjoint", marks=pytest.mark.slow),
        pytest.param(
            "actor=fsdp:d2,ref=fsdp:d1@2,critic,reward=fsdp:d2@1", 1, id="reference elsewhere", marks=pytest.mark.slow
        ),
        pytest.param(
            "actor=megatron:p2,critic=megatron:c2@1,ref,reward=fsdp:d1", 1, id="stages, rows", marks=pytest.mark.slow
        ),
        pytest.param("actor,ref=fsdp:d2,critic,reward=fsdp:d2@1", 1, id="2 and 2", marks=pytest.mark.slow),
        pytest.param("actor,ref=fsdp:d1,critic,reward=fsdp:d1@1", 1, id="1 and 1", marks=pytest.mark.slow),
        pytest.param("actor,ref=fsdp:d2,critic=fsdp:d1,reward=fsdp:d1", 1, id="three", marks=pytest.mark.slow),
        pytest.param("actor=fsdp:d1,critic=fsdp:d2@0,*=fsdp:d2@1", 1, id="1 within 2", marks=pytest.mark.slow),
    ],
)
def test_four_roles_train_as_a_loop_over_answers_does(allocation: str, num_minibatches: int, four_roles: Path) -> None:
    batches = make_batches(NUM_STEPS)
    settings = (f"ppo.n_minibatches={num_minibatches}", f"control.max_steps={NUM_STEPS}")
    trial = TrainerTrial(four_roles, allocation)
    assert trial.run(batches, allocation, *settings) == WorkerExit.DONE
    loop = PPOLoop(load_four_roles(four_roles, *settings))
    losses = [loop.step(batch) for batch in batches]
    found = trial.metrics()
    assert [(line["ppo/loss"], line["critic/loss"]) for line in found] == [
        pytest.approx(each, abs=1e-5) for each in losses
    ]
    assert all(all(line[name] > 0 for line in found) for name in ("ppo/capped_fraction", "ppo/clip_fraction"))
    assert {step: set(uids) for step, uids in trial.trained().items()} == {
        step: {group.uid for group in batch} for step, batch in enumerate(batches, 1)
    }
    for role in ROLES:
        assert largest_difference(loop.weights(role), trial.weights(role)) < TOLERANCE, role


@pytest.fixture(scope="module")
def usual(four_roles: Path) -> PPOLoop:
    """The loop after a run of the settings as they are."""
    return trained(load_four_roles(four_roles))


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "actor.optimizer.gradient_clipping=1e9",
        "actor.optimizer.weight_decay=0",
        "critic.optimizer.gradient_clipping=1e9",
        "critic.optimizer.weight_decay=0",
        "critic.value_eps_clip=0.2",
        "critic.value_norm=none",
        "ref.ema=0.1",
        "ppo.sample_reuse=1",
        "ppo.n_minibatches=2",
        "ppo.discount=1.0",
        "ppo.gae_lambda=1.0",
        "ppo.eps_clip=0.03",
        "ppo.c_clip=null",
        "ppo.is_ratio_clip=null",
        "ppo.kl.coef=0.2",
    ],
)
def test_every_setting_of_the_loop_decides_weights(setting: str, usual: PPOLoop, four_roles: Path) -> None:
    other = trained(load_four_roles(four_roles, setting))
    assert max(largest_difference(usual.weights(role), other.weights(role)) for role in ROLES) > 100 * TOLERANCE


def trained(experiment: AsyncPPOExperiment) -> PPOLoop:
    loop = PPOLoop(experiment)
    for batch in make_batches(NUM_STEPS):
        loop.step(batch)
    return loop
