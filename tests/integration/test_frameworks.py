"""Agents of other people's frameworks, as their packages ship them, and tasks of reasoning-gym train for some steps.

program ──► a stand-in that answers as it should ──► what was asked ──► SFT on those answers ──► GRPO with the program

Nothing of a program is changed but the address, the key and the name of the model. An untrained model calls no tools,
so one that has learned the answers of one run is what trains.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.inputs.other_pythons import environment_python
from tests.chat_models import TEMPLATES, VOCABULARY, write_chat_tokenizer
from tests.environments import needs_environments
from tests.integration.evidence import check_every_sample_was_consumed_once, check_generator_and_trainer_agreed
from tests.integration.trial_helpers import Material, submit, submit_environment

pytestmark = pytest.mark.slow

ENVIRONMENTS_PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
INSTALL_S = 900.0
NUM_STEPS = 3
NUM_LESSONS = 880
TEACHING_S = 1200.0
PACKAGES = (
    "pydantic-ai-slim[openai,groq]==2.62.0",
    "pydantic-ai-examples==2.62.0",
    "smolagents[openai]==1.26.0",
)
ROULETTE = """\
import asyncio
from pydantic_ai_examples.roulette_wheel import main, roulette_agent
with roulette_agent.override(model="openai-chat:policy"):
    asyncio.run(main())
"""
SMOLAGENT = """\
exec smolagent "12+34=?" --action-type tool_calling --model-type OpenAIModel --model-id policy \
--api-base "$OPENAI_BASE_URL" --api-key "$OPENAI_API_KEY" --tools
"""
Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Framework:
    """How its program is started, and how a model that knows what to do answers it, call for call."""

    command: Sequence[str]
    program: str
    calls: Sequence[Call]


FRAMEWORKS = {
    "pydantic_ai": Framework(
        ["env", "GROQ_API_KEY=none", "{bin}/python"],
        ROULETTE,
        [
            ("roulette_wheel", {"square": 18}),
            ("final_result", {"response": True}),
            ("roulette_wheel", {"square": 5}),
            ("final_result", {"response": False}),
        ],
    ),
    "smolagents": Framework(["env", "PATH={bin}:/usr/bin:/bin", "sh"], SMOLAGENT, [("final_answer", {"answer": "46"})]),
}


class StandIn(BaseHTTPRequestHandler):
    """OpenAI's chat, streamed, by a model that answers each request with the next of its calls."""

    calls: ClassVar[list[Call]]
    asked: ClassVar[list[dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name, arguments = self.calls[len(self.asked)]
        self.asked.append(body)
        assert body["stream"]
        call = {"name": name, "arguments": json.dumps(arguments)}
        said = {"role": "assistant", "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": call}]}
        choice = {"index": 0, "delta": said, "finish_reason": "tool_calls"}
        chunk = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": [choice]}
        sent = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


def installed(folder: Path, *rounds: Sequence[str]) -> Path:
    """The folder of programs of a new environment, after these rounds of `pip install`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
    for options in rounds:
        subprocess.run([folder / "bin" / "pip", "install", "-q", *options], check=True, timeout=INSTALL_S)
    return folder / "bin"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The examples want databases, phones and browsers.
    return installed(tmp_path_factory.mktemp("frameworks"), PACKAGES[0::2], ["--no-deps", PACKAGES[1]])


@pytest.fixture
def stand_in() -> Iterator[tuple[type[StandIn], str]]:
    class OfThisTest(StandIn):
        calls: ClassVar[list[Call]] = []
        asked: ClassVar[list[dict[str, Any]]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), OfThisTest)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield OfThisTest, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is one string."""
    content = message.get("content")
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content
    return {**message, "content": text or ""}


def rows_of(asked: Sequence[Mapping[str, Any]], calls: Sequence[Call]) -> list[dict[str, Any]]:
    """What is to be learned: to each of these requests, its call."""
    return [
        {
            "id": str(number),
            "prompt": [plain(message) for message in body["messages"]],
            "tools": body["tools"],
            "answer": f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
        }
        for number, (body, (name, arguments)) in enumerate(zip(asked, calls, strict=True))
    ]


