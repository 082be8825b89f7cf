"""The Python that environments run in, for tests that play some."""

import json
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.inputs.environment_tasks import environment_python

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


def environment(name: str, **settings: Any) -> dict[str, Any]:
    """`rollout.environment` for one of the tests' own."""
    return {"id": name, "variables": ["PYTHONPATH"], **settings}
