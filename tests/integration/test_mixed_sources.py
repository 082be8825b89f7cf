"""Which prompt comes next, over kill -9 of trainer and manager: what would have come, no prompt twice, none lost.

Two sources in their shares, some rows filtered out, groups of equal rewards dropped; and then by a curriculum, whose
order is known from the start, or by a sampler of the user's own, whose order follows from rewards. In the first trial
each source has a teacher of its own, who is learned from beside the rewards, and a frozen model judges answers, on a
server of its own, which is lost, too.
"""

import asyncio
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from corral.experiments.plan import RunPlan
from corral.experiments.prompts.tokens import encode_answer, load_tokenizer
from corral.experiments.worker_specs import GserverManagerSpec
from corral.launcher.samples import KeptAnswers
from corral.workers.checkpoint.ledger import Ledger, numbers_of
from corral.workers.data.arithmetic import write_model
from corral.workers.data.prompts import PlannedPrompts, split_uid
from corral.workers.master.drawn_prompts import DrawnPrompts
from tests.integration.evidence import audited, check_generator_and_trainer_agreed, check_nothing_is_left
from tests.integration.paced_rewards import rewards_by_row
from tests.integration.trial_helpers import ROOT, Material, Trial, read_lines, write_rows

BATCH, GROUP, ROWS, SEED = 8, 4, 24, 1
PARTS = {
    "most": {"function": "paced_rewards:by_row", "weight": 0.75},
    "rest": {"function": "paced_rewards:by_row", "weight": 0.25},
    "short": {
        "function": "corral.workers.rewards:Length",
        "weight": 0.0,
        "settings": {"longest": 1, "unit": "characters"},
    },
}
"""Which are `by_row` together, as these are numbers that floats have."""
JUDGE: dict[str, Any] = {
    "function": "corral.workers.rewards:Judge",
    "settings": {
        "url": "trial",
        "prompt": "{problem[prompt]}{answer}",
        "verdict": "([0-9])",
        "sampling": {"max_tokens": 3},
    },
}
USERS_FILE = re.search(r"```python\n(# my_prompts\.py\n.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)


def saying(text: str, model: Path, directory: Path) -> Path:
    """A model that answers every prompt with this token, again and again."""
    shutil.copytree(model, directory)
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (token,) = encode_answer(load_tokenizer(model), text)
    with torch.no_grad():
        for layer in judge.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for embedding in (judge.get_input_embeddings(), judge.get_output_embeddings()):
            embedding.weight.fill_(1.0)
            embedding.weight[token] = 2.0
    judge.save_pretrained(directory)
    return directory


def begin(
    start_trial: Callable[..., Trial], folder: Path, *, passes: int, order: str = "", **settings: object
) -> Trial:
    """A trial of 24 of 28 rows, in order and one step after the other."""
    write_rows(folder / "lines.jsonl", 28)
    rows = [
        json.loads(line) | {"level": n % 5} for n, line in enumerate((folder / "lines.jsonl").read_text().splitlines())
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[20:]), folder / "rows.parquet")
    taken = f"where: level != 4 or len(prompt) > 99{order}"
    sources = (
        f"{{many: {{path: {folder / 'lines.jsonl'}, weight: 3, {taken}}}, "
        f"few: {{path: {folder / 'rows.parquet'}, weight: 1}}}}"
    )
    return start_trial(
        num_rows=ROWS,
        num_passes=passes,
        pause_s=0.1,
        overrides={
            "dataset.path": "null",
            "dataset.sources": sources,
            "evaluation.every": "1000 steps",
            "rollout.reward": json.dumps(PARTS),
            "rollout.drop_uniform_groups": "true",
            "rollout.max_head_offpolicyness": 0,
            "rollout.reorder_window": 1,
            **settings,
        },
    )


def outlive(trial: Trial, *victims: str, after_steps: int, kills_all: bool = False) -> list[str]:
    """Over the deaths of some, perhaps of all and a stop, to its end; the uids trained, in their order."""
    trial.wait_for_steps(after_steps)
    trial.kill("master_worker/0")
    trial.wait_for_steps(1)
    for victim in ("gserver_manager/0", *victims):
        trial.kill(victim)
    if kills_all:
        trial.wait_for_steps(1)
        for pid in trial.processes():  # workers, supervisor and Redis; who keeps them starts them again
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trial.wait_for_steps(1)
        assert "STOPPED" in trial.run("rl-stop")
        trial.run_resume()
    trial.full_speed()
    trial.wait_for_end()
    check_nothing_is_left(trial)
    return [line["uid"] for line in read_lines(trial.directory.trajectories_path)]


def prompts_of(trial: Trial) -> tuple[PlannedPrompts, dict[str, list[float]]]:
    """The prompts, and the rewards of each row's answers, whoever gives them."""
    plan = RunPlan.from_json(trial.directory.plan_path.read_bytes())
    prompts = PlannedPrompts.load(plan.all_of(GserverManagerSpec)[0].dataset)
    return prompts, {row: rewards_by_row(row.partition("/")[2], GROUP) for row in prompts.row_ids}


