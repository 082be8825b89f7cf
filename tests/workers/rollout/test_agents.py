"""Agents of a user's own among real parts, in processes without keys: what they do is learned from, and what they do
wrong costs their prompt, and nobody else."""

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.agents import Outcome
from corral.experiments.config.rollout import RolloutConfig, reward_parts
from corral.experiments.exit_codes import WorkerExit
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.workers.agents.shipped import outcome_of
from corral.workers.data.answer_seed import AnswerSeeds
from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.rollout.episode_player import open_player
from corral.workers.rollout.judging import RewardJudge
from corral.workers.user_code.children import HostError, Launch
from tests.workers.data.tiny_tokenizer import EOS, ids_of, write_tokenizer
from tests.workers.rollout import some_agents
from tests.workers.rollout.rollout_rig import RolloutRig
from tests.workers.rollout.some_agents import FOLDER

HERE = some_agents.__name__
FILE = "some_agents.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What agents write to."""
    (folder := tmp_path / "folder").mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def plays(agent: str, **settings: Any) -> dict[str, Any]:
    return {"agent": f"{HERE}:{agent}", "agent_processes": 1, "reward_retries": 0, **settings}


def one_group(
    tmp_path: Path, rollout: Mapping[str, Any], *, group_size: int = 2
) -> tuple[RolloutRig, Mapping[str, Any]]:
    """What is delivered of the only prompt "1+1="."""
    with RolloutRig(tmp_path, ["1+1="], rollout=rollout, group_size=group_size) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
    assert rig.outcomes() == {"0": "finished"}
    return rig, rig.tensors[0]


def outcomes_of(tmp_path: Path, rollout: Mapping[str, Any], num_prompts: int) -> dict[str, str]:
    """Of so many prompts of one episode each, when all have come."""
    with RolloutRig(tmp_path, ["1+2="] * num_prompts, rollout=rollout, group_size=1) as rig:
        rig.run_until(lambda: len(rig.received) == num_prompts, f"{num_prompts} prompts")
    return rig.outcomes()


def test_what_is_said_between_two_answers_is_given_and_both_are_learned_from(tmp_path: Path) -> None:
    rig, tensors = one_group(tmp_path, plays("asks_twice", reward=f"{HERE}:ranks"))
    prompt, made = ids_of("1+1="), [*ids_of("7"), EOS]
    sequence = [*prompt, *made, *ids_of("+"), *made]
    np.testing.assert_array_equal(tensors["input_ids"], sequence * 2)
    np.testing.assert_array_equal(tensors["prompt_mask"], ([True] * 4 + [False] * 2 + [True] + [False] * 2) * 2)
    np.testing.assert_array_equal(tensors["rewards"], [20.0, 21.0])  # of a judge that sees both episodes
    np.testing.assert_array_equal(tensors["turn_rewards"], [0, 0, 0, 0, 0.25, 0, 0, 0] * 2)
    np.testing.assert_array_equal(tensors["episodes"], [0, 1])
    np.testing.assert_allclose(tensors["old_logprobs"], [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5] * 2)
    seeds = AnswerSeeds(rig.plan.seed, "0:0", 0)
    expected = {seeds.of(each, call=turn) for each in (0, 1) for turn in (0, 1)}
    assert set(rig.server.seeds) == expected and len(rig.server.seeds) == 4
    [header] = rig.received
    assert [[(span.start, span.end) for span in spans] for spans in header.version_spans] == [[(0, 2), (2, 4)]] * 2
    rewarded = {name for name in header.scalars if name.startswith("reward/")}
    assert rewarded >= {"reward/seconds", "reward/seconds/max"} and len(rewarded) == 3
    routed = {name: value for name, value in header.scalars.items() if name.startswith("routing/")}
    assert routed.pop("routing/seconds") > 0.0 and routed == {"routing/groups": 1.0, "routing/kv_share": 0.0}
    told = rewarded | {"routing/seconds", *routed}
    assert {name: value for name, value in header.scalars.items() if name not in told} == {
        "response_duplicates": 1.0,
        "episode/turns": 2.0,
        "episode/sequences": 1.0,
        "notes/episode": 0.5,
        "notes/asked": 2.0,
        **dict.fromkeys((f"episode/ended/{why}" for why in ("length", "turns", "time", "other")), 0.0),
        "episode/failed": 0.0,
    }


