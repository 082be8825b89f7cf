"""SLURM's text forms: what is accepted means what SLURM means, and nothing else gets through."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.scheduling import ALLOCATION_FIELDS, check_extra_argument, option_name
from corral.scheduling.slurm_formats import (
    check_environment_name,
    check_plain_text,
    format_time_limit,
    parse_memory_mb,
    parse_point_in_time,
    parse_time_limit,
)

NOON = datetime(2026, 3, 10, 12, 0, 0)


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
    "text",
    [
        "16:00", "4:30 PM", "23:59:59", "2026-01-31", "2026-01-31T08:00", "2026-01-31T08:00:30", "01/31", "01/31/27",
        "0131", "013127", "01/31-08:00", "01.31.27", "02/29", "now", "now+2hours", "now+60", "now+1day", "noon",
        "tomorrow",
    ],
)  # fmt: skip
def test_points_in_time_that_slurm_knows_are_accepted(text: str) -> None:
    parse_point_in_time(text, now=NOON)


@pytest.mark.parametrize(
    "text",
    [
        "25:00",
        "13:00 PM",
        "2026-13-01",
        "2026-02-30",
        "02/30",
        "02/29/27",
        "12:61",
        "now-1hour",
        "soon",
        "",
        "now+1 hour",
        "noon\n",
    ],
)
def test_points_in_time_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_point_in_time(text, now=NOON)


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


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("now", "2026-03-10T12:00:00"),
        ("now+90", "2026-03-10T12:01:30"),
        ("now+2hours", "2026-03-10T14:00:00"),
        ("now+1week", "2026-03-17T12:00:00"),
        ("13:30", "2026-03-10T13:30:00"),
        ("11:30", "2026-03-11T11:30:00"),
        ("11:30 PM", "2026-03-10T23:30:00"),
        ("12:15AM", "2026-03-11T00:15:00"),
        ("midnight", "2026-03-11T00:00:00"),
        ("noon", "2026-03-11T12:00:00"),
        ("teatime", "2026-03-10T16:00:00"),
        ("2024-01-31", "2024-01-31T00:00:00"),
        ("2026-12-31T08:00", "2026-12-31T08:00:00"),
        ("03/09", "2027-03-09T00:00:00"),
        ("03/11", "2026-03-11T00:00:00"),
        ("03/09/26-09:00", "2026-03-09T09:00:00"),
        ("02/29", "2028-02-29T00:00:00"),
    ],
)
def test_a_point_in_time_is_the_moment_that_slurm_takes_it_for(text: str, moment: str) -> None:
    assert parse_point_in_time(text, now=NOON) == datetime.fromisoformat(moment)


@given(st.times(), st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2090, 1, 1)))
def test_a_clock_without_a_date_is_the_next_time_that_it_shows_it(clock: object, now: datetime) -> None:
    moment = parse_point_in_time(f"{clock:%H:%M:%S}", now=now)
    assert now < moment <= now + timedelta(days=1)


@given(st.text(max_size=30), st.sampled_from(["now+", "12:", "2026-01-", "01/02", ""]))
def test_what_is_no_point_in_time_is_refused_and_nothing_else_happens(text: str, start: str) -> None:
    try:
        parse_point_in_time(start + text, now=NOON)
    except ValueError as error:
        assert "SLURM" in str(error) or "does not" in str(error)
