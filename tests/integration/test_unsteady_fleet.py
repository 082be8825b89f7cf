"""Three servers and two rollout workers that are killed and frozen all the time, and nothing is lost, doubled or stale.

    act (one at a time, 34 of them)     SIGKILL         the supervisor starts it again
                                        SIGSTOP         until a train step has run without it, or because of it none did
                                        SIGSTOP         until the supervisor takes it for dead

What is proven is read from the trial's files after its end: the recorded trajectories and the ledger.
"""

import itertools
from collections.abc import Callable

import pytest

from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_unsteady_players import freeze_for_a_while, freeze_for_good, kill
from tests.integration.trial_helpers import Trial

pytestmark = pytest.mark.slow

VICTIMS = (
    "generation_server/0",
    "rollout_worker/0",
    "generation_server/1",
    "gserver_manager/0",
    "rollout_worker/1",
    "generation_server/2",
)
NUM_ACTS = 34  # a hundred over three trials


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("eta", "policies"),
    [(0, {"spare_answers": 1}), (1, {}), (1, {"reorder_window": 1}), (4, {"reorder_window": 6, "spare_answers": 1})],
)
def test_no_prompt_is_lost_and_no_token_too_old_however_unsteady_the_fleet_is(
    start_trial: Callable[..., Trial], eta: int, policies: dict[str, int]
) -> None:
    trial = start_trial(
        num_rows=200,
        num_passes=4,
        pause_s=0.05,
        overrides={
            "allocation": "hf:d3+fsdp:d1",
            "groups.rollout_worker.count": 2,
            "train_batch_size": 6,
            "rollout.max_head_offpolicyness": eta,
            **{f"rollout.{name}": value for name, value in policies.items()},
            "rollout.sampling.max_new_tokens": 24,
            "control.commit_every": "4 steps",
            "supervision.max_restarts": 100,
            "supervision.healthy_after_s": 0.01,
            "supervision.silence_timeout_s": 8,
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_steps(1)
    acts = itertools.cycle((kill, freeze_for_a_while, kill, freeze_for_good, kill))  # 5 and 6 have no divisor
    for victim, act in itertools.islice(zip(itertools.cycle(VICTIMS), acts, strict=False), NUM_ACTS):
        act(trial, victim)
        trial.wait_for_steps(1)
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    oldest = check_no_token_was_too_old(trial, eta=eta)
    assert (oldest > 0) is (eta > 0)
