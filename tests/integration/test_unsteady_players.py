"""Agents and environments of several turns, whose processes, workers and servers are killed and frozen in mid-turn.

    act (a hundred over both trials)    SIGKILL         its supervisor starts it again
                                        SIGSTOP         until a train step has run without it, or because of it none did
                                        SIGSTOP         until its supervisor takes it for dead
    of a third trial, with a judge and trackers, also SIGKILL of a rollout worker and of its next players as they load

What is proven is read from the trial's files after its end: every prompt is in the ledger once, with all its episodes;
and how many answers servers have brought to their end, beside how many the agents were given.
"""

import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from corral.launcher.trial.processes import children_of, descendants_of
from tests.environments import PACKAGES, needs_environments
from tests.integration.evidence import (
    check_every_sample_was_consumed_once,
    check_no_token_was_too_old,
    check_nothing_is_left,
)
from tests.integration.test_mixed_sources import JUDGE, saying
from tests.integration.trial_helpers import Material, Pace, Trial, read_lines, submit_environment
from tests.tracked import check_same, in_tensorboard, written

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PLAYERS = "players of "
VICTIMS = (
    f"{PLAYERS}rollout_worker/0",
    "rollout_worker/0",
    "generation_server/0",
    f"{PLAYERS}rollout_worker/1",
    "rollout_worker/1",
    "generation_server/1",
)
HOSTS = (b"corral.workers.user_code.agents:agent", b"corral_host")
"""What the command lines of processes have that play episodes."""
SETTINGS: dict[str, object] = {
    "allocation": "hf:d2+fsdp:d1",
    "groups.rollout_worker.count": 2,
    "train_batch_size": 4,
    "ppo.group_size": 2,
    "rollout.max_head_offpolicyness": 2,
    "rollout.agent_processes": 1,
    "rollout.agent_timeout_s": 10,
    "rollout.episode.can_replay": "true",
    "rollout.episode.max_turns": 4,
    "rollout.sampling.max_new_tokens": 4,
    "control.commit_every": "4 steps",
    "supervision.max_restarts": 100,
    "supervision.healthy_after_s": 0.01,
    "supervision.silence_timeout_s": 8,
    "evaluation.every": "1000 steps",
}


