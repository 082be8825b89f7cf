"""The library of the pretended device, built once for each torch and each text of device.cpp and kept in a cache.

    device.cpp ── c++, once: half a minute ──► $XDG_CACHE_HOME/corral/pretended-gpu/TORCH-DIGEST.so ──► every test run

It finds torch's libraries where they lay when it was built, so the digest covers their folder as well.

torch itself is not imported: it asks for its devices while it is, so the library has to be there first.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
DEADLINE_S = 240.0  # ten times what it takes alone


def why_not_pretended() -> str | None:
    """Why there can be no pretended GPU here; None where there can."""
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this torch is for real GPUs"
    if shutil.which(compiler()) is None:
        return f"no compiler to pretend a GPU: {compiler()} is not installed (`make setup-slurm` installs it)"
    return None


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def library() -> Path:
    """The built library; the first that asks builds it, and others wait for that.

    Raises:
        RuntimeError: if the compiler refuses the source, with what it says.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corral" / "pretended-gpu"
    digest = hashlib.sha256(SOURCE.read_bytes() + os.fsencode(_torch())).hexdigest()[:16]
    built = cache / f"{version('torch')}-{digest}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    torch = _torch()
    part = built.with_suffix(".part")
    # Not optimized: kernels are torch's own, and the headers alone take their time.
    command = [compiler(), "-O0", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch}/include", str(SOURCE)]
    command += [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib", "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    part.rename(built)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
