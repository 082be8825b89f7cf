"""What a machine says that can make no sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corral.workers.sandbox.availability import explain, why_no_sandbox

ROOT = Path(__file__).parents[3]
ASKED = [sys.executable, "-m", "corral.workers.sandbox"]


def test_this_machine_makes_one_and_says_so() -> None:
    assert why_no_sandbox() == ""
    run = subprocess.run(ASKED, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "sandboxes can be made here\n")


def test_a_kernel_without_user_namespaces_is_named_with_its_setting() -> None:
    # Where they are turned off for all namespaces below, as an administrator does it for all.
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "/bin/sh", "-c", script, "sh", *ASKED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and not run.stderr, run
    assert run.stdout.startswith("this kernel allows no user namespaces (user.max_user_namespaces = 0; ")
    assert "ask the administrators" in run.stdout


def test_without_bubblewrap_or_with_an_old_one_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_no_sandbox() == "there is no bwrap in the PATH; install the package bubblewrap, 0.8 or newer"
    # 0.4.1, as RHEL 9 has it.
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: Unknown option --disable-userns' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.getuid() and folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    reason = why_no_sandbox()
    assert reason.startswith("bubblewrap is too old (") and reason.endswith(
        "install the package bubblewrap, 0.8 or newer"
    )


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces = 0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone = 0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
    ],
)
def test_each_setting_that_turns_them_off_is_named(setting: str, value: str, word: str) -> None:
    fine = {"user/max_user_namespaces": "1000", "kernel/unprivileged_userns_clone": "1"}
    assert explain("unshare failed", fine) == "unshare failed"
    reason = explain("unshare failed", fine | {setting: value})
    assert word in reason and "unshare failed" in reason and "administrators" in reason
