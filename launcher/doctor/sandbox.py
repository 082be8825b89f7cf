"""Asks the half of corral that makes sandboxes whether it can make one on this machine."""

import subprocess

from corral.experiments.own_python import own_python

_TIMEOUT_S = 60.0  # Python from a cold file server


def why_no_sandbox() -> str:
    """The reason in words, with a way out; "" if one was made."""
    command = own_python("-m", "corral.workers.sandbox")
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} did not end within {_TIMEOUT_S:.0f} s"
    if run.returncode == 0:
        return ""
    return run.stdout.strip() or run.stderr.strip()[-500:] or f"{' '.join(command)} ended with {run.returncode}"