def test_shares_a_curriculum_and_a_judge_outlive_trainer_manager_and_the_judges_server(
    start_trial: Callable[..., Trial], material: Material, tmp_path: Path
) -> None:
    write_model(tmp_path / "teacher", seed=2, hidden_size=32, num_layers=2)
    taught: dict[str, object] = {
        "teachers": f"{{many: {{path: {material.model}}}, few: {{path: {tmp_path / 'teacher'}}}}}",
        "ppo.distillation.coef": 0.1,
        "ppo.distillation.top_k": 5,
        "allocation": "hf:d2+fsdp:d1",
        "rollout.judge.path": saying("7", material.model, tmp_path / "judge"),
        "rollout.reward": json.dumps(PARTS | {"good": JUDGE}),
    }
    trial = begin(start_trial, tmp_path, passes=2, order=", order: level", **taught)
    trained = outlive(trial, "generation_server/1", after_steps=2)
    check_generator_and_trainer_agreed(trial)  # whose answers the judge has not made
    lost, last = trial.events("task_ended", who="generation_server/1")
    assert (lost["code"], last["code"]) == (-9, 0)
    assert "own judge" in trial.run("rl-eval", "--local", exit_code=2)
    evaluated = [line["eval/reward/mean"] for line in trial.metrics() if "eval/reward/mean" in line]
    assert len(evaluated) >= 2 and min(evaluated) >= 7.0
    prompts, rewards = prompts_of(trial)
    planned = list(prompts.uids(seed=SEED, num_epochs=2))
    assert trained == [uid for uid in planned if len(set(rewards[split_uid(uid)[1]])) > 1]
    counts = f"{len(trained)} prompts trained, {48 - len(trained)} dropped"
    assert audited(trial) == f"{counts}, in the order of the seed: skipped 0, repeated 0\n"
    assert Counter(split_uid(uid)[1].partition("/")[0] for uid in planned) == {"many": 36, "few": 12}
    steps = [line for line in trial.metrics() if "rewards/mean" in line]
    for line in steps:
        most, rest, short = (line[f"reward/part/{name}"] for name in PARTS)
        assert line["reward/part/good"] == 7.0
        assert line["rewards/mean"] == pytest.approx(0.75 * most + 0.25 * rest + 7.0, abs=1e-5)
        assert short <= 0.0 <= line["reward/seconds"] <= line["reward/seconds/max"]
    assert steps and any(line["reward/part/short"] < 0.0 for line in steps)
    assert all(0.0 < line["ppo/teacher_kl"] < 10.0 for line in steps)
    answers = KeptAnswers(trial.directory.samples_path)
    for kept in answers.read(answers.steps("all"), is_whole=False):
        most, rest, short = (kept[f"part_{name}"] for name in PARTS)
        assert kept["reward"] == pytest.approx(0.75 * most + 0.25 * rest + 7.0, abs=1e-5) and short <= 0.0
    assert answers.read(answers.steps("all"), where="part_short < 0", sort="part_most", is_whole=False)
    named = {name for line in steps for name in line if "/source/" in name}
    of_drops = {name for name in named if name.startswith("data/dropped/filtered/source/")}
    assert of_drops and steps[-1]["data/dropped/filtered"] == sum(steps[-1].get(name, 0.0) for name in of_drops)
    kinds = ("reward", "response_length", "no_eos_fraction")
    assert named - of_drops == {f"{kind}/source/{name}" for kind in kinds for name in ("many", "few")}


@pytest.mark.slow
def test_a_sampler_draws_over_kills_and_a_resume_what_it_would_have_drawn(
    start_trial: Callable[..., Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert USERS_FILE is not None
    (tmp_path / "my_prompts.py").write_text(USERS_FILE[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings: dict[str, object] = {"dataset.sampler": "my_prompts:weigh", "control.commit_every": "2 steps"}
    trial = begin(start_trial, tmp_path, passes=5, **settings)
    trained = outlive(trial, after_steps=Random().randint(1, 4), kills_all=True)
    prompts, rewards = prompts_of(trial)
    assert trained == drawn_without_interruption(prompts, rewards, total=5 * ROWS)
    counts = f"{len(trained)} prompts trained, {5 * ROWS - len(trained)} dropped"
    assert audited(trial) == f"{counts}, as drawn: skipped 0, repeated 0\n"


def drawn_without_interruption(prompts: PlannedPrompts, rewards: dict[str, list[float]], *, total: int) -> list[str]:
    """What a trainer trains that is never interrupted, by the sampler in this process."""
    import my_prompts

    async def weigh(histories: Sequence[Sequence[float]]) -> list[float]:
        return [my_prompts.weigh(list(history)) for history in histories]

    ledger, trained = Ledger(numbers_of(prompts.row_ids)), list[str]()
    sources: dict[str, Any] = {name: one.weight for name, one in prompts.config.sources.items()}
    drawn = DrawnPrompts(prompts.row_ids, ledger, seed=SEED, batch_size=BATCH, eta=0, total=total, sources=sources)
    while ledger.consumed_count < total:
        batch: list[str] = []
        while len(batch) < min(BATCH, total - ledger.consumed_count):
            uid = next(uid for uid in drawn.open_uids() if uid not in batch)
            given = rewards[split_uid(uid)[1]]
            if len(set(given)) > 1:
                batch.append(uid)
            else:
                ledger.drop(uid, "filtered")
                drawn.drop(uid, sum(given) / len(given))
        ledger.train(1, batch)
        trained += batch
        means = {uid: sum(rewards[split_uid(uid)[1]]) / GROUP for uid in batch}
        asyncio.run(drawn.train(means, weigh))
    return trained
