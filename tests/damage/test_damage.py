"""Damage to any file of a trial leads where it must: on, back to an earlier commit, or to a clear refusal."""

from pathlib import Path

import pytest

from tests.damage.cases import one_case_per_file
from tests.damage.table import run_cases


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some dozen trials, of which each has its own deadline
def test_no_damaged_file_hangs_a_trial_or_loses_a_sample(tmp_path: Path) -> None:
    # All damages of all files are `make damage`; what follows from one of a file follows from the others.
    rows = list(run_cases(one_case_per_file(), tmp_path))
    assert [(row.case.name, row.seen.value, row.words) for row in rows if not row.is_expected] == []
