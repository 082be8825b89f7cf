"""What torch is told of a GPU's memory, before it is there to be told."""

import os
import subprocess
import sys

import pytest

from corral.workers.__main__ import _let_segments_grow

GROWING = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@pytest.mark.parametrize(
    ("kind", "site", "told"),
    [
        ("model_worker", {}, dict([GROWING])),
        ("generation_server", {}, {}),
        ("model_worker", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ("model_worker", {GROWING[0]: "backend:native"}, {GROWING[0]: "backend:native"}),
    ],
)
def test_training_ranks_have_memory_that_grows_in_place_unless_the_site_says_otherwise(
    kind: str, site: dict[str, str], told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # to be put back afterwards
        monkeypatch.delenv(name)
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    _let_segments_grow(kind)
    assert {name: os.environ[name] for name in (GROWING[0],) if name in os.environ} == told


def test_a_worker_does_not_load_torch_before_it_knows_its_kind() -> None:
    code = "import sys, corral.workers.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
