import pytest

from corral.experiments.errors import ConfigError
from corral.launcher.submit.preflight import ClusterShape


def test_a_shape_is_nodes_gpus_and_memory() -> None:
    shape = ClusterShape.parse("4x8x80G")
    assert shape == ClusterShape(num_nodes=4, gpus_per_node=8, gpu_memory_mb=80 * 1024)
    assert shape.num_gpus == 32 and str(shape) == "4 nodes with 8 GPUs of 80 GiB"
    assert str(ClusterShape.parse(" 1x1x24576m ")) == "1 node with 1 GPU of 24 GiB"


@pytest.mark.parametrize(
    "text", ["", "4x8", "4x8x80", "4*8*80G", "0x8x80G", "4x0x80G", "4x8x0G", "4x8x80GB", "4x8x8.5G"]
)
def test_a_misspelt_shape_is_told_the_rule_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="(?s)NODESxGPUSxMEMORY.*hint: write 4x8x80G for 4 nodes") as refused:
        ClusterShape.parse(text)
    assert repr(text) in str(refused.value)
