"""Rows of a dataset as training samples: prompt and answer in one sequence, the loss on the answer only.

row {"prompt": "12+34=", "answer": "46"}  ──►  input_ids = prompt ids, answer ids, end-of-answer;  prompt_mask
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from corral.experiments.inputs.tokens import encode_answer, encode_prompt, end_of_answer_id, load_tokenizer
from corral.experiments.worker_specs import DatasetSpec
from corral.workers.data.prompts import load_planned_rows, split_uid
from corral.workers.data.sequence_sample import SequenceSample


class RowLoader:
    """Turns uids into samples; `model` is the directory with the tokenizer."""

    def __init__(self, spec: DatasetSpec, model: Path) -> None:
        self._rows = load_planned_rows(spec)
        self._tokenizer = load_tokenizer(model)
        self._end_of_answer = end_of_answer_id(model, self._tokenizer)
        self._max_prompt_tokens = spec.config.max_prompt_tokens

    def load(self, uids: Iterable[str]) -> list[SequenceSample]:
        """One sample per uid."""
        return [self._sample(uid) for uid in uids]

    def _sample(self, uid: str) -> SequenceSample:
        _, row_id = split_uid(uid)
        row = self._rows[row_id]
        prompt = encode_prompt(self._tokenizer, row.prompt)
        if len(prompt) > self._max_prompt_tokens:
            raise ValueError(
                f"row {row_id!r} (line {row.line}) has a prompt of {len(prompt)} tokens, more than "
                f"dataset.max_prompt_tokens {self._max_prompt_tokens}; raise that limit or shorten the row"
            )
        answer = [*encode_answer(self._tokenizer, row.answer or ""), self._end_of_answer]
        ids = np.asarray([*prompt, *answer], dtype=np.int32)
        return SequenceSample.from_group(uid, {"input_ids": [ids], "prompt_mask": [np.arange(len(ids)) < len(prompt)]})
