"""What roles on ranks of their own gain: PPO's graph with calls of known durations, on one mesh and on two.

    python benchmarks/split_placement.py [--steps 3]

The master's own code runs here (trainer group, dealing, transfers, step runner), real model workers run in processes of
their own, and samples move between them; but each call sleeps (`slow_calls.py`) for 0.2 to 0.6 s. Printed are the
seconds of a step beside those of the best order that the graph allows (its critical path, where ranks are resources),
and from the ranks' own records which calls ran side by side in every step:

    one mesh of 2                 all roles in turns
    actor,ref | critic,reward     two meshes of 2: the same calls, as long as before, on twice the ranks
    one mesh of 4                 all roles in turns, and each call half as long, as if it scaled without a loss
"""

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.real_ranks import real_ranks, worker_context  # noqa: E402 - found through the line above
from benchmarks.slow_calls import Interval, Pace, read_intervals, write_paces  # noqa: E402
from corral.experiments.experiment import Experiment  # noqa: E402
from corral.experiments.plan import RunPlan, TrialIdentity, make_run_plan  # noqa: E402
from corral.experiments.registry import load_experiment  # noqa: E402
from corral.experiments.specs import read_dataset  # noqa: E402
from corral.experiments.trial.secrets import TrialSecrets  # noqa: E402
from corral.experiments.worker_specs import MasterWorkerSpec, ModelWorkerSpec, WorkerSpec  # noqa: E402
from corral.scheduling.dataflow import build_dataflow  # noqa: E402
from corral.scheduling.model_function_call import ModelFunctionCall  # noqa: E402
from corral.scheduling.policy_version import Lineage  # noqa: E402
from corral.workers.data.prompts import ordered_uids  # noqa: E402
from corral.workers.lifecycle.worker import WorkerContext  # noqa: E402
from corral.workers.master.calls import MeshCalls  # noqa: E402
from corral.workers.master.sample_source import DatasetSource, SequenceBuffer  # noqa: E402
from corral.workers.master.step_order import StepOutcome, StepRunner  # noqa: E402
from corral.workers.master.trainer_group import TrainerGroup  # noqa: E402
from tests.experiments.broken_yaml import VALID_PPO, write_inputs  # noqa: E402
from tests.workers.backends.training_helpers import save_tiny_model  # noqa: E402

SECONDS = {
    "actor_inf": 0.2,
    "ref_inf": 0.2,
    "rew_inf": 0.3,
    "critic_inf": 0.2,
    "actor_train": 0.6,
    "critic_train": 0.5,
}
ROW_KEYS = ("input_ids", "prompt_mask")
"""What a row of a dataset has; trajectories have more, but nobody generates here."""
BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """One step."""

    seconds: float
    result: StepOutcome
    moved_bytes: int
    """Of samples, from rank to rank."""


