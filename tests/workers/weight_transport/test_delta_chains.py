"""Which deltas are read where several versions were missed: compared with all ways that there are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from corral.workers.checkpoint.durable_file import FileEntry
from corral.workers.weight_transport.staging import Delta, cheapest_chain

SIZE = 100


def content(number: int) -> FileEntry:
    return FileEntry(size=SIZE, digest=f"{number:064x}")


def delta(base: int, result: int, size: int) -> Delta:
    return Delta(path=Path(f"v{result}/model.safetensors.delta"), size=size, base=content(base), result=content(result))


@st.composite
def deltas(draw: st.DrawFn) -> list[Delta]:
    """Of a lineage, of branches that were lost, and of steps back to contents from before."""
    ends = st.integers(0, 5)
    return draw(st.lists(st.builds(delta, ends, ends, st.integers(1, 60)), max_size=9))


def all_ways(held: set[int], wanted: int, known: Sequence[Delta]) -> Iterator[list[Delta]]:
    """Every chain without a repetition, by trying all of them."""
    if wanted in held:
        yield []
    for last in known:
        if last.result == content(wanted):
            rest = [one for one in known if one.result != last.result]
            yield from ([*way, last] for way in all_ways(held, int(last.base.digest, 16), rest))


@given(deltas(), st.sets(st.integers(0, 4)))
def test_the_chain_is_the_smallest_of_all_and_smaller_than_the_file(known: list[Delta], held: set[int]) -> None:
    wanted = 5
    sizes = [sum(one.size for one in way) for way in all_ways(held, wanted, known)]
    chain = cheapest_chain({content(number) for number in held}, content(wanted), known)
    if chain is None:
        assert not [size for size in sizes if size < SIZE]
        return
    assert sum(one.size for one in chain) == min(sizes) < SIZE
    assert chain[0].base in {content(number) for number in held} and chain[-1].result == content(wanted)
    assert all(one.result == next_one.base for one, next_one in zip(chain, chain[1:], strict=False))


def test_a_file_that_is_held_needs_no_delta_and_one_that_nothing_leads_to_has_no_way() -> None:
    assert cheapest_chain({content(1)}, content(1), []) == ()
    assert cheapest_chain({content(1)}, content(2), [delta(2, 1, 5)]) is None