def write_model(directory: Path, *, text: str = "") -> Path:
    """An untrained Qwen2 for conversations of some thousand characters; each word of `text` is one of its tokens."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(1)
    words = sorted({*re.findall(r"\w{2,}", text + TEMPLATES["qwen"])} - VOCABULARY.keys()) if text else []
    vocabulary = VOCABULARY | {word: len(VOCABULARY) + number for number, word in enumerate(words)}
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY["<|im_end|>"],
    )
    auto_class: Any = AutoModelForCausalLM
    auto_class.from_config(config).save_pretrained(directory)
    write_chat_tokenizer(directory, "qwen")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = vocabulary
    if text:
        tokenizer["pre_tokenizer"]["pattern"] = {"Regex": r"\w+|[\s\S]"}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def taught(folder: Path, material: Material, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A model that has learned these answers."""
    copies = [{**row, "id": f"{row['id']}/{copy}"} for copy in range(NUM_LESSONS // len(rows)) for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in copies)
    (folder / "lessons.jsonl").write_text(text)
    settings = {
        "model.path": write_model(folder / "model", text=text),
        "model.optimizer.lr": 4e-3,
        "model.optimizer.lr_schedule": "linear",
        "model.max_tokens_per_micro_batch": 16384,
        "dataset.path": folder / "lessons.jsonl",
        "dataset.max_prompt_tokens": 8192,
        "evaluation": "null",
        "train_batch_size": 4,
        "control.commit_every": "40 steps",
    }
    trial = submit("sft", folder / "sft", material, num_rows=8, overrides=settings)
    try:
        trial.wait_for(lambda: trial.ends(), "its lessons", timeout_s=TEACHING_S, may_end=True)
        trial.wait_for_end()
        assert trial.metrics()[-1]["sft/loss"] < 0.1, trial.metrics()[-1]
        return trial.directory.exports_path / "final"
    finally:
        trial.close()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_program_of_a_framework_trains(
    name: str, programs: Path, stand_in: tuple[type[StandIn], str], material: Material, tmp_path: Path
) -> None:
    framework = FRAMEWORKS[name]
    (tmp_path / "program").write_text(framework.program)
    command = [word.replace("{bin}", str(programs)) for word in (*framework.command, str(tmp_path / "program"))]
    model_of_one_run, address = stand_in
    model_of_one_run.calls.extend(framework.calls)
    environment = os.environ | {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True)
    model = taught(tmp_path, material, rows_of(model_of_one_run.asked, framework.calls))
    settings = {
        "actor.path": model,
        "actor.optimizer.lr": 1e-5,
        "actor.max_tokens_per_micro_batch": 16384,
        "rollout.agent": "corral.agents:program",
        "rollout.agent_settings": json.dumps({"command": command}),
        "rollout.max_concurrent_rollouts": 2,
        "rollout.sampling.max_new_tokens": 120,
        "rollout.sampling.temperature": 0.5,
        "engine.max_total_tokens": 65536,
        "dataset.max_prompt_tokens": 16,
        "ppo.group_size": 2,
        "train_batch_size": 4,
        "evaluation": "null",
    }
    trial = submit("grpo", tmp_path / "grpo", material, num_rows=4 * NUM_STEPS, overrides=settings)
    try:
        trial.wait_for_end()
        assert trial.train_steps() == list(range(1, NUM_STEPS + 1)), trial.tails()
        check_every_sample_was_consumed_once(trial)
        assert check_generator_and_trainer_agreed(trial) > 0
    finally:
        trial.close()


@needs_environments
def test_tasks_of_reasoning_gym_train(material: Material, tmp_path: Path) -> None:
    """The taskset of docs/environments.md."""
    text = re.search(r"```python\n# gym_tasks\.py\n(.*?)```", ENVIRONMENTS_PAGE.read_text(), re.DOTALL)
    assert text is not None
    (tmp_path / "gym_tasks.py").write_text(text[1])
    programs = installed(tmp_path / "gym", ["reasoning-gym==0.1.25"])
    [packages] = (tmp_path / "gym" / "lib").glob("python*/site-packages")
    [of_environments] = environment_python(EnvironmentConfig(id="any")).parents[1].glob("lib/python*/site-packages")
    (packages / "environments.pth").write_text(f"{of_environments}\n")
    settings = {
        "actor.path": write_model(tmp_path / "model"),
        "rollout.environment.id": "gym_tasks",
        "rollout.environment.python": programs / "python",
        "rollout.environment.variables": "[PYTHONPATH]",
        "rollout.environment.args": f"{{taskset: {{size: {4 * NUM_STEPS}}}}}",
        "rollout.environment.held_out_args": "null",
        "dataset.max_prompt_tokens": 512,
        "engine.max_total_tokens": 65536,
        "train_batch_size": 4,
        "evaluation": "null",
    }
    trial = submit_environment(
        tmp_path, material, num_tasks=4 * NUM_STEPS, overrides=settings, environment={"PYTHONPATH": str(tmp_path)}
    )
    try:
        trial.wait_for_end()
        assert trial.train_steps() == list(range(1, NUM_STEPS + 1)), trial.tails()
        check_every_sample_was_consumed_once(trial)
    finally:
        trial.close()
