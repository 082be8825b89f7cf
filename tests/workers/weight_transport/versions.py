"""Versions of weights as a trainer leaves them: a few files under a manifest."""

import threading
from pathlib import Path

import numpy as np

from corral.experiments.config.rollout import WeightsConfig
from corral.workers.checkpoint.manifest import write_manifest
from corral.workers.weight_transport.filling import StagingDeadline
from corral.workers.weight_transport.staging import WeightStaging, make_staging
from tests.workers.checkpoint.sealing import describe
from tests.workers.trusted import trust

LONG_S = 60.0


def make_version(
    directory: Path, *, seed: int = 0, sizes: tuple[int, ...] = (5_000_001, 17, 0), suffix: str = ".safetensors"
) -> str:
    """Random files; returns the digest of their manifest."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        (directory / f"model-{number:05d}{suffix}").write_bytes(random.bytes(size))
    return write_manifest(directory, describe(directory), {"version": f"0.{seed}"}).digest


def joined(tmp_path: Path, transport: str, *, number: int = 0) -> WeightStaging:
    """One of the workers of a host, whose memory is a folder of `tmp_path`."""
    (tmp_path / "memory").mkdir(exist_ok=True)
    config = WeightsConfig.model_validate({"transport": transport, "host_directory": tmp_path / "memory"})
    return make_staging(
        config, trial_uuid="ab" * 16, worker=f"generation_server/{number}", admin_key="", tls=trust().client()
    )


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def patience(timeout_s: float = LONG_S) -> StagingDeadline:
    return StagingDeadline.of("version 0.1", timeout_s=timeout_s, given_up=threading.Event())


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
