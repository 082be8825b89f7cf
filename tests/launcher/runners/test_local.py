"""Workers on this machine: who gets which GPU, and what is told when there are too few."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.launcher.runners import runner as runner_module
from corral.launcher.runners.runner import LocalRunner, share_gpus, visible_gpus
from tests.launcher.trials import wait_until


@settings(deadline=None)
@given(wanted=st.lists(st.integers(0, 3), max_size=6), spare=st.integers(0, 2))
def test_every_worker_gets_the_gpus_that_it_asks_for_and_nobody_shares(wanted: list[int], spare: int) -> None:
    gpus_wanted = {f"model_worker/{index}": count for index, count in enumerate(wanted)}
    gpus = [f"GPU-{index}" for index in range(sum(wanted) + spare)]
    shares = share_gpus(gpus_wanted, gpus)
    assert {worker: len(share) for worker, share in shares.items()} == gpus_wanted
    assert [gpu for share in shares.values() for gpu in share] == gpus[: sum(wanted)]


def test_too_few_gpus_are_an_error_with_both_numbers_the_groups_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"needs 3 GPUs \(generation_server, model_worker\) .* has 2; .*`gpu: 0`"):
        share_gpus({"master_worker/0": 0, "model_worker/0": 2, "generation_server/0": 1}, ["0", "1"])


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> None:
    """A driver that shows so many."""
    for index in range(count):
        (folder / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    monkeypatch.setattr(runner_module, "_GPUS", folder / "gpus")
    monkeypatch.setattr(runner_module, "_HIDDEN_DRIVERS", ())


@pytest.mark.parametrize(
    ("value", "count", "gpus"),
    [
        ("0,2", 3, ["0", "2"]),
        ("0,2", 2, ["0"]),
        ("0,1", 0, []),
        (" GPU-a , GPU-b,", 2, ["GPU-a", "GPU-b"]),
        ("GPU-a", 0, []),
        ("", 2, []),
    ],
)
def test_the_gpus_are_those_that_the_user_left_visible_and_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, count: int, gpus: list[str]
) -> None:
    pretend_gpus(monkeypatch, tmp_path, count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == gpus


@pytest.mark.parametrize(("worker", "seen"), [("model_worker/0", "1,3"), ("master_worker/0", "")])
def test_a_worker_sees_its_own_gpus_and_without_any_none_of_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    runner = LocalRunner(bind_address="auto", gpus_by_worker={"model_worker/0": ["1", "3"]})
    log = tmp_path / "log"
    command = ("sh", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES, $A"')
    task = runner.start(worker, command, environment={"A": "b"}, log_path=log)
    wait_until(lambda: task.poll() is not None, "its end")
    assert (task.poll(), log.read_text()) == (0, f"sees {seen}, b\n")
