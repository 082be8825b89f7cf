import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.trial.directory import (
    StopRequest,
    TrialDirectory,
    TrialExistsError,
    atomic_write,
    link_files,
    next_trial_name,
    require_inside,
    validate_name,
)

_ALLOWED = "ABCXYZabcxyz0189._-"


@given(st.text(alphabet=_ALLOWED, min_size=1, max_size=64).filter(lambda name: name[0] not in ".-"))
def test_names_of_allowed_characters_are_accepted(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 65,
        ".hidden",
        "-rf",
        "..",
        "a/b",
        "a\nb",
        "a b",
        "a$(id)",
        "a;b",
        "tr\u00efal",
        "a\x00",
        "a\n",
        "a'b",
        "*",
    ],
)
def test_hostile_names_are_refused_with_the_value(name: str) -> None:
    with pytest.raises(ValueError, match="trial name") as caught:
        validate_name(name, what="trial name")
    assert repr(name) in str(caught.value)


@given(st.text(max_size=70))
def test_an_accepted_name_is_one_plain_path_part(name: str) -> None:
    try:
        validate_name(name)
    except ValueError:
        return
    assert Path("/root") / name == Path(f"/root/{name}") and Path(name).parts == (name,) and name not in (".", "..")


def test_the_layout_is_what_users_and_workers_know(tmp_path: Path) -> None:
    trial = TrialDirectory.of(tmp_path, experiment="math", trial="t1")
    root = tmp_path / "math" / "t1"
    assert trial.path == root
    assert {
        trial.config_path: "config.yaml",
        trial.plan_path: "plan.json",
        trial.code_path: "code",
        trial.sbatch_path: "trial.sbatch",
        trial.layout_path: "layout.json",
        trial.evaluations_path: "eval",
        trial.rendezvous_path: "rdzv.json",
        trial.journal_path: "events.jsonl",
        trial.metrics_path: "metrics.jsonl",
        trial.secrets_path: "secrets",
        trial.logs_path: "logs",
        trial.attempt_logs(2): "logs/attempt-2",
        trial.worker_log(2, "model_worker", 3): "logs/attempt-2/model_worker-3.log",
        trial.log_path: "log",
        trial.checkpoints_path: "checkpoints",
        trial.weights_path: "weights",
        trial.ledger_path: "ledger",
        trial.turns_path: "turns",
        trial.samples_path: "samples",
        trial.timeline_path: "timeline",
        trial.tasks_path: "tasks.jsonl",
        trial.held_out_tasks_path: "held-out-tasks.jsonl",
        trial.spool_path(1): "spool/rollout_worker-1",
        trial.page_path: "page.html",
        trial.exports_path: "exports",
        trial.trajectories_path: "trajectories.jsonl",
        trial.control_path: "control",
        trial.stop_request_path: "control/stop.json",
        trial.kept_down_path: "control/kept-down",
        trial.failed_nodes_path: "control/failed-nodes",
        trial.supervisor_alive_path: "control/supervisor-alive",
    } == {root / name: name for name in (path.relative_to(root).as_posix() for path in _all_paths(trial))}


def _all_paths(trial: TrialDirectory) -> list[Path]:
    names = [name for name in dir(TrialDirectory) if name.endswith("_path") and not callable(getattr(trial, name))]
    calls = [trial.attempt_logs(2), trial.worker_log(2, "model_worker", 3), trial.spool_path(1)]
    return [*(getattr(trial, name) for name in names), *calls]


def test_a_new_trial_directory_is_closed_to_others_and_has_its_folders(tmp_path: Path) -> None:
    trial = TrialDirectory.of(tmp_path, experiment="math", trial="t1")
    previous = os.umask(0)
    try:
        trial.create()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(trial.path.stat().st_mode) == 0o700
    for folder in (trial.logs_path, trial.log_path, trial.checkpoints_path, trial.ledger_path, trial.control_path):
        assert folder.is_dir()


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_a_project_folder_gives_its_group_to_all_of_a_trial(umask: int, tmp_path: Path) -> None:
    group = next((one for one in (*os.getgroups(), 65534) if one != os.getgid()), os.getgid())
    try:
        os.chown(tmp_path, -1, group)
    except PermissionError:
        pytest.skip("this user has no second group")
    tmp_path.chmod(0o2775)
    before = os.umask(umask)
    try:
        trial = TrialDirectory.of(tmp_path / "corral", experiment="exp", trial="trial")
        trial.create()
        atomic_write(trial.path / "weights" / "file", b"x")
        link_files(trial.path / "weights", trial.path / "exports" / "step-1")
    finally:
        os.umask(before)
    inside = [trial.path, *trial.path.rglob("*")]
    assert {path.stat().st_gid for path in inside} == {group}
    assert all(path.stat().st_mode & stat.S_ISGID for path in inside if path.is_dir())
    assert not trial.path.stat().st_mode & 0o077


