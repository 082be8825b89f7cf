"""Checkpoints as tests make them: files that anybody has put somewhere, described by reading them."""

from pathlib import Path

from blake3 import blake3

from corral.workers.checkpoint.durable_file import FileEntry


def describe(directory: Path) -> dict[str, FileEntry]:
    """All files below a directory but hidden ones, by path, as `write_durable` would have described them."""
    return {
        path.relative_to(directory).as_posix(): FileEntry(
            size=path.stat().st_size, digest=blake3(path.read_bytes()).hexdigest()
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
