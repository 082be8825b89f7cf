"""Keys that something of the user's own says it reads and makes: a process imports it and asks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.users_code import Declared
from corral.experiments.inputs.users_process import ask_keys
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import CallType

MINE = """\
from corral.scheduling.keys import Key, built_in
from corral.scheduling.model_function_call import CallType
from corral.workers.algorithms.advantage import AdvantageEstimator
from corral.workers.algorithms.base import ModelInterface

MARGIN = Key("margin", "per_answer", "float32")
KEYS = [*built_in("values"), *(Key(f"bonus_{number}", "per_token", "float32", (2,)) for number in range(2))]
mine = AdvantageEstimator(lambda batch, config: {}, inputs=(MARGIN, *KEYS), outputs=(MARGIN,))


class Base(ModelInterface):
    def __init__(self, settings):
        self._ppo = settings.require_ppo()

    @property
    def inputs(self):
        return {CallType.INFERENCE: built_in("input_ids", *(["values"] if self._ppo.eps_clip == 0.5 else []))}


class Mine(Base):
    outputs = {CallType.INFERENCE: (MARGIN, *built_in("rewards"))}


def plain(scores, micro_batch, config): ...
"""
Ask = Callable[..., dict[str, Declared]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.chdir(tmp_path)

    def ask(text: str, *names: str, interfaces: tuple[str, ...] = (), **ppo: float) -> dict[str, Declared]:
        (tmp_path / "mine.py").write_text(text)
        config = {"actor": {"interface": "mine:Mine"}, "ppo": {"advantage": "mine:mine"}}
        return dict(ask_keys(names, interfaces=interfaces, ppo=PPOConfig(**ppo), config=config))  # type: ignore[arg-type]

    return ask


def test_keys_are_those_of_what_the_code_makes_however_it_is_written(ask: Ask) -> None:
    told = ask(MINE, "mine:mine", "mine:plain", "mine:Mine", interfaces=("mine:Mine",), eps_clip=0.5)
    bonus = ("bonus_0", "bonus_1")
    assert told["mine:mine"].names("inputs") == ("margin", "values", *bonus)
    assert told["mine:mine"].names("outputs") == ("margin",)
    assert Key("bonus_1", "per_token", "float32", (2,)) in told["mine:mine"].keys
    assert told["mine:plain"] == Declared(inputs={"": ()}, outputs={"": ()})
    interface = told["mine:Mine"]
    assert interface.names("inputs", CallType.INFERENCE) == ("input_ids", "values")  # as the settings have it
    assert interface.names("outputs", CallType.INFERENCE) == ("margin", "rewards")
    assert interface.names("inputs", CallType.TRAIN_STEP) == ()


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (
            ("per_answer", "per_prompt"),
            "mine:mine",
            "ppo.advantage: cannot be imported: RuleError: .*per_prompt.*mine.py:6",
        ),
        (
            ("settings.require_ppo()", "settings.ppo_settings"),
            "mine:Mine",
            "actor.interface: AttributeError: .*mine.py:13",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_under_its_key_with_its_line(
    ask: Ask, change: tuple[str, str], name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(MINE.replace(*change), name, interfaces=("mine:Mine",))
