"""Items in columns: none lies on another, and wires are straight and free of crossings where they can be."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from corral.launcher.report.layered import Item, Layers

GAP = 0.25


@st.composite
def layered_graphs(draw: st.DrawFn) -> Layers:
    columns = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    items = [
        Item(
            name=f"{column}.{number}",
            column=column,
            height=draw(st.floats(0.1, 2.0)),
            stays_below=draw(st.booleans()),
        )
        for column, count in enumerate(columns)
        for number in range(count)
    ]
    pairs = [(a.name, b.name) for a in items for b in items if b.column == a.column + 1]
    wires = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Layers(items=items, wires=wires, gap=GAP)


@given(layered_graphs())
def test_no_item_of_a_column_comes_nearer_to_another_than_the_gap(layers: Layers) -> None:
    y = layers.centres()
    columns: dict[int, list[Item]] = defaultdict(list)
    for item in sorted(layers.items, key=lambda item: -y[item.name]):
        columns[item.column].append(item)
    for column in columns.values():
        for above, below in zip(column, column[1:], strict=False):
            room = (y[above.name] - above.height / 2) - (y[below.name] + below.height / 2)
            assert room >= GAP - 1e-9


@given(layered_graphs())
def test_what_stays_below_is_below_the_rest_of_its_column(layers: Layers) -> None:
    y = layers.centres()
    for low in (item for item in layers.items if item.stays_below):
        assert all(
            y[low.name] < y[item.name] for item in layers.items if item.column == low.column and not item.stays_below
        )


def test_a_chain_is_a_straight_line() -> None:
    items = [Item(name=name, column=column, height=1.0 + column) for column, name in enumerate("abc")]
    y = Layers(items=items, wires=[("a", "b"), ("b", "c")], gap=GAP).centres()
    assert max(y.values()) - min(y.values()) < 1e-6


def test_wires_that_need_not_cross_do_not() -> None:
    items = [Item(name=f"{side}{number}", column=side, height=0.5) for side in (0, 1) for number in range(4)]
    partner = {"00": "12", "01": "10", "02": "13", "03": "11"}
    y = Layers(items=items, wires=list(partner.items()), gap=GAP).centres()
    order = sorted(partner, key=lambda name: -y[name])
    assert [partner[name] for name in order] == sorted(partner.values(), key=lambda name: -y[name])


def test_an_item_without_wires_gives_way_to_those_that_have_some() -> None:
    items = [
        Item(name="samples", column=0, height=1.0),
        Item(name="evaluate", column=0, height=1.0, stays_below=True),
        Item(name="train", column=1, height=1.0),
    ]
    y = Layers(items=items, wires=[("samples", "train")], gap=GAP).centres()
    assert abs(y["samples"] - y["train"]) < 0.01 and y["evaluate"] < y["samples"]
