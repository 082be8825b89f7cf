"""Groups by a model worker's own model: which random numbers make answers, and what is dropped, counted, evaluated."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from corral.experiments.config.data import HELD_OUT_ANSWERS, DatasetConfig, EvaluationConfig, EvaluationSampling
from corral.experiments.config.rollout import RewardConfig, SamplingConfig, reward_parts
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.worker_specs import GenerationSpec
from corral.scheduling.keys import merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.data.arithmetic import make_problems, write_model
from corral.workers.data.held_out import means_by_set
from corral.workers.engine.engine import load_model
from corral.workers.lifecycle.worker import PromptsFailError, UserCodeError
from corral.workers.model.data_store import DataStore
from corral.workers.model.generator import Generator
from corral.workers.model.models import Models
from corral.workers.requests.messages import Evaluate, Generate, HeldOutReply, Initialize, SampleMetadata
from corral.workers.user_code.children import HostError
from tests.workers.backends.training_helpers import save_tiny_model
from tests.workers.data.tiny_tokenizer import write_tokenizer
from tests.workers.model.test_models import PLACES, specification

MISBEHAVES = """
import math
import threading

def score(problem, answer):
    '''Raises for every fourth problem, hangs for every fourth, is not a number for every fourth.'''
    number = problem["number"]
    if number % 4 == 1:
        raise ValueError("no such problem")
    if number % 4 == 2:
        threading.Event().wait()
    return math.nan if number % 4 == 3 else 0.5 if number % 8 == 0 else 1.0
"""
PEEKS = """
from pathlib import Path

def score(problem, answer):
    return float(len(list(Path(problem["secrets"]).iterdir())))  # how many of a trial's secrets it sees
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_no_reward_of_a_model_worker_sees_the_secrets_of_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peeking.py").write_text(PEEKS)
    monkeypatch.syspath_prepend(tmp_path)
    save_tiny_model(tmp_path / "actor")
    save_tiny_model(tmp_path / "ref")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "key").write_text("k")
    rows = DatasetConfig(path=tmp_path / "rows.jsonl", max_prompt_tokens=16)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"id": "a", "prompt": "1+2=", "answer": "3", "secrets": str(secrets)})
    )
    actor = ModelName("actor")
    calls = [
        ModelFunctionCall(
            name="ask",
            model_name=actor,
            call_type=CallType.GENERATE,
            implementation="",
            n_seqs=1,
            output_keys=("rewards",),
        ),
        ModelFunctionCall(
            name="look", model_name=actor, call_type=CallType.EVALUATE, implementation=HELD_OUT_ANSWERS, n_seqs=1
        ),
    ]
    spec = specification(tmp_path).model_copy(
        update={
            "calls": calls,
            "tokenizer": write_tokenizer(tmp_path / "tokenizer"),
            "reward": RewardConfig(reward=reward_parts("peeking:score")),
            "dataset": dataset_spec(rows, kind="prompts"),
            "evaluation": EvaluationConfig(dataset=rows, sampling=EvaluationSampling(max_new_tokens=2)),
            "generation": GenerationSpec(
                sampling=SamplingConfig(max_new_tokens=2), group_size=1, max_running_requests=1
            ),
        }
    )
    store = DataStore(merge_keys(spec.declared_keys))
    with closing(Models(spec, store, PLACES, seed=0, secrets=[secrets])) as models:
        models.initialize(
            Initialize(weights={"actor": str(tmp_path / "actor")}, states={}, step=0), on_progress=lambda: None
        )
        models.generate(Generate(mfc="ask", uids=["0:a"], orders=[0], tries=[0], version="0.0"))
        evaluated = models.evaluate(Evaluate(mfc="look", uids=[]))
    assert store.gather(["0:a"], ("rewards",)).data["rewards"].tolist() == [0.0]
    assert isinstance(evaluated, HeldOutReply) and evaluated.sums[""]["reward"] == 0.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose tokenizer can spell arithmetic."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, seed=1, hidden_size=32, num_layers=1)
    return directory


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "misbehaving.py").write_text(MISBEHAVES)
    monkeypatch.syspath_prepend(tmp_path)
    return RewardConfig(reward=reward_parts("misbehaving:score"), reward_timeout_s=1.0, reward_retries=0)


