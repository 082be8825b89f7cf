"""Generation as a call of the graph: which random numbers make the answers of one model worker."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from corral.experiments.config.data import HELD_OUT_ANSWERS, DatasetConfig, EvaluationConfig, EvaluationSampling
from corral.experiments.config.rollout import RewardConfig, SamplingConfig, reward_parts
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.prompts.tokens import load_tokenizer
from corral.experiments.worker_specs import GenerationSpec
from corral.scheduling.keys import merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.model.data_store import DataStore
from corral.workers.model.generator import Generator
from corral.workers.model.models import Models
from corral.workers.requests.messages import Evaluate, Generate, Initialize
from corral.workers.rollout.judging import RewardJudge
from tests.workers.backends.training_helpers import save_tiny_model
from tests.workers.data.tiny_tokenizer import write_tokenizer
from tests.workers.model.test_models import PLACES, specification

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
    assert evaluated.stats["reward/mean"] == 0.0


def test_answers_follow_from_prompt_and_step_and_are_others_after_a_try_without_a_finite_loss(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "actor")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "actor", dtype=torch.float32)
    write_tokenizer(tmp_path / "actor")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "prompt": "1+2=", "answer": "3"}))
    dataset = dataset_spec(DatasetConfig(path=tmp_path / "rows.jsonl", max_prompt_tokens=16), kind="prompts")
    spec = specification(tmp_path).model_copy(update={"dataset": dataset})
    sampling = SamplingConfig(max_new_tokens=8)
    generator = Generator(
        spec,
        GenerationSpec(sampling=sampling, group_size=2, max_running_requests=2),
        judge=RewardJudge(spec.reward, load_tokenizer(spec.tokenizer), stop_token_ids=(), hidden=()),
        seed=1,
    )

    def answers(*, order: int, tries: int, version: str) -> list[int]:
        [made] = generator.generate(
            model, Generate(mfc="actor_gen", uids=["0:a"], orders=[order], tries=[tries], version=version)
        )
        assert made.sample is not None and made.described.order == order
        return list(made.sample.data["input_ids"].tolist())

    first = answers(order=4, tries=0, version="1.2")
    assert answers(order=9, tries=0, version="3.2") == first, "issued again, after a restart"
    assert answers(order=4, tries=1, version="1.2") != first
    assert answers(order=4, tries=0, version="1.3") != first
