"""Checksums of live weights: hashed once, and again only where somebody wrote."""

import hashlib

import pytest
import torch
from torch import nn

from corral.workers.engine import weights as checksums
from corral.workers.engine.weights import Checksums


def sha256_of(*values: float) -> str:
    return hashlib.sha256(torch.tensor(values).numpy().tobytes()).hexdigest()[:16]


def test_a_tensor_is_hashed_once_until_somebody_writes_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.tensor([1.0, 2.0])) for name in ("a", "b", "c")})
    held = Checksums(model)
    names = held.names(skipped=["c"])
    assert held.of(names) == {"a": sha256_of(1.0, 2.0), "b": sha256_of(1.0, 2.0)}
    hashed = []
    hash_data = checksums.fingerprint
    monkeypatch.setattr(checksums, "fingerprint", lambda data: [hashed.append(data), hash_data(data)][1])
    assert held.of(names) == {"a": sha256_of(1.0, 2.0), "b": sha256_of(1.0, 2.0)} and not hashed
    with torch.no_grad():
        model["a"][1] = 3.0
    assert held.of(names) == {"a": sha256_of(1.0, 3.0), "b": sha256_of(1.0, 2.0)}
    assert len(hashed) == 1
