"""rl-doctor's judgement: facts of a machine and its cluster -> findings, each with what to do.

this machine      python, Redis, profile files, the file root
the cluster       scontrol show config, sinfo, partitions          all pure functions: facts in, findings out
its nodes         what the probe job answered (probe.py)
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from corral.launcher.doctor.findings import Finding, fail, ok, warn
from corral.launcher.slurm.parse import Node
from corral.scheduling.slurm_formats import parse_time_limit

_OLDEST_SLURM = (20, 11)  # srun --exact
_OLDEST_SLURM_TESTED = (22, 5)
_MIN_JOB_AGE_S = 60
_DEFAULT_CRED_EXPIRE_S = 120
_LONG_SLURMD_TIMEOUT_S = 600
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


def judge_config(config: Mapping[str, str]) -> Iterator[Finding]:
    """What `scontrol show config` says that matters to trials."""
    yield judge_version(config.get("SLURM_VERSION", ""))
    yield _accounting(config)
    yield _job_age(config)
    yield _select(config)
    yield _requeue(config)
    yield _preemption(config)
    yield _limits(config)
    yield _backfill(config)
    yield _node_timeout(config)
    yield ok("config.kill_wait", f"steps have {config.get('KillWait', '?')} between SIGTERM and SIGKILL (KillWait)")


def judge_version(version: str) -> Finding:
    """`22.05.8` and the like."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return warn("slurm.version", f"version {version!r} is not understood", "corral needs SLURM 20.11 or newer")
    found = (int(match[1]), int(match[2]))
    if found < _OLDEST_SLURM:
        return fail(
            "slurm.version",
            f"SLURM {version} has no srun --exact, so steps of one trial would wait for each other",
            "use layout `jobs` at most, or ask for SLURM 20.11 or newer",
        )
    if found < _OLDEST_SLURM_TESTED:
        return warn("slurm.version", f"SLURM {version}", "corral is tested with 22.05; try a small trial first")
    return ok("slurm.version", f"SLURM {version} (steps side by side: 20.11; tested: 22.05)")