def test_a_branch_is_a_sequence_of_its_own_and_an_untrained_turn_is_given(tmp_path: Path) -> None:
    rig, tensors = one_group(tmp_path, plays("asks_in_branches"))
    prompt, made = ids_of("1+1="), [*ids_of("7"), EOS]
    first, second = [*prompt, *made, *ids_of("1"), *made], [*prompt, *ids_of("2"), *made]
    np.testing.assert_array_equal(tensors["input_ids"], [*first, *second] * 2)
    mask = [*[True] * 4, *[False] * 2, *[True] * 3, *[True] * 5, *[False] * 2]
    np.testing.assert_array_equal(tensors["prompt_mask"], mask * 2)
    np.testing.assert_array_equal(tensors["episodes"], [0, 0, 1, 1])
    np.testing.assert_array_equal(tensors["rewards"], [1.0] * 4)
    assert rig.received[0].scalars["episode/ended/other"] == 1.0 and rig.received[0].scalars["notes/branches"] == 2.0


@pytest.mark.parametrize(
    ("agent", "limits", "why", "reward"),
    [
        ("asks_until_the_end", {"max_turns": 3}, "turns", 0.75),
        ("asks_for_ever", {"max_tokens": 11}, "length", 1.0),
    ],
)
def test_an_episode_ends_at_its_limits_and_its_agent_may_say_what_it_is_worth(
    agent: str, limits: Mapping[str, int], why: str, reward: float, tmp_path: Path
) -> None:
    """A sequence has 4 + 2 tokens, and 3 more with each turn; the last one may be cut."""
    rig, tensors = one_group(tmp_path, plays(agent, episode=limits))
    np.testing.assert_array_equal(tensors["rewards"], [reward] * 2)
    scalars = rig.received[0].scalars
    assert (scalars["episode/turns"], scalars[f"episode/ended/{why}"]) == (3, 1.0)
    assert len(tensors["input_ids"]) <= 2 * limits.get("max_tokens", 99)


