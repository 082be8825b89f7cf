"""SLURM's text forms: what is accepted means what SLURM means, and nothing else gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.scheduling import ALLOCATION_FIELDS, check_extra_argument, option_name
from corral.scheduling.slurm_formats import (
    check_environment_name,
    check_plain_text,
    format_time_limit,
    parse_memory_mb,
    parse_time_limit,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("1:30:00", 5400),
        ("100:00:00", 360_000),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("2-12:30:15", 60 * 3600 + 1815),
        ("0-0:01", 60),
    ],
)
def test_time_limits_mean_what_slurm_means(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1h", "1:60", "1:00:60", "1-24", "1-1:60", "-5", "1.5", "1:2:3:4", "12:00:00\n", " 5", "٣"]
)
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time limit"):
        parse_time_limit(text)


@pytest.mark.parametrize("text", ["0", "0:00", "00:00:00", "0-0"])
def test_a_time_limit_of_zero_is_refused_because_slurm_reads_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match="no limit"):
        parse_time_limit(text)


@given(st.integers(min_value=1, max_value=10**9))
def test_a_formatted_time_limit_reads_back(seconds: int) -> None:
    assert parse_time_limit(format_time_limit(seconds)) == seconds


def test_a_formatted_time_limit_has_days_only_from_one_day_on() -> None:
    assert format_time_limit(86_399) == "23:59:59"
    assert format_time_limit(90_061) == "1-01:01:01"


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("20G", 20480),
        ("20g", 20480),
        ("20GiB", 20480),
        ("512", 512),
        ("512M", 512),
        ("1T", 1 << 20),
        ("1025K", 2),
        ("1.5 GB", 1536),
    ],
)
def test_memory_sizes_are_megabytes_by_powers_of_1024(text: str, megabytes: int) -> None:
    assert parse_memory_mb(text) == megabytes


@pytest.mark.parametrize("text", ["", "G", "20X", "-1G", "20G\n5", "1e3", "20GG"])
def test_other_memory_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="20G"):
        parse_memory_mb(text)


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--job-name=x", "experiment and trial names"),
        ("--output=/tmp/log", "trial directory"),
        ("--cpus-per-task=4", "field cpu"),
        ("--gres=gpu:8", "gpu_type"),
        ("--time=10", "field time_limit"),
        ("--export=ALL", "env_vars"),
        ("--ntasks-per-node=2", "count"),
        ("--job-n=x", "experiment and trial names"),
        ("--ARRAY=1-3", "sweep"),
        ("--test-only", "--dry-run"),
        ("--chdir=/tmp", "call rl-submit there"),
        ("--gpu-bind=closest", "gpu_binding"),
        ("-J x", "long option"),
        ("--licenses a:1", "long option"),
        ("echo", "long option"),
        ("--comment=a\n#SBATCH --uid=0", "control character"),
    ],
)
def test_sbatch_arguments_that_corral_owns_are_refused_with_the_field_to_use(argument: str, remedy: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check_extra_argument(argument)
    assert remedy in str(refusal.value)
    assert repr(argument) in str(refusal.value)


@pytest.mark.parametrize("field", ALLOCATION_FIELDS)
def test_an_option_that_has_a_field_is_refused_as_a_further_argument(field: str) -> None:
    with pytest.raises(ValueError, match=f"use the field {field}"):
        check_extra_argument(f"--{option_name(field)}=x")


def test_other_sbatch_arguments_pass() -> None:
    for argument in ("--exclusive", "--licenses=matlab:1", "--mail-type=END,FAIL", "--time-min=10", "--nice=5"):
        assert check_extra_argument(argument) == argument


@given(st.text())
def test_no_control_character_passes(text: str) -> None:
    dangerous = any(
        ord(character) < 32 or 127 <= ord(character) < 160 or character in "\u2028\u2029" for character in text
    )
    if dangerous:
        with pytest.raises(ValueError, match="control character"):
            check_plain_text(text, what="value")
    else:
        check_plain_text(text, what="value")


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n"])
def test_environment_names_that_no_shell_exports_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters"):
        check_environment_name(name)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK"])
def test_environment_names_that_steer_slurm_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="SLURM's commands"):
        check_environment_name(name)
