"""Keys of a user's file, read as text."""

from pathlib import Path

import pytest

from corral.experiments.inputs.declared_keys import names_of_keys, read_declared_keys
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import CallType


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)

    return write


def test_keys_are_read_wherever_they_stand_and_nothing_is_run(write) -> None:  # type: ignore[no-untyped-def]
    write(
        "raise SystemExit('this file was run')\n"
        "import torch\n"
        "from corral.scheduling import keys\n"
        "MARGIN = Key('margin', 'per_answer', 'float32')\n"
        "class Mine:\n"
        "    outputs = {'inference': (MARGIN, keys.Key(name='weight', layout='per_token', dtype='bool'))}\n"
    )
    assert read_declared_keys("mine:Mine") == (
        [Key("margin", "per_answer", "float32"), Key("weight", "per_token", "bool")],
        [],
    )


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("Key(NAME, 'per_answer', 'float32')", "each a plain string"),
        ("Key('margin', 'per_answer')", "each a plain string"),
        ("Key('margin', 'per_answer', 'float32', (2,))", "each a plain string"),
        ("Key('margin', 'per_answer', 'float32', shape=(2,))", "each a plain string"),
        ("Key('margin', 'per_prompt', 'float32')", "layouts are per_token"),
    ],
)
def test_a_key_that_cannot_be_read_is_named_with_its_line(write, declaration: str, message: str) -> None:  # type: ignore[no-untyped-def]
    write(f"NAME = 'margin'\n\nclass Mine:\n    inputs = ({declaration},)\n")
    keys, (problem,) = read_declared_keys("mine:Mine")
    assert keys == []
    assert "mine.py:4: " in problem.message and message in problem.message
    assert problem.hint == 'for example Key("margin", "per_answer", "float32")'


def test_a_path_that_leads_nowhere_is_the_problem(write) -> None:  # type: ignore[no-untyped-def]
    write("class Mine: pass\n")
    keys, (problem,) = read_declared_keys("mine:Yours")
    assert keys == [] and "defines no 'Yours'" in problem.message


WRAPPED = """\
from corral.scheduling.keys import Key, built_in
raise SystemExit('this file was run')
MARGIN = Key("margin", "per_answer", "float32")
BOTH = (MARGIN, *built_in("values"))
mine = AdvantageEstimator(_mine, inputs=BOTH + (Key("bonus", "per_answer", "float32"), MARGIN), outputs=(MARGIN,))
class Mine(ModelInterface):
    inputs = {CallType.INFERENCE: built_in("input_ids", "prompt_mask"), "train_step": [MARGIN]}

    @property
    def outputs(self):
        return {CallType.INFERENCE: (MARGIN, *built_in("rewards"))}
def plain(scores, micro_batch, config): ...
"""


@pytest.mark.parametrize(
    ("name", "attribute", "call_type", "names"),
    [
        ("mine", "inputs", None, ("margin", "values", "bonus")),
        ("mine", "outputs", None, ("margin",)),
        ("Mine", "inputs", CallType.INFERENCE, ("input_ids", "prompt_mask")),
        ("Mine", "inputs", CallType.TRAIN_STEP, ("margin",)),
        ("Mine", "inputs", CallType.EVALUATE, ()),
        ("Mine", "outputs", CallType.INFERENCE, ("margin", "rewards")),
        ("plain", "inputs", None, ()),
    ],
)
def test_what_is_read_and_made_is_known_by_name(write, name, attribute, call_type, names) -> None:  # type: ignore[no-untyped-def]
    write(WRAPPED)
    assert names_of_keys(f"mine:{name}", attribute, call_type) == names


@pytest.mark.parametrize("inputs", ["(MARGIN,)", "KEYS", "tuple(KEYS)", "(Key(NAME, 'per_answer', 'float32'),)"])
def test_inputs_that_cannot_be_read_are_named_with_their_line(write, inputs: str) -> None:  # type: ignore[no-untyped-def]
    write(f"from yours import MARGIN, KEYS, NAME\n\nmine = PolicyLoss(_mine, inputs={inputs})\n")
    with pytest.raises(ValueError, match="mine.py:3: inputs"):
        names_of_keys("mine:mine", "inputs")
