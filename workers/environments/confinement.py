"""The confinement of an environment's host: its own folder for HOME and temporary files, and few variables.

    the worker's environment ──few names──► the host's ──verifiers' rule: nothing with API_KEY──► programs it starts
    DIR/harnesses (`make environments`) ──linked──► the folder: what verifiers would fetch for its programs is there

No key of the trial is in it. What it starts leaves its session, and is found by a mark when it is to be ended.
"""

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MARK = "CORRAL_ENVIRONMENT"
_PASSED_ON = frozenset(
    "CORRAL_TRIAL_UUID CURL_CA_BUNDLE HTTPS_PROXY HTTP_PROXY LANG LC_ALL LD_LIBRARY_PATH NO_PROXY OMP_NUM_THREADS PATH"
    " REQUESTS_CA_BUNDLE SSL_CERT_DIR SSL_CERT_FILE TZ http_proxy https_proxy no_proxy".split()
)
"""Names of variables; CORRAL_TRIAL_UUID says whose processes these are."""
_SCRIPTS = ".cache/verifiers/runtimes/scripts"  # below HOME, where verifiers has its programs


class Confinement:
    """The folder and the environment of one host.

    Example:
        confinement = Confinement(python, variables=["SERPER_API_KEY"])
        subprocess.Popen(..., env=confinement.environment, cwd=confinement.folder)
        ...
        confinement.end()
    """

    def __init__(
        self, python: Path, *, variables: Sequence[str] = (), inherited: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            python: the host's.
            variables: names that it gets besides.
            inherited: None is this process's environment.
        """
        inherited = os.environ if inherited is None else inherited
        self.folder = Path(tempfile.mkdtemp(prefix="corral-environment-"))
        self._mark = secrets.token_hex(16)
        home, temporary = self.folder / "home", self.folder / "tmp"
        home.mkdir()
        temporary.mkdir()
        self.environment = {
            **{name: value for name, value in inherited.items() if name in _PASSED_ON or name in variables},
            _MARK: self._mark,
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "PATH": f"{python.parent}{os.pathsep}{inherited.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": inherited.get("HF_HUB_OFFLINE", "1"),  # the tokenizer is a folder
            **_linked_programs(python.parent.parent / "harnesses", home),
        }

    def end(self) -> list[int]:
        """Kills what was started in it, wherever it went, and removes the folder; the process ids."""
        killed = []
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        return killed

    def _processes(self) -> Iterator[int]:
        mark = f"{_MARK}={self._mark}".encode()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):  # another user's, or it has just ended
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    yield pid


def _linked_programs(prepared: Path, home: Path) -> dict[str, str]:
    """Has uv find in this home what was fetched when the environment was installed; what to tell it for that.

    What it makes of it is this home's own. Without the locks it would ask the registry what is new.
    """
    if not prepared.is_dir():
        return {}
    scripts, cache = home / _SCRIPTS, home / ".cache" / "uv"
    scripts.mkdir(parents=True)
    cache.mkdir(parents=True)
    for lock in (prepared / "scripts").glob("*.lock"):
        shutil.copyfile(lock, scripts / lock.name)
    for bucket in (prepared / "uv-cache").iterdir():
        if bucket.is_dir():
            (cache / bucket.name).symlink_to(bucket)
    return {"UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "symlink"}
