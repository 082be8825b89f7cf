"""KeptSamples: some training samples of each step, for people to read.

    prepared sample ──some prompts of it──► a row for each sequence ──thread──► samples/step-00000040-e2-r0.parquet
                                                                   └── too many bytes: the oldest of this rank go

Nothing depends on these files, and training never waits for them: while one is written the next step's are passed over,
and a disk that refuses is reported once. A step that is trained again, by a later epoch, has other files, and readers
take the newest.

One row is one sequence: a whole answer, or one branch of an episode. What belongs to a token stands at its place.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.experiments.prompts.tokens import load_tokenizer
from corral.experiments.trial.samples import PART, samples_file, schema
from corral.scheduling.keys import EPISODES, REMARKS, REWARD_PARTS, KeyLayout
from corral.workers.algorithms.base import generated
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.streams.closing import Closing

logger = logging.getLogger(__name__)

_MB = 1 << 20


class KeptSamples(Closing):
    """Of one data-parallel head.

    Example:
        kept.begin(epoch=2)
        kept.offer(sample, version=39)     # it was trained on in step 40
    """

    def __init__(
        self,
        folder: Path,
        *,
        prompts_per_step: int | None,
        tokenizer: Path,
        rank: int,
        num_ranks: int,
        parts: Sequence[str] = (),
        max_mb: int = 512,
    ) -> None:
        """
        Args:
            prompts_per_step: that are kept of each step, by all ranks together; None keeps all.
            max_mb: space for the samples of all ranks; beyond it the oldest steps go.
            parts: of the reward, whose numbers samples have.
            tokenizer: directory of the model whose tokens they are.
            num_ranks: data-parallel ranks, which share what is kept and the space for it.
        """
        self._most = None if prompts_per_step is None else -(-prompts_per_step // num_ranks)
        self._max_bytes = max_mb * _MB // num_ranks
        self._folder, self._rank, self._parts = folder, rank, parts
        self._tokenizer_directory = tokenizer
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samples")
        self._running: Future[None] | None = None
        self._epoch = 0

    def begin(self, epoch: int) -> None:
        """What follows is an epoch of the trainer, which may train again what an earlier one has trained."""
        self._epoch = epoch

    def offer(self, sample: SequenceSample, *, version: int) -> None:
        """Keep some of what the step from this version on was trained on."""
        if self._most == 0 or not sample.uids or self.is_writing:
            return
        chosen = range(len(sample.uids))
        if self._most is not None and self._most < len(sample.uids):
            chosen = np.linspace(0, len(sample.uids) - 1, self._most).astype(int).tolist()
        parts = sample.unpack()
        self._running = self._writer.submit(self._write, [parts[at] for at in chosen], version, self._epoch)

    @property
    def is_writing(self) -> bool:
        return self._running is not None and not self._running.done()

    def close(self) -> None:
        self._writer.shutdown()

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_directory)

    def _write(self, samples: Sequence[SequenceSample], version: int, epoch: int) -> None:
        import pyarrow.parquet  # not where none are kept

        try:
            rows = [row for sample in samples for row in self._rows(sample, version)]
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = samples_file(self._folder, step=version + 1, epoch=epoch, rank=self._rank)
            part = path.with_suffix(".part")
            table = pyarrow.Table.from_pylist(rows, schema=schema(self._parts))
            pyarrow.parquet.write_table(table, part, compression="zstd")
            part.rename(path)
            self._remove_oldest()
        except OSError as error:  # a disk that is full now
            logger.warning("samples of step %d are not kept for reading: %s", version + 1, error)
        except Exception:  # whatever is wrong with what is only read, training goes on
            logger.exception("samples of step %d cannot be kept for reading", version + 1)
            self._most = 0

    def _remove_oldest(self) -> None:
        own = sorted(self._folder.glob(f"step-*-r{self._rank}.parquet"))
        sizes = [path.stat().st_size for path in own]
        while sum(sizes) > self._max_bytes and len(own) > 1:
            own.pop(0).unlink(missing_ok=True)
            sizes.pop(0)

    def _rows(self, sample: SequenceSample, version: int) -> list[dict[str, Any]]:
        rows = []
        cuts = {key: np.cumsum([0, *sample.answer_lengths(key)]) for key in sample.data}
        for at in range(sum(sample.num_answers_per_sample())):
            values = {key: array[cuts[key][at] : cuts[key][at + 1]] for key, array in sample.data.items()}
            rows.append({"step": version + 1, "uid": sample.uids[0], **self._row(sample, values, version, at)})
        return rows

    def _row(
        self, sample: SequenceSample, values: dict[str, npt.NDArray[Any]], version: int, at: int
    ) -> dict[str, Any]:
        for key, array in values.items():
            if sample.specs[key].layout is KeyLayout.PER_SHIFTED_TOKEN and not sample.specs[key].shape:
                values[key] = np.concatenate([np.zeros(1, array.dtype), array])
        ids, given = values["input_ids"], values["prompt_mask"]
        first = int(np.argmin(given)) if not given.all() else len(ids)
        made, advantages = ~given, values["advantages"]
        trainer = values.get("proximal_logprobs")
        is_generated = generated(values, made)
        gaps = None if trainer is None else np.abs(trainer - values["old_logprobs"])[is_generated]
        versions = values["versions"][is_generated]
        parts = [None if isnan(number) else float(number) for number in values.get(REWARD_PARTS, ())]
        return {
            "answer": int(values[EPISODES][0]) if EPISODES in values else at,
            "sequence": at,
            "prompt": self._tokenizer.decode(ids[:first].tolist(), skip_special_tokens=False),
            "said": self._tokenizer.decode(ids[first:].tolist(), skip_special_tokens=False),
            "reward": float(values["rewards"][0]),
            "advantage": float(advantages[made].mean()) if made.any() else 0.0,
            "length": int(made.sum()),
            "remarks": values[REMARKS].tobytes().rstrip(b"\0").decode(errors="replace") if REMARKS in values else "",
            "is_cut": bool(values["seq_no_eos_mask"][0]),
            "staleness": version - int(versions.min()) if len(versions) else 0,
            "gap": float(gaps.mean()) if gaps is not None and len(gaps) else None,
            "ids": ids,
            "made": made,
            "logprobs": values["old_logprobs"],
            "trainer_logprobs": trainer,
            "advantages": advantages,
            "versions": values["versions"],
            **{f"{PART}{name}": number for name, number in zip(self._parts, parts, strict=True)},
        }
