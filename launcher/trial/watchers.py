"""Is it learning? Rules over the last train steps that tell, gently, what usually precedes a trial that goes wrong.

    last lines of metrics.jsonl ──mean over some steps, beyond a limit──► Finding: what is seen, and the usual remedy

They look at what every trial has written anyway and decide nothing: a trial that means to do what a rule warns of goes
on as it is. A rule speaks only once enough steps have been seen, so nothing is said of a beginning.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from corral.experiments.trial.log_state import DROPPED_AS_FILTERED
from corral.launcher.trial.metrics import is_number
from corral.launcher.trial.view import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A number that stays beyond a limit."""

    metric: str
    above: float
    """Limit of its mean over `steps`."""
    steps: int = 10
    weight: str | None = None
    """How much a step counts in the mean; every step the same without."""
    text: str
    """With the mean as {value}."""
    remedy: str
    """With the trial's name as {trial}."""


RULES = (
    # Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.4: what is cut off is judged for its length.
    Rule(
        metric="no_eos_fraction",
        above=0.3,
        text="{value:.0%} of the answers are cut off by the limit of tokens",
        remedy="raise rollout.sampling.max_new_tokens, or let ppo.overlong_buffer charge for length",
    ),
    # The same, section 3.2: groups of equal rewards give no gradient, and the batch is as much smaller.
    Rule(
        metric="data/dropped_of_issued",
        above=0.5,
        weight="data/issued",
        text="{value:.0%} of the prompts of these steps were dropped",
        remedy="rl-logs {trial} --errors says why; where answers are all as good, take other prompts (dataset.sampler)",
    ),
    # What errors drop is not drawn by chance: the rest of the prompts is a chosen part.
    Rule(
        metric="data/dropped_for_errors",
        above=0.03,
        steps=1,
        text="{value:.0%} of the prompts were dropped for errors",
        remedy="rl-logs {trial} --errors shows each error, with its file and line",
    ),
    # Schulman et al. 2017, https://arxiv.org/abs/1707.06347: beyond the clip a token teaches nothing more.
    Rule(
        metric="ppo/clip_fraction",
        above=0.3,
        text="{value:.0%} of the tokens are clipped: the policy moves far within a step",
        remedy="lower actor.optimizer.lr, or ppo.n_minibatches and ppo.sample_reuse",
    ),
    Rule(
        metric="train/skipped_early_stop",
        above=0.2,
        text="{value:.2g} updates of a step are left out since the policy had moved too far",
        remedy="lower actor.optimizer.lr, or ppo.n_minibatches",
    ),
    # Fu et al. 2025 (AReaL), https://arxiv.org/abs/2505.24298: weights of tokens that are too old are capped.
    Rule(
        metric="ppo/capped_fraction",
        above=0.2,
        text="{value:.0%} of the tokens leave the loss, as generator and trainer are too far apart on them",
        remedy="lower rollout.max_head_offpolicyness, or look at what rl-status says of the two",
    ),
    # Cui et al. 2025, https://arxiv.org/abs/2505.22617: without entropy nothing new is tried, and reward stands still.
    Rule(
        metric="entropy_is_gone",
        above=0.99,
        steps=20,
        text="the policy always says the same (entropy below 0.01 nats a token), and is not always right",
        remedy="start anew from earlier weights with ppo.eps_clip_high, ppo.entropy_coef, or a lower rate",
    ),
    # Kirk et al. 2023, https://arxiv.org/abs/2310.06452: RL from rewards makes a model's answers to a prompt alike.
    Rule(
        metric="answers_are_alike",
        above=0.99,
        text="most answers are copies of another one to the same prompt, and most are not right",
        remedy="raise rollout.sampling.temperature, ppo.entropy_coef or ppo.eps_clip_high; see rl-samples {trial}",
    ),
    # Gao et al. 2022, https://arxiv.org/abs/2210.10760: what a reward measures badly is found as the KL grows.
    Rule(
        metric="ppo/ref_kl",
        above=0.5,
        text="the policy is {value:.2g} nats a token away from the reference",
        remedy="raise ppo.kl.coef, or lower actor.optimizer.lr; rl-samples {trial} shows what it says now",
    ),
    # Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783: some losses make wrong answers longer and longer.
    Rule(
        metric="length_growth",
        above=2.0,
        steps=5,
        text="answers are {value:.2g} times as long as twenty steps before",
        remedy="rl-samples {trial} --sort=-length shows them; ppo.overlong_buffer charges for length",
    ),
    Rule(
        metric="rewards_are_equal",
        above=0.99,
        text="all answers of these steps have the same reward: nothing is learned from them",
        remedy="rl-samples {trial} shows them; look at the reward, or take harder or easier prompts",
    ),
)
_NO_ENTROPY = 0.01  # nats per token
_SOLVED = 0.95
_ALIKE, _HALF = 0.8, 0.5  # of the answers: of a prompt that is solved they may well be the same
_GROWTH_STEPS = 20
_ERROR_STEPS = 20


