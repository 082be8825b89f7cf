"""A loss that is no number any more: what was finite stays, and the trial says what is wrong."""

import json
from collections.abc import Callable

import pytest

from tests.integration.evidence import History
from tests.integration.trial_helpers import Trial

NUM_ROWS = 40


@pytest.mark.slow
def test_a_loss_that_stays_not_finite_fails_the_trial_and_consumes_nothing(start_trial: Callable[..., Trial]) -> None:
    trial = start_trial(
        "dpo",
        num_rows=NUM_ROWS,
        overrides={
            "dpo.loss": "broken_losses:not_a_number_later",
            "evaluation.every": "1000 steps",
        },
    )
    trial.wait_for_end("FAILED")
    (ended,) = trial.ends()
    assert "train step 2 had a loss or gradient that is not finite" in ended["cause"]
    assert len(trial.starts("master_worker/0")) == 1  # another start would change nothing

    history = History.of(trial)
    assert [entry["kind"] for entry in history.entries.values()] == ["claim", "commit", "claim"]
    (commit,) = history.lineage()
    delta = json.loads((trial.directory.path / commit["ledger_file"]).read_bytes())
    assert {step: len(uids) for step, uids in delta["trained"].items()} == {"1": 8} and delta["dropped"] == {}
    assert trial.train_steps() == [1]
    assert [event["step"] for event in trial.events("step_not_finite")] == [2] * 6
    assert [path.name for path in trial.directory.weights_path.iterdir()] == ["v00000001-e1"]
    assert not trial.directory.exports_path.exists()
    assert "gives up: train step 2" in trial.logs("--errors")
