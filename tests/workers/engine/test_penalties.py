"""Penalties of a batch equal a slow loop over its rows, at every token, whoever shares the batch."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.workers.engine.sampling import PenalizedRow, PenaltyBatch, SamplingParams
from tests.workers.engine.slow_penalties import penalize

VOCAB_SIZE = 7
token_ids = st.integers(0, VOCAB_SIZE - 1)
penalties = st.fixed_dictionaries(
    {
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "repetition_penalty": st.floats(0.125, 2, width=32),
        "min_new_tokens": st.integers(0, 6),
        "stop_token_ids": st.frozensets(token_ids, max_size=3),
    }
)


@given(
    rows=st.lists(st.tuples(penalties, st.lists(token_ids, max_size=5), st.booleans()), min_size=1, max_size=4),
    next_ids=st.lists(st.lists(token_ids, min_size=4, max_size=4), max_size=4),
    seed=st.integers(0, 1000),
)
def test_every_row_is_penalized_for_its_own_tokens(
    rows: list[tuple[dict[str, Any], list[int], bool]], next_ids: list[list[int]], seed: int
) -> None:
    """As the rows grow token by token; rows without penalties keep their logits."""
    outputs = [list(output) for _, output, _ in rows]
    penalized = [
        PenalizedRow(
            row=row,
            sampling=SamplingParams(**params),
            stop_token_ids=params["stop_token_ids"],
            output_ids=outputs[row],
        )
        for row, (params, _, is_penalized) in enumerate(rows)
        if is_penalized
    ]
    if not penalized:
        return
    batch = PenaltyBatch(penalized, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for step in [*next_ids, [0] * 4]:
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3
        expected = logits.clone()
        for row, (params, _, is_penalized) in enumerate(rows):
            if is_penalized:
                expected[row] = torch.tensor(penalize(logits[row].tolist(), outputs[row], **params))
        batch.apply_(logits)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        drawn = step[: len(rows)]
        batch.count(torch.tensor(drawn))
        for output, token_id in zip(outputs, drawn, strict=True):
            output.append(token_id)


def test_a_stop_token_outside_the_vocabulary_is_no_error() -> None:
    row = PenalizedRow(
        row=0,
        sampling=SamplingParams(min_new_tokens=2),
        stop_token_ids=frozenset({3, VOCAB_SIZE, -1}),
        output_ids=[],
    )
    batch = PenaltyBatch([row], vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    logits = torch.zeros(1, VOCAB_SIZE)
    batch.apply_(logits)
    assert logits[0].isinf().tolist() == [token_id == 3 for token_id in range(VOCAB_SIZE)]
