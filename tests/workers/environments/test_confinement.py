"""What a host is started with, and what is left of it."""

import os
import subprocess
import sys
from pathlib import Path

from corral.workers.environments.confinement import Confinement


def test_a_few_variables_pass_and_none_that_may_be_a_key() -> None:
    inherited = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "HF_TOKEN": "secret",
        "WANTED": "yes",
        "https_proxy": "http://proxy",
    }
    confinement = Confinement(Path("/venv/bin/python"), variables=["WANTED"], inherited=inherited)
    try:
        environment = confinement.environment
        assert environment["PATH"] == "/venv/bin:/bin" and environment["https_proxy"] == "http://proxy"
        assert environment["WANTED"] == "yes" and "HF_TOKEN" not in environment
        assert (
            Path(environment["HOME"]).is_relative_to(confinement.folder)
            and confinement.folder.stat().st_mode & 0o77 == 0
        )
    finally:
        confinement.end()


def test_programs_find_what_was_fetched_when_the_environment_was_installed(tmp_path: Path) -> None:
    prepared = tmp_path / "harnesses"
    (prepared / "scripts").mkdir(parents=True)
    (prepared / "scripts" / "a.py.lock").write_text("locked")
    (prepared / "uv-cache" / "wheels-v8").mkdir(parents=True)
    confinement = Confinement(tmp_path / "bin" / "python", inherited={})
    cache, home = Path(confinement.environment["UV_CACHE_DIR"]), Path(confinement.environment["HOME"])
    assert (home / ".cache/verifiers/runtimes/scripts/a.py.lock").read_text() == "locked"
    assert (cache / "wheels-v8").resolve() == prepared / "uv-cache" / "wheels-v8" and cache.is_relative_to(home)
    confinement.end()
    assert not confinement.folder.exists() and (prepared / "uv-cache" / "wheels-v8").is_dir()


def test_what_has_left_its_session_is_ended_too() -> None:
    confinement = Confinement(Path(sys.executable), inherited=dict(os.environ))
    code = "import os, sys, time; os.setsid(); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], env=confinement.environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert confinement.end() == [process.pid]
        assert process.wait(30) == -9
