"""Every recipe and algorithm, one after the other, on this machine: does training move what it should? `make recipes`.

    arithmetic data, an untrained model ─┬► arithmetic_sft.yaml ──export──► all other recipes ──► a table
                                         └► the same, cut short ──► arithmetic_grpo.yaml by each algorithm ──► another

Recipes name example paths, which are given their meaning here: demo/model is the untrained model, demo/sft,
demo/tools_sft and demo/grpo are what the recipes of `MADE` have made of it, and all others are files of the data.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments import registry
from corral.experiments.config.presets import PRESETS, SHOWING
from corral.experiments.errors import dotted, leaves
from corral.experiments.loading.yaml_loader import read_yaml
from corral.experiments.own_python import own_python

EXAMPLES = "demo/"
UNTRAINED, AFTER_SFT, AFTER_TOOLS_SFT = "model", "sft", "tools_sft"
AFTER_GRPO = "grpo"
MADE: Mapping[str, str] = {
    AFTER_SFT: "arithmetic-sft",
    AFTER_TOOLS_SFT: "arithmetic-tools-sft",
    AFTER_GRPO: "arithmetic-grpo",
}
"""The name of the recipe that makes it, by the example path."""
_COMPARED, _DISTILLED = "arithmetic_grpo.yaml", "arithmetic_distillation.yaml"
COMPARED_FROM = "control.max_steps=520"
"""What SFT is cut short by: its model has most of what algorithms teach still before it."""
COMPARED_BY = ("control.max_steps=24", "train_batch_size=64", "evaluation.every=2 steps")
GOALS = (0.7, 0.75, 0.8)
"""Mean rewards of answers to held-out problems; the model of `COMPARED_FROM` has about 0.5."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a recipe is for: a number of metrics.jsonl that rises, or falls."""

    metric: str
    words: str
    rises: bool

    def is_kept(self, before: float, after: float) -> bool:
        """Whether the number went where it should."""
        return after > before if self.rises else after < before


PROMISES: Mapping[str, Promise] = {
    "sft": Promise("eval/loss", "held-out loss falls", rises=False),
    "reward_model": Promise("eval/accuracy", "held-out accuracy rises", rises=True),
    "dpo": Promise("eval/margin", "held-out margin rises", rises=True),
    "ppo": Promise("eval/reward/mean", "held-out reward rises", rises=True),
    "async_ppo": Promise("eval/reward/mean", "held-out reward rises", rises=True),
}
"""By the recipe's `experiment` key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one recipe went."""

    recipe: str
    promise: Promise
    values: Sequence[float]
    """The promised number at each evaluation; empty if the trial failed before it was known twice."""
    seconds: float

    @property
    def is_good(self) -> bool:
        return len(self.values) > 1 and self.promise.is_kept(self.values[0], self.values[-1])


def all_recipes() -> list[Path]:
    """Every recipe that ships, SFT first: the others start from what it makes."""
    folder = Path(registry.__file__).with_name("recipes")
    return sorted(folder.glob("*.yaml"), key=lambda path: (kind_of(path) != "sft", path.name))


def kind_of(recipe: Path) -> str:
    """Its `experiment` key."""
    return str(read_yaml(recipe)[0]["experiment"])


def example_paths(recipe: Path) -> dict[str, str]:
    """The example behind each key that names one: {"actor.path": "sft", "dataset.path": "train_grpo.jsonl"}."""
    return {
        dotted(path): value.removeprefix(EXAMPLES)
        for path, value in leaves(read_yaml(recipe)[0])
        if isinstance(value, str) and value.startswith(EXAMPLES)
    }


def needs_of(recipe: Path) -> list[Path]:
    """The recipes that make what it starts from or learns of."""
    by_name = {str(read_yaml(path)[0]["name"]): path for path in all_recipes()}
    return [by_name[MADE[example]] for example in example_paths(recipe).values() if example in MADE]


def with_needs(recipes: Iterable[Path]) -> list[Path]:
    """The recipes, each once and behind those that it needs."""
    return list(dict.fromkeys(one for path in recipes for one in (*with_needs(needs_of(path)), path)))


def gpu_settings(recipe: Path) -> list[str]:
    """Overrides that give a GPU to each worker that the recipe keeps on the CPU: it computes there by itself."""
    groups = read_yaml(recipe)[0].get("groups", {})
    return [f"groups.{name}.scheduling.gpu=1" for name, group in groups.items() if "gpu" in group["scheduling"]]


def backend_settings(recipe: Path, backend: str) -> list[str]:
    """Overrides by which servers of this backend answer, in recipes where any do."""
    allocation = str(read_yaml(recipe)[0]["allocation"])
    generation, plus, training = allocation.partition("+")
    layout = generation.partition(":")[2]
    return [f"allocation={backend}:{layout}{plus}{training}"] if plus else []


def read_values(metrics: Path, name: str) -> list[float]:
    """A number of every line of metrics.jsonl that has it."""
    if not metrics.exists():
        return []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(line[name]) for line in lines if line.get(name) is not None]