def test_a_taken_name_is_refused_with_the_way_out(tmp_path: Path) -> None:
    trial = TrialDirectory.of(tmp_path, experiment="math", trial="t1")
    trial.create()
    with pytest.raises(TrialExistsError, match="--resume"):
        trial.create()


def test_a_link_out_of_the_file_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / "math").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="elsewhere"):
        TrialDirectory.of(root, experiment="math", trial="t1")


def test_a_sibling_with_the_same_prefix_is_not_inside(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        require_inside(tmp_path / "run10", tmp_path / "run1")


@pytest.mark.parametrize("relative", ["", "/etc/passwd", "../x", "checkpoints/../../x", "."])
def test_paths_that_leave_the_trial_are_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(ValueError):
        TrialDirectory(tmp_path).inside(relative)


def test_inside_and_relative_are_inverse(tmp_path: Path) -> None:
    trial = TrialDirectory(tmp_path)
    assert trial.relative(trial.inside("ledger/1-2.json")) == "ledger/1-2.json"


def test_trial_names_count_up_from_the_highest(tmp_path: Path) -> None:
    assert next_trial_name(tmp_path / "missing") == "trial-1"
    for name in ("trial-2", "trial-10", "trial-x", "other-99", "trial-10-old"):
        (tmp_path / name).mkdir()
    assert next_trial_name(tmp_path) == "trial-11"


def test_latest_points_at_the_newest_attempt(tmp_path: Path) -> None:
    trial = TrialDirectory(tmp_path / "t")
    trial.create()
    for attempt in (1, 2, 2):
        trial.start_attempt_logs(attempt)
    assert os.readlink(trial.logs_path / "latest") == "attempt-2"


def test_a_stop_request_reaches_the_trial_and_can_be_forgotten(tmp_path: Path) -> None:
    trial = TrialDirectory(tmp_path / "t")
    trial.create()
    assert trial.read_stop_request() is None
    request = StopRequest(requested_at=1.5, by="ann@login1", now=False, grace_s=60.0)
    trial.write_stop_request(request)
    assert trial.read_stop_request() == request
    trial.clear_stop_request()
    assert trial.read_stop_request() is None


def test_groups_are_kept_down_until_that_is_undone(tmp_path: Path) -> None:
    trial = TrialDirectory.of(tmp_path, experiment="math", trial="t1")
    trial.create()
    assert trial.read_groups_kept_down() == frozenset()
    kinds = ("rollout_worker", "generation_server")
    with ThreadPoolExecutor(2) as pool:  # two commands at once: neither undoes what the other asks for
        for _ in range(20):
            for undo, kept_down in ((False, {*kinds}), (True, frozenset())):
                list(pool.map(lambda kind, undo=undo: trial.keep_group_down(kind, undo=undo), kinds))
                assert trial.read_groups_kept_down() == kept_down


def test_a_hand_written_stop_request_is_refused_by_name(tmp_path: Path) -> None:
    trial = TrialDirectory(tmp_path / "t")
    trial.create()
    trial.stop_request_path.write_text("please stop")
    with pytest.raises(ValueError, match=r"stop\.json.*rl-stop"):
        trial.read_stop_request()


def test_an_atomic_write_replaces_the_content_and_sets_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old", mode=0o644)
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_atomic_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_linked_directory_has_every_file_and_no_second_copy(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    (source / "below" / "further").mkdir(parents=True)
    names = ("model", "below/one", "below/further/two")
    for name in names:
        (source / name).write_text(name)
    (source / "below" / "loop").symlink_to(source)
    link_files(source, target)
    assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == set(names)
    assert all(os.path.samefile(source / name, target / name) for name in names)
