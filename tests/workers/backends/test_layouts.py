"""Every layout of the fsdp backend trains like a plain loop over transformers, and goes on where another stopped."""

from pathlib import Path

import pytest

from tests.workers.backends.layout_checks import (
    MODES,
    Part,
    Scene,
    VariantScene,
    assert_like_one_rank,
    assert_part_is_alike,
    assert_trained_alike,
    make_scene,
    make_variants,
)

LAYOUTS = ("d1", "d2", "t2", "c2", "c4", "d2t2", "d2c2", "t2c2")
FEW = Part(
    models=("qwen3",),
    layouts={"d2t2": "full", "d2c2": "full", "t2c2": "selective"},
    chains=(),  # test_megatron.py has one, of both backends
)
ROUND = tuple(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
ALL = {
    f"{kind}, recompute {how}": Part(
        models=(kind,), layouts=dict.fromkeys(LAYOUTS, how), chains=ROUND if how == "none" else ()
    )
    for kind in ("qwen2", "qwen3", "llama")
    for how in MODES
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("few"), FEW)


@pytest.mark.parametrize("layout", FEW.layouts)
def test_a_layout_trains_like_a_plain_loop(layout: str, few: Scene) -> None:
    assert_trained_alike(few, "qwen3", layout)


@pytest.mark.slow
@pytest.mark.parametrize("part", ALL.values(), ids=ALL)
def test_every_layout_trains_every_kind_of_model_like_a_plain_loop(part: Part, tmp_path: Path) -> None:
    assert_part_is_alike(make_scene(tmp_path, part), part)


CASES = (
    *(("every algorithm", layout) for layout in ("c2", "d2t1")),  # d2 itself is of the last two of four ranks
    *((name, "c2") for name in ("value", "scalar", "taught")),
    *((name, "t2") for name in ("value", "muon", "bfloat16", "lora with dropout", "taught")),
    *((name, "d2t1") for name in ("value", "bfloat16")),
)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> VariantScene:
    return make_variants(tmp_path_factory.mktemp("variants"), CASES, world_size=2)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_heads_optimizers_and_adapters_train_in_a_layout_as_on_one_rank(
    name: str, layout: str, variants: VariantScene
) -> None:
    assert_like_one_rank(variants, name, layout)


@pytest.mark.slow
def test_adapters_train_as_on_one_rank_where_ranks_share_layers_and_rows(tmp_path: Path) -> None:
    scene = make_variants(tmp_path, (("lora", "t2c2"),), world_size=4)
    assert_like_one_rank(scene, "lora", "t2c2")