def load(directory: Path) -> Any:
    return load_model(directory, dtype=torch.float32, device="cpu")[0]


@contextmanager
def generator_of(
    folder: Path,
    directory: Path,
    *,
    num_rows: int = 8,
    reward: RewardConfig | None = None,
    max_prompt_tokens: int = 16,
    evaluates: bool = True,
    **settings: Any,
) -> Iterator[tuple[Generator, DataStore]]:
    """Of prompts that are the held-out problems, too; with two answers each, where they are prompts."""
    rows = [{**row, "id": str(n), "number": n} for n, row in enumerate(make_problems(seed=1)[:num_rows])]
    rows += [] if evaluates else [{"id": "long", "prompt": "1+2+3+4+5=", "answer": "15"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(path=folder / "rows.jsonl", max_prompt_tokens=max_prompt_tokens)
    settings.setdefault("sampling", EvaluationSampling(max_new_tokens=8))
    spec = specification(folder).model_copy(
        update={
            "tokenizer": directory,
            "dataset": dataset_spec(dataset, kind="prompts"),
            "reward": reward or RewardConfig(),
            "evaluation": EvaluationConfig(dataset=dataset, **settings),
            "generation": GenerationSpec(
                sampling=SamplingConfig(max_new_tokens=8), group_size=2, max_running_requests=4
            ),
        }
    )
    store = DataStore()
    with closing(Generator(spec, store, seed=1, secrets=(), evaluates=evaluates)) as generator:
        yield generator, store


def evaluate(generator: Generator, model: Any, *, batch_size: int = 4) -> dict[str, float]:
    found = generator.evaluate(model, context=ParallelContext(), batch_size=batch_size)
    return means_by_set(found.sums)


def generate(generator: Generator, model: Any, *row_ids: object, step: int = 0, tries: int = 0) -> list[SampleMetadata]:
    uids, number = [f"0:{row_id}" for row_id in row_ids], len(row_ids)
    asked = Generate(
        mfc="ask", uids=uids, orders=list(range(number)), tries=[tries] * number, version=f"{1 + tries}.{step}"
    )
    return generator.generate(model, asked, context=ParallelContext())


def test_answers_follow_from_prompt_and_step_and_are_others_after_a_try_without_a_finite_loss(
    tmp_path: Path, directory: Path
) -> None:
    model = load(directory)
    with generator_of(tmp_path, directory) as (generator, store):

        def answers(*beside: object, step: int, tries: int = 0) -> list[int]:
            made = generate(generator, model, 0, *beside, step=step, tries=tries)
            assert [one.uid for one in made] == ["0:0", *(f"0:{row_id}" for row_id in beside)]
            return list(store.gather(["0:0"], ("input_ids",)).data["input_ids"].tolist())

        first = answers(step=2)
        assert answers(3, 4, step=2) == first, "whatever is answered beside it"
        assert answers(step=2, tries=1) != first
        assert answers(step=3) != first


def test_a_bad_row_is_dropped_and_what_is_made_beside_it_keeps_its_place(tmp_path: Path, directory: Path) -> None:
    with generator_of(tmp_path, directory, max_prompt_tokens=6, evaluates=False) as (generator, _):
        made = generate(generator, load(directory), 0, "long", 1)
    assert [(one.uid, len(one.num_tokens)) for one in made] == [("0:0", 2), ("0:long", 0), ("0:1", 2)]
    assert [one.order for one in made] == [0, 1, 2]
    assert made[1].dropped_because.startswith("bad_row: the prompt has ")


def test_answers_of_weights_that_are_not_finite_are_dropped_until_too_many_are(tmp_path: Path, directory: Path) -> None:
    model = load(directory)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with generator_of(tmp_path, directory, num_rows=20) as (generator, _):
        [made] = generate(generator, model, 0)
        assert made.dropped_because == "not_finite: the model's logits are not finite"
        with pytest.raises(PromptsFailError, match="16 prompts in a row failed, the last one with not_finite"):
            generate(generator, model, *range(1, 16))


@pytest.mark.parametrize(("step", "error"), [(0, UserCodeError), (3, PromptsFailError)])
def test_a_reward_that_fails_on_everything_ends_the_worker_as_it_ends_a_rollout_worker(
    step: int, error: type[Exception], tmp_path: Path, directory: Path, misbehaving: RewardConfig
) -> None:
    raising = range(1, 65, 4)
    with generator_of(tmp_path, directory, num_rows=66, reward=misbehaving) as (generator, _):
        [dropped] = generate(generator, load(directory), raising[0], step=step)
        assert dropped.dropped_because.startswith("reward_error: the reward function score failed 1 times, last: ")
        with pytest.raises(error, match="16 prompts in a row failed, .*; mend reward misbehaving:score"):
            generate(generator, load(directory), *raising[1:], step=step)


def test_a_reward_that_says_that_it_cannot_be_loaded_ends_the_trial_also_where_it_is_evaluated_first(
    tmp_path: Path, directory: Path
) -> None:
    model, missing = load(directory), RewardConfig(reward=reward_parts("no_such_module:score"))
    with generator_of(tmp_path, directory, reward=missing) as (generator, _):
        with pytest.raises(UserCodeError, match="no_such_module"):
            evaluate(generator, model)
        with pytest.raises(UserCodeError, match="no_such_module"):
            generate(generator, model, 0)
        with pytest.raises(HostError, match="no_such_module"):  # it has judged: the file system may be away
            generate(generator, model, 0, step=3)


def test_a_reward_that_fails_on_a_held_out_answer_is_counted_and_left_out(
    tmp_path: Path, directory: Path, misbehaving: RewardConfig
) -> None:
    with generator_of(tmp_path, directory, reward=misbehaving) as (generator, _):
        found = generator.evaluate(load(directory), context=ParallelContext(), batch_size=4)
    assert found.failures[""].startswith("reward_error: the reward function score failed 1 times, last: ")
    assert found.failures[""].endswith("ValueError: no such problem (misbehaving.py:9)")
    assert means_by_set(found.sums) == {
        "problems": 8.0,
        "unjudged": 6.0,
        "accuracy": 0.5,
        "reward/mean": 0.75,
        "response_length/mean": 8.0,
    }


def test_held_out_problems_are_answered_as_evaluation_says_and_alike_each_time(tmp_path: Path, directory: Path) -> None:
    sampled = {"sampling": EvaluationSampling(max_new_tokens=2, temperature=1.0), "answers_per_problem": 4}
    vote = {"vote": r"(\d)", "correct": 0.0}
    model = load(directory)
    with generator_of(tmp_path, directory, **sampled, **vote) as (generator, _):
        found = evaluate(generator, model)
        assert found == evaluate(generator, model, batch_size=64)
    assert {"pass@2", "pass@4", "majority"} <= found.keys()
    assert (found["problems"], found["pass@4"]) == (8.0, 1.0)


def test_every_declared_end_ends_a_held_out_answer(tmp_path: Path, directory: Path) -> None:
    several, model = tmp_path / "several", load(directory)
    shutil.copytree(directory, several)
    with generator_of(tmp_path, directory) as (generator, _):
        assert evaluate(generator, model)["response_length/mean"] == 8.0, "it ends no answer by itself"
    # Every digit is an end too, so that whatever the model says ends at once.
    config = json.loads((directory / "config.json").read_text())
    for name in ("config.json", "generation_config.json"):
        (several / name).write_text(json.dumps({**config, "eos_token_id": [config["eos_token_id"], *range(2, 14)]}))
    with generator_of(tmp_path, several) as (generator, _):
        assert evaluate(generator, model)["response_length/mean"] == 1.0


def test_a_held_out_prompt_that_is_too_long_is_refused(tmp_path: Path, directory: Path) -> None:
    said = r"prompt of .*rows.jsonl:1 has 6 tokens, more than max_prompt_tokens 5"
    with pytest.raises(ValueError, match=said), generator_of(tmp_path, directory, max_prompt_tokens=5):
        pass
