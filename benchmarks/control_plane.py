"""What a train step costs the master itself: real requests over real sockets to ranks that do not compute.

    python benchmarks/control_plane.py [--ranks 64 256 1024] [--samples 8192] [--answers 8] [--steps 9] [--idle-s 10]
                                       [--profile]

The master's own code runs here: request stream with CURVE, trainer group, sequence buffer, trajectory source, with
the graph actor_inf, ref_inf -> actor_train of a real plan. The ranks of `stub_ranks.py` live in other processes, a
connection each. It prints CPU seconds of the whole master process, of the middle step and of the least one, those of
its event loop's thread in the middle step, their share of a step of 30 s, and the bytes of a step that went to the
ranks and came from them:

    the same batch on more ranks                 what a rank costs
    a batch that grows with the ranks            what a sample costs besides: should be no more for many than for few
    the same, where each sample arrives alone    the most that arrivals can cost

Compare loads by the middle step. A step on few ranks is short, and what it costs differs by a third with where its
two threads happen to run: the least of several is a lucky one, while in a long step luck evens out.

Apart from that: the CPU seconds of the start, with a CURVE handshake per rank, and of 30 s in which nobody speaks.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_ranks import worker_context  # noqa: E402 - found through the line above
from benchmarks.stub_ranks import TRIAL  # noqa: E402
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan  # noqa: E402
from corral.experiments.registry import load_experiment  # noqa: E402
from corral.experiments.trial.secrets import TrialSecrets  # noqa: E402
from corral.experiments.worker_specs import MasterWorkerSpec  # noqa: E402
from corral.scheduling.dataflow import build_dataflow  # noqa: E402
from corral.scheduling.policy_version import Lineage  # noqa: E402
from corral.workers.lifecycle.worker import WorkerContext  # noqa: E402
from corral.workers.master.calls import MeshCalls  # noqa: E402
from corral.workers.master.master_worker import rare_collections  # noqa: E402
from corral.workers.master.sample_source import SequenceBuffer, TrajectorySource  # noqa: E402
from corral.workers.master.step_order import StepRunner  # noqa: E402
from corral.workers.master.trainer_group import TrainerGroup  # noqa: E402
from tests.experiments.broken_yaml import write_inputs  # noqa: E402
from tests.name_services import MemoryNameService  # noqa: E402

RANKS_PER_PROCESS = 128
STEP_S = 30.0


@dataclass(frozen=True)
class Load:
    """What is measured."""

    num_ranks: int
    samples: int
    """Of one step, over all ranks."""
    answers: int
    is_alone: bool = False
    """Whether each sample arrives by itself."""


@dataclass
class Cost:
    """CPU seconds and bytes of the master."""

    startup_s: float = 0.0
    process_s: list[float] = field(default_factory=list)
    """Per step, over all threads."""
    loop_s: list[float] = field(default_factory=list)
    """Per step, of the event loop's thread."""
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    idle_s: float = 0.0
    """Per second in which nobody says anything, over all threads."""


