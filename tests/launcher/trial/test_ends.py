"""What is read of a task's end: whether its memory limit ended it."""

import pytest

from corral.launcher.trial.ends import says_out_of_memory

BY_CGROUP = (
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.2. Some of your processes may have been killed."
)
BY_OLDER_SLURM = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.2. Some of the step tasks have been OOM Killed."
)


@pytest.mark.parametrize("returncode", [1, -9, 137, 253])
@pytest.mark.parametrize("line", [BY_CGROUP, BY_OLDER_SLURM])
def test_an_end_by_the_memory_limit_is_named_whatever_srun_ends_with(returncode: int, line: str) -> None:
    assert says_out_of_memory(returncode, ["step 4", line, "srun: error: n1: task 0: Killed"])


@pytest.mark.parametrize(
    "said", ["", "INFO: slurmstepd: error: Detected 1 oom-kill event(s)", "the memory limit is 4 GB"]
)
def test_a_worker_that_fails_by_itself_is_not_taken_for_one_that_was_killed(said: str) -> None:
    assert not says_out_of_memory(1, [said])


def test_a_worker_that_ended_well_was_not_killed_for_its_memory() -> None:
    assert not says_out_of_memory(0, [BY_CGROUP])
