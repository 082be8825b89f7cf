"""Name services over a table of records: everything but where the records are kept.

    NameService --> TableNameService (expiry, owners, subtrees) --> RecordTable (lock, read, create, replace, remove)
                                                                       MemoryStore | FileTable

Expired records stay in the table until something is stored or deleted under their name; until then nobody sees them.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from corral.name_resolve.base import NameService
from corral.name_resolve.errors import NameServiceError
from corral.name_resolve.lease import Put
from corral.name_resolve.names import names_in_subtree
from corral.name_resolve.watch import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One stored value; `expires_at_s` is by the clock of the table that holds it."""

    owner: str
    value: str
    expires_at_s: float | None = None

    def to_json(self) -> str:
        return json.dumps({"owner": self.owner, "value": self.value, "expires_at_s": self.expires_at_s})

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "Record":
        """Parse what `to_json` wrote; `source` names the file or key in the error."""
        try:
            fields = json.loads(text)
            return cls(owner=fields["owner"], value=fields["value"], expires_at_s=fields.get("expires_at_s"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NameServiceError(f"{source} is not a record of a name service: {text[:80]!r}; delete it") from error


class RecordTable(Protocol):
    """Raw records by name, expired ones included."""

    def now_s(self) -> float: ...

    def locked(self) -> AbstractContextManager[None]:
        """Excludes all other writers; readers need no lock."""
        ...

    def read(self, name: str) -> Record | None: ...

    def create(self, name: str, record: Record) -> bool:
        """Store only if no record exists, expired or not; answer whether it was stored."""
        ...

    def replace(self, name: str, record: Record) -> None: ...

    def remove(self, name: str) -> None:
        """Forget a name; fine if it is not there."""
        ...

    def names(self) -> Iterable[str]: ...


class TableNameService(NameService):
    """A name service whose records are in a `RecordTable`."""

    def __init__(self, table: RecordTable, *, described: str) -> None:
        super().__init__(described=described)
        self._table = table

    def _put(self, puts: Sequence[Put], *, patience_s: float | None = None) -> list[str]:
        with self._table.locked():
            return [self._put_one(put) for put in puts]

    def _put_one(self, put: Put) -> str:
        while True:
            stored = self._table.read(put.name)
            if stored is not None and self._is_live(stored) and not put.replace and stored.owner != put.owner:
                return stored.owner
            expires_at_s = None if put.ttl_s is None else self._table.now_s() + put.ttl_s
            record = Record(owner=put.owner, value=put.value, expires_at_s=expires_at_s)
            if stored is not None:
                self._table.replace(put.name, record)
                return ""
            if self._table.create(put.name, record):
                return ""
            # Created between our read and now, by a host whose lock does not reach us: look again.

    def _remove(self, name: str, *, owner: str | None, patience_s: float | None = None) -> bool:
        with self._table.locked():
            stored = self._table.read(name)
            if stored is None or (owner is not None and stored.owner != owner):
                return False
            self._table.remove(name)
            return self._is_live(stored)

    def _fetch(self, name: str, *, patience_s: float | None = None) -> str | None:
        stored = self._table.read(name)
        return stored.value if stored is not None and self._is_live(stored) else None

    def clock(self) -> float:
        return self._table.now_s()

    def _fetch_subtree(self, root: str) -> dict[str, str]:
        values = {name: self._fetch(name) for name in names_in_subtree(self._table.names(), root=root)}
        return {name: value for name, value in values.items() if value is not None}

    def _clear_subtree(self, root: str) -> int:
        return sum(self._remove(name, owner=None) for name in names_in_subtree(self._table.names(), root=root))

    def _incr(self, name: str, amount: int) -> int:
        with self._table.locked():
            stored = self._table.read(name)
            counter = stored if stored is not None and self._is_live(stored) else Record(owner="counter", value="0")
            try:
                number = int(counter.value) + amount
            except ValueError as error:
                raise NameServiceError(f"cannot count {name!r}: it holds {counter.value[:40]!r}, no integer") from error
            record = Record(owner=counter.owner, value=str(number), expires_at_s=counter.expires_at_s)
            if stored is not None or not self._table.create(name, record):
                self._table.replace(name, record)
            return number

    def _survey(self, names: Sequence[str]) -> Survey:
        return Survey(num_present=sum(self._fetch(name) is not None for name in names), incarnation="one")

    def _close(self) -> None:
        """The table stays: other services use it, and a file is open only while it is read or written."""

    def _is_live(self, record: Record) -> bool:
        return record.expires_at_s is None or self._table.now_s() < record.expires_at_s
