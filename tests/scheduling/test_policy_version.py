"""Versions are pairs, and a lineage tells living ones from orphans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.policy_version import INITIAL_VERSION, Lineage, PolicyVersion


@given(st.integers(0, 10**6), st.integers(0, 10**9))
def test_a_version_survives_its_own_text(epoch: int, step: int) -> None:
    version = PolicyVersion(epoch, step)
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "3", "3.", ".3", "a.b", "1.2.3", "-1.2", "1.-2", "١.٢"])
def test_a_malformed_tag_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="epoch.step"):
        PolicyVersion.parse(text)


def test_steps_of_a_lost_branch_are_orphans() -> None:
    lineage = Lineage([PolicyVersion(1, 2), PolicyVersion(1, 4), PolicyVersion(3, 6)], epoch=4)
    living = [
        INITIAL_VERSION,
        *(PolicyVersion(1, step) for step in (1, 2, 3, 4)),
        PolicyVersion(3, 5),
        PolicyVersion(3, 6),
    ]
    assert all(lineage.contains(version) for version in living)
    assert not lineage.contains(PolicyVersion(1, 5))
    assert not lineage.contains(PolicyVersion(2, 5))
    assert not lineage.contains(PolicyVersion(3, 7))
    assert lineage.contains(PolicyVersion(4, 7))


def test_a_lineage_whose_steps_fall_is_refused() -> None:
    with pytest.raises(ValueError, match="fall"):
        Lineage([PolicyVersion(1, 4), PolicyVersion(2, 3)], epoch=3)
