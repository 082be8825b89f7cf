"""The logprob check on tokens of older weights: how often it raises a false alarm, and which faults it finds.

    python benchmarks/logprob_alarm.py [--prompts 4 8 16 32 64] [--steps 70] [--seeds 1] [--group 8]

A torch loop trains the demo's model by supervised learning, then by GRPO with the settings of
arithmetic_grpo.yaml. Every answer is one version old, so that no token can be compared exactly. Each step gives a look
of the rule in `functional/logprob_gap.py`. At step 10 and every 15 steps from there on, each fault is put into five
looks in a row, beside the healthy ones, and begins with the evidence that the healthy steps have left:

    stale         the generator draws and reports with the weights of one version earlier than it says
    temperature   it draws and reports at temperature 1.2, and the trainer computes at 1
    reported      it draws at 1, and reports at 1.2
    damaged       it draws and reports with weights that are off by 10 % of each matrix's deviation
    first token   it draws and reports behind a prompt whose first character is another one
    rounded       its numbers are off by normal noise of 0.2 nats

The table: looks without a fault, alarms among them, the largest evidence (1 is an alarm); faults found in five looks.
"""

import argparse
import copy
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.workers.algorithms.functional.logprob_gap import Alarm, LogprobGap, MeanSize
from corral.workers.data.arithmetic import write_datasets, write_model

LR, SFT_LR, EPOCHS, SFT_BATCH = 2e-4, 1e-3, 12, 64
MOST_TOKENS, EOS = 8, 1
BOUND = 1e-3  # nats, of float32
FIRST, EVERY, LOOKS = 10, 15, 5
FAULTS = ("stale", "temperature", "reported", "damaged", "first token", "rounded")
NOTHING = LogprobGap.of(
    dict.fromkeys(
        ("tokens", "unequal", "difference", "kl", "answers", "answers_beyond")
        + ("squares", "effect_squares", "effect_products"),
        0.0,
    ),
    {"difference": 0.0, "negative": 0.0},
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="corral-alarm-") as folder:
        write_model(Path(folder) / "model", seed=1)
        write_datasets(Path(folder), seed=1)
        task = Task(Path(folder))
        learned = supervised(task)
    print(f"{'prompts':>8}{'looks':>7}{'alarms':>8}{'evidence':>10}" + "".join(f"{name:>14}" for name in FAULTS))
    for num_prompts in options.prompts:
        looks = alarms = 0
        evidence, found, windows = 0.0, Counter[str](), 0
        for seed in range(options.seeds):
            trial = Trial(task, learned, num_prompts=num_prompts, group=options.group, steps=options.steps, seed=seed)
            trial.run()
            looks, alarms, evidence = looks + trial.looks, alarms + trial.alarms, max(evidence, trial.evidence)
            found, windows = found + trial.found, windows + trial.windows
        shares = "".join(f"{f'{found[name]} of {windows}':>14}" for name in FAULTS)
        print(f"{num_prompts:>8}{looks:>7}{alarms:>8}{evidence:>10.2f}{shares}", flush=True)


class Task:
    """The demo's rows as ids."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        sft, grpo = (
            [json.loads(line) for line in (folder / f"train_{name}.jsonl").read_text().splitlines()]
            for name in ("sft", "grpo")
        )
        self.sft = [(self.ids(row["prompt"]), [*self.ids(row["answer"]), EOS]) for row in sft]
        self.prompts, self.answers = [self.ids(row["prompt"]) for row in grpo], [row["answer"] for row in grpo]

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text).ids
        return found


def supervised(task: Task) -> Any:
    """The model with which GRPO begins."""
    model, rng = copy.deepcopy(task.model), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, weight_decay=0.0)
    for _ in range(EPOCHS):
        for batch in np.array_split(rng.permutation(len(task.sft)), len(task.sft) // SFT_BATCH):
            rows = [task.sft[at] for at in batch]
            ids = torch.zeros(len(rows), max(len(p) + len(a) for p, a in rows), dtype=torch.long)
            mask = torch.zeros(ids.shape)
            for number, (prompt, answer) in enumerate(rows):
                ids[number, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
                mask[number, len(prompt) : len(prompt) + len(answer)] = 1.0
            logits = model(input_ids=ids).logits[:, :-1].transpose(1, 2)
            losses = F.cross_entropy(logits, ids[:, 1:], reduction="none") * mask[:, 1:]
            step(model, optimizer, losses.sum() / mask.sum())
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One update with clipped gradients."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def generate(model: Any, prompts: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([n, t] answers, [n, t] which of their tokens were drawn)."""
    ids, is_done, masks = prompts, torch.zeros(len(prompts), dtype=torch.bool), []
    while len(masks) < MOST_TOKENS and not bool(is_done.all()):
        logits = model(input_ids=ids).logits[:, -1] / temperature
        drawn = torch.multinomial(torch.softmax(logits, -1), 1)
        masks.append(~is_done)
        ids = torch.cat([ids, torch.where(is_done[:, None], 0, drawn)], 1)
        is_done = is_done | (drawn[:, 0] == EOS)
    return ids[:, prompts.shape[1] :], torch.stack(masks, 1)


