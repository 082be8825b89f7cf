"""Whether sandboxes can be made on this machine, found out by making one; and if not, why, and what to do.

bwrap in the PATH? ──► a sandbox ──► Python in it says 42 ──► ""
                           └── failed: what the kernel is set to, and the error
"""

import asyncio
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from corral.workers.sandbox.base import SandboxError
from corral.workers.sandbox.bubblewrap import Bubblewrap, complaint_of

_TIMEOUT_S = 60.0  # Python from a cold file server
_INSTALL = "install the package bubblewrap, 0.8 or newer"
_OFF_BY_SETTING = {
    "user/max_user_namespaces": ("0", "this kernel allows no user namespaces"),
    "kernel/unprivileged_userns_clone": ("0", "this kernel leaves user namespaces to root"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "AppArmor takes the rights away that a user namespace gives"),
}
_ASK = "ask the administrators to allow them, or for another node"


def why_no_sandbox() -> str:
    """The reason in words and a way out; "" if a sandbox was just made, and ran this Python."""
    if shutil.which("bwrap") is None:
        return f"there is no bwrap in the PATH; {_INSTALL}"
    try:
        asyncio.run(_try())
    except SandboxError as error:
        return explain(str(error), _settings())
    return ""


def explain(error: str, settings: Mapping[str, str]) -> str:
    """Why none could be made.

    Args:
        error: of the attempt.
        settings: of the kernel, by their names below /proc/sys; what it does not have is left out.
    """
    for name, (value, meaning) in _OFF_BY_SETTING.items():
        if settings.get(name) == value:
            return f"{meaning} ({name.replace('/', '.')} = {value}; {error}); {_ASK}"
    if "Unknown option" in error:
        return f"bubblewrap is too old ({error}); {_INSTALL}"
    return error


def _settings(folder: Path = Path("/proc/sys")) -> dict[str, str]:
    return {name: (folder / name).read_text().strip() for name in _OFF_BY_SETTING if (folder / name).is_file()}


async def _try() -> None:
    async with await Bubblewrap.create() as sandbox:
        result = await sandbox.exec([sys.executable, "-I", "-c", "print(6 * 7)"], timeout_s=_TIMEOUT_S)
    if result.stdout != b"42\n":
        raise SandboxError(f"{sys.executable} does not run in a sandbox: {complaint_of(result.stderr)}")
