"""What a trial's files prove, read from the bytes on disk and not through the code that wrote them.

log/ (claims, commits, fallbacks) --> which epoch made which version --> trajectories.jsonl: no token too old
ledger/ of the last commit and its ancestors --> every sample consumed once
"""

import contextlib
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from corral.experiments.trial.directory import TrialDirectory
from tests.integration.trial_helpers import Trial, read_lines


@dataclass(frozen=True)
class History:
    """The trial log as plain data: entries by slot."""

    entries: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, trial: Trial) -> "History":
        paths = [path for path in trial.directory.log_path.iterdir() if path.name.isdigit()]
        return cls({int(path.name): json.loads(path.read_bytes()) for path in sorted(paths)})

    def last_commit(self) -> int:
        """Slot of the last commit; 0 if there is none."""
        return max((slot for slot, entry in self.entries.items() if entry["kind"] == "commit"), default=0)

    def continued_by(self, epoch: int) -> int:
        """Slot of the commit that an epoch starts from; 0 for the initial weights."""
        head, starts = 0, dict[int, int]()
        for slot, entry in sorted(self.entries.items()):
            if entry["kind"] in ("commit", "fallback"):
                head = slot if entry["kind"] == "commit" else entry["to"]
            if entry["kind"] in ("claim", "fallback"):
                starts[entry["epoch"]] = head
        return starts[epoch]

    def lineage(self) -> list[dict[str, Any]]:
        """The last commit and its ancestors, the newest first."""
        chain, slot = [], self.last_commit()
        while slot:
            chain.append(self.entries[slot])
            slot = chain[-1]["parent"]
        return chain

    def tag(self, *, epoch: int, step: int) -> str:
        """The version `step` that a trainer of `epoch` descends from, as a tag: who made it, and which one it is."""
        while step:
            start = self.continued_by(epoch)
            if not start or step > self.entries[start]["step"]:
                return f"{epoch}.{step}"
            epoch = self.entries[start]["epoch"]
        return "0.0"


def check_every_sample_was_consumed_once(trial: Trial) -> None:
    """Each prompt of each pass is in the ledger of the final lineage exactly once."""
    history = History.of(trial)
    counts: Counter[str] = Counter()
    for commit in history.lineage():
        delta = json.loads((trial.directory.path / commit["ledger_file"]).read_bytes())
        counts.update(uid for uids in delta["trained"].values() for uid in uids)
        assert delta["dropped"] == {}
    assert counts == Counter(trial.uids)
    check_ledger_of_checkpoint(trial.directory.path / history.lineage()[0]["directory"], trial)


def audited(trial: Trial) -> str:
    """What the audit command says of it."""
    command = [sys.executable, "-m", "corral.workers.master.audit", str(trial.directory.path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_ledger_of_checkpoint(checkpoint: Path, trial: Trial) -> None:
    """The byte of each row of each pass says that it was trained on."""
    states = msgspec.msgpack.decode(zlib.decompress((checkpoint / "ledger.msgpack").read_bytes()))
    rows_of_passes = Counter(int(uid.partition(":")[0]) for uid in trial.uids)
    trained = {
        number: b"".join(held for _, held in sorted(parts.items())) for number, parts in states["passes"].items()
    }
    assert trained == {number: b"\x01" * rows for number, rows in rows_of_passes.items()}


def check_no_token_was_too_old(trial: Trial, *, eta: int) -> int:
    """Every token that was trained on came from weights at most `eta` versions old, which the trainer descends from.

    Returns:
        How old the oldest was.
    """
    history = History.of(trial)
    records = read_lines(trial.directory.trajectories_path)
    ages: list[int] = []
    for record in records:
        trained_from = record["step"] - 1
        for tag in record["versions"]:
            made_by = int(tag.partition(".")[2])
            assert trained_from - eta <= made_by <= trained_from, record
            assert tag == history.tag(epoch=record["trainer_epoch"], step=made_by), (
                record,
                "made by weights taken back",
            )
            ages.append(trained_from - made_by)
    assert {record["uid"] for record in records} == set(trial.uids)
    return max(ages)


def check_generator_and_trainer_agreed(trial: Trial, *, nats: float = 1e-3) -> int:
    """Tokens that were compared; the first step has some, and each epoch tells once that both sides agree."""
    lines = [line for line in trial.metrics() if "gap/tokens" in line]
    assert [line["step"] for line in lines] == trial.train_steps()
    assert lines[0]["gap/tokens"] > 0
    apart = {line["step"]: line["gap/max"] for line in lines if line["gap/tokens"]}
    assert max(apart.values()) <= nats, apart
    told = trial.events("train_notice")
    assert [notice["epoch"] for notice in told] == sorted({notice["epoch"] for notice in told})
    assert told and not any(notice["is_alarm"] for notice in told), told
    return int(sum(line["gap/tokens"] for line in lines))


def check_nothing_is_left(trial: Trial) -> None:
    """No process, no secret, no weights in memory; and the status that a user asks for right after the end."""
    assert trial.processes() == []
    assert not trial.directory.secrets_path.exists()
    assert not Path("/dev/shm", f"corral-weights-{trial.uuid}").exists()
    status = trial.status()
    assert status["state"] == "COMPLETE"
    assert "</html>" in trial.directory.page_path.read_text()[-100:]


def find_secrets(directory: TrialDirectory, values: Iterable[str]) -> set[str]:
    """Files of a trial directory that hold one of the secret values; a running trial removes some while this looks."""
    needles = [value.encode() for value in values]
    paths = [Path(folder, name) for folder, _, names in os.walk(directory.path) for name in names]
    found = set()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and any(needle in path.read_bytes() for needle in needles):
                found.add(directory.relative(path))
    return found
