"""The consumed prompts of a trial, compared with the order of its seed: printed to show that none is lost.

python -m corral.workers.master.audit TRIAL

the commits' ledgers ──► prompts in the order in which they were consumed ──┐
the data, seed, shares ──► prompts in the order in which they are issued ───┴──► skipped, repeated, in order
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.log import TrialLog
from corral.experiments.worker_specs import GserverManagerSpec, ModelWorkerSpec
from corral.workers.checkpoint.checkpoint import PROMPTS_NAME, committed_ledger
from corral.workers.checkpoint.ledger import DROPPED, TRAINED, Ledger, LedgerDelta, numbers_of, read_delta
from corral.workers.data.prompts import PlannedPrompts, split_uid
from corral.workers.master.drawn_prompts import PromptsState


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit."""

    trained: int
    dropped: int
    skipped: tuple[str, ...]
    """Prompts that were issued before others which were consumed, and are not: lost, or, where answers come in any
    order, still under way."""
    repeated: tuple[str, ...]
    """Prompts that were consumed more than once."""
    is_in_order: bool | None
    """Whether the last commits trained them in the order in which they are issued, dropped ones left out; None where
    a sampler has drawn them."""

    def render(self) -> str:
        """One line, for people."""
        order = "in the order of the seed" if self.is_in_order else "not in the order of the seed, as answers came"
        order = "as drawn" if self.is_in_order is None else order
        summary = f"{self.trained} prompts trained, {self.dropped} dropped, {order}: "
        return summary + f"skipped {len(self.skipped)}, repeated {len(self.repeated)}"


def audit(ledger: Ledger, deltas: Iterable[LedgerDelta], issued: Iterable[str]) -> Audit:
    """
    Args:
        ledger: of the last commit: what has become of every row.
        deltas: what the last commits have added, in their order; all of them, or as many as are known still.
        issued: all prompts of the trial, in their order.
    """
    trained: list[str] = []
    dropped: list[str] = []
    for delta in deltas:
        trained += [uid for step in sorted(delta.trained) for uid in delta.trained[step]]
        dropped += delta.dropped
    expected = list(islice(issued, ledger.consumed_count))
    in_order = [uid for uid in expected if not ledger.dropped(uid)]
    return Audit(
        trained=ledger.trained_count,
        dropped=ledger.dropped_count,
        skipped=tuple(uid for uid in expected if not ledger.consumed(uid)),
        repeated=tuple(uid for uid, count in Counter([*trained, *dropped]).items() if count > 1),
        is_in_order=in_order[len(in_order) - len(trained) :] == trained,
    )


def skipped_draws(ledger: Ledger, row_ids: Sequence[str], drawn: Collection[str]) -> Iterator[str]:
    """Draws of a row that nobody has, though a later one of it was consumed.

    Args:
        drawn: those that no step has passed yet.
    """
    last: dict[str, int] = {}
    for dataset_epoch, row in map(split_uid, ledger.beyond(Ledger(numbers_of(row_ids)), TRAINED, DROPPED)):
        last[row] = max(dataset_epoch, last.get(row, 0))
    for row, number in last.items():
        uids = (f"{dataset_epoch}:{row}" for dataset_epoch in range(number))
        yield from (uid for uid in uids if not ledger.consumed(uid) and uid not in drawn)


def audit_trial(path: Path) -> Audit:
    """The audit of a trial's directory, running or not.

    Raises:
        OSError, ValueError: if it is none, or its data has changed.
    """
    directory = TrialDirectory(path)
    plan = RunPlan.from_json(directory.plan_path.read_bytes())
    datasets = [manager.dataset for manager in plan.all_of(GserverManagerSpec)]
    datasets += [rank.dataset for rank in plan.all_of(ModelWorkerSpec) if rank.dataset is not None]
    epochs = plan.master.control.total_train_epochs
    prompts = PlannedPrompts.load(datasets[0])
    rows, issued = numbers_of(prompts.row_ids), prompts.uids(seed=plan.seed, num_epochs=epochs)
    lineage = TrialLog(directory.log_path).read().lineage
    if not lineage:
        return audit(Ledger(rows), (), issued)
    ledger = committed_ledger(directory, lineage[-1].commit, rows)
    found = audit(ledger, (read_delta(directory, logged.commit) for logged in lineage), issued)
    if datasets[0].config.sampler is None:
        return found
    content = (directory.inside(lineage[-1].commit.directory) / PROMPTS_NAME).read_bytes()
    drawn = msgspec.msgpack.decode(content, type=PromptsState).ahead
    return replace(found, skipped=tuple(skipped_draws(ledger, prompts.row_ids, drawn)), is_in_order=None)


if __name__ == "__main__":
    found = audit_trial(Path(sys.argv[1]))
    print(found.render())
    sys.exit(1 if found.repeated else 0)
