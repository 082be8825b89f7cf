"""Random operations on a name service, compared with a dict whose entries carry a deadline."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corral.name_resolve import (
    MemoryNameService,
    MemoryStore,
    NameExistsError,
    NameNotFoundError,
    NameService,
    NameServiceError,
)
from corral.name_resolve.file import FileTable
from corral.name_resolve.lease import Put
from corral.name_resolve.table import TableNameService

NAMES = ["a", "a/b", "a/b/c", "ab", "a.b", "b"]
names = st.sampled_from(NAMES)
values = st.sampled_from(["v", "w", "7"])
owners = st.sampled_from(["me", "you"])
ttls = st.sampled_from([None, 1.0, 5.0])


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FileTableOnFakeClock(FileTable):
    def __init__(self, root: Path, clock: FakeClock) -> None:
        super().__init__(root)
        self._clock = clock

    def now_s(self) -> float:
        return self._clock()


class NameServiceMachine(RuleBasedStateMachine):
    """The model: (owner, value, deadline) by name; "counter" and "plain" stand for owners that nobody else has."""

    make: Callable[[FakeClock], NameService]

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.service = type(self).make(self.clock)
        self.model: dict[str, tuple[str, str, float]] = {}

    def teardown(self) -> None:
        self.service.close()

    def forget_expired(self) -> None:
        self.model = {name: entry for name, entry in self.model.items() if self.clock.now_s < entry[2]}

    def deadline_s(self, ttl_s: float | None) -> float:
        return float("inf") if ttl_s is None else self.clock.now_s + ttl_s

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.forget_expired()

    @rule(name=names, value=values, ttl_s=ttls, replace=st.booleans())
    def add(self, name: str, value: str, ttl_s: float | None, replace: bool) -> None:
        if name in self.model and not replace:
            with pytest.raises(NameExistsError):
                self.service.add(name, value, ttl_s=ttl_s)
        else:
            self.service.add(name, value, ttl_s=ttl_s, replace=replace)
            self.model[name] = ("plain", value, self.deadline_s(ttl_s))

    @rule(name=names, value=values, owner=owners)
    def beat(self, name: str, value: str, owner: str) -> None:
        [holder] = self.service._put([Put(name=name, value=value, owner=owner, ttl_s=3.0)])
        if name in self.model and self.model[name][0] != owner:
            assert holder not in ("", owner)
        else:
            assert holder == ""
            self.model[name] = (owner, value, self.deadline_s(3.0))

    @rule(name=names, owner=owners)
    def release(self, name: str, owner: str) -> None:
        is_ours = name in self.model and self.model[name][0] == owner
        assert self.service._remove(name, owner=owner) == is_ours
        if is_ours:
            del self.model[name]

    @rule(name=names)
    def delete(self, name: str) -> None:
        if self.model.pop(name, None) is None:
            with pytest.raises(NameNotFoundError):
                self.service.delete(name)
        else:
            self.service.delete(name)

    @rule(name=names, amount=st.integers(-3, 3))
    def incr(self, name: str, amount: int) -> None:
        owner, value, deadline_s = self.model.get(name, ("counter", "0", float("inf")))
        if value.isalpha():
            with pytest.raises(NameServiceError):
                self.service.incr(name, amount)
        else:
            assert self.service.incr(name, amount) == int(value) + amount
            self.model[name] = (owner, str(int(value) + amount), deadline_s)

    @rule(root=st.sampled_from(["", *NAMES]))
    def clear_subtree(self, root: str) -> None:
        cleared = [name for name in self.model if not root or (name + "/").startswith(root + "/")]
        assert self.service.clear_subtree(root) == len(cleared)
        for name in cleared:
            del self.model[name]

    @invariant()
    def every_subtree_is_as_in_the_model(self) -> None:
        for root in ["", "a", "a/b"]:
            expected = {
                name: self.model[name][1]
                for name in sorted(self.model)
                if not root or (name + "/").startswith(root + "/")
            }
            assert list(self.service.get_subtree(root).items()) == list(expected.items())

    @invariant()
    def every_name_is_as_in_the_model(self) -> None:
        for name in NAMES:
            if name in self.model:
                assert self.service.get(name) == self.model[name][1]
            else:
                with pytest.raises(NameNotFoundError):
                    self.service.get(name)


class MemoryMachine(NameServiceMachine):
    @staticmethod
    def make(clock: FakeClock) -> NameService:
        return MemoryNameService(MemoryStore(clock=clock))


class FileMachine(NameServiceMachine):
    directory: Path

    @staticmethod
    def make(clock: FakeClock) -> NameService:
        FileMachine.directory = Path(tempfile.mkdtemp())
        return TableNameService(FileTableOnFakeClock(FileMachine.directory, clock), described="files on a fake clock")

    def teardown(self) -> None:
        super().teardown()
        leftovers = [
            path.name for path in self.directory.iterdir() if path.name.startswith("~") and path.name != "~lock"
        ]
        shutil.rmtree(self.directory)
        assert leftovers == []


TestMemoryNameServiceIsADict = MemoryMachine.TestCase
TestMemoryNameServiceIsADict.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFileNameServiceIsADict = FileMachine.TestCase
TestFileNameServiceIsADict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
