"""rl-doctor's looks: at the machine it runs on, for what a trial needs even with --local, and at a cluster.

look_here         Python, Redis, SGLang, verifiers, sandboxes, profiles, GPUs, the file root
look_at_cluster   three questions to the controller, then the probe on its nodes
"""

import errno
import os
import secrets as random_tokens
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.config.environment import EnvironmentConfig
from corral.experiments.config.rollout import SglangConfig
from corral.experiments.errors import ConfigError
from corral.experiments.inputs.other_pythons import environment_python, sglang_python, sglang_version, verifiers_version
from corral.experiments.loading.profile import find_profiles, merge, read_profile
from corral.experiments.trial.login_shell import low_hard_limits
from corral.launcher.doctor.judge import (
    Finding,
    fail,
    judge_config,
    judge_limits,
    judge_partitions,
    judge_probe,
    judge_sandbox,
    ok,
    warn,
)
from corral.launcher.doctor.node import DISTRIBUTION, why_no_sandbox
from corral.launcher.doctor.probe import probe
from corral.launcher.runners.local import visible_gpus
from corral.launcher.slurm.client import COMMANDS, SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.parse import Node
from corral.launcher.trial.find import node_local_folder
from corral.launcher.trial.redis_server import find_redis_executable, redis_version

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
