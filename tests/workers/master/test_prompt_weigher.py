"""A sampler of the user's own runs in a process of its own: weights come back, and what it does wrong is said."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from corral.workers.lifecycle.worker import UserCodeError
from corral.workers.master.dealt_prompts import PromptWeigher

USERS = """
import os
def weigh(rewards):
    print("not an answer")
    return os.getpid() if rewards == [-1.0] else len(rewards) + rewards[-1]
def killed(rewards):
    os.kill(os.getpid(), 9)
def negative(rewards):
    return -1.0
def failing(rewards):
    raise KeyError("no such thing")
"""


@pytest.fixture(autouse=True)
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sampler.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)


async def asked(name: str, *histories: Sequence[float]) -> list[float]:
    async with PromptWeigher(f"my_sampler:{name}", hidden=()) as weigher:
        return await weigher.weigh(histories)


def test_weights_come_from_another_process_again_when_it_was_killed() -> None:
    async def over_a_kill() -> list[float]:
        async with PromptWeigher("my_sampler:weigh", hidden=()) as weigher:
            (pid,) = await weigher.weigh([[-1.0]])
            assert int(pid) != os.getpid()
            os.kill(int(pid), signal.SIGKILL)
            return await weigher.weigh([[0.5], [0.0, 1.0]])

    assert asyncio.run(over_a_kill()) == [1.5, 3.0]
    assert asyncio.run(asked("weigh")) == []


def test_a_sampler_whose_processes_are_killed_is_no_fault_of_its_code() -> None:
    with pytest.raises(TimeoutError, match="my_sampler:killed gave no weights in 3 tries: its process ended"):
        asyncio.run(asked("killed", [0.5]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("negative", r"a weight is a finite number from 0 on, and for \[0.5\] it is -1.0"),
        ("failing", r"my_sampler:failing fails: KeyError: 'no such thing' \(my_sampler.py:11\)"),
        ("missing", "my_sampler:missing fails: .*missing"),
    ],
)
def test_what_is_wrong_with_it_is_said(name: str, words: str) -> None:
    with pytest.raises(UserCodeError, match=words):
        asyncio.run(asked(name, [0.5]))
