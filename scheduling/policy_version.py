"""PolicyVersion: which weights made a token, and Lineage: which versions the present weights descend from.

A failure may take the trainer back to its last commit. The steps after it are trained again by a new epoch and give
other weights under the same step number, so a version is the pair (epoch, step), written "3.17". Versions of a lost
branch are orphans: they are never compared with living ones by number alone. Weights are published before the commit
that covers them, so servers may hold an orphan, and samples may have been made by one.

    commits:   (epoch 1, step 2)   (epoch 1, step 4)        (epoch 3, step 6)
    lineage:   0.0  1.1  1.2       1.3  1.4                 3.5  3.6        then, in epoch 4: 4.7, 4.8 ...
    orphans:                                  1.5  2.5
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """Weights after `step` train steps, made by trainer epoch `epoch`.

    Example:
        PolicyVersion.parse("3.17") == PolicyVersion(epoch=3, step=17);  str(PolicyVersion(3, 17)) == "3.17"
    """

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, tag: str) -> "PolicyVersion":
        """Read "epoch.step"; ValueError names a text that is not of this form."""
        epoch, separator, step = tag.partition(".")
        if not (separator and epoch.isascii() and epoch.isdigit() and step.isascii() and step.isdigit()):
            raise ValueError(f"a policy version is written epoch.step, such as 3.17, not {tag!r}")
        return cls(int(epoch), int(step))


class VersionSpan(NamedTuple):
    """Tokens [start, end) of one answer were made by the weights of `version`, written "epoch.step"."""

    version: str
    start: int
    end: int


INITIAL_VERSION = PolicyVersion(0, 0)


class Lineage:
    """The versions that the present weights descend from, as commits and the present epoch give them."""

    def __init__(self, commits: Iterable[PolicyVersion], *, epoch: int) -> None:
        """
        Args:
            commits: those that the present weights build on, in log order, or the last one of each epoch.
            epoch: the trainer's present epoch; steps after the last commit are its own.

        Raises:
            ValueError: if the commits' steps fall.
        """
        self._epoch = epoch
        self._commits = [INITIAL_VERSION, *commits]
        for before, commit in pairwise(self._commits):
            if commit.step < before.step:
                raise ValueError(f"commit {commit} does not follow step {before.step}: a lineage's steps never fall")

    def version(self, step: int) -> PolicyVersion:
        """The living version of a step."""
        place = bisect_left(self._commits, step, key=lambda commit: commit.step)
        return PolicyVersion(self._commits[place].epoch if place < len(self._commits) else self._epoch, step)

    def contains(self, version: PolicyVersion) -> bool:
        """Whether the present weights descend from `version`."""
        return self.version(version.step) == version
