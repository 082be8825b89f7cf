"""A loss or an advantage of one's own, held against what every one of them has to be: one command, before any trial.

    python -m corral.workers.algorithms.check gentle_loss:gentle            exit 0, or 1 with what is wrong
    python -m corral.workers.algorithms.check mine:Loss loss_settings.worse=0.3

made-up answers ──► the loss ──► its gradient against a numeric one       what is detached is held still in both
                            ──► alone, beside others, in another order    the same losses: micro-batches and ranks
                            ──► other numbers where nothing is trained    the same losses: prompts and padding
                            ──► at the center of the ratio                better answers become likelier
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.loading.overrides import apply_overrides, parse_override
from corral.scheduling.keys import Key, KeyLayout
from corral.workers.algorithms.advantage import AdvantageBatch, AdvantageEstimator, advantage_named
from corral.workers.algorithms.functional.losses import TokenLosses
from corral.workers.algorithms.policy_loss import PolicyLoss, loss_named
from corral.workers.backends.base import TokenScores
from corral.workers.backends.micro_batches import MicroBatch, pack_row
from corral.workers.user_code.loading import load_callable

_LENGTHS = (7, 4, 9, 6, 5, 8)  # tokens of each answer, its prompt included
_GROUPS = (3, 2, 1)
_PROMPT = 2  # tokens
_STEP = 1e-5  # of the numeric gradient, in nats; its error is then about 1e-10 of the loss
_TOLERANCE = 1e-4
_FAR = 40.0  # nats that trainer and generator may disagree by on a token: exp() is still finite


class _Held(TorchFunctionMode):
    """Gives again, call by call, what `detach` gave before: what a loss takes for a constant does not move."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []
        self._next: int | None = None

    def again(self) -> "_Held":
        self._next = 0
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.detach:
            return result
        if self._next is None or self._next >= len(self._seen):
            self._seen.append(result.clone())
            return result
        self._next += 1
        return self._seen[self._next - 1].clone()


