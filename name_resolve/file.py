"""The name service in a directory of a shared file system, for clusters where no Redis can run.

    "workers/model_worker/0"  <->  <root>/workers%model_worker%0       one JSON file per name
    put if absent             -->  write <root>/~<uuid>, link(2) it to the name   (EEXIST: somebody else was first)
    overwrite                 -->  write <root>/~<uuid>, rename(2) it over the name
    any change                -->  under flock(2) of <root>/~lock, so comparing the owner and writing are one step

Readers take no lock: link and rename show them whole records or none. '%' and '~' cannot occur in names.

Limits, which Redis does not have: every wait polls; and expiry is a deadline on the *wall clock* of the host that
wrote the record, judged by the wall clock of the host that reads it. Between hosts with skewed clocks there is no
guarantee of liveness: a record may be seen for longer or shorter than its TTL by the skew.
"""

import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from corral.name_resolve.errors import NameServiceUnavailableError
from corral.name_resolve.table import Record, TableNameService

_LOCK_TIMEOUT_S = 10.0  # each holder is done within milliseconds; longer means a hung file system
_LOCK_POLL_INTERVAL_S = 0.005
_MAX_STALE_READS = 5  # NFS: a file replaced while we open it answers ESTALE; opening it again finds the new one


class FileTable:
    """Records as files in the directory `root`, which is created for this user only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._threads = threading.Lock()  # NFS turns flock into a lock per process, which leaves out our own threads
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def now_s(self) -> float:
        return time.time()

    @contextmanager
    def locked(self) -> Iterator[None]:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        if not self._threads.acquire(timeout=_LOCK_TIMEOUT_S):
            raise NameServiceUnavailableError(f"{self._root}: another thread held the lock for {_LOCK_TIMEOUT_S:g} s")
        try:
            descriptor = os.open(self._root / "~lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._lock_file(descriptor, deadline_s)
                yield
            finally:
                os.close(descriptor)  # also gives up the lock, as the death of this process would
        finally:
            self._threads.release()

    def _lock_file(self, descriptor: int, deadline_s: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise NameServiceUnavailableError(
                        f"{self._root}/~lock was held by another process for {_LOCK_TIMEOUT_S:g} s; "
                        "`fuser` names it if it is on this host"
                    ) from error
            time.sleep(_LOCK_POLL_INTERVAL_S)

    def read(self, name: str) -> Record | None:
        path = self._path(name)
        for attempt in range(_MAX_STALE_READS):
            try:
                return Record.from_json(path.read_text(), source=str(path))
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno != errno.ESTALE or attempt == _MAX_STALE_READS - 1:
                    raise NameServiceUnavailableError(f"cannot read {path}: {error}") from error
        return None

    def create(self, name: str, record: Record) -> bool:
        temporary = self._write_temporary(record)
        try:
            os.link(temporary, self._path(name))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def replace(self, name: str, record: Record) -> None:
        os.replace(self._write_temporary(record), self._path(name))

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def names(self) -> Iterable[str]:
        return [entry.replace("%", "/") for entry in os.listdir(self._root) if not entry.startswith("~")]

    def _path(self, name: str) -> Path:
        return self._root / name.replace("/", "%")

    def _write_temporary(self, record: Record) -> Path:
        path = self._root / f"~{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(record.to_json())
        return path


class FileNameService(TableNameService):
    """A name service in the directory `root`; one directory per trial."""

    def __init__(self, root: Path | str) -> None:
        root = Path(root)
        super().__init__(FileTable(root), described=f"the file name service in {root}")
