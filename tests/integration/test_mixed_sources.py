"""Two sources in their shares, over kill -9 of the trainer: in the order of the seed, no prompt twice, none lost.

Each of them has a teacher of its own, who is learned from beside the rewards.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet

from corral.workers.data.arithmetic import write_model
from tests.integration.evidence import check_nothing_is_left
from tests.integration.trial_helpers import Material, Trial, read_lines, write_rows


def test_shares_and_order_outlive_the_trainer(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    write_rows(lines, 16)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:8]), tmp_path / "rows.parquet")
    sources = f"{{many: {{path: {lines}, weight: 3}}, few: {{path: {tmp_path / 'rows.parquet'}, weight: 1}}}}"
    write_model(tmp_path / "teacher", seed=2, hidden_size=32, num_layers=2)
    teachers = f"{{many: {{path: {material.model}}}, few: {{path: {tmp_path / 'teacher'}}}}}"
    trial = start_trial(
        num_rows=24,
        num_passes=2,
        pause_s=0.1,
        overrides={
            "dataset.path": "null",
            "dataset.sources": sources,
            "evaluation.every_steps": 1000,
            "teachers": teachers,
            "ppo.distillation.coef": 0.1,
            "ppo.distillation.top_k": 5,
        },
    )
    trial.wait_for_steps(2)
    trial.kill("master_worker/0")
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    command = [sys.executable, "-m", "corral.workers.master.audit", str(trial.directory.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("48 prompts trained, 0 dropped") and said.endswith("skipped 0, repeated 0\n"), said
    uids = [line["uid"] for line in read_lines(trial.directory.trajectories_path)]
    assert Counter(uid.partition(":")[2].partition("/")[0] for uid in uids) == {"many": 36, "few": 12}
    named = {name for line in trial.metrics() for name in line if name.startswith("reward/source/")}
    assert named == {"reward/source/many", "reward/source/few"}
    divergences = [line["ppo/teacher_kl"] for line in trial.metrics() if "ppo/loss" in line]
    assert len(divergences) == 6 and all(0.0 < divergence < 10.0 for divergence in divergences)