def test_episodes_that_fail_are_the_spare_ones_as_long_as_there_are_some(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollout, fields = plays("fails_for_some", spare_answers=2), [{"fails": 2}, {"fails": 3}, {"fails": 0}]
    with RolloutRig(tmp_path, ["1+1=", "1+2=", "1+3="], rollout=rollout, fields=fields) as rig:
        rig.run_until(lambda: len(rig.received) == 3, "three prompts")
    outcomes, line = rig.outcomes(), some_agents.fails_for_some.__code__.co_firstlineno + 6
    assert outcomes.pop("1").startswith("agent_error: ") and outcomes == {"0": "finished", "2": "finished"}
    assert f"failed, and is done without: KeyError: 'no such field' ({FILE}:{line})" in caplog.text
    place = next(place for place, header in enumerate(rig.received) if header.uid.startswith("0:0#"))
    assert rig.received[place].scalars["episode/failed"] == 2.0 and rig.received[place].num_answers == 2
    np.testing.assert_array_equal(rig.tensors[place]["episodes"], [0, 1])


def test_an_agent_that_misbehaves_is_tried_again_then_its_prompt_dropped_with_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each row in another way, and nothing but these is dropped; no turn is kept of any."""
    rollout = plays("misbehaves", reward_retries=1, episode={"max_tokens": 64, "can_replay": True})
    rollout["agent_settings"] = {"extra": 2}
    with caplog.at_level(logging.INFO), RolloutRig(tmp_path, ["1+2="] * 18, rollout=rollout, group_size=1) as rig:
        rig.run_until(lambda: len(rig.received) == 18, "all prompts")
        assert not list(rig.trial.turns_path.iterdir())
    outcomes, line = rig.outcomes(), some_agents.misbehaves.__code__.co_firstlineno
    assert {number for number, outcome in outcomes.items() if outcome == "finished"} == set("0 6 7 10 12 13 17".split())
    assert outcomes["1"] == f"agent_error: KeyError: 'no such field' ({FILE}:{line + 5})"
    assert outcomes["2"] == f"agent_error: SystemExit: 0 ({FILE}:{line + 7})"
    assert outcomes["3"] == f"agent_error: CancelledError ({FILE}:{line + 9})"
    assert outcomes["4"] == "agent_error: TypeError: an agent returns a number, an Outcome or None, got str"
    assert outcomes["5"].startswith("agent_error: ValueError: a reward must be a finite float32")
    assert outcomes["8"] == "agent_error: its process ended by itself, exit code 3"
    assert outcomes["9"].endswith(
        "processes that played it ended, the last: its process ended by itself, killed by signal 9"
    )
    assert outcomes["11"].startswith("agent_error: ValueError: what it reports has 10")
    assert outcomes["14"].startswith("agent_error: ValueError: yyyy")
    assert outcomes["15"] == f"agent_error: UnshowableError: an error whose text cannot be shown ({FILE}:{line + 33})"
    assert outcomes["16"] == rf"agent_error: KeyError: '\ud800' ({FILE}:{line + 35})"
    scalars = {header.uid.partition("#")[0]: header.scalars for header in rig.received}
    assert scalars["0:12"]["episode/ended/length"] == 1.0 and scalars["0:10"]["episode/ended/length"] == 0.0
    assert scalars["0:13"]["notes/" + "m" * 200] == 1.0
    assert [scalars["0:17"][name] for name in ("notes/a?b", "notes/m?", "episode/ended/other")] == [1.0] * 3
    assert max(len(record.getMessage()) for record in caplog.records) < 70_000, "the rest is said in a number"
    assert any("bytes more" in record.getMessage() for record in caplog.records)
    assert ", in misbehaves\n" in caplog.text and ", in _outcome\n" not in caplog.text, (
        "tracebacks begin in the user's file"
    )


def test_episodes_whose_process_another_one_ended_are_played_again_as_if_nothing_were(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = outcomes_of(tmp_path, plays("kills_once"), 8)
    assert outcomes.pop("0") == "agent_error: its process ended by itself, exit code 3"
    assert set(outcomes.values()) == {"finished"}


def test_an_agent_that_awaits_what_never_comes_is_dropped_and_one_that_awaits_a_slow_reward_is_not(
    tmp_path: Path, folder: Path
) -> None:
    rollout = plays(
        "waits_for_some", agent_timeout_s=0.5, reward=f"{HERE}:waits_for_the_others", reward_timeout_s=600.0
    )
    os.mkfifo(fifo := folder / "fifo")
    with RolloutRig(tmp_path, ["1+2="] * 4, rollout=rollout, group_size=1) as rig, ExitStack() as stack:

        def all_came() -> bool:
            if {"1", "2"} <= rig.outcomes().keys():
                stack.callback(os.close, os.open(fifo, os.O_RDWR))
            return len(rig.received) == 4

        rig.run_until(all_came, "four prompts")
        outcomes = rig.outcomes()
    assert outcomes["0"] == outcomes["3"] == "finished"
    why = f"agent_error: agent {HERE}:waits_for_some waited 0.5 s (rollout.agent_timeout_s) for "
    line = some_agents.waits_for_some.__code__.co_firstlineno + 3
    assert outcomes["1"].startswith(why) and outcomes["1"].endswith(f", in {FILE}:{line}")
    assert outcomes["2"].startswith(why)


def test_an_agent_that_blocks_the_loop_is_interrupted_or_ended_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted where it stands, or ended with its process, where that is impossible."""
    monkeypatch.setattr("corral.workers.user_code.children._SILENCE_GRACE_S", 0.5)
    outcomes = outcomes_of(tmp_path, plays("blocks_for_some", agent_timeout_s=1.0), 4)
    assert [outcomes[number] for number in ("0", "3")] == ["finished"] * 2
    why = f"agent_error: EventLoopBlockedError: agent {HERE}:blocks_for_some blocked the event loop for 1 s "
    line = some_agents.blocks_for_some.__code__.co_firstlineno + 13
    assert outcomes["1"].startswith(why) and outcomes["1"].endswith(f"({FILE}:{line})")
    assert outcomes["2"].startswith("agent_error: its event loop stood still for ")


def test_episodes_are_dealt_to_all_processes_which_may_make_sandboxes(tmp_path: Path, folder: Path) -> None:
    _, tensors = one_group(tmp_path, plays("makes_a_sandbox", agent_processes=2), group_size=4)
    np.testing.assert_array_equal(tensors["rewards"], [1.0] * 4)
    assert len(list(folder.iterdir())) == 2


def test_each_try_has_other_answers(tmp_path: Path, folder: Path) -> None:
    rig, _ = one_group(tmp_path, plays("fails_at_first", reward_retries=1), group_size=1)
    seeds = AnswerSeeds(rig.plan.seed, "0:0", 0)
    assert rig.server.seeds == [seeds.of(answer, call=turn) for answer, turn in ((0, 0), (1, 0), (1, 1))]


def test_an_agent_that_always_fails_ends_the_worker_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What rl-logs --errors shows are the last lines of the worker's log."""
    with RolloutRig(tmp_path, ["1+2="] * 20, rollout=plays("always_raises")) as rig, caplog.at_level(logging.INFO):
        assert rig.run_to_its_end() == WorkerExit.USER_CODE
    own = [record for record in caplog.records if not record.name.startswith("aiohttp")]  # servers of the rig
    last_line = own[-1].getMessage().splitlines()[-1]
    line = some_agents.always_raises.__code__.co_firstlineno + 1
    assert f"{HERE}:always_raises" in last_line and f"KeyError: 'no such field' ({FILE}:{line})" in last_line


LOADS = """
import os, signal
from pathlib import Path
from tests.workers.rollout.some_agents import asks_twice
flag = Path(__file__).with_suffix(".flag")
if not flag.exists():
    flag.write_text("")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_while_it_loads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loads_once_killed.py").write_text(LOADS)
    monkeypatch.syspath_prepend(tmp_path)
    rollout = plays("asks_twice") | {"agent": "loads_once_killed:asks_twice"}
    with RolloutRig(tmp_path, ["1+2="], rollout=rollout, group_size=1) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
    assert rig.outcomes() == {"0": "finished"}


@pytest.mark.parametrize(
    ("loads", "has_played", "error"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", False, HostError),
        ("import time\ntime.sleep(600)", False, HostError),
        ("import no_such_module", True, HostError),
        ("import no_such_module", False, UserCodeError),
    ],
)
def test_only_what_a_process_says_before_anything_was_played_is_the_users_code(
    loads: str, has_played: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_loads.py").write_text(loads)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Launch, "start_timeout_s", 30.0 if "sleep" not in loads else 0.5)
    config = RolloutConfig(agent="never_loads:play", reward=reward_parts("corral.workers.rewards:exact_match"))
    prompts = PromptEncoder(write_tokenizer(tmp_path / "m"))
    judge = RewardJudge(config, prompts.tokenizer, stop_token_ids=(), hidden=())

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await open_player(stack, config, judge, prompts, has_played=has_played)

    with pytest.raises(error, match="never_loads:play"):
        asyncio.run(start())


def test_a_process_that_plays_holds_no_secret_of_the_trial(tmp_path: Path, folder: Path) -> None:
    fields = [{"look in": [str(tmp_path / "exp" / "trial" / "secrets")]}]
    with RolloutRig(tmp_path, ["1+1="], rollout=plays("looks_around"), group_size=1, fields=fields) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
        secrets = [path.read_bytes() for path in rig.trial.secrets_path.iterdir() if path.is_file()]
    assert rig.outcomes() == {"0": "finished"}
    seen = json.loads((folder / "seen").read_text())
    assert not any(str(tmp_path) in target for target in seen["opened"].values()), "no file of the trial is open"
    words = {word for content in secrets for word in content.split(b'"') if len(word) >= 24}
    assert words, "there are secrets"
    assert seen["secrets"] == [], "nobody may read them"
    assert 1 <= len(seen["processes"]) < 8, "there are its own, and no worker that holds them"
    for where in ("environ", "cmdline", "memory"):
        content = (folder / where).read_bytes()
        assert content and not any(word in content for word in words), where


@pytest.mark.parametrize(("can_replay", "num_requests"), [(True, 3), (False, 5)])
def test_turns_of_an_episode_whose_process_is_lost_are_made_once_where_it_can_be_played_again(
    can_replay: bool, num_requests: int, tmp_path: Path, folder: Path
) -> None:
    rollout = plays("dies_once", episode={"can_replay": can_replay})
    rig, tensors = one_group(tmp_path, rollout, group_size=1)
    assert rig.server.num_requests == num_requests
    made = [*ids_of("7"), EOS]
    expected = [*ids_of("1+1="), *made, *ids_of("+"), *made, *ids_of("+"), *made]
    np.testing.assert_array_equal(tensors["input_ids"], expected)
    assert not rig.trial.turns_path.exists() or not list(rig.trial.turns_path.iterdir())


def test_turns_that_cannot_be_kept_cost_no_prompt(tmp_path: Path, folder: Path) -> None:
    (folder / "go").touch()
    with RolloutRig(
        tmp_path, ["1+1="], rollout=plays("waits_between", episode={"can_replay": True}), group_size=1
    ) as rig:
        rig.trial.turns_path.write_text("no folder")  # as good as a full disk: nothing can be written below it
        rig.run_until(lambda: len(rig.received) == 1, "the episode")
    assert rig.outcomes() == {"0": "finished"}


def test_a_rollout_worker_goes_on_behind_the_turns_that_the_one_before_it_has_seen(
    tmp_path: Path, folder: Path
) -> None:
    rollout = plays("waits_between", episode={"can_replay": True})
    with RolloutRig(tmp_path, ["1+1="], rollout=rollout, group_size=1) as rig:
        turns = rig.trial.turns_path
        rig.run_until(lambda: sum(path.read_bytes().count(b"\n") for path in turns.glob("*")) == 2, "two turns")
        (folder / "go").touch()
        rig.run_until(lambda: len(rig.received) == 1, "the episode")
        assert rig.server.num_requests == 3
        np.testing.assert_array_equal(rig.tensors[0]["prompt_mask"].sum(), 6)


def test_a_program_that_knows_the_api_alone_plays_an_episode(tmp_path: Path) -> None:
    """The one of docs/agents.md, with the client of OpenAI; it is told an address and a key, and nothing of a trial."""
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    (tmp_path / "play.py").write_text(page.partition("# play.py\n")[2].partition("```")[0])
    settings = {"command": [sys.executable, str(tmp_path / "play.py")]}
    rollout = {"agent": "corral.agents:program", "agent_settings": settings, "agent_processes": 1}
    with RolloutRig(tmp_path, ["1+1="], rollout=rollout, fields=[{"answer": 7}], group_size=1) as rig:
        rig.run_until(lambda: len(rig.received) == 1, "one prompt")
    assert rig.outcomes() == {"0": "finished"}
    np.testing.assert_array_equal(rig.tensors[0]["input_ids"], [*ids_of("1+1="), *ids_of("7"), EOS])
    np.testing.assert_array_equal(rig.tensors[0]["rewards"], [1.0])
    assert rig.received[0].scalars["notes/characters"] == 1.0


LOOKS = """
import glob, json, os, sys, time, urllib.request
row, own, folder = json.load(sys.stdin), os.environ["OPENAI_API_KEY"], sys.argv[1]
open(f"{folder}/{row['id']}", "w").close()
while len(os.listdir(folder)) < 2:  # until the other program has its key, too
    time.sleep(0.01)
keys = set()
for kind in ("environ", "task/*/environ"):
    for path in glob.glob(f"/proc/[0-9]*/{kind}"):
        try:
            words = open(path).read().split(chr(0))
        except OSError:
            continue
        keys |= {word.partition("=")[2] for word in words if word.startswith("OPENAI_API_KEY=")}
for path in glob.glob("/proc/[0-9]*/mem"):
    try:
        open(path, "rb").close()
        keys.add(path)
    except OSError:
        pass
keys -= {own, f"/proc/{os.readlink('/proc/self')}/mem"}
body = json.dumps({"model": "policy", "prompt": row["prompt"]}).encode()
headers = {"Authorization": f"Bearer {own}", "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
print(json.dumps({"reward": len(keys)}))
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_no_program_reads_the_key_of_another_episode(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "here").mkdir()
    settings = {"command": [sys.executable, str(tmp_path / "looks.py"), str(tmp_path / "here")]}
    rollout = {"agent": "corral.agents:program", "agent_settings": settings, "agent_processes": 1}
    with RolloutRig(tmp_path, ["1+1=", "1+2="], rollout=rollout, group_size=1) as rig:
        rig.run_until(lambda: len(rig.received) == 2, "both prompts")
    assert rig.outcomes() == {"0": "finished", "1": "finished"}
    assert [tensors["rewards"].tolist() for tensors in rig.tensors] == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        ("", None),
        ("12", Outcome(12.0)),
        ("1\n0.5\n", Outcome(0.5)),
        ('{"reward": 1, "calls": 2, "why": "right"}', Outcome(1.0, metrics={"calls": 2.0})),
        (
            '{"reward": 1, "cost": Infinity, "size": 1' + "0" * 400 + "}",
            Outcome(1.0, metrics={"cost": inf, "size": inf}),
        ),
        (f"{10**400}", None),
        ('{"score": 1}', None),
        ("1\nthe answer is 1", None),
        ("NaN", None),
        ('["1"]', None),
    ],
)
def test_the_last_line_of_a_program_says_what_it_was_worth(output: str, outcome: Outcome | None) -> None:
    assert outcome_of(output) == outcome
