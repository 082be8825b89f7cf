"""Episodes of an environment in its own Python, among real parts: what is trained is what the environment saw, and what
it does wrong costs its prompt, and nobody else."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.experiments.worker_specs import EnvironmentSpec
from tests.environments import PACKAGES, add_template, environment, needs_environments
from tests.workers.data.tiny_tokenizer import EOS, ids_of
from tests.workers.rollout.rollout_rig import RolloutRig

pytestmark = needs_environments
PROMPT, MADE = ids_of("1+1="), [*ids_of("7"), EOS]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def rig_of(tmp_path: Path, tasks: Sequence[Mapping[str, Any]], *, group_size: int = 2, **rollout: Any) -> RolloutRig:
    """A worker whose prompts are these tasks."""
    fields = [{"task": {"id": f"task-{number}", "prompt": "1+1=", **task}} for number, task in enumerate(tasks)]
    settings = {"environment": environment("adding"), "agent_processes": 1, "reward_retries": 0, **rollout}
    rig = RolloutRig(tmp_path, ["1+1="] * len(tasks), rollout=settings, group_size=group_size, fields=fields)
    add_template(tmp_path / "model")
    return rig


def test_what_is_trained_is_what_the_environment_saw_which_is_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "seen").mkdir()
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SERPER_API_KEY", "wanted")
    settings = environment("adding", variables=["PYTHONPATH", "SERPER_API_KEY"])
    rig = rig_of(tmp_path, [{"folder": str(folder)}], environment=settings)
    spec = EnvironmentSpec(packages={"verifiers": "0.3.0"}, sha256="0")
    workers = [each.model_copy(update={"environment": spec}) for each in rig.plan.workers]
    rig.plan = rig.plan.model_copy(update={"workers": workers})
    with rig:
        rig.run_until(lambda: len(rig.received) == 1, "the prompt")
    [tensors], sequence = rig.tensors, [*PROMPT, *MADE, *ids_of("+"), *MADE]
    np.testing.assert_array_equal(tensors["input_ids"], sequence * 2)
    np.testing.assert_array_equal(tensors["rewards"], [1.0, 1.0])
    traces = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert len(traces) == 2
    made = ([False] * 4 + [True] * 2 + [False] + [True] * 2) * 2
    np.testing.assert_array_equal(~tensors["prompt_mask"], made)
    np.testing.assert_array_equal(tensors["old_logprobs"], [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5] * 2)
    assert [trace["said"] for trace in traces] == [["1+1=", "7", "+", "7"]] * 2
    scalars = rig.received[0].scalars
    assert (scalars["episode/turns"], scalars["notes/replies"], scalars["notes/reward/right"]) == (2.0, 2.0, 1.0)

    variables, home = traces[0]["variables"], Path(traces[0]["variables"]["HOME"])
    assert variables["SERPER_API_KEY"] == "wanted"
    assert not {"OPENAI_API_KEY", "SLURM_JOB_ID"} & variables.keys()
    assert home.is_relative_to(traces[0]["cwd"]) and Path(variables["TMPDIR"]).is_relative_to(traces[0]["cwd"])
    assert not home.exists(), "the folder goes with the process"
    mark = f"CORRAL_ENVIRONMENT={variables['CORRAL_ENVIRONMENT']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            assert mark not in (process / "environ").read_bytes(), "what it started goes with it, too"
    assert "environment adding is not what it was at submission: {'verifiers': '0.3.0'} then" in caplog.text


def test_what_an_environment_does_wrong_costs_its_prompt_alone(tmp_path: Path) -> None:
    """Whatever ends the host takes other episodes with it, which are played again. An episode that comes to a limit is
    judged as it stands."""
    tasks = [{"does": does} for does in ("", "raises", "exits", "hangs", "dies", "helps", "", "goes on")]
    with rig_of(tmp_path, tasks, group_size=1, agent_timeout_s=5.0, episode={"max_turns": 3}) as rig:
        rig.run_until(lambda: len(rig.received) == len(tasks), "all prompts")
    outcomes = rig.outcomes()
    assert {outcomes[number] for number in "0567"} == {"finished"}
    assert outcomes["1"].startswith("agent_error: TaskError: ") and "no such field" in outcomes["1"]
    assert outcomes["2"].startswith("agent_error: SystemExit: 3") and "adding.py" in outcomes["2"]
    assert outcomes["3"].startswith("agent_error: TimeoutError: it neither ended nor asked the model for 5 s")
    assert outcomes["4"] == "agent_error: its process ended by itself, exit code 3"
    place_of = {header.uid.partition("#")[0]: place for place, header in enumerate(rig.received)}
    helped, cut = place_of["0:5"], place_of["0:7"]
    # What the agent that learns nothing had the policy say is not among it.
    np.testing.assert_array_equal(rig.tensors[helped]["input_ids"], [*PROMPT, *MADE, *ids_of("+"), *MADE])
    assert rig.received[helped].scalars["episode/turns"] == 3.0
    np.testing.assert_array_equal(rig.tensors[cut]["input_ids"], [*PROMPT, *MADE, *[*ids_of("+"), *MADE] * 2])
    np.testing.assert_array_equal(rig.tensors[cut]["rewards"], [0.0])  # its last reply was none
    ended = [rig.received[place].scalars["episode/ended/turns"] for place in (helped, cut)]
    assert ended == [0.0, 1.0]
