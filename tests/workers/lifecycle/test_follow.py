"""A worker acts on what changes in the name service, and goes on when that is away for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.name_resolve.base import NameServiceUnavailableError
from corral.workers.lifecycle.worker import Worker
from tests.launcher.trials import make_plan
from tests.name_services import MemoryNameService
from tests.workers.worker_context import worker_context

DEADLINE_S = 60.0


class Follower(Worker):
    def run(self) -> None:
        raise AssertionError("its loops are run one by one")


class UnreliableNames(MemoryNameService):
    """Fails now and then."""

    num_failures = 0

    def changes(self, seen: Mapping[str, str], *, timeout_s: float) -> dict[str, str]:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise NameServiceUnavailableError("away")
        return super().changes(seen, timeout_s=timeout_s)


def followed(tmp_path: Path, test: Callable[[UnreliableNames, dict[str, int]], Awaitable[None]]) -> None:
    """Run a test beside a worker that counts its looks at the roots `a` and `b/c`, which it does not do by itself."""
    trial = TrialDirectory(tmp_path / "exp" / "trial")
    trial.create()
    names, looks = UnreliableNames(), {"a": 0, "b/c": 0}

    async def look_at_a() -> None:
        looks["a"] += 1

    async def look_at_b() -> None:
        looks["b/c"] += 1

    async def run() -> None:
        secrets = TrialSecrets.create(trial.secrets_path)
        with worker_context(make_plan(trial.path), "rollout_worker", names=names, secrets=secrets) as context:
            follower = Follower(context)
            following = asyncio.create_task(
                follower.follow({"a": look_at_a, "b/c": look_at_b}, at_least_every_s=2 * DEADLINE_S)
            )
            await until(lambda: looks == {"a": 1, "b/c": 1})
            await test(names, looks)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_change_below_a_root_is_looked_at_without_waiting_for_the_next_look(tmp_path: Path) -> None:
    async def run(names: UnreliableNames, looks: dict[str, int]) -> None:
        names.add("b/c/0", "x")
        await until(lambda: looks["b/c"] == 2)
        assert looks["a"] == 1
        names.delete("b/c/0")
        await until(lambda: looks["b/c"] == 3)

    followed(tmp_path, run)


def test_what_changed_while_the_service_was_away_is_looked_at(tmp_path: Path) -> None:
    async def run(names: UnreliableNames, looks: dict[str, int]) -> None:
        names.num_failures = 2
        names.add("a/0", "x")
        await until(lambda: looks["a"] >= 2)
        before = looks["a"]
        names.add("a/0", "y")
        await until(lambda: looks["a"] > before and names.num_failures == 0)

    followed(tmp_path, run)