@pytest.fixture
def counters(tmp_path: Path) -> dict[str, str]:
    """Variables by which answers are counted where they are given, and where they are had."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE / "counted_answers", HERE, PACKAGES))),
        "CORRAL_TEST_SERVED": str(tmp_path / "served"),
        "CORRAL_TEST_ANSWERS": str(tmp_path / "answers"),
    }


@pytest.mark.timeout(3600)
def test_agents_are_played_to_their_end_however_often_something_of_them_is_lost(
    start_trial: Callable[..., Trial], counters: dict[str, str]
) -> None:
    trial = start_trial(
        num_rows=300,
        num_passes=2,
        pause_s=0.2,
        overrides={**SETTINGS, "rollout.agent": "steady_agents:goes_on"},
        environment=counters,
    )
    act_and_check(trial, counters, num_acts=60)


@needs_environments
@pytest.mark.timeout(3600)
def test_environments_are_played_to_their_end_however_often_something_of_them_is_lost(
    material: Material, tmp_path: Path, counters: dict[str, str]
) -> None:
    pace = Pace(tmp_path / "pace", num_steps=300)
    pace.set(pause_s=0.5)
    counters["CORRAL_TEST_PACE"] = str(pace.path)
    trial = submit_environment(
        tmp_path,
        material,
        num_tasks=1200,
        overrides={
            **SETTINGS,
            "rollout.environment.id": "paced",
            "rollout.environment.held_out_args": "{taskset: {num_tasks: 4}}",
            "rollout.environment.variables": "[PYTHONPATH, CORRAL_TEST_PACE, CORRAL_TEST_ANSWERS]",
        },
        pace=pace,
        environment=counters,
    )
    try:
        act_and_check(trial, counters, num_acts=40)
    finally:
        trial.close()


@pytest.mark.timeout(3600)
def test_a_trial_outlives_kills_of_players_that_load_and_of_its_judge_and_trackers(
    start_trial: Callable[..., Trial], counters: dict[str, str], material: Material, tmp_path: Path
) -> None:
    trial = start_trial(
        num_rows=300,
        num_passes=2,
        pause_s=0.2,
        overrides={
            **SETTINGS,
            "allocation": "hf:d3+fsdp:d1",
            "rollout.agent": "steady_agents:goes_on",
            "rollout.judge.path": saying("7", material.model, tmp_path / "judge"),
            "rollout.reward": json.dumps({"digits": {"function": "paced_rewards:digits"}, "good": JUDGE}),
            "tracking.to": "[tensorboard]",
        },
        environment=counters,
    )
    trial.wait_for_steps(1)
    victims = itertools.cycle(
        ("loading rollout_worker/0", "generation_server/2", "tracker/0", "loading rollout_worker/1", "master_worker/0")
        + ("model_worker/0", "gserver_manager/0", f"{PLAYERS}rollout_worker/0", "redis")
    )
    done = Counter[str]()
    for victim in itertools.islice(victims, 45):
        if victim.startswith("loading "):
            worker = victim.removeprefix("loading ")
            trial.kill(worker)
            for _ in range(2):
                kill(trial, PLAYERS + worker)
        else:
            kill(trial, victim)
        trial.wait_for_steps(1)
        done[victim] += 1
        print(f"{sum(done.values()):3} {victim}", flush=True)
    trial.full_speed()
    trial.wait_for(lambda: trial.ends(), "the rest of it", timeout_s=1200, may_end=True)
    trial.wait_for_end()
    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=2)
    check_same(in_tensorboard(trial.directory), written(trial.directory))
    print(f"{sum(done.values())} acts, {done}")


def act_and_check(trial: Trial, counters: dict[str, str], *, num_acts: int) -> None:
    """Everything that is done to a trial, and all that has to be so then."""
    trial.wait_for_steps(1)
    acts = itertools.cycle((kill, freeze_for_a_while, kill, freeze_for_good, kill))  # 5 and 6 have no divisor
    done = Counter[str]()
    for victim, act in itertools.islice(zip(itertools.cycle(VICTIMS), acts, strict=False), num_acts):
        began = time.monotonic()
        trial.wait_for(lambda: any(_is_kept(path) for path in _turns(trial)), "an episode that has had a turn")
        act(trial, victim)
        trial.wait_for_steps(1)
        done[f"{act.__name__} {victim}"] += 1
        print(f"{sum(done.values()):3} {act.__name__:20} {victim:30} {time.monotonic() - began:5.1f} s", flush=True)
    trial.full_speed()
    trial.wait_for(lambda: trial.ends(), "the rest of it", timeout_s=1200, may_end=True)
    trial.wait_for_end()

    check_nothing_is_left(trial)
    check_every_sample_was_consumed_once(trial)
    check_no_token_was_too_old(trial, eta=2)
    recorded = read_lines(trial.directory.trajectories_path)
    assert sorted(record["uid"] for record in recorded) == sorted(trial.uids)
    replaced = [event["worker"] for event in trial.events("worker_silent")]
    assert {"rollout_worker/0", "rollout_worker/1"} <= set(replaced), "a frozen rollout worker is found"
    assert not list(_turns(trial)), "turns are kept no longer than their episodes are played"
    num_served = len(Path(counters["CORRAL_TEST_SERVED"]).read_text().splitlines())
    num_given = len(Path(counters["CORRAL_TEST_ANSWERS"]).read_text().splitlines())
    print(f"{num_given} answers were given, {num_served} were made, {len(recorded)} prompts, {done}")
    assert num_given - num_served >= num_acts, "what was made was not made again"


def _turns(trial: Trial) -> Iterator[Path]:
    """Where turns of unfinished episodes are kept."""
    return trial.directory.turns_path.glob("*")


def _is_kept(path: Path) -> bool:
    with suppress(FileNotFoundError):  # its episode has just ended
        return path.stat().st_size > 0
    return False


def _pids(trial: Trial, victim: str) -> set[int]:
    """The processes that an act is about; none while what it is about is being started."""
    worker = victim.removeprefix(PLAYERS)
    if worker == victim:
        return {trial.pid(worker)}
    found = {pid for pid in descendants_of(trial.pid(worker)) if _is_host(pid)}
    return {pid for pid in found if found.isdisjoint(children_of(pid))}  # bubblewrap's have the same words


def _is_host(pid: int) -> bool:
    with suppress(OSError):  # it has just ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(host in command for host in HOSTS)
    return False


def _send(trial: Trial, victim: str, number: signal.Signals) -> set[int]:
    """A signal to what is there as soon as there is something."""
    pids = trial.wait_for(lambda: _pids(trial, victim), f"{victim} to be there", pause_s=0.3)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def kill(trial: Trial, victim: str) -> None:
    if victim.startswith(PLAYERS):
        killed = _send(trial, victim, signal.SIGKILL)
        trial.wait_for(lambda: _pids(trial, victim) - killed, f"other {victim}", pause_s=0.3)
    else:
        trial.kill(victim)


def freeze_for_a_while(trial: Trial, victim: str) -> None:
    """It wakes up with what it knew before, and some of that is not so any more."""
    steps = len(trial.train_steps())
    pids = _send(trial, victim, signal.SIGSTOP)
    trial.wait_for(
        lambda: len(trial.train_steps()) > steps or pids.isdisjoint(_pids(trial, victim)),
        f"a train step without {victim}, or its end",
        pause_s=0.3,
    )
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def freeze_for_good(trial: Trial, victim: str) -> None:
    if not victim.startswith(PLAYERS):  # who is still becoming ready is given minutes
        trial.wait_for(lambda: trial.workers()[victim]["state"] == "UP", f"{victim} to be up", pause_s=0.3)
    frozen = _send(trial, victim, signal.SIGSTOP)
    trial.wait_for(lambda: frozen.isdisjoint(_pids(trial, victim)), f"{victim} to be taken for dead", pause_s=0.3)
