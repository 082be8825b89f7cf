"""Every broken experiment is refused with its key, its line and a way out, and no input does worse than that."""

import os
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.errors import ConfigError
from corral.experiments.loading.validation import OLD_KEYS
from corral.experiments.loading.yaml_loader import MAX_FILE_BYTES, parse_yaml
from corral.experiments.registry import load_experiment
from tests.experiments.broken_yaml import BROKEN_CASES, VALID_PPO, VALID_SFT, BrokenCase, write_inputs


def _error_of(case: BrokenCase, folder: Path) -> ConfigError:
    path = case.write(folder)
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, case.overrides)
    return caught.value


@pytest.mark.parametrize("case", BROKEN_CASES, ids=lambda case: case.name)
def test_broken_experiment_is_refused_with_key_line_and_remedy(case: BrokenCase, tmp_path: Path) -> None:
    error = _error_of(case, tmp_path)
    text = str(error)
    missing = [word for word in case.words if word.lower() not in text.lower()]
    assert not missing, f"{missing} not in:\n{text}"
    assert error.exit_code == 2
    assert all(problem.hint for problem in error.problems)
    assert all(line.startswith(("error: ", "  ")) for line in text.splitlines())
    assert len(text.splitlines()) <= 24, f"does not fit on one screen:\n{text}"
    if case.line is not None:
        assert any(f"experiment.yaml:{case.line} " in f"{line} " for line in text.splitlines()), text


def test_an_old_key_is_refused_with_the_new_key_or_the_reason(tmp_path: Path) -> None:
    places = {
        "optimizer": "actor.optimizer",
        "kl": "ppo.kl",
        "environment": "rollout.environment",
        "teacher": "rollout.teacher",
        "scheduling": "groups.model_worker.scheduling",
        "n_seqs": "actor.n_seqs",
    }
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_PPO)
    for key, (new, reason) in OLD_KEYS.items():
        first, dot, rest = key.partition(".")
        place = f"{places.get(first, first)}{dot}{rest}".replace("*", "digits")
        kind = ["experiment=dpo"] if first == "dpo" else []
        with pytest.raises(ConfigError) as refused:
            load_experiment(tmp_path / "experiment.yaml", [*kind, f"{place}=1"])
        (problem,) = [one for one in refused.value.problems if "no key any more" in one.message]
        assert place in problem.message and reason in problem.message and new.format(1) in problem.hint, key


def test_an_old_key_without_a_value_is_to_be_removed(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_PPO)
    with pytest.raises(ConfigError) as refused:
        load_experiment(tmp_path / "experiment.yaml", ["control.save_every_steps=null"])
    assert [problem.hint for problem in refused.value.problems] == ["remove save_every_steps"]


@pytest.mark.parametrize(
    ("what", "kind"),
    [("experiment.yaml", "pipe"), ("train.jsonl", "pipe"), ("train.jsonl", "device"), ("model/config.json", "pipe")],
)
def test_a_pipe_is_not_waited_for_and_a_device_is_not_read_to_its_end(tmp_path: Path, what: str, kind: str) -> None:
    write_inputs(tmp_path)
    (tmp_path / "experiment.yaml").write_text(VALID_PPO)
    (tmp_path / what).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / what)
    else:
        (tmp_path / what).symlink_to("/dev/zero")
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from corral.experiments.registry import load_experiment\n"
        "load_experiment(sys.argv[1])\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "experiment.yaml")]
    refused = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    assert "ConfigError" in refused.stderr and "not a regular file" in refused.stderr.lower(), refused.stderr