def findings_of(lines: Sequence[Mapping[str, Any]], *, trial: str) -> list[Finding]:
    """The findings of the rules about the last train steps.

    Args:
        lines: of metrics.jsonl, oldest first; those of evaluations are passed over.
    """
    steps = [_with_derived(line) for line in lines if "train/tokens" in line]
    _add_dropped(steps)
    _add_growth(steps)
    found = []
    for rule in RULES:
        lines = [line for line in steps[-rule.steps :] if is_number(line.get(rule.metric))]
        if len(lines) == rule.steps and (mean := _mean(lines, rule.metric, rule.weight)) > rule.above:
            text = rule.text.format(value=mean)
            text = f"{text}, over {rule.steps if rule.steps > 1 else min(len(steps), _ERROR_STEPS)} steps"
            remedy = rule.remedy.format(trial=trial)
            found.append(Finding(topic=rule.metric, text=text, details=remedy, step=steps[-1]["step"]))
    return found


def dropped_fraction(lines: Sequence[Mapping[str, Any]], steps: Collection[int]) -> float:
    """The fraction of the prompts of these train steps that was dropped."""
    found = [dict(line) for line in lines if "train/tokens" in line]
    _add_dropped(found)
    counted = [line for line in found if line["step"] in steps and "data/issued" in line]
    return _mean(counted, "data/dropped_of_issued", "data/issued") if counted else 0.0


def _mean(lines: Sequence[Mapping[str, Any]], metric: str, weight: str | None) -> float:
    return fmean([line[metric] for line in lines], [line[weight] for line in lines] if weight else None)


def _with_derived(line: Mapping[str, Any]) -> dict[str, Any]:
    derived = dict(line)
    entropy, mean, spread = (line.get(name) for name in ("ppo/entropy", "rewards/mean", "rewards/std"))
    if is_number(alike := line.get("response_duplicates")) and is_number(mean):
        derived["answers_are_alike"] = float(alike > _ALIKE and mean < _HALF)
    if is_number(entropy) and is_number(mean):
        derived["entropy_is_gone"] = float(entropy < _NO_ENTROPY and mean < _SOLVED)
    if is_number(spread) and is_number(mean):
        derived["rewards_are_equal"] = float(spread == 0.0 and mean < _SOLVED)
    return derived


def _add_dropped(steps: Sequence[dict[str, Any]]) -> None:
    """Per step, the fraction of prompts that was dropped; over the last steps, the fraction that errors dropped."""
    names = ("data/samples_dropped", "data/samples_trained")
    recent = deque[tuple[float, float]](maxlen=_ERROR_STEPS)  # errors and prompts of a step
    begin = [dict.fromkeys(names, 0.0)] if steps and steps[0]["step"] == 1 else []
    for before, line in pairwise([*begin, *steps]):
        if all(is_number(one.get(name)) for one in (before, line) for name in names):
            dropped, trained = (line[name] - before[name] for name in names)
            if dropped >= 0 and trained > 0:  # else a failure took steps back
                line["data/issued"] = dropped + trained
                line["data/dropped_of_issued"] = dropped / line["data/issued"]
                is_same_epoch = before.get("trainer_epoch") == line.get("trainer_epoch")
                num_errors = _errors(line) - (_errors(before) if is_same_epoch else 0.0)
                recent.append((num_errors, line["data/issued"]))
                line["data/dropped_for_errors"] = sum(one[0] for one in recent) / sum(one[1] for one in recent)


def _errors(line: Mapping[str, Any]) -> float:
    """Prompts that errors have dropped since the trainer epoch began."""
    kinds = (name.removeprefix("data/dropped/") for name in line if name.startswith("data/dropped/"))
    return sum(line[f"data/dropped/{kind}"] or 0.0 for kind in kinds if "/" not in kind and kind != DROPPED_AS_FILTERED)


def _add_growth(steps: Sequence[dict[str, Any]]) -> None:
    """Of each step's answers, how much longer they are than some steps before."""
    name = "response_length/mean"
    for before, line in zip(steps, steps[_GROWTH_STEPS:], strict=False):
        if is_number(line.get(name)) and is_number(before.get(name)) and before[name] > 0:
            line["length_growth"] = line[name] / before[name]
