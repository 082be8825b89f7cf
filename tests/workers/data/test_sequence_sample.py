"""Packed samples: what goes in comes out, however it was cut and put together in between."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.scheduling.keys import BUILT_IN_KEYS, Key, KeyLayout, merge_keys
from corral.workers.data.sequence_sample import SequenceSample, answer_slices

group_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def make_sample(lengths_by_sample: list[list[int]]) -> SequenceSample:
    """Samples whose token ids count up, so that every token can be told from every other."""
    next_token = 0
    groups = []
    for index, lengths in enumerate(lengths_by_sample):
        ids = []
        for length in lengths:
            ids.append(np.arange(next_token, next_token + length))
            next_token += length
        answers: dict[str, Sequence[npt.ArrayLike]] = {
            "input_ids": ids,
            "old_logprobs": [-0.5 * x[1:] for x in ids],
            "rewards": [float(x[0]) for x in ids],
        }
        groups.append(SequenceSample.from_group(f"0:{index}", answers))
    return SequenceSample.gather(groups)


def assert_same(left: SequenceSample, right: SequenceSample) -> None:
    assert left.uids == right.uids
    assert left.seqlens == right.seqlens
    assert left.data.keys() == right.data.keys()
    for key in left.data:
        np.testing.assert_array_equal(left.data[key], right.data[key])


@given(st.lists(group_lengths, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_gather_undoes_unpack(lengths: list[list[int]]) -> None:
    sample = make_sample(lengths)
    assert_same(SequenceSample.gather(sample.unpack()), sample)


@given(st.lists(group_lengths, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_samples_are_gathered_in_the_order_asked_for(lengths: list[list[int]], random: object) -> None:
    sample = make_sample(lengths)
    order = list(range(len(sample)))
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = sample.unpack()
    chosen = SequenceSample.gather([parts[i] for i in order])
    starts = np.cumsum([0, *map(sum, lengths)])
    expected = [token for i in order for token in range(starts[i], starts[i + 1])]
    assert chosen.data["input_ids"].tolist() == expected


def test_keys_have_their_declared_types_and_lengths() -> None:
    sample = make_sample([[4, 2], [3]])
    assert sample.seqlens == {
        "input_ids": [[4, 2], [3]],
        "old_logprobs": [[3, 1], [2]],
        "rewards": [[1, 1], [1]],
    }
    assert {key: str(array.dtype) for key, array in sample.data.items()} == {
        "input_ids": "int32",
        "old_logprobs": "float32",
        "rewards": "float32",
    }
    assert sample.total_length() == 9
    assert sample.answer_lengths("old_logprobs") == [3, 1, 2]
    assert sample.num_answers_per_sample() == [2, 1]


def test_chosen_answers_stay_with_the_others_of_their_prompt() -> None:
    sample = make_sample([[4, 2], [3], [5, 6, 7]])
    assert sample.answer_names() == ["0:0#0", "0:0#1", "0:1#0", "0:2#0", "0:2#1", "0:2#2"]
    part = sample.select_answers([5, 1, 3])
    assert part.uids == ["0:0", "0:2"]
    assert part.seqlens["old_logprobs"] == [[1], [4, 6]]
    ids = np.split(sample.data["input_ids"], np.cumsum(sample.answer_lengths())[:-1])
    assert part.data["input_ids"].tolist() == [*ids[1], *ids[3], *ids[5]]
    assert len(sample.select_answers([])) == 0


def test_update_merges_new_keys_of_the_same_samples() -> None:
    sample = make_sample([[4, 2], [3]])
    proximal = sample.select_keys(["old_logprobs"]).remap_keys({"old_logprobs": "proximal_logprobs"})
    sample.update_(proximal)
    np.testing.assert_array_equal(sample.data["proximal_logprobs"], sample.data["old_logprobs"])
    with pytest.raises(ValueError, match="cannot merge"):
        sample.update_(proximal.unpack()[1])


def test_a_key_is_added_with_the_layout_that_it_declares() -> None:
    sample = make_sample([[4, 2]]).with_key("advantages", np.zeros(4, np.float32))
    assert sample.seqlens["advantages"] == [[3, 1]]
    with pytest.raises(ValueError, match=r"'advantages' has shape \(5,\); its seqlens add up to \[4\]"):
        make_sample([[4, 2]]).with_key("advantages", np.zeros(5, np.float32))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"rewards": [1.0]}, "no 'input_ids'"),
        ({"input_ids": [[1, 2]], "old_logprob": [[0.0]]}, "did you mean 'old_logprobs'"),
        ({"input_ids": [[1, 2]], "old_logprobs": [[0.0, 0.0]]}, "needs 1 values for 2 tokens"),
        ({"input_ids": [[1, 2]], "rewards": [1.0, 2.0]}, "2 answers in 'rewards' but 1"),
    ],
)
def test_a_group_that_breaks_a_layout_is_refused(answers: dict[str, list[object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceSample.from_group("0:a", answers)  # type: ignore[arg-type]


def test_repeated_uids_and_differing_keys_are_refused() -> None:
    sample = make_sample([[2], [3]])
    with pytest.raises(ValueError, match="'0:0' occurs more than once"):
        SequenceSample.gather([sample, sample])
    with pytest.raises(ValueError, match="cannot gather different keys"):
        SequenceSample.gather([sample.unpack()[0], sample.unpack()[1].select_keys(["input_ids"])])
    with pytest.raises(ValueError, match="gives two keys one name"):
        sample.remap_keys({"rewards": "input_ids"})


def test_every_declared_key_has_a_length_for_an_answer() -> None:
    assert BUILT_IN_KEYS["versions"].layout is KeyLayout.PER_SHIFTED_TOKEN
    assert {layout: layout.length(5) for layout in KeyLayout} == {
        KeyLayout.PER_TOKEN: 5,
        KeyLayout.PER_SHIFTED_TOKEN: 4,
        KeyLayout.PER_ANSWER: 1,
    }
    assert BUILT_IN_KEYS["input_ids"].dtype == "int32"
    assert answer_slices([2, 0, 3]) == [slice(0, 2), slice(2, 2), slice(2, 5)]


DIFFICULTY = Key("difficulty", "per_answer", "float32")


def test_a_key_of_the_users_own_goes_wherever_the_others_go() -> None:
    sample = make_sample([[4, 2], [3]]).with_key(DIFFICULTY, np.array([1.0, 2.0, 3.0], np.float32))
    assert sample.seqlens["difficulty"] == [[1, 1], [1]]
    part = SequenceSample.gather(sample.unpack()[::-1]).select_keys(["difficulty"])
    assert part.data["difficulty"].tolist() == [3.0, 1.0, 2.0]
    assert part.specs["difficulty"] == merge_keys([DIFFICULTY])["difficulty"]
    renamed = part.remap_keys({"difficulty": "hardness"})
    assert renamed.specs["hardness"] == part.specs["difficulty"]
    plain = make_sample([[4], [5], [6]]).unpack()[2]
    both = SequenceSample.gather([plain, sample], keys=["input_ids"], specs=sample.specs)
    assert both.with_key("difficulty", np.zeros(4, np.float32)).seqlens["difficulty"] == [[1], [1, 1], [1]]


def test_a_table_of_declared_keys_reads_groups_and_empty_samples() -> None:
    specs = merge_keys([DIFFICULTY])
    group = SequenceSample.from_group("0:a", {"input_ids": [[1, 2]], "difficulty": [0.5]}, specs=specs)
    assert group.data["difficulty"].dtype == np.float32
    nothing = SequenceSample.gather([], keys=["input_ids", "difficulty"], specs=specs)
    assert nothing.data["difficulty"].dtype == np.float32
    assert nothing.with_key("difficulty", np.empty(0, np.float32)).seqlens["difficulty"] == []
    with pytest.raises(ValueError, match="unknown sample key 'difficulty'"):
        SequenceSample.from_group("0:a", {"input_ids": [[1, 2]], "difficulty": [0.5]})


def test_the_module_does_not_import_torch() -> None:
    program = "import sys, corral.workers.data.sequence_sample; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_a_key_whose_values_are_arrays_is_cut_with_the_tokens_that_they_belong_to() -> None:
    pairs = Key("pairs", "per_token", "int16", (3, 2))
    rows = [np.arange(length * 6).reshape(length, 3, 2) + 100 * length for length in (4, 2)]
    sample = SequenceSample.from_group(
        "0:a", {"input_ids": [[1, 2, 3, 4], [5, 6]], "pairs": rows}, specs=merge_keys([pairs])
    )
    assert sample.seqlens["pairs"] == [[24, 12]] and sample.data["pairs"].dtype == np.int16
    second = sample.select_answers([1])
    np.testing.assert_array_equal(second.data["pairs"].reshape(-1, 3, 2), rows[1])
    assert_same(sample.select_keys(["input_ids"]).with_key(pairs, sample.data["pairs"]), sample)
    with pytest.raises(ValueError, match="needs 12 values for 2 tokens"):
        SequenceSample.from_group(
            "0:a", {"input_ids": [[5, 6]], "pairs": [np.zeros((2, 2))]}, specs=merge_keys([pairs])
        )


@given(shape=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sequences_of_an_episode_stay_together(shape: list[list[int]]) -> None:
    numbers = [np.repeat(np.arange(len(sizes)), sizes) for sizes in shape]
    groups = [
        SequenceSample.from_group(f"0:{index}", {"input_ids": [[1, 2]] * len(of_each), "episodes": of_each.tolist()})
        for index, of_each in enumerate(numbers)
    ]
    sample = SequenceSample.gather(groups)
    assert sample.episode_sizes() == [size for sizes in shape for size in sizes]
    assert sample.num_episodes_per_sample() == [len(sizes) for sizes in shape]
    assert [one.episode_sizes() for one in sample.unpack()] == shape
    last = sample.select_answers(range(sum(map(sum, shape)) - shape[-1][-1], sum(map(sum, shape))))
    assert (last.uids, last.episode_sizes()) == ([f"0:{len(shape) - 1}"], [shape[-1][-1]])
    plain = sample.select_keys(["input_ids"])
    assert plain.episode_sizes() == [1] * sum(plain.num_answers_per_sample())
    assert plain.num_episodes_per_sample() == plain.num_answers_per_sample()


@pytest.mark.parametrize("numbers", [[0, 1, 0], [1, 1, 2], [0, 2, 2], [-1, 0, 0]])
def test_episodes_that_cannot_be_told_apart_are_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="sample '0:a' has the episodes .* sequences of one episode are neighbours"):
        SequenceSample.from_group("0:a", {"input_ids": [[1, 2]] * 3, "episodes": numbers})