def main() -> None:
    """Measure all loads and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--samples", type=int, default=8192, help="of one step on the largest number of ranks")
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long to look on while nobody says anything")
    parser.add_argument("--profile", action="store_true", help="print where the largest load spends the loop's time")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    most = max(options.ranks)
    print(
        f"{'RANKS':>6}{'SAMPLES':>9}{'CPU/STEP':>11}{'LEAST':>10}{'LOOP':>10}{'OF 30 s':>9}{'SENT':>11}"
        f"{'RECEIVED':>11}{'START':>9}{'IDLE 30 s':>11}"
    )
    with tempfile.TemporaryDirectory(prefix="corral-control-") as folder:
        write_inputs(Path(folder))
        for title, growing, is_alone in (
            ("the same batch on more ranks", False, False),
            ("a batch that grows with the ranks", True, False),
            ("the same, each sample arriving alone", True, True),
        ):
            print(title)
            for ranks in options.ranks:
                load = Load(
                    ranks, options.samples * ranks // most if growing else options.samples, options.answers, is_alone
                )
                idle_s = options.idle_s if growing and not is_alone else 0.0
                _print(load, measure(load, Path(folder), num_steps=options.steps, idle_s=idle_s))
        if options.profile:
            profile = cProfile.Profile()
            measure(
                Load(most, options.samples, options.answers), Path(folder), num_steps=options.steps, profile=profile
            )
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def measure(
    load: Load, folder: Path, *, num_steps: int, idle_s: float = 0.0, profile: cProfile.Profile | None = None
) -> Cost:
    """Some steps of one load, after one that warms up; then so many seconds without any."""
    plan = _plan(load, folder, num_steps=num_steps)
    with ExitStack() as stack:
        secrets = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "secrets"
        TrialSecrets.create(secrets)
        context = stack.enter_context(
            worker_context(plan, "master_worker", 0, names=MemoryNameService(), secrets=TrialSecrets.load(secrets))
        )
        ranks: list[subprocess.Popen[str]] = []
        try:
            with rare_collections():
                cost = asyncio.run(
                    _drive(load, context, secrets, ranks, num_steps=num_steps, idle_s=idle_s, profile=profile)
                )
        finally:
            answers = [rank.communicate()[0] for rank in ranks]
    for answer in answers:
        counted = json.loads(answer)
        cost.sent_bytes += counted["received_bytes"] / (num_steps + 1)
        cost.received_bytes += counted["sent_bytes"] / (num_steps + 1)
    return cost


def _plan(load: Load, folder: Path, *, num_steps: int) -> RunPlan:
    settings = {
        "actor.path": folder / "model",
        "ref.path": folder / "model",
        "dataset.path": folder / "train.jsonl",
        "evaluation": "null",
        "ppo.kl.coef": 0.1,
        "ppo.n_minibatches": 2,
        "train_batch_size": load.samples,
        "allocation": f"hf:d1+fsdp:d{load.num_ranks}",
        "control.total_train_epochs": (num_steps + 2) * load.samples,  # however few rows there are
    }
    recipe = ROOT / "experiments" / "recipes" / "arithmetic_grpo.yaml"
    experiment = load_experiment(recipe, [f"{key}={value}" for key, value in settings.items()])
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid=TRIAL, directory=folder / "trial")
    return make_run_plan(experiment, identity, "local")


async def _drive(
    load: Load,
    context: WorkerContext,
    secrets: Path,
    ranks: "list[subprocess.Popen[str]]",
    *,
    num_steps: int,
    idle_s: float,
    profile: cProfile.Profile | None,
) -> Cost:
    """The master's part: what `TrainerEpoch` does in a step, without files."""
    spec = context.specification(MasterWorkerSpec)
    graph = build_dataflow(spec.calls)
    cost, begin_s = Cost(), time.process_time()
    opening = asyncio.create_task(_start_ranks(load, context, secrets, ranks))
    async with TrainerGroup(context, spec, epoch=1) as trainers:
        await opening
        await trainers.initialize(step=0, weights={}, states={})
        cost.startup_s = time.process_time() - begin_s
        lineage = Lineage([], epoch=1)
        buffer = SequenceBuffer(is_consumed=lambda uid: False)
        source = TrajectorySource(
            buffer,
            trainers,
            lineage,
            input_keys=graph.dataset_keys,
            batch_size=load.samples,
            eta=1,
            producers=(),
            on_drop=lambda uid, reason: None,
            is_dropped=lambda uid: False,
        )
        calls = MeshCalls(spec, graph, trainers, buffer, lineage)
        for step in range(num_steps + 1):
            process_s, loop_s = time.process_time(), time.thread_time()
            if profile is not None and step > 0:
                profile.enable()
            batch = await _next_batch(trainers, source, step)
            await StepRunner(graph, calls, batch, version=step, publish=_publish).run()
            calls.end_step()
            trainers.clear(buffer.release(batch))
            if profile is not None:
                profile.disable()
            if step > 0:  # the first one warms up
                cost.process_s.append(time.process_time() - process_s)
                cost.loop_s.append(time.thread_time() - loop_s)
        if idle_s > 0:
            begin_s = time.process_time()
            await asyncio.sleep(idle_s)
            cost.idle_s = (time.process_time() - begin_s) / idle_s
    return cost


async def _publish() -> None:
    """Weights are no part of what is measured."""


async def _next_batch(trainers: TrainerGroup, source: TrajectorySource, step: int) -> list[str]:
    while True:
        trainers.news.clear()
        trainers.check_alive()
        batch = await source.poll(version=step, remaining=2**40)
        if batch is not None:
            return batch
        await trainers.news.wait()


async def _start_ranks(load: Load, context: WorkerContext, secrets: Path, ranks: "list[subprocess.Popen[str]]") -> None:
    endpoint = context.names.get(context.keys.master_stream())
    at_once = 1 if load.is_alone else load.samples
    for first in range(0, load.num_ranks, RANKS_PER_PROCESS):
        count = min(RANKS_PER_PROCESS, load.num_ranks - first)
        arguments = [secrets, endpoint, first, count, load.samples // load.num_ranks, load.answers, at_once]
        command = [sys.executable, str(ROOT / "benchmarks" / "stub_ranks.py"), *map(str, arguments)]
        ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def _print(load: Load, cost: Cost) -> None:
    middle_s, least_s, loop_s = median(cost.process_s), min(cost.process_s), median(cost.loop_s)
    print(
        f"{load.num_ranks:>6}{load.samples:>9}{middle_s:>9.4f} s{least_s:>8.4f} s{loop_s:>8.4f} s",
        f"{middle_s / STEP_S:>9.2%}{cost.sent_bytes / 1e6:>8.2f} MB",
        f"{cost.received_bytes / 1e6:>8.2f} MB{cost.startup_s:>7.2f} s",
        f"{cost.idle_s * STEP_S:>9.2f} s" if cost.idle_s else "",
        sep="",
        flush=True,
    )


if __name__ == "__main__":
    main()
