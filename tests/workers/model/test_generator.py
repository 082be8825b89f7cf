"""Generation as a call of the graph: which random numbers make the answers of one model worker."""

import json
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM

from corral.experiments.config.data import DatasetConfig
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.datasets.dataset import dataset_spec
from corral.experiments.worker_specs import GenerationSpec
from corral.workers.model.generator import Generator
from corral.workers.requests.messages import Generate
from corral.workers.sandbox.curtain import Curtain
from tests.workers.backends.training_helpers import save_tiny_model
from tests.workers.data.tiny_tokenizer import write_tokenizer
from tests.workers.model.test_models import specification


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
        seed=1,
        curtain=Curtain(),
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
