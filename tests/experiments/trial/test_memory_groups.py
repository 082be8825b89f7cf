"""Control groups of both versions: what a process may still use, and whether somebody was killed for memory."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from corral.experiments.trial.memory_groups import memory_groups

MiB = 1 << 20
UNLIMITED_IN_V1 = 9223372036854771712


def write(folder: Path, files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def proc_of(tmp_path: Path, group: str, mount: str) -> Path:
    write(tmp_path / "proc", {"cgroup": group, "mountinfo": f"20 1 0:5 / /proc rw - proc proc rw\n{mount}"})
    return tmp_path / "proc"


@pytest.mark.parametrize("root", ["/", "/docker/7"])
def test_version_1_is_read_where_the_memory_controller_is_mounted(tmp_path: Path, root: str) -> None:
    """A container sees the tree from its own group on."""
    top = tmp_path / "memory"
    job = top / "job_7"
    write(top, {"memory.limit_in_bytes": UNLIMITED_IN_V1, "memory.usage_in_bytes": 900 * MiB})
    write(
        job,
        {
            "memory.limit_in_bytes": 100 * MiB,
            "memory.usage_in_bytes": 60 * MiB,
            "memory.stat": f"cache 1\ntotal_cache {30 * MiB}\ntotal_shmem {10 * MiB}",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
        },
    )
    group = f"9:name=systemd:/\n4:cpuset,memory:{root.rstrip('/')}/job_7\n0::/"
    proc = proc_of(tmp_path, group, f"35 31 0:32 {root} {top} rw,relatime - cgroup cgroup rw,memory")
    own, above = memory_groups(proc)
    assert (own.folder, own.room, own.kills) == (job, 60 * MiB, 2)
    assert above.folder == top and above.room is not None and above.room > 1 << 60 and above.kills is None


def test_version_2_is_read_up_to_its_mount(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    write(
        top / "job_7" / "step_0",
        {"memory.max": "max", "memory.current": 5, "memory.events": "oom 3\noom_kill 1", "cgroup.procs": "12\n13"},
    )
    write(
        top / "job_7",
        {
            "memory.max": 100 * MiB,
            "memory.current": 70 * MiB,
            "memory.stat": f"anon 1\nfile {9 * MiB}\nshmem {4 * MiB}",
        },
    )
    proc = proc_of(tmp_path, "0::/job_7/step_0", f"35 31 0:32 / {top} rw - cgroup2 cgroup2 rw,nsdelegate")
    step, job, root = memory_groups(proc)
    assert (step.room, step.kills, step.members) == (None, 1, {12, 13})
    assert job.room == 35 * MiB and job.kills is None
    assert (root.folder, root.room, root.members) == (top, None, set())


def test_a_group_outside_of_what_is_mounted_and_no_groups_at_all_say_nothing(tmp_path: Path) -> None:
    mount = f"35 31 0:32 /docker/7 {tmp_path} rw - cgroup2 cgroup2 rw"
    assert list(memory_groups(proc_of(tmp_path, "0::/elsewhere", mount))) == []
    assert list(memory_groups(tmp_path / "nothing")) == []
