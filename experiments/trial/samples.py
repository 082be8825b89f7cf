"""samples/: answers that the trainer keeps for people to read, one file per step and data-parallel rank.

samples/step-00000040-e2-r0.parquet     of train step 40, as epoch 2 has trained it
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

_NAME = re.compile(r"step-(?P<step>\d{8,})-e(?P<epoch>\d+)-r\d+\.parquet", re.ASCII)


PART = "part_"
"""What a part of the reward is called in a row, before its name."""


def schema(parts: Sequence[str] = ()) -> "pyarrow.Schema":
    """Of every file; lists have one value for each token of `ids`.

    Args:
        parts: names of the reward's, where there are several.
    """
    import pyarrow  # only who keeps or reads some pays for it

    numbers, is_made = pyarrow.list_(pyarrow.float32()), pyarrow.list_(pyarrow.bool_())
    fields = [
        ("step", pyarrow.int32()),
        ("uid", pyarrow.string()),  # of the prompt: pass over the data, and row
        ("answer", pyarrow.int32()),  # which of the prompt's answers, or episodes
        ("sequence", pyarrow.int32()),  # which of all its sequences: an episode may have several
        ("prompt", pyarrow.string()),  # all that stands before the first token that the model made
        ("said", pyarrow.string()),  # the rest: what it made, and what was given in between
        ("reward", pyarrow.float32()),  # as it was judged; with a reward model, its score
        ("advantage", pyarrow.float32()),  # mean over the tokens that were made
        ("length", pyarrow.int32()),  # tokens that were made
        ("remarks", pyarrow.string()),  # what its reward has said in words, and its agent has noted
        ("is_cut", pyarrow.bool_()),  # whether the limit of tokens ended it
        ("staleness", pyarrow.int32()),  # train steps between its oldest token and the policy that it trained
        ("gap", pyarrow.float32()),  # mean of |trainer's - generator's log-probability|, where the step has both
        ("ids", pyarrow.list_(pyarrow.int32())),
        ("made", is_made),  # whether the model made the token; given ones are never trained on
        ("logprobs", numbers),  # the generator's; 0 on given tokens
        ("trainer_logprobs", numbers),  # by the weights that the step began with
        ("advantages", numbers),
        ("versions", pyarrow.list_(pyarrow.int32())),  # train steps of the weights that made it; -1 on given tokens
    ]
    fields += [(f"{PART}{name}", pyarrow.float32()) for name in parts]  # what it has said, before its weight
    return pyarrow.schema(fields)


def samples_file(folder: Path, *, step: int, epoch: int, rank: int) -> Path:
    """Where a rank keeps what it has of a step."""
    return folder / f"step-{step:08d}-e{epoch}-r{rank}.parquet"


def files_by_step(folder: Path) -> Mapping[int, Sequence[Path]]:
    """The files of each step, in order; of a step that was trained again those of the last time."""
    found: dict[int, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("step-*.parquet")):
        if match := _NAME.fullmatch(path.name):
            found[int(match["step"])][int(match["epoch"])].append(path)
    return {step: by_epoch[max(by_epoch)] for step, by_epoch in sorted(found.items())}