def score(model: Any, prompts: Tensor, answers: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, t] log-probabilities."""
    logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, prompts.shape[1] - 1 : -1] / temperature
    return F.log_softmax(logits, -1).gather(-1, answers[..., None])[..., 0]


class Trial:
    """GRPO on answers of the version before, and what the check says of them."""

    def __init__(self, task: Task, learned: Any, *, num_prompts: int, group: int, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.steps, self.group, self.num_prompts = task, steps, group, num_prompts
        self.order = np.random.default_rng(seed).permutation(len(task.prompts))
        self.model = copy.deepcopy(learned)
        self.last, self.before_last = copy.deepcopy(learned), copy.deepcopy(learned)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.alarm, self.moved = Alarm(), MeanSize.of(MeanSize.sums(np.zeros(0), np.zeros(0, np.int64)))
        self.looks = self.alarms = self.windows = 0
        self.evidence = 0.0
        self.found = Counter[str]()

    def run(self) -> None:
        """All steps."""
        of_faults: dict[str, Alarm] = {}
        for version in range(self.steps):
            chosen = [self.order[(version * self.num_prompts + at) % len(self.order)] for at in range(self.num_prompts)]
            prompts = torch.tensor([self.task.prompts[at] for at in chosen for _ in range(self.group)])
            answers, mask = generate(self.last, prompts)
            with torch.no_grad():
                reported, current = score(self.last, prompts, answers), score(self.model, prompts, answers)
            phase = (version - FIRST) % EVERY
            if version >= FIRST and phase < LOOKS and version - phase + LOOKS <= self.steps:
                of_faults = dict.fromkeys(FAULTS, self.alarm) if phase == 0 else of_faults
                for name in FAULTS:
                    difference, where = self.faulty(name, prompts, answers, mask, reported, current)
                    of_faults[name] = self.look(of_faults[name], difference, where)
                if phase == LOOKS - 1:
                    self.windows += 1
                    self.found.update(name for name, alarm in of_faults.items() if alarm.is_raised)
            if version > 0:
                self.looks += 1
                after = self.look(self.alarm, reported - current, mask)
                self.alarms += bool(after.is_raised) and not self.alarm.is_raised
                self.alarm, self.evidence = after, max(self.evidence, after.evidence)
            self.update(prompts, answers, mask, reported, [self.task.answers[at] for at in chosen], version)
            with torch.no_grad():
                change = score(self.model, prompts, answers) - current
            per_prompt = min(2 if self.group >= 8 else 1, self.group)
            places = np.unique(np.linspace(0, self.num_prompts - 1, min(self.num_prompts, 32)).astype(int))
            scored = [at * self.group + number for at in places for number in range(per_prompt)]
            self.moved = self.mean_size(change[scored], mask[scored], per_prompt)

    def mean_size(self, difference: Tensor, mask: Tensor, per_prompt: int) -> MeanSize:
        """Over the drawn tokens."""
        prompts = (torch.arange(len(mask)) // per_prompt)[:, None].expand(mask.shape)
        return MeanSize.of(MeanSize.sums(difference[mask].double().numpy(), prompts[mask].numpy()))

    def look(self, alarm: Alarm, difference: Tensor, mask: Tensor) -> Alarm:
        """The rule, as a train step follows it."""
        older, allowed = self.mean_size(difference, mask, self.group), BOUND + self.moved.mean
        evidence = older.evidence(allowed, self.moved.variance)
        return alarm.after(NOTHING, threshold=BOUND, older=older, allowed=allowed, evidence=evidence)

    @torch.no_grad()
    def faulty(
        self, name: str, prompts: Tensor, answers: Tensor, mask: Tensor, reported: Tensor, current: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(differences of a generator with this fault, which tokens were drawn)."""
        if name == "rounded":
            return reported + 0.2 * torch.randn_like(reported) - current, mask
        if name == "reported":
            return score(self.last, prompts, answers, 1.2) - current, mask
        model, heard, temperature = self.last, prompts, 1.2 if name == "temperature" else 1.0
        if name == "stale":
            model = self.before_last
        elif name == "damaged":
            model, noise = copy.deepcopy(self.last), torch.Generator().manual_seed(5)
            for weight in (weight for weight in model.parameters() if weight.ndim > 1):
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=noise))
        elif name == "first token":
            heard = prompts.clone()
            one, two = self.task.ids("12")
            heard[:, 0] = torch.where(heard[:, 0] == one, two, one)
        drawn, where = generate(model, heard, temperature)
        return score(model, heard, drawn, temperature) - score(self.model, prompts, drawn), where

    def update(
        self, prompts: Tensor, answers: Tensor, mask: Tensor, reported: Tensor, wanted: list[str], version: int
    ) -> None:
        """One step of the decoupled loss, whose rate rises over a fifth of the trial and falls after that."""
        said = [self.task.tokenizer.decode(ids[drawn].tolist()) for ids, drawn in zip(answers, mask, strict=True)]
        right = [float(one == wanted[at // self.group]) for at, one in enumerate(said)]
        rewards = torch.tensor(right).reshape(-1, self.group)
        deviation = rewards.std(1, unbiased=False, keepdim=True)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-6)).reshape(-1, 1)
        logprobs = score(self.model, prompts, answers)
        weights = torch.exp(logprobs.detach() - reported)
        losses = -advantages * torch.exp(logprobs - logprobs.detach()) * weights
        kept = mask & (weights <= 5.0)
        rising = 0.2 * self.steps
        share = (version + 1) / rising if version < rising else 1 - 0.9 * (version - rising) / (self.steps - rising)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * share
        self.before_last.load_state_dict(self.last.state_dict())
        self.last.load_state_dict(self.model.state_dict())
        step(self.model, self.optimizer, losses[kept].sum() / kept.sum())


if __name__ == "__main__":
    main()
