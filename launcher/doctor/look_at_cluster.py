"""rl-doctor's look at a cluster: three questions to the controller, then the probe on its nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.errors import ConfigError
from corral.experiments.loading.profile import find_profiles, merge, read_profile
from corral.launcher.doctor.findings import Finding, fail, ok
from corral.launcher.doctor.judge_cluster import judge_config, judge_partitions
from corral.launcher.doctor.judge_nodes import judge_probe
from corral.launcher.doctor.probe import probe
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.parse import Node

_NUM_PROBED_NODES = 2


def look_at_cluster(
    fileroot: Path, *, partition: str | None, is_quick: bool, client: SlurmClient | None = None
) -> tuple[bool, list[Finding]]:
    """Whether the controller answers, and what was found."""
    client = client or SlurmClient()
    try:
        config = client.settings()
        nodes, partitions = client.nodes(), client.partitions()
    except SlurmUnreachableError as error:
        advice = "see scontrol ping; trials that run go on meanwhile"
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
    return min(_NUM_PROBED_NODES, max(len(have_room), 1), int(limit) if limit.isdigit() else _NUM_PROBED_NODES)


def _cluster_of_profiles() -> ClusterConfig:
    """What the profiles say of the site; a broken one is another check's finding."""
    try:
        merged = merge([read_profile(file) for file in find_profiles()])
        return ClusterConfig.model_validate(merged.data.get("cluster") or {})
    except (ConfigError, ValidationError):
        return ClusterConfig()
