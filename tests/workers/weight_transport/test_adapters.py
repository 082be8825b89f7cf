"""A host reads the adapter alone where it holds a version, makes the rest bit for bit, and stages nothing wrong."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from corral.workers.checkpoint.manifest import MANIFEST_NAME, SealedDirectory, write_manifest
from corral.workers.weight_transport.filling import StagedVersion
from corral.workers.weight_transport.staging import BASE_FILE, WeightStaging
from tests.workers.checkpoint.sealing import describe
from tests.workers.weight_transport.adapted_versions import merged, publish_adapted, random_adapter
from tests.workers.weight_transport.versions import LONG_S, content_of, flip_a_byte, joined

RANK = 2
ADAPTED = ("layer.0.q_proj.weight", "layer.1.q_proj.weight")
SHAPES = {"embed.weight": (400, 150), ADAPTED[0]: (200, 150), "layer.0.norm.weight": (150,), ADAPTED[1]: (200, 150)}


class Trainer:
    """Publishes a base model with random adapters, in two files that divide it otherwise than its own."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.dtype = folder, dtype
        self.base = folder / "base"
        self.base.mkdir(parents=True)
        self._generator = torch.Generator().manual_seed(1)
        self.weights = {name: torch.randn(shape, generator=self._generator) for name, shape in SHAPES.items()}
        save_file(
            {name: self.weights[name] for name in SHAPES if name != ADAPTED[1]}, self.base / "model-1.safetensors"
        )
        save_file({ADAPTED[1]: self.weights[ADAPTED[1]]}, self.base / "model-2.safetensors")
        (self.base / "config.json").write_text("{}")

    def write(self, name: str) -> SealedDirectory:
        shapes = {name: SHAPES[name] for name in ADAPTED}
        adapter = random_adapter(shapes, rank=RANK, generator=self._generator)
        weights = merged(self.weights, adapter, dtype=self.dtype)
        files = {
            "model-00001-of-00002.safetensors": {name: weights[name] for name in list(SHAPES)[:2]},
            "model-00002-of-00002.safetensors": {name: weights[name] for name in list(SHAPES)[2:]},
        }
        return publish_adapted(self.folder / name, files, adapter, base=self.base)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[WeightStaging]:
    with closing(joined(tmp_path, "lora")) as transport:
        yield transport


def stage(transport: WeightStaging, version: SealedDirectory) -> StagedVersion:
    """What is staged is what was published, bit for bit, however it came."""
    staged = transport.stage(version.path.name, version.path, version.digest, timeout_s=LONG_S)
    assert staged.path != version.path
    published = {path.name: path.read_bytes() for path in version.path.iterdir() if path.is_file()}
    here = content_of(staged.path)
    here.pop(BASE_FILE, None)
    assert here == published
    return staged


def bytes_of(version: SealedDirectory, *, adapter: bool) -> int:
    return sum(entry.size for name, entry in version.files.items() if name.startswith("adapter/") == adapter)


def base_bytes() -> int:
    return sum(4 * SHAPES[name][0] * SHAPES[name][1] for name in ADAPTED)


def small(version: SealedDirectory) -> int:
    """The adapter, and the manifest."""
    return bytes_of(version, adapter=True) + version.files[MANIFEST_NAME].size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_fifty_versions_a_host_still_has_what_the_trainer_has_bit_for_bit(
    transport: WeightStaging, tmp_path: Path, dtype: torch.dtype
) -> None:
    trainer = Trainer(tmp_path / "weights", dtype=dtype)
    first, second = trainer.write("v0-e1"), trainer.write("v1-e1")
    assert stage(transport, first).bytes_read == bytes_of(first, adapter=False)
    assert stage(transport, second).bytes_read == small(second) + base_bytes()
    for number in range(2, 51):
        version = trainer.write(f"v{number}-e1")
        assert stage(transport, version).bytes_read == small(version) < 0.05 * bytes_of(version, adapter=False)
    with closing(joined(tmp_path, "lora", number=1)) as joiner:
        assert stage(joiner, version).bytes_read == 0


def test_who_joins_late_on_another_host_reads_all_once_and_then_adapters(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write("v0-e1")
    late = trainer.write("v50-e1")
    with closing(joined(tmp_path, "lora")) as transport:
        assert stage(transport, late).bytes_read == bytes_of(late, adapter=False)
        for number in (51, 52):
            version = trainer.write(f"v{number}-e1")
            assert stage(transport, version).bytes_read == small(version) + (base_bytes() if number == 51 else 0)


def test_a_torn_adapter_is_said_and_all_is_read(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v0-e1"))
    for number, damaged in enumerate(("adapter_model.safetensors", "adapter_config.json"), 1):
        version = trainer.write(f"v{number}-e1")
        file = version.path / "adapter" / damaged
        if damaged.endswith("json"):
            file.write_bytes(file.read_bytes()[:-9])
        else:
            flip_a_byte(file)
        assert stage(transport, version).bytes_read >= bytes_of(version, adapter=False) - len("{}")
        assert "is read whole" in caplog.text
        caplog.clear()
    version = trainer.write("v3-e1")
    assert stage(transport, version).bytes_read == small(version) + base_bytes()  # the base was doubted, and read anew


def test_another_base_model_is_found_out(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v0-e1"))
    name = ADAPTED[1]
    save_file({name: load_file(trainer.base / "model-2.safetensors")[name] + 1}, trainer.base / "model-2.safetensors")
    version = trainer.write("v1-e1")
    stage(transport, version)
    assert "model-00002-of-00002.safetensors is read whole" in caplog.text
    assert "model-00001-of-00002.safetensors is read whole" not in caplog.text


def test_kept_base_weights_that_cannot_be_used_are_read_anew_for_the_next_version(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v0-e1"))
    kept = stage(transport, trainer.write("v1-e1")).path / BASE_FILE
    for number, content in enumerate((b"torn", save({"another.weight": torch.ones(2)}))):
        kept.write_bytes(content)
        version = trainer.write(f"v{2 * number + 2}-e1")
        assert stage(transport, version).bytes_read > bytes_of(version, adapter=False) - len("{}")
        assert "weights that this host keeps cannot be used" in caplog.text
        caplog.clear()
        version = trainer.write(f"v{2 * number + 3}-e1")
        staged = stage(transport, version)
        assert staged.bytes_read == small(version) + base_bytes()
        kept = staged.path / BASE_FILE


def test_a_base_model_that_is_gone_is_said_and_all_is_read(
    transport: WeightStaging, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    stage(transport, trainer.write("v0-e1"))
    (trainer.base / "model-2.safetensors").unlink()
    version = trainer.write("v1-e1")
    assert stage(transport, version).bytes_read == bytes_of(version, adapter=False) - len("{}")
    assert f"{trainer.base} has no weight {ADAPTED[1]}" in caplog.text


def test_a_version_without_adapter_is_read_whole(transport: WeightStaging, trainer: Trainer) -> None:
    stage(transport, trainer.write("v0-e1"))
    trainer.write("v1-e1")
    plain = trainer.folder / "plain"
    plain.mkdir()
    save_file({"a": torch.ones(3)}, plain / "model.safetensors")
    sealed = write_manifest(plain, describe(plain), {})
    staged = transport.stage("plain", plain, sealed.digest, timeout_s=LONG_S)
    assert content_of(staged.path) == content_of(plain)
