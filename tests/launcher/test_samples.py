"""What the trainer keeps of its answers, as rl-samples finds and shows it."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.errors import ConfigError
from corral.experiments.prompts.tokens import load_tokenizer
from corral.experiments.trial.samples import files_by_step
from corral.launcher.samples import (
    KeptAnswers,
    as_diff,
    as_table,
    as_whole,
    by_prompt,
    dropped_table,
    gaps_of,
    name_of,
    prompts_table,
)
from corral.scheduling.keys import remarks_key
from corral.workers.algorithms.advantage import advantage_named
from corral.workers.algorithms.ppo_batch import prepare_actor_sample
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.model.kept_samples import KeptSamples
from tests.chat_models import write_chat_tokenizer
from tests.workers.backends.training_helpers import make_sample


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_chat_tokenizer(folder, "qwen")
    return folder


def learned(*, num_prompts: int, seed: int = 0, version: int = 3) -> SequenceSample:
    sample = make_sample([[6, 9]] * num_prompts, seed=seed, version=version)
    config = PPOConfig(group_size=2)
    return prepare_actor_sample(
        config, sample, estimator=advantage_named(config.advantage), kl_coefficient=0.0, context=ParallelContext()
    )


def keep(
    folder: Path,
    tokenizer: Path,
    samples: dict[int, SequenceSample],
    *,
    epoch: int = 1,
    most: int | None = 8,
    max_mb: int = 512,
) -> None:
    kept = KeptSamples(folder, prompts_per_step=most, tokenizer=tokenizer, rank=0, num_ranks=1, max_mb=max_mb)
    kept.begin(epoch)
    with kept:
        for version, sample in samples.items():
            kept.offer(sample, version=version)
            while kept.is_writing:
                time.sleep(0.001)


def test_what_is_kept_is_what_was_trained_on_token_by_token(tmp_path: Path, tokenizer: Path) -> None:
    sample = learned(num_prompts=3).with_key(remarks_key(8), np.frombuffer(b"fine\0\0\0\0" * 6, np.uint8))
    keep(tmp_path, tokenizer, {3: sample}, most=None)
    rows = KeptAnswers(tmp_path).read([4])
    assert [(row["uid"], row["sequence"]) for row in rows] == [(f"0:{at}", n) for at in range(3) for n in range(2)]
    one = sample.unpack()[1]
    start, tokens = one.answer_lengths("input_ids")[0], one.answer_lengths("input_ids")[1]
    row = rows[3]
    assert row["ids"] == one.data["input_ids"][start : start + tokens].tolist()
    assert row["made"] == (~one.data["prompt_mask"][start : start + tokens]).tolist()
    for name, key in (("logprobs", "old_logprobs"), ("trainer_logprobs", "proximal_logprobs"), ("advantages",) * 2):
        assert row[name] == pytest.approx([0.0, *one.data[key][start - 1 : start + tokens - 2]])
    made = np.array(row["made"])
    assert row["length"] == made.sum() and row["advantage"] == pytest.approx(np.array(row["advantages"])[made].mean())
    assert row["gap"] == pytest.approx(np.abs(np.array(row["trainer_logprobs"]) - row["logprobs"])[made].mean())
    assert row["staleness"] == 3 - min(np.array(row["versions"])[made])
    text = load_tokenizer(tokenizer).decode(row["ids"], skip_special_tokens=False)
    assert row["prompt"] + row["said"] == text and row["remarks"] == "fine"


def test_a_demonstration_has_no_gap_and_no_age(tmp_path: Path, tokenizer: Path) -> None:
    sample = learned(num_prompts=1)
    first = np.arange(sample.total_length("versions")) < sample.answer_lengths("versions")[0]
    sample = sample.with_key("versions", np.where(first, -1, sample.data["versions"]).astype(np.int32))
    keep(tmp_path, tokenizer, {3: sample}, most=None)
    shown, made = KeptAnswers(tmp_path).read([4])
    assert (shown["gap"], shown["staleness"]) == (None, 0) and set(gaps_of(shown) or []) == {0.0}
    assert made["gap"] > 0.0 and any(gaps_of(made) or [])


def test_some_prompts_of_a_step_stand_for_all_and_the_oldest_steps_make_room(tmp_path: Path, tokenizer: Path) -> None:
    keep(tmp_path, tokenizer, {step: learned(num_prompts=9) for step in range(3)}, most=3)
    kept = KeptAnswers(tmp_path)
    assert kept.steps("all") == [1, 2, 3] and kept.steps("latest") == [3] and kept.steps("2:") == [2, 3]
    assert {row["uid"] for row in kept.read([1])} == {"0:0", "0:4", "0:8"}
    big = dict.fromkeys(range(3, 9), learned(num_prompts=1500))
    keep(tmp_path, tokenizer, big, most=None, max_mb=1)
    files = [path for of_step in files_by_step(tmp_path).values() for path in of_step]
    assert sum(path.stat().st_size for path in files) <= 1 << 20
    assert KeptAnswers(tmp_path).steps("latest") == [9] and 1 not in KeptAnswers(tmp_path).steps("all")


def test_a_step_that_was_trained_again_is_shown_as_it_counts(tmp_path: Path, tokenizer: Path) -> None:
    keep(tmp_path, tokenizer, {3: learned(num_prompts=1, seed=1)}, epoch=1)
    keep(tmp_path, tokenizer, {3: learned(num_prompts=1, seed=2)}, epoch=2)
    (row, _) = KeptAnswers(tmp_path).read([4])
    assert row["ids"] == learned(num_prompts=1, seed=2).data["input_ids"][:6].tolist()


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    keep(tmp_path / "samples", tokenizer, {step: learned(num_prompts=1) for step in range(4)})
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert said == [f"samples of step {step} are not kept for reading" for step in range(1, 5)], "it is tried each time"


def test_answers_are_found_by_what_is_so_of_them(tmp_path: Path, tokenizer: Path) -> None:
    keep(tmp_path, tokenizer, {step: learned(num_prompts=4, seed=step) for step in range(3)})
    kept = KeptAnswers(tmp_path)
    rows = kept.read(kept.steps("all"), where="reward == 1 and row == '2' and length > 4", sort="-advantage", most=2)
    assert 0 < len(rows) <= 2 and all(row["reward"] == 1 and row["uid"] == "0:2" and row["length"] > 4 for row in rows)
    assert [row["advantage"] for row in rows] == sorted((row["advantage"] for row in rows), reverse=True)
    (one,) = kept.read(kept.steps("all"), named="0:2#1", most=1)
    assert name_of(one) == "0:2#1" and len(one["ids"]) == 9
    assert "ids" not in kept.read([1], is_whole=False)[0]
    for arguments, message in (({"where": "rewrd > 1"}, "no 'rewrd'"), ({"sort": "age"}, "no 'age'")):
        with pytest.raises(ConfigError, match=message):
            kept.read([1], **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there are 3 steps from 1 to 3"):
        kept.steps("40")
    with pytest.raises(ConfigError, match="kept no answers"):
        KeptAnswers(tmp_path / "elsewhere")


def test_prompts_that_are_never_solved_come_first_and_answers_to_one_are_compared(
    tmp_path: Path, tokenizer: Path
) -> None:
    keep(tmp_path, tokenizer, {step: learned(num_prompts=4, seed=step) for step in range(3)})
    kept = KeptAnswers(tmp_path)
    rows = kept.read(kept.steps("all"), is_whole=False)
    lines = by_prompt(rows)
    for line in lines:
        rewards = [row["reward"] for row in rows if row["row"] == line["row"]]
        assert (line["answers"], line["reward"], line["best"]) == (6, sum(rewards) / 6, max(rewards))
    assert [line["reward"] for line in lines] == sorted(line["reward"] for line in lines) and len(lines) == 4
    of_one = kept.read(kept.steps("all"), row="2", is_whole=False)
    assert [(row["step"], name_of(row)) for row in of_one] == [(step, "0:2#0") for step in (1, 2, 3)]
    said = [{**row, "said": text} for row, text in zip(of_one, ("it is 4", "it is 5 \x1b[31m", "no"), strict=True)]
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"), force_terminal=True)
    console.print(as_diff(said), prompts_table(lines), dropped_table({"0:7": "reward_error: late"}))
    styled = console.export_text(styles=True, clear=False)
    assert "\x1b[9;31m4" in styled and "\x1b[32m5" in styled and "\x1b[31m\x1b" not in styled
    assert "reward_error: late" in console.export_text()


def test_turns_of_an_episode_begin_where_it_is_said_and_remarks_stand_above(tmp_path: Path, tokenizer: Path) -> None:
    row: dict[str, Any] = {
        **{"uid": "0:a", "sequence": 0, "step": 4, "reward": 1.0, "advantage": 0.5, "length": 3, "staleness": 0},
        **{"is_cut": False, "ids": [5, 6, 7, 8, 9, 10], "made": [False, True, True, False, False, True]},
        **{"logprobs": [0.0] * 6, "trainer_logprobs": None, "advantages": [0.0] * 6},
        "remarks": "good: \x1b[31mfine\nnoted: calls 2",
    }
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"), force_terminal=False)
    console.print(as_whole(row, load_tokenizer(tokenizer), "logprob"))
    shown = console.export_text()
    assert re.findall(r"── (.+) ──", shown) == [
        "1 tokens given", "2 tokens made", "2 tokens given", "1 tokens made",
    ]  # fmt: skip
    assert "noted: calls 2\n" in shown and "good: " in shown and "\x1b" not in shown
    console.print(as_whole({**row, "made": [False] * 3 + [True] * 3, "remarks": ""}, load_tokenizer(tokenizer), "gap"))
    assert "──" not in console.export_text()


def test_nothing_that_a_model_wrote_reaches_the_terminal_as_more_than_text(tmp_path: Path, tokenizer: Path) -> None:
    keep(tmp_path, tokenizer, {3: learned(num_prompts=1)})
    row = KeptAnswers(tmp_path).read([4])[0] | {"said": "\x1b]0;title\x07\x1b[31mred\nmore [bold]", "uid": "0:\x1b[2J"}
    console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"), force_terminal=False)
    console.print(as_table([row]))
    console.print(as_whole(row, load_tokenizer(tokenizer), "gap"))
    shown = console.export_text()
    assert "\x1b" not in shown and "\x07" not in shown and "red⏎more [bold]" in shown
    assert name_of(row) not in shown and "reward" in shown
    assert json.dumps(row)
