"""A version of the weights under a second name that stays: a commit's, an export's.

    weights/v00000007-e1:  model.safetensors, config.json, ... ──second names──► checkpoints/.../weights, exports/...
                           model.safetensors.delta             ──► left behind, and a manifest of what was not

A delta saves bytes to a host that holds the version before, and that one is gone long before a commit or an export is.
Beside the whole files that it leads to it would only be stored, copied, and verified at every recovery.
"""

from pathlib import Path

from corral.experiments.trial.directory import link_files
from corral.workers.checkpoint.file_delta import DELTA_SUFFIX
from corral.workers.checkpoint.manifest import MANIFEST_NAME, SealedDirectory, read_manifest, write_manifest


def link_weights(version: SealedDirectory, target: Path) -> SealedDirectory:
    """Makes the directory `target` with second names of all that a loader of the version wants; nothing is hashed.

    Guarantee: what is there is whole and under a manifest: the version's own, unless that names deltas.

    Raises:
        CorruptCheckpointError: the version's manifest is not there any more.
    """
    if not any(name.endswith(DELTA_SUFFIX) for name in version.files):
        link_files(version.path, target)
        return SealedDirectory(target, version.files)
    extra = read_manifest(version.path, version.digest).extra
    link_files(version.path, target, wants=_is_kept)
    return write_manifest(target, {name: entry for name, entry in version.files.items() if _is_kept(name)}, extra)


def _is_kept(name: str) -> bool:
    return name != MANIFEST_NAME and not name.endswith(DELTA_SUFFIX)
