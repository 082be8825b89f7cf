"""Which versions of the weights may go, and their removal.

weights/v00000089-e1  v00000090-e1        the lineage: its newest versions stay
        v00000091-e1  v00000092-e1        orphans, since epoch 2 continues step 90: they go, however high their number
        v00000091-e2  v00000091-e2-copy1  the present version, which was damaged, and is published again
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from corral.scheduling.policy_version import Lineage, PolicyVersion
from corral.workers.checkpoint.removal import Remover

_KEPT: Final = 3  # a server that was told of a version just now may not have said yet that it reads it
_NAME: Final = re.compile(r"v(?P<step>\d{8,})-e(?P<epoch>\d+)(-copy\d+)?", re.ASCII)


def weights_name(version: PolicyVersion, *, copy: int = 0) -> str:
    """Name of the directory of a version, or of a further copy of it."""
    return f"v{version.step:08d}-e{version.epoch}" + (f"-copy{copy}" if copy else "")


def remove_old_weights(
    directory: Path, lineage: Lineage, *, present: PolicyVersion, in_use: Collection[Path], remover: Remover
) -> list[str]:
    """Removes orphans, and the lineage's versions before its newest ones.

    Args:
        directory: holds one folder per version.
        present: the version that the trainer holds; folders of a later epoch than its own are not its business.
        in_use: folders that a server reads.

    Returns:
        The names that were removed.
    """
    remover.sweep(directory)
    matches = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    versions = {match[0]: PolicyVersion(int(match["epoch"]), int(match["step"])) for match in matches}
    living = sorted(
        {version for version in versions.values() if lineage.contains(version)}, key=lambda version: version.step
    )
    kept = {*living[-_KEPT:], present}
    removed: list[str] = []
    for name, version in sorted(versions.items(), key=lambda item: item[1]):
        path = directory / name
        if version in kept or version.epoch > present.epoch or path in in_use:
            continue
        if remover.remove(path):
            removed.append(path.name)
    return removed
