"""Tokens per second of three generation servers before, while and after new weights take long to arrive.

    OMP_NUM_THREADS=1 python benchmarks/update_gap.py [--staging-s 8] [--versions 3] [--sglang] [--eta 1]

A real manager with three real servers, of the embedded engine in this process or SGLang's. 24 groups of four answers of
256 tokens are always under way, asked for as rollout workers ask, and counted as they come. Versions are published
one after the other, and each takes so many seconds to be staged on every host. The trainer waits for samples: each
group is of its next batch.

    before     the seconds before a version is published, with no update under way
    while      from its publication until the last server holds it
    after      as long as before, from then on
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # servers as the tests start them

from benchmarks.weight_update import make_model  # noqa: E402
from corral.experiments.config.rollout import RolloutConfig, SamplingConfig  # noqa: E402
from corral.experiments.trial.directory import TrialDirectory  # noqa: E402
from corral.experiments.trial.secrets import Secret, TrialSecrets  # noqa: E402
from corral.experiments.trial.trust import Trust  # noqa: E402
from corral.experiments.worker_specs import GserverManagerSpec  # noqa: E402
from corral.name_resolve.keys import TrialKeys  # noqa: E402
from corral.scheduling.policy_version import PolicyVersion  # noqa: E402
from corral.workers.checkpoint.published_weights import PublishedWeights  # noqa: E402
from corral.workers.episodes.partial_answer import PartialAnswer  # noqa: E402
from corral.workers.generation.control import ControlServer  # noqa: E402
from corral.workers.manager.gserver_manager import GserverManager  # noqa: E402
from corral.workers.requests.manager_messages import Route, Schedule  # noqa: E402
from corral.workers.rollout.generation_client import FailedTry, GenerationClient  # noqa: E402
from corral.workers.streams.https import open_session  # noqa: E402
from corral.workers.weight_transport.filling import StagedVersion  # noqa: E402
from corral.workers.weight_transport.host_weights import HostWeights  # noqa: E402
from corral.workers.weight_transport.staging import WeightStaging  # noqa: E402
from tests.launcher.trials import make_plan  # noqa: E402
from tests.name_services import MemoryNameService  # noqa: E402
from tests.workers.backends.trained_versions import publish  # noqa: E402
from tests.workers.generation.servers import ADMIN_KEY, API_KEY, LOOPBACK, serving  # noqa: E402
from tests.workers.loop_thread import loop_thread  # noqa: E402
from tests.workers.rollout.rollout_rig import prompt_dataset  # noqa: E402
from tests.workers.trusted import trust  # noqa: E402
from tests.workers.worker_context import worker_context  # noqa: E402

NUM_SERVERS, NUM_GROUPS, BATCH, ANSWERS = 3, 24, 24, 4
PROMPT = list(range(5, 37))
NEW_TOKENS = 256
SETTLE_S, PHASE_S, DEADLINE_S = 4.0, 8.0, 300.0


class SlowStaging(WeightStaging):
    """As from a shared file system that others read, too."""

    staging_s = 0.0

    def stage(
        self, version: str, weights: Path, digest: str | None, *, timeout_s: float, sources: Sequence[str] = ()
    ) -> StagedVersion:
        time.sleep(self.staging_s)
        return super().stage(version, weights, digest, timeout_s=timeout_s, sources=sources)


class Trial:
    """A manager, its servers, and groups that are always under way."""

    def __init__(self, folder: Path, eta: int) -> None:
        self.names = MemoryNameService()
        trial = TrialDirectory(folder / "exp" / "trial")
        trial.create()
        secrets = TrialSecrets.create(trial.secrets_path)
        shutil.copy(trust().path, Trust(trial.secrets_path).path)
        self.secrets = msgspec.structs.replace(secrets, http_api_key=Secret(API_KEY), http_admin_key=Secret(ADMIN_KEY))
        self.rollout = RolloutConfig.model_validate(
            {"reward": "tests.workers.rollout.rollout_rig:judge", "max_head_offpolicyness": eta}
        )
        spec = GserverManagerSpec(
            dataset=prompt_dataset(folder, ["1+1="]),
            train_batch_size=BATCH,
            total_train_epochs=1,
            rollout=self.rollout,
        )
        self.plan = make_plan(trial.path).model_copy(update={"workers": [spec]})
        self.keys = TrialKeys(self.plan.trial.uuid)
        self.step = 0
        self.num_tokens = 0
        """That have come from servers."""
        self.knows = ""
        """Why no server may answer, as the manager said last."""

    def tell(self, published: PublishedWeights) -> None:
        self.names.add(self.keys.policy_version(), published.to_json())
        self.step = published.policy_version.step

    def are_all_at(self, step: int) -> bool:
        return len(list(self.manager._table.serving(PolicyVersion(0, step)))) == NUM_SERVERS

    async def start(self) -> None:
        self.tasks = [asyncio.create_task(self.manager._main())]
        self.tasks += [asyncio.create_task(self.make_groups(number)) for number in range(NUM_GROUPS)]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def make_groups(self, number: int) -> None:
        """One group after the other, each as if it were admitted now, for the next batch of the trainer."""
        headers = {"Authorization": f"Bearer {API_KEY}"}

        async def route(uid: str, tokens: int, oldest_version: str, setback: FailedTry | None) -> str | None:
            asked = Schedule(
                uid=uid, tokens=tokens, order=0, due_step=due_step, oldest_version=oldest_version, knows=self.knows
            )
            answer = self.manager._route(asked)
            answer = answer if isinstance(answer, Route) else await answer
            self.knows = answer.reason
            return answer.url

        async with open_session(trust().client(), headers=headers, max_connections=8) as session:
            client = GenerationClient(
                session,
                route,
                sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
                stop_token_ids=[],
                token_timeout_s=DEADLINE_S,
            )
            for turn in itertools.count():
                due_step = self.step + number // BATCH
                seeds = [ANSWERS * turn + index for index in range(ANSWERS)]
                await asyncio.gather(*(self.make_answer(client, f"0:{number}-{turn}", seed) for seed in seeds))

    async def make_answer(self, client: GenerationClient, uid: str, seed: int) -> None:
        num_counted = 0

        def count(answer: PartialAnswer) -> None:
            nonlocal num_counted
            self.num_tokens += len(answer.output_ids) - num_counted
            num_counted = len(answer.output_ids)

        answer = PartialAnswer(max_new_tokens=NEW_TOKENS, sampling_seed=seed)
        await client.complete(uid, PROMPT, answer, sampling=client.sampling, watch=count)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(0.01)


@dataclass
class Meter:
    """Tokens of all servers."""

    trial: Trial

    def rate(self, until: Callable[[], bool]) -> float:
        """Tokens per second from now until something holds."""
        tokens, started = self.trial.num_tokens, time.monotonic()
        wait_for(until, "the end of a phase")
        return (self.trial.num_tokens - tokens) / (time.monotonic() - started)

    def rate_for(self, seconds: float) -> float:
        end = time.monotonic() + seconds
        return self.rate(lambda: time.monotonic() >= end)


@contextmanager
def running(arguments: argparse.Namespace, folder: Path, model: Path) -> Iterator[tuple[Trial, Meter]]:
    trial = Trial(folder, arguments.eta)
    with ExitStack() as stack:
        for index in range(NUM_SERVERS):
            host = folder / f"host-{index}"
            host.mkdir()
            served = stack.enter_context(serving("sglang" if arguments.sglang else "hf", model, host))
            staging = WeightStaging(HostWeights(host, trial.plan.trial.uuid, owner=f"generation_server/{index}"))
            staging.__class__, staging.staging_s = SlowStaging, arguments.staging_s  # type: ignore[attr-defined]
            served = stack.enter_context(served.taking(staging))
            control = ControlServer(served.updates, admin_key=ADMIN_KEY, address=LOOPBACK, tls=trust().server())
            record = {"url": served.client.url, "control": served.run(control.start()), "incarnation": "a", "place": ""}
            stack.callback(lambda served=served, control=control: served.run(control.stop()))
            trial.names.add(trial.keys.generation_server(index), json.dumps(record))
        loop = stack.enter_context(loop_thread(deadline_s=DEADLINE_S))
        context = worker_context(trial.plan, "gserver_manager", names=trial.names, secrets=trial.secrets)
        trial.manager = GserverManager(stack.enter_context(context))
        trial.tell(PublishedWeights(version="0.0", weights=str(model), digest=None))
        loop.run(trial.start())
        stack.callback(lambda: loop.run(trial.stop()))
        wait_for(lambda: trial.are_all_at(0), "the servers")
        yield trial, Meter(trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staging-s", type=float, default=8.0)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--eta", type=int, default=1)
    parser.add_argument("--sglang", action="store_true")
    arguments = parser.parse_args()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", megabytes=14, seed=0)
        weights = load_file(model / "model.safetensors")
        with running(arguments, folder, model) as (trial, meter):
            shares: list[tuple[float, float]] = []
            for step in range(1, arguments.versions + 1):
                weights = {key: 1.001 * tensor for key, tensor in weights.items()}
                sealed = publish(folder / f"v{step}", weights, companions=model)
                time.sleep(SETTLE_S)
                before = meter.rate_for(PHASE_S)
                trial.tell(PublishedWeights(version=f"0.{step}", weights=str(sealed.path), digest=sealed.digest))
                during = meter.rate(partial(trial.are_all_at, step))
                after = meter.rate_for(PHASE_S)
                shares.append((during / before, after / before))
                print(f"version {step}: {before:.0f} tokens/s before, {during:.0f} while, {after:.0f} after")
    during, after = (statistics.median(share) for share in zip(*shares, strict=True))
    print(f"{during:.2f} of undisturbed while weights arrive, {after:.2f} after (medians)")


if __name__ == "__main__":
    main()
