"""Tells whether sandboxes can be made on this machine: exit 0, or 1 and the reason.

python -m corral.workers.sandbox
"""

import sys

from corral.workers.sandbox.availability import why_no_sandbox


def main() -> int:
    """For rl-doctor, which imports no worker, and for people."""
    reason = why_no_sandbox()
    print(reason or "sandboxes can be made here")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