def answers_to_goal(metrics: Path, goal: float) -> int | None:
    """Answers that were trained on before held-out problems were first answered that well; None if they never were."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    reached = next((line["step"] for line in lines if line.get("eval/reward/mean", -1.0) >= goal), None)
    if reached is None:
        return None
    trained: float = sum(line.get("ppo/num_answers", 0.0) for line in lines if line["step"] <= reached)
    return round(trained)


def compared_algorithms() -> list[str]:
    """All but those with a critic, for which a model is missing in the recipes that they train by."""
    return [name for name, preset in PRESETS.items() if preset.get("advantage") != "gae"]


def recipe_of(algorithm: str) -> Path:
    """The recipe that an algorithm is compared by: one for all, but with a teacher where one is learned from."""
    name = _DISTILLED if "distillation" in PRESETS.get(algorithm, {}) else _COMPARED
    (recipe,) = (path for path in all_recipes() if path.name == name)
    return recipe


def compare(names: Sequence[str], *, root: Path, trial: str, data: Path, backend: Sequence[str]) -> tuple[str, bool]:
    """The same recipe by each algorithm, from one model that knows half.

    Args:
        backend: settings of who answers.

    Returns:
        A table of how many answers each was trained on until it was that good; whether each raised the reward.
    """
    sft = next(path for path in all_recipes() if kind_of(path) == "sft")
    train(sft, root=root, trial=f"{trial}-half", data=data, overrides=[COMPARED_FROM])
    start = f"actor.path={root / MADE[AFTER_SFT] / f'{trial}-half' / 'exports' / 'final'}"
    rows, is_good = [("ALGORITHM", "BEFORE", "AFTER", *(f"ANSWERS TO {goal:g}" for goal in GOALS))], True
    for name in names:
        own = [start, f"ppo.algorithm={name}", *COMPARED_BY, *backend]
        own += ["rollout.demonstrations=answer"] if name in SHOWING else []
        metrics = train(recipe_of(name), root=root, trial=f"{trial}-{name}", start=trial, data=data, overrides=own)
        values = read_values(metrics, "eval/reward/mean") or [0.0, 0.0]
        answers = [answers_to_goal(metrics, goal) for goal in GOALS]
        is_good &= values[-1] > values[0]
        ends = (f"{values[0]:.3f}", f"{values[-1]:.3f}")
        rows.append((name, *ends, *(f"{count:,}" if count is not None else "-" for count in answers)))
    return _aligned(rows), is_good


def render(results: Sequence[Result]) -> str:
    """One line a recipe."""
    rows = [("RECIPE", "WHAT MOVES", "BEFORE", "AFTER", "TIME", "")]
    for result in results:
        has_both = len(result.values) > 1
        before, after = (f"{result.values[n]:.3f}" if has_both else "-" for n in (0, -1))
        verdict = "yes" if result.is_good else "NO" if has_both else "FAILED"
        rows.append((result.recipe, result.promise.words, before, after, f"{result.seconds:.0f} s", verdict))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def train(
    recipe: Path, *, root: Path, trial: str, data: Path, start: str | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Train a recipe to its end on this machine; returns its metrics.jsonl, which may be missing if it failed.

    Args:
        root: where trials go.
        data: the folder of the arithmetic data.
        start: the trial of other recipes whose models this one names; None is `trial`.
        overrides: settings in place of the recipe's, such as "seed=2".
    """
    options = []
    made = {example: root / name / (start or trial) / "exports" / "final" for example, name in MADE.items()}
    for key, example in example_paths(recipe).items():
        options += ["-s", f"{key}={made.get(example, data / example)}"]
    for override in overrides:
        options += ["-s", override]
    submit = [str(Path(sys.executable).parent / "rl-submit"), str(recipe), "--local", "--wait"]
    subprocess.run([*submit, "--trial", trial, "--fileroot", str(root), *options], check=False)
    return root / str(read_yaml(recipe)[0]["name"]) / trial / "metrics.jsonl"


def run(recipe: Path, *, root: Path, trial: str, data: Path, overrides: Sequence[str] = ()) -> Result:
    """Train a recipe to its end, and look at what has become of the promised number."""
    promise = PROMISES[kind_of(recipe)]
    print(f"== {recipe.name}: {promise.words}", flush=True)
    started = time.monotonic()
    metrics = train(recipe, root=root, trial=trial, data=data, overrides=overrides)
    values = read_values(metrics, promise.metric)
    return Result(recipe=recipe.name, promise=promise, values=values, seconds=time.monotonic() - started)


def make_data(root: Path) -> Path:
    """The arithmetic data and an untrained model; returns their folder."""
    data = root / "demo-data"
    subprocess.run(own_python("-m", "corral.workers.data.arithmetic", "--out", str(data)), check=True)
    return data


def main() -> int:
    """Run the recipes and compare the algorithms; 1 if one does not move what it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "only", nargs="*", help="words of recipes' names, such as dpo: these and what they need, and no algorithms"
    )
    default = Path(os.environ.get("CORRAL_FILEROOT", "~/corral")).expanduser()
    parser.add_argument("--fileroot", type=Path, default=default, help="where trials and data go")
    parser.add_argument("--backend", choices=["hf", "sglang"], default="hf", help="whose generation servers answer")
    parser.add_argument("--algorithms", help="compare these, comma between them, and run only recipes that they need")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each trainer rank and generation server")
    arguments = parser.parse_args()
    root: Path = arguments.fileroot.absolute()
    data = make_data(root)
    trial = time.strftime("recipes-%Y%m%d-%H%M%S")
    names = arguments.algorithms.split(",") if arguments.algorithms else [] if arguments.only else compared_algorithms()
    if arguments.algorithms:
        wanted = [need for name in names for need in needs_of(recipe_of(name)) if kind_of(need) != "sft"]
    else:
        wanted = [path for path in all_recipes() if any(word in path.name for word in arguments.only or [""])]

    def settings(recipe: Path) -> list[str]:
        return backend_settings(recipe, arguments.backend) + (gpu_settings(recipe) if arguments.gpu else [])

    results = [run(path, root=root, trial=trial, data=data, overrides=settings(path)) for path in with_needs(wanted)]
    tables, is_good = [render(results)] if results else [], all(result.is_good for result in results)
    if names:
        table, has_risen = compare(names, root=root, trial=trial, data=data, backend=settings(recipe_of("grpo")))
        tables, is_good = [*tables, table], is_good and has_risen
    print(*(f"\n{table}" for table in tables), sep="\n")
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