class _Answers:
    """Made-up answers as a loss sees them, in float64."""

    def __init__(self, config: PPOConfig, inputs: Sequence[Key]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.lengths = _LENGTHS
        num_tokens = sum(_LENGTHS) - len(_LENGTHS)
        masks = [torch.arange(length - 1) >= _PROMPT - 1 for length in _LENGTHS]
        self.mask = torch.cat(masks)
        self.mask[-2] = False  # a token that a cap has taken out
        self.entropy = 1.0 + torch.rand(num_tokens, generator=draw, dtype=torch.float64)
        self.keys = {key.name: _drawn(key, draw) for key in inputs}
        for name in ("old_logprobs", "proximal_logprobs", "ref_logprobs"):
            self.keys[name] = -2.0 + 0.5 * torch.randn(num_tokens, generator=draw, dtype=torch.float64)
        of_answers = torch.tensor([1.0, -0.5, 0.0, 0.8, -1.2, 0.6], dtype=torch.float64)
        self.keys["advantages"] = torch.cat([a.expand(n - 1) for a, n in zip(of_answers, _LENGTHS, strict=True)])
        center = self.keys["proximal_logprobs" if config.use_decoupled_loss else "old_logprobs"]
        self.center = torch.where(self.mask, center, 0.0)
        self.logprobs = self.center + 0.3 * torch.randn(num_tokens, generator=draw, dtype=torch.float64)
        self.layouts = {key.name: key.layout for key in inputs}

    def micro_batch(self, order: Sequence[int], keys: Mapping[str, Tensor] | None = None) -> MicroBatch:
        """These answers of them, in this order."""
        lengths = [self.lengths[number] for number in order]
        tensors = {name: self.part(name, values, order) for name, values in (keys or self.keys).items()}
        tensors["input_ids"] = torch.arange(sum(lengths)) % 7 + 1
        tensors["loss_mask"] = self.part("loss_mask", self.mask, order)
        tensors["loss_weights"] = torch.ones(sum(lengths) - len(order), dtype=torch.float64)
        return pack_row(order, lengths, tensors, torch.device("cpu"))

    def part(self, name: str, values: Tensor, order: Sequence[int]) -> Tensor:
        """A key of these answers."""
        layout = self.layouts.get(name, KeyLayout.PER_SHIFTED_TOKEN)
        parts = torch.split(values, layout.lengths(self.lengths))
        return torch.cat([parts[number] for number in order])


def _drawn(key: Key, draw: torch.Generator) -> Tensor:
    values = torch.randn(sum(key.layout.lengths(_LENGTHS)), generator=draw, dtype=torch.float64)
    if key.dtype.startswith("float"):
        return values
    return values > 0 if key.dtype == "bool" else values.abs().long()


def check_loss(loss: PolicyLoss, config: PPOConfig) -> Iterator[str]:
    """What is wrong with a policy loss, one sentence each; nothing if nothing is."""
    answers, everybody = _Answers(config, loss.inputs), tuple(range(len(_LENGTHS)))

    def run(logprobs: Tensor, batch: MicroBatch, order: Sequence[int] = everybody) -> TokenLosses:
        masked = torch.where(batch.tensors["loss_mask"], logprobs, 0.0)
        return loss(TokenScores(masked, answers.part("entropy", answers.entropy, order)), batch, config)

    logprobs, batch, mask = answers.logprobs.clone().requires_grad_(), answers.micro_batch(everybody), answers.mask
    before = {name: values.clone() for name, values in batch.tensors.items()}
    held = _Held()
    with held:
        made = run(logprobs, batch)
    if problem := _form_of(made, logprobs):
        yield problem
        return
    if changed := [name for name, values in batch.tensors.items() if not torch.equal(values, before[name])]:
        yield f"it changes {', '.join(changed)} in place; compute something new, which other losses do not see"
        return
    losses = made.losses.detach()[mask]
    (gradient,) = torch.autograd.grad(made.losses[mask].sum(), logprobs)
    if not bool(torch.isfinite(losses).all() and torch.isfinite(gradient).all()):
        yield "the loss or its gradient is not finite; one of the tokens has an advantage of 0"
        return

    def moved(by: Tensor) -> float:
        with torch.no_grad(), held.again():
            return float(run(answers.logprobs + by, batch).losses[mask].sum())

    steps = _STEP * torch.eye(len(mask), dtype=torch.float64)
    numeric = torch.tensor([(moved(step) - moved(-step)) / (2 * _STEP) for step in steps])
    yield from _unequal(
        "its gradient is not that of its value", gradient, numeric, "write detach() where a constant is meant"
    )
    yield from _company_problems(run, answers, losses)
    yield from _direction_problems(run, answers)
    far = torch.where(mask, answers.center + _FAR * torch.sign(answers.logprobs - answers.center), 0.0)
    if not bool(torch.isfinite(run(far.float(), _in_float32(batch)).losses[mask]).all()):
        yield (
            f"the loss is not finite where trainer and generator are {_FAR:g} nats apart on a token; use "
            "functional.policy_losses:importance_ratio, which bounds the exponent"
        )


def _form_of(made: Any, logprobs: Tensor) -> str:
    if not isinstance(made, TokenLosses):
        return f"it returns a {type(made).__name__}, and not TokenLosses(losses, stats)"
    for name, values in {"the loss": made.losses, **made.stats}.items():
        if values.shape != logprobs.shape:
            return f"{name} has the shape {list(values.shape)}, and not one number for each of {len(logprobs)} tokens"
    if not made.losses.requires_grad:
        return "the loss has no gradient: it has to be computed from scores.logprobs"
    if grown := [name for name, values in made.stats.items() if values.requires_grad]:
        return f"statistics with a gradient keep the whole graph in memory: detach() {', '.join(grown)}"
    return ""


def _company_problems(run: Callable[..., TokenLosses], answers: _Answers, losses: Tensor) -> Iterator[str]:
    """Losses that depend on what is beside an answer, or on numbers that nobody trains on."""
    everybody = range(len(_LENGTHS))
    backwards = tuple(reversed(everybody))

    def by_answer(orders: Sequence[Sequence[int]], keys: Mapping[str, Tensor] | None = None) -> Tensor:
        """The losses in the order of the answers, which are given in these micro-batches."""
        parts: dict[int, Tensor] = {}
        for order in orders:
            batch = answers.micro_batch(order, keys)
            made = run(answers.part("logprobs", answers.logprobs, order), batch, order).losses.detach()
            split = zip(order, torch.split(made, [_LENGTHS[n] - 1 for n in order]), strict=True)
            parts |= dict(split)
        return torch.cat([parts[number] for number in everybody])[answers.mask]

    yield from _unequal("called once more it gives something else", by_answer([everybody]), losses, "it keeps a state")
    hint = "compute each answer's loss from its own tokens; what is added up and divided is the actor's business"
    for order, words in (
        ([backwards], "the order of the answers in a micro-batch changes their losses"),
        ([[number] for number in everybody], "an answer's loss depends on the others in its micro-batch"),
    ):
        yield from _unequal(words, by_answer(order), losses, hint)
    others = {
        name: torch.where(answers.mask, values, 3.0 - values) if values.shape == answers.mask.shape else values
        for name, values in answers.keys.items()
        if values.dtype == torch.float64
    }
    same = {name: values for name, values in answers.keys.items() if name not in others}
    yield from _unequal(
        "numbers outside loss_mask change the losses inside",
        by_answer([everybody], others | same),
        losses,
        "use torch.where(loss_mask, ..., 0.0) before anything is added up over an answer",
    )


def _direction_problems(run: Callable[..., TokenLosses], answers: _Answers) -> Iterator[str]:
    logprobs = answers.center.clone().requires_grad_()
    made = run(logprobs, answers.micro_batch(range(len(_LENGTHS))))
    (gradient,) = torch.autograd.grad(made.losses[answers.mask].sum(), logprobs)
    if float((gradient * answers.keys["advantages"])[answers.mask].sum()) >= 0.0:
        yield "a step along it makes answers with a positive advantage less likely: is a minus sign missing?"


def check_advantage(estimator: AdvantageEstimator, config: PPOConfig) -> Iterator[str]:
    """What is wrong with an advantage, one sentence each; nothing if nothing is."""
    batch = _judged(config, estimator.inputs, range(len(_GROUPS)))
    before = batch.token_rewards.clone()
    made = estimator(batch, config)["advantages"]
    mask = batch.response_mask
    if made.shape != mask.shape:
        yield f"advantages have the shape {list(made.shape)}, and not one number for each of {len(mask)} tokens"
        return
    if not torch.equal(before, batch.token_rewards):
        yield "it changes token_rewards in place"
    if not bool(torch.isfinite(made[mask]).all()):
        yield "advantages are not finite; one group has equal rewards, and one a single answer"
        return
    one_by_one = [_judged(config, estimator.inputs, [group]) for group in range(len(_GROUPS))]
    alone = torch.cat([estimator(one, config)["advantages"] for one in one_by_one])
    yield from _unequal(
        "a group's advantages depend on the other prompts of its rank",
        alone[mask],
        made[mask],
        "compare within a group; ppo.advantage_normalization: batch is over all ranks",
    )
    best, worst = (batch.per_token(batch.answer_rewards == reward) & mask for reward in (1.0, 0.0))
    if float(made[best].mean()) <= float(made[worst].mean()):
        yield "answers with a reward of 1 have no larger advantage than those with 0"


def _judged(config: PPOConfig, inputs: Sequence[Key], groups: Sequence[int]) -> AdvantageBatch:
    """Groups whose answers differ in reward, are equal, and are one."""
    answers = _Answers(config, inputs)
    starts = [sum(_GROUPS[:group]) for group in range(len(_GROUPS))]
    order = [starts[group] + number for group in groups for number in range(_GROUPS[group])]
    rewards = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0)
    lengths = [_LENGTHS[number] - 1 for number in order]
    token_rewards = torch.zeros(sum(lengths))
    token_rewards[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor([rewards[number] for number in order])
    mask = torch.cat([torch.arange(length) >= _PROMPT - 1 for length in lengths])
    return AdvantageBatch(
        token_rewards=token_rewards,
        response_mask=mask,
        answer_lengths=lengths,
        group_sizes=[_GROUPS[group] for group in groups],
        tensors={name: answers.part(name, values, order) for name, values in answers.keys.items()},
        episode_sizes=[1] * len(order),
        episodes_per_group=[_GROUPS[group] for group in groups],
    )


def _unequal(words: str, found: Tensor, wanted: Tensor, hint: str) -> Iterator[str]:
    difference = (found - wanted).abs() / wanted.abs().clamp(min=1.0)
    if not bool((difference <= _TOLERANCE).all()):
        worst = int(difference.nan_to_num(nan=torch.inf).argmax())
        yield f"{words}: {float(found[worst]):.6g} and {float(wanted[worst]):.6g} for token {worst}; {hint}"


def _in_float32(batch: MicroBatch) -> MicroBatch:
    narrow = {name: v.float() if v.dtype == torch.float64 else v for name, v in batch.tensors.items()}
    return replace(batch, tensors=narrow)


def check_file(import_path: str, settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with what the import path names: a loss takes scores first, an advantage a batch."""
    found = load_callable(import_path)
    is_advantage = isinstance(found, AdvantageEstimator) or "AdvantageBatch" in _first_annotation(found)
    if is_advantage:
        config = PPOConfig.model_validate({"advantage": import_path, **settings})
        return list(check_advantage(advantage_named(import_path, config.advantage_settings), config))
    config = PPOConfig.model_validate({"loss": import_path, **settings})
    return list(check_loss(loss_named(import_path, config.loss_settings), config))


def _first_annotation(found: Any) -> str:
    function = vars(found).get("__call__") if isinstance(found, type) else found
    kinds = [str(kind) for name, kind in getattr(function, "__annotations__", {}).items() if name != "return"]
    return kinds[0] if kinds else ""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing is wrong, 1 with what is, 2 for what is no loss or advantage."""
    parser = argparse.ArgumentParser(
        prog="python -m corral.workers.algorithms.check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("import_path", help="package.module:name of a loss or an advantage")
    parser.add_argument("settings", nargs="*", help="settings of ppo: eps_clip=0.1 loss_settings.worse=0.3")
    arguments = parser.parse_args(argv)
    try:
        settings = apply_overrides({}, [parse_override(setting) for setting in arguments.settings])
        problems = check_file(arguments.import_path, settings)
    except (ValueError, ImportError) as error:
        print(f"{arguments.import_path}: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"{arguments.import_path}: {problem}")
    if not problems:
        print(f"{arguments.import_path}: gradient, micro-batches, order, padding and direction are as they should be")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