def main() -> None:
    """Measure each placement and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    num_steps = parser.parse_args().steps
    half = {name: seconds / 2 for name, seconds in SECONDS.items()}
    placements = (
        ("one mesh of 2", "fsdp:d2", SECONDS),
        ("actor,ref | critic,reward", "actor,ref=fsdp:d2,critic,reward=fsdp:d2", SECONDS),
        ("one mesh of 4", "fsdp:d4", half),
    )
    print(f"{'PLACEMENT':<28}{'STEP':>9}{'CRITICAL PATH':>16}{'ABOVE IT':>10}{'SPEED-UP':>10}")
    first_s = 0.0
    for title, training, seconds in placements:
        with tempfile.TemporaryDirectory(prefix="corral-split-") as name:
            plan = slow_plan(Path(name), training)
            write_paces(Path(name), {call: Pace(seconds=value) for call, value in seconds.items()})
            step_s = min(step.seconds for step in run_steps(plan, Path(name), num_steps=num_steps + 1)[1:])
            pairs = side_by_side(read_intervals(Path(name)))
        first_s = first_s or step_s
        path_s = critical_path_s(plan.master, seconds)
        print(
            f"{title:<28}{step_s:>7.3f} s{path_s:>14.3f} s{step_s / path_s - 1:>10.1%}{first_s / step_s:>9.2f}x",
            flush=True,
        )
        print(f"    side by side: {', '.join(f'{one} and {other}' for one, other in pairs) or 'nothing'}", flush=True)


def side_by_side(intervals: Sequence[Interval]) -> list[tuple[str, str]]:
    """Calls that ran at the same time in every step, in the order of their beginnings."""
    steps_by_pair: dict[frozenset[str], set[int]] = {}
    for one, other in itertools.combinations(intervals, 2):
        if one.number == other.number and one.call != other.call and one.overlaps(other):
            steps_by_pair.setdefault(frozenset((one.call, other.call)), set()).add(one.number)
    order = {name: place for place, name in enumerate(dict.fromkeys(interval.call for interval in intervals))}
    pairs = [sorted(pair, key=order.__getitem__) for pair, steps in steps_by_pair.items() if steps == _steps(intervals)]
    return [(one, other) for one, other in pairs]


def _steps(intervals: Sequence[Interval]) -> set[int]:
    return {interval.number for interval in intervals}


def slow_plan(folder: Path, training: str, *overrides: str) -> RunPlan:
    """A plan of PPO with four roles whose calls only sleep, and whose samples are rows: nobody has to generate."""
    write_inputs(folder)
    save_tiny_model(folder / "model", hidden_size=16, intermediate_size=16, num_hidden_layers=1, eos_token_id=1)
    (folder / "ppo.yaml").write_text(VALID_PPO)
    model = folder / "model"
    settings = {
        "allocation": f"hf:d1+{training}",
        "evaluation": "null",
        "train_batch_size": str(BATCH_SIZE),
        "critic": f"{{path: {model}, optimizer: {{lr: 1e-4}}}}",
        "ref": f"{{path: {model}}}",
        "reward_model": f"{{path: {model}}}",
        "ppo.kl.coef": "0.1",
        "ppo.advantage": "gae",
        "ppo.use_decoupled_loss": "true",
        "ppo.n_minibatches": "2",  # so that the proximal policy is a call of its own
    }
    experiment = load_experiment(
        folder / "ppo.yaml", [f"{key}={value}" for key, value in settings.items()] + [*overrides]
    )
    identity = TrialIdentity(experiment=experiment.name, trial="t", uuid="ab" * 16, directory=folder / "trial")
    plan = make_run_plan(experiment, identity, "local")
    return plan.model_copy(update={"workers": [_slow_worker(worker, experiment) for worker in plan.workers]})


def _slow_worker(worker: WorkerSpec, experiment: Experiment) -> WorkerSpec:
    if isinstance(worker, MasterWorkerSpec):
        return worker.model_copy(update={"calls": _slow_calls(worker.calls), "source": "dataset"})
    if isinstance(worker, ModelWorkerSpec):
        return worker.model_copy(update={"calls": _slow_calls(worker.calls), "dataset": read_dataset(experiment)})
    return worker


def _slow_calls(calls: list[ModelFunctionCall]) -> list[ModelFunctionCall]:
    """The same graph, of what can be had from rows."""
    there = {*ROW_KEYS, *(key for call in calls for key in call.output_keys)}
    return [
        call.model_copy(
            update={
                "implementation": f"benchmarks.slow_calls:{call.name}",
                "input_keys": tuple(key for key in call.input_keys if key in there),
            }
        )
        for call in calls
    ]


def run_steps(plan: RunPlan, folder: Path, *, num_steps: int) -> list[Seen]:
    """Some train steps of a plan, by the master's code and real ranks."""
    secrets = folder / "secrets"
    TrialSecrets.create(secrets)
    loaded = TrialSecrets.load(secrets)
    with (
        real_ranks(plan, folder, secrets) as names,
        worker_context(plan, "master_worker", 0, names=names, secrets=loaded) as context,
    ):
        return asyncio.run(_drive(context, num_steps=num_steps))


async def _drive(context: WorkerContext, *, num_steps: int) -> list[Seen]:
    """The master's part: what `TrainerEpoch` does in a step, without files."""
    spec = context.specification(MasterWorkerSpec)
    graph = build_dataflow(spec.calls)
    seen: list[Seen] = []
    async with TrainerGroup(context, spec, epoch=1) as trainers:
        await trainers.initialize(step=0, weights=spec.initial_weights, states={})
        buffer = SequenceBuffer(is_consumed=lambda uid: False)
        uids = ordered_uids(
            [f"sum-{number}" for number in range(spec.num_prompts)], seed=1, dataset_epoch=0, shuffle=True
        )
        source = DatasetSource(
            iter(uids), buffer, trainers, batch_size=spec.train_batch_size, on_drop=lambda uid, why: None
        )
        calls = MeshCalls(spec, graph, trainers, buffer, Lineage([], epoch=1))
        for step in range(num_steps):
            batch = await source.poll(version=step, remaining=spec.num_prompts)
            assert batch is not None, "rows are always there"
            started = time.monotonic()
            result = await StepRunner(graph, calls, batch, version=step, publish=_publish).run()
            seen.append(Seen(time.monotonic() - started, result, calls.end_step()))
            trainers.clear(buffer.release(batch))
    return seen


async def _publish() -> None:
    """Nobody generates."""


def critical_path_s(spec: MasterWorkerSpec, seconds: Mapping[str, float]) -> float:
    """The least time in which a step's calls can all be run, if nothing but they took any.

    A call begins when those that it waits for (by its keys, or since it changes their weights) have ended, and when its
    ranks are free. Every order in which calls can be given their ranks is tried, so the least is really that.
    """
    graph = build_dataflow(spec.calls)
    before = {call.name: {*graph.predecessors(call.name), *graph.must_follow(call.name)} for call in graph.step_calls}
    ranks = {call.name: spec.mesh(call.model_name).ranks for call in graph.step_calls}
    return min(
        _length_s(order, before, ranks, seconds)
        for order in itertools.permutations(before)
        if all(before[name] <= set(order[:number]) for number, name in enumerate(order))
    )


def _length_s(
    order: tuple[str, ...],
    before: Mapping[str, set[str]],
    ranks: Mapping[str, tuple[int, ...]],
    seconds: Mapping[str, float],
) -> float:
    ended: dict[str, float] = {}
    free: dict[int, float] = {}
    for name in order:
        begun = max([0.0, *(ended[other] for other in before[name]), *(free.get(rank, 0.0) for rank in ranks[name])])
        ended[name] = begun + seconds[name]
        free |= dict.fromkeys(ranks[name], ended[name])
    return max(ended.values())


if __name__ == "__main__":
    main()
