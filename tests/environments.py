"""The Python that environments run in, for tests that play some."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.inputs.other_pythons import environment_python
from tests.workers.data.tiny_tokenizer import write_tokenizer

PACKAGES = Path(__file__).parent / "environment_packages"
"""A folder with environments of the tests' own: modules, as any that is installed."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)

needs_environments = pytest.mark.skipif(
    not environment_python(EnvironmentConfig(id="any")).exists(),
    reason="verifiers is not installed: make environments",
)


def add_template(model: Path) -> None:
    """Lets a model of `write_tokenizer` converse."""
    said = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(said))


def give_tokenizer(model: Path) -> None:
    """A tokenizer that every library can read, with a template, to a model of a test's."""
    with tempfile.TemporaryDirectory() as folder:
        add_template(write_tokenizer(Path(folder)))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(folder) / name, model / name)


def environment(name: str, **settings: Any) -> dict[str, Any]:
    """`rollout.environment` for one of the tests' own."""
    return {"id": name, "variables": ["PYTHONPATH"], **settings}