def _accounting(config: Mapping[str, str]) -> Finding:
    kind = config.get("AccountingStorageType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        return ok("config.accounting", "accounting is off; corral does not need it, and keeps its own records")
    return ok("config.accounting", f"accounting by {kind}; asked only about jobs that squeue has forgotten")


def _job_age(config: Mapping[str, str]) -> Finding:
    age_s = seconds_of(config.get("MinJobAge", ""))
    if age_s is not None and age_s < _MIN_JOB_AGE_S:
        return warn(
            "config.min_job_age",
            f"SLURM forgets a job {age_s} s after its end (MinJobAge)",
            "a trial killed from outside may end as LOST instead of, say, TIMED_OUT; ask for MinJobAge >= 60",
        )
    return ok("config.min_job_age", f"ended jobs stay known for {age_s} s (MinJobAge)")


def _select(config: Mapping[str, str]) -> Finding:
    plugin, parameters = config.get("SelectType", ""), config.get("SelectTypeParameters", "")
    if plugin.endswith("linear"):
        return fail(
            "config.select",
            "select/linear gives out whole nodes only, and steps cannot share one",
            "ask for select/cons_tres, or give every group nodes of its own (layout `jobs`)",
        )
    if plugin.endswith("cons_res"):
        return warn("config.select", "select/cons_res has no GPUs per task", "set gpu_binding: slice or none")
    if "MEMORY" not in parameters.upper():
        said = f"{plugin} ({parameters}) does not count memory"
        return warn("config.select", said, "`mem` of a group is not enforced; leave room on shared nodes")
    return ok("config.select", f"{plugin} ({parameters}): steps side by side on one node")


def _requeue(config: Mapping[str, str]) -> Finding:
    found = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    delay_s = int(found[1]) if found else _DEFAULT_CRED_EXPIRE_S
    if config.get("JobRequeue", "1") == "0":
        return ok("config.requeue", f"JobRequeue=0, which corral overrides for its jobs; it takes {delay_s} s or more")
    return ok("config.requeue", f"a requeued job may start again after {delay_s} s (cred_expire)")


def _preemption(config: Mapping[str, str]) -> Finding:
    kind, mode = config.get("PreemptType", "").rpartition("/")[2], config.get("PreemptMode", "")
    if kind in ("", "none"):
        return ok("config.preemption", "nobody is preempted here")
    return ok("config.preemption", f"preemption by {kind}, mode {mode}; partitions may say otherwise")


def _limits(config: Mapping[str, str]) -> Finding:
    enforced = config.get("EnforcePartLimits", "NO")
    if enforced == "NO":
        said = "sbatch accepts jobs that can never start (EnforcePartLimits=NO)"
        return ok("config.limits", f"{said}; rl-submit checks them itself")
    return ok("config.limits", f"sbatch refuses jobs that can never start (EnforcePartLimits={enforced})")


def _backfill(config: Mapping[str, str]) -> Finding:
    if not config.get("SchedulerType", "").endswith("backfill"):
        return warn(
            "config.backfill",
            f"{config.get('SchedulerType') or 'the scheduler'} is no backfill scheduler, which alone starts "
            "heterogeneous jobs",
            "use layout packed or jobs",
        )
    found = re.search(r"bf_interval=(\d+)", config.get("SchedulerParameters", ""))
    interval = found[1] if found else "30"
    return ok("config.backfill", f"heterogeneous jobs start within {interval} s or more (bf_interval)")


def _node_timeout(config: Mapping[str, str]) -> Finding:
    timeout_s = seconds_of(config.get("SlurmdTimeout", ""))
    if timeout_s is not None and timeout_s > _LONG_SLURMD_TIMEOUT_S:
        said = f"SLURM notices a dead node after {timeout_s} s only (SlurmdTimeout)"
        return warn("config.node_timeout", said, "rl-status names its workers as silent long before")
    return ok("config.node_timeout", f"SLURM notices a dead node after {timeout_s} s (SlurmdTimeout)")


def judge_partitions(
    nodes: Sequence[Node], partitions: Mapping[str, Mapping[str, str]], config: Mapping[str, str]
) -> Iterator[Finding]:
    """What each partition offers, and what it does to a job that says nothing."""
    if not any(node.is_default_partition for node in nodes):
        names = ", ".join(sorted(partitions)) or "none"
        yield warn("partitions", "there is no default partition", f"set launch.partition in your profile: {names}")
    if not any(node.gpus for node in nodes):
        has_gres = "gpu" in config.get("GresTypes", "")
        said = "no node offers GPUs" if has_gres else "this cluster gives out no GPUs (no GRES `gpu`)"
        advice = "CPU trials only; where nodes come with all of their GPUs set cluster.gpu_request: none"
        yield warn("partitions.gpus", said, advice)
    for name, settings in sorted(partitions.items()):
        yield _judge_partition(name, settings, [node for node in nodes if node.partition == name])


def _judge_partition(name: str, settings: Mapping[str, str], nodes: Sequence[Node]) -> Finding:
    check = f"partition.{name}"
    state = settings.get("State", "UP")
    if state != "UP":
        return warn(check, f"is {state}", "choose another one for now")
    up = [node for node in nodes if node.is_up]
    shown = f"{len(up)} of {len(nodes)} nodes up, {_shapes(up)}" if up else f"none of {len(nodes)} nodes is up"
    default, longest = settings.get("DefaultTime", "NONE"), settings.get("MaxTime", "")
    times = f"time limit {default if default.upper() not in _UNLIMITED else 'none'}, at most {longest or '?'}"
    preempted = "" if settings.get("PreemptMode", "OFF") == "OFF" else f", may be preempted ({settings['PreemptMode']})"
    said = f"{shown}; {times}{preempted}"
    if not up:
        return warn(check, said, "choose another one for now; sinfo -R says why")
    if default.upper() in _UNLIMITED and longest.upper() in _UNLIMITED:
        return warn(check, said, "set launch.time_limit: a job without one is never backfilled")
    return ok(check, said)


def _shapes(nodes: Sequence[Node]) -> str:
    counts: dict[str, int] = {}
    for node in nodes:
        gpus = " + ".join(f"{count} x {kind or 'gpu'}" for kind, count in node.gpus_by_type.items()) or "no GPU"
        shape = f"{node.cpus} CPUs {node.mem_mb / 1024:.0f} GB {gpus}"
        counts[shape] = counts.get(shape, 0) + 1
    shown = [f"{count} x ({shape})" for shape, count in sorted(counts.items(), key=lambda item: -item[1])]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more shapes" if len(shown) > 3 else "")


def seconds_of(text: str) -> int | None:
    """`300 sec`, `5 min`, `01:00:00` -> seconds; None for what is no time."""
    match = re.fullmatch(r"(\d+)\s*(sec|min|s|m)?", text.strip())
    if match:
        return int(match[1]) * (60 if (match[2] or "").startswith("m") else 1)
    try:
        return parse_time_limit(text)
    except ValueError:
        return None
