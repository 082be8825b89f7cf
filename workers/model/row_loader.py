"""Rows of a dataset as training samples: prompt and answer in one sequence, the loss on the answer only.

row {"prompt": "12+34=", "answer": "46"}  ──►  input_ids = prompt ids, answer ids, end-of-answer;  prompt_mask
row {"prompt": "12+34=", "chosen": "46", "rejected": "45"}  ──►  two such sequences as one group, the chosen one first
"""

from pathlib import Path

import numpy as np

from corral.experiments.inputs.tokens import encode_answer, encode_prompt, end_of_answer_id, load_tokenizer
from corral.experiments.worker_specs import DatasetSpec
from corral.workers.data.prompts import load_planned_rows, split_uid
from corral.workers.data.sequence_sample import SequenceSample


class RowLoader:
    """Turns a uid into a sample; `model` is the directory with the tokenizer."""

    def __init__(self, spec: DatasetSpec, model: Path) -> None:
        self._rows = load_planned_rows(spec)
        self._tokenizer = load_tokenizer(model)
        self._end_of_answer = end_of_answer_id(model, self._tokenizer)
        self._max_prompt_tokens = spec.config.max_prompt_tokens

    def load(self, uid: str) -> SequenceSample:
        """The sample of a uid.

        Raises:
            ValueError: if its prompt is longer than the dataset allows.
        """
        _, row_id = split_uid(uid)
        row = self._rows[row_id]
        prompt = encode_prompt(self._tokenizer, row.prompt)
        if len(prompt) > self._max_prompt_tokens:
            raise ValueError(
                f"row {row_id!r} (line {row.line}) has a prompt of {len(prompt)} tokens, more than "
                f"dataset.max_prompt_tokens {self._max_prompt_tokens}; raise that limit or shorten the row"
            )
        encoded = [[*prompt, *encode_answer(self._tokenizer, text), self._end_of_answer] for text in row.answers]
        sequences = [np.asarray(ids, dtype=np.int32) for ids in encoded]
        masks = [np.arange(len(ids)) < len(prompt) for ids in sequences]
        return SequenceSample.from_group(uid, {"input_ids": sequences, "prompt_mask": masks})