@pytest.mark.parametrize("written", ["0123", "007", "1e5", "0x10", "1_000"])
def test_an_account_of_digits_is_shown_as_it_is_written(written: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_PPO.replace("launch:\n", f"launch:\n  account: {written}\n"))
    if written == "1_000":  # text by YAML 1.2
        assert load_experiment(path).launch.account == written
        return
    with pytest.raises(ConfigError) as caught:
        load_experiment(path)
    (problem,) = caught.value.problems
    assert problem.message == f"launch.account must be text, got {written}"
    assert problem.hint == f'write it in quotes: "{written}"' and problem.shown == written
    assert load_experiment(path, [f"launch.account={written}"]).launch.account == written
    with pytest.raises(ConfigError) as caught:  # a value of this form is not looked up in the file
        load_experiment(path, [f"launch={{account: {written}}}"])
    assert caught.value.problems[0].hint == "write it in quotes"


def test_all_mistakes_of_a_stage_are_reported_at_once(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    path.write_text(VALID_PPO.replace("seed: 3", "seed: x").replace("  group_size: 4", "  group_siz: 4"))
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, ["rollout.sampling.top_p=2", "actor.dtype=float16"])
    assert [problem.path for problem in caught.value.problems] == [
        ("seed",),
        ("actor", "dtype"),
        ("ppo", "group_siz"),
        ("rollout", "sampling", "top_p"),
    ]


def test_two_contradictions_and_a_missing_file_are_reported_together(tmp_path: Path) -> None:
    case = BrokenCase(
        name="several", words=(), edit=("  kl: {coef: 0.0}", "  kl: {coef: 1}"), files={"heldout.jsonl": None}
    )
    error = _error_of(case, tmp_path)
    assert {problem.path for problem in error.problems} == {("ppo", "kl", "coef"), ("evaluation", "dataset", "path")}


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the experiment file"):
        load_experiment(tmp_path / "absent.yaml")


def test_directory_in_place_of_a_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the experiment file"):
        load_experiment(tmp_path)


def test_file_beyond_the_size_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"# " + b"x" * MAX_FILE_BYTES)
    with pytest.raises(ConfigError, match=str(MAX_FILE_BYTES)):
        load_experiment(path)


def test_file_that_is_not_utf8_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:2"):
        parse_yaml(b"name: a\nseed: \xff\n", file=Path("x.yaml"))


def test_alias_bomb_is_refused_before_it_grows() -> None:
    bomb = "a: &a [x, x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
    )
    with pytest.raises(ConfigError, match="anchor"):
        parse_yaml(bomb.encode(), file=Path("bomb.yaml"))


def _only_config_error(content: bytes) -> None:
    try:
        parse_yaml(content, file=Path("fuzz.yaml"))
    except ConfigError as error:
        assert str(error).startswith("error: ")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet=string.printable, max_size=200).map(str.encode))
def test_arbitrary_bytes_raise_nothing_but_config_errors(content: bytes) -> None:
    _only_config_error(content)


def test_mutated_experiments_raise_nothing_but_config_errors(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    path = tmp_path / "experiment.yaml"
    generator = random.Random(20240229)
    refused = 0
    for number in range(1000):
        path.write_bytes(_mutated((VALID_SFT, VALID_PPO)[number % 2].encode(), generator))
        try:
            load_experiment(path)
        except ConfigError as error:
            refused += 1
            assert error.problems
    assert refused > 500  # the mutations do reach the checks


def _mutated(content: bytes, generator: random.Random) -> bytes:
    tokens = (
        b"&a ",
        b"*a",
        b"!!int ",
        b"{",
        b"]",
        b": ",
        b"\n- ",
        b"\t",
        b"'",
        b'"',
        b"\x00",
        b"\xff",
        b"---\n",
        b"<<: ",
        b"1e999",
    )
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(content) + 1)
        kind = generator.randrange(4)
        if kind == 0:
            content = content[:at] + generator.choice(tokens) + content[at:]
        elif kind == 1:
            content = content[:at] + bytes([generator.randrange(256)]) + content[at + 1 :]
        elif kind == 2:
            content = content[:at] + content[at + generator.randrange(20) :]
        else:
            lines = content.split(b"\n")
            generator.shuffle(lines)
            content = b"\n".join(lines)
    return content
