"""Makers with int8 weights beside makers in float32, with and without the correction: the same recipe, several seeds.

    python benchmarks/quantized_makers.py [--seeds 1 2 3] [--makers float32 int8-corrected]

    arithmetic_sft.yaml ──export──► arithmetic_grpo.yaml, each maker x each seed ──metrics.jsonl──► one table

The trainer is in float32 everywhere, and held-out problems are answered by its weights. The first two makers are those
of the recipe, whose answers are a version old; the correction is truncated importance sampling (docs/algorithms.md).

No setting of corral's leaves the correction out, so a loss is here that takes every token for one that the trainer's
present weights have sampled. That leaves out what the token's age changes, too, which is a far larger error: so the
last two makers are compared on answers of the present version (rollout.max_head_offpolicyness: 0).

Trials that are found finished are not run again, so that seeds can be added to a table. To be started in the
repository's root; a trial takes some two and a half minutes of two cores. Errors are standard errors over seeds.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.run_recipes import all_recipes, make_data, read_values, train  # noqa: E402
from corral.experiments.config.algorithm import PPOConfig  # noqa: E402
from corral.workers.algorithms.functional.losses import TokenLosses  # noqa: E402
from corral.workers.backends.base import TokenScores  # noqa: E402
from corral.workers.backends.micro_batches import MicroBatch  # noqa: E402

SFT_RECIPE, GRPO_RECIPE = "arithmetic_sft.yaml", "arithmetic_grpo.yaml"

_FRESH = "rollout.max_head_offpolicyness=0"

MAKERS: Mapping[str, Sequence[str]] = {
    "float32": (),
    "int8-corrected": ("engine.quantization=int8", "ppo.is_ratio_mode=token_truncate"),
    "float32-fresh": (_FRESH,),
    "int8-fresh-uncorrected": (
        _FRESH,
        "engine.quantization=int8",
        "ppo.use_decoupled_loss=false",
        "ppo.loss=benchmarks.quantized_makers:uncorrected",
    ),
}
"""What is set in place of the recipe's settings, by the maker's name in the table."""

_LAST_STEPS = 10


def uncorrected(scores: TokenScores, micro_batch: MicroBatch, config: PPOConfig) -> TokenLosses:
    """The policy gradient at the present weights, whoever has sampled the tokens (one optimizer step a batch)."""
    ratio = (scores.logprobs - scores.logprobs.detach()).exp()
    return TokenLosses(-micro_batch.tensors["advantages"] * ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one trial came to."""

    maker: str
    seed: int
    held_out: Sequence[float]
    """Mean held-out rewards: before the first step, every ten steps, and after the last."""
    trained: float
    """Mean reward of the answers that the last ten steps were trained on."""
    gap_means: Sequence[float]
    """Nats between maker and trainer with the same weights, mean over tokens, at each step that had such tokens."""
    gap_maxima: Sequence[float]
    """The same of the token that differs most."""


def read_run(trial: Path, *, maker: str, seed: int) -> Run | None:
    """What the trial in this directory came to; None if it has not come to its end, where it exports its weights."""
    if not (trial / "exports" / "final").exists():
        return None
    metrics = trial / "metrics.jsonl"
    return Run(
        maker=maker,
        seed=seed,
        held_out=read_values(metrics, "eval/reward/mean"),
        trained=statistics.fmean(read_values(metrics, "rewards/mean")[-_LAST_STEPS:]),
        gap_means=read_values(metrics, "gap/mean"),
        gap_maxima=read_values(metrics, "gap/max"),
    )


def render(runs: Iterable[Run]) -> str:
    """One line a maker: final held-out rewards by seed; means over seeds of that, of the curve, and of the gap."""
    by_maker: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_maker.setdefault(run.maker, []).append(run)
    rows = [("MAKER", "HELD-OUT REWARD BY SEED", "MEAN", "CURVE", "LAST STEPS", "GAP MEAN", "GAP MAX")]
    for maker, of_maker in by_maker.items():
        rows.append(
            (
                maker,
                " ".join(f"{run.seed}:{run.held_out[-1]:.3f}" for run in of_maker),
                _with_error([run.held_out[-1] for run in of_maker]),
                _with_error([statistics.fmean(run.held_out) for run in of_maker]),
                _with_error([run.trained for run in of_maker]),
                f"{statistics.fmean(gap for run in of_maker for gap in run.gap_means):.1e}",
                f"{max(gap for run in of_maker for gap in run.gap_maxima):.1e}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def _with_error(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean}+-{statistics.stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else mean


def main() -> int:
    """Run what is missing, print the table; 1 if a trial has not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the GRPO trials; SFT has seed 1")
    parser.add_argument("--makers", nargs="+", choices=MAKERS, default=list(MAKERS))
    default = Path(os.environ.get("CORRAL_FILEROOT", "~/corral")).expanduser() / "quantized-makers"
    parser.add_argument("--fileroot", type=Path, default=default, help="where trials and data go, and are found again")
    arguments = parser.parse_args()
    root: Path = arguments.fileroot.absolute()
    recipes = {path.name: path for path in all_recipes()}
    data = make_data(root)
    if not (root / "arithmetic-sft" / "start" / "exports" / "final").exists():
        train(recipes[SFT_RECIPE], root=root, trial="start", data=data)
    runs: list[Run | None] = []
    for seed in arguments.seeds:
        for maker in arguments.makers:
            trial = f"{maker}-{seed}"
            metrics = root / "arithmetic-grpo" / trial / "metrics.jsonl"
            if not metrics.exists():
                print(f"== {trial}", flush=True)
                overrides = (f"seed={seed}", *MAKERS[maker])
                train(recipes[GRPO_RECIPE], root=root, trial=trial, data=data, start="start", overrides=overrides)
            runs.append(read_run(metrics, maker=maker, seed=seed))
    print(f"\n{render(run for run in runs if run is not None)}")
    return int(None in runs)


if __name__ == "__main__":
    sys.exit(main())
