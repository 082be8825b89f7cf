"""SLURM's text -> values. Pure; what a newer SLURM adds to it is kept or skipped, never an error.

sinfo -o NODE_FORMAT --parse_nodes--> Node      scontrol -o --parse_key_values, parse_records--> settings
scontrol show node   --/                        settings --memory_rules--> whether and how much memory jobs may ask for
squeue -s            --parse_steps--> step ids by name
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from corral.scheduling.slurm_formats import MemoryRules

_NO_LIMIT = 1 << 62
NODE_FORMAT = "%N|%P|%c|%m|%G|%f|%t|%z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node in one partition, with what jobs can get of it."""

    name: str
    partition: str
    is_default_partition: bool
    cpus: int
    mem_mb: int
    gpus_by_type: Mapping[str, int]
    """GPUs by GRES type; "" where the site names no type."""
    features: tuple[str, ...]
    state: str
    threads_per_core: int = 1
    """How many of its CPUs are one core; 1 where SLURM counts cores only, whatever the hardware has."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Why jobs get less CPUs (`cpu`) or memory (`mem`) than the node has, for people."""

    def at_most(
        self, *, cpus: int = _NO_LIMIT, cpu_rule: str = "", mem_mb: int = _NO_LIMIT, mem_rule: str = ""
    ) -> "Node":
        """The node for jobs that get no more than this, with the rules that say so."""
        lowered = {"cpu": cpu_rule} if cpus < self.cpus else {}
        lowered |= {"mem": mem_rule} if mem_mb < self.mem_mb else {}
        cpus, mem_mb = min(self.cpus, cpus), min(self.mem_mb, mem_mb)
        return replace(self, cpus=cpus, mem_mb=mem_mb, rules={**self.rules, **lowered}) if lowered else self

    @property
    def gpus(self) -> int:
        """GPUs of any type."""
        return sum(self.gpus_by_type.values())

    @property
    def is_up(self) -> bool:
        """Whether the node could ever start a job; sinfo marks one that does not answer with `*`."""
        gone = ("down", "drain", "drng", "fail", "inval")
        return not (self.state.startswith(gone) or self.is_in_maintenance or "*" in self.state)

    @property
    def is_in_maintenance(self) -> bool:
        """Whether it comes back by itself, at an hour that the administrators have set."""
        return self.state.startswith("maint")


def parse_steps(text: str) -> dict[str, list[str]]:
    """Numbered steps only: the batch step is the supervisor itself."""
    steps: dict[str, list[str]] = {}
    for line in text.splitlines():
        step_id, _, name = line.strip().partition("|")
        if re.fullmatch(r"\d+\.\d+", step_id):
            steps.setdefault(name, []).append(step_id)
    return steps


def parse_key_values(text: str) -> dict[str, str]:
    """One `-o` line of scontrol: `JobId=7 JobName=a b Comment={"x": "c d=1"}` with values that may hold spaces."""
    matches = list(re.finditer(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/-]*)=", text))
    if comment := next((match for match in matches if match[1] == "Comment"), None):
        with suppress(ValueError):  # not ours, or cut off
            end = json.JSONDecoder().raw_decode(text, comment.end())[1]
            matches = [match for match in matches if not comment.end() <= match.start() < end]
    values: dict[str, str] = {}
    ends = [*(following.start() for following in matches[1:]), len(text)]
    for match, end in zip(matches, ends, strict=False):
        values.setdefault(match[1], text[match.end() : end].strip())
    return values


def parse_records(text: str, *, key: str) -> dict[str, dict[str, str]]:
    """The lines of `scontrol show ... -o` by one of their values; a line without it is skipped."""
    records = (parse_key_values(line) for line in text.splitlines() if line.strip())
    return {record[key]: record for record in records if key in record}


def parse_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """sacctmgr's lines of values between bars; one of another length is skipped."""
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def parse_settings(text: str) -> dict[str, str]:
    """`scontrol show config`: one `Name = value` a line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def keeps_accounts(settings: Mapping[str, str]) -> bool:
    """Whether the site keeps accounts; one that does not has several ways to say so."""
    storage = settings.get("AccountingStorageType", "")
    return bool(storage) and not storage.endswith("/none") and storage != "(null)"


def memory_rules(config: Mapping[str, str], partition: Mapping[str, str]) -> MemoryRules:
    """How a partition gives out memory; what its own settings say replaces what the cluster's say."""
    select, of_partition = config.get("SelectTypeParameters"), partition.get("SelectTypeParameters", "NONE")
    parameters = select if of_partition == "NONE" else of_partition
    limits = [
        [limit_of(one, f"{what}MemPer{each}") for each in ("Node", "CPU")]
        for what in ("Max", "Def")
        for one in (partition, config)
    ]
    (per_node, per_cpu), default = (own if any(own) else wide for own, wide in (limits[:2], limits[2:]))
    return MemoryRules(
        is_counted=parameters is None or "MEMORY" in parameters.upper(),
        has_default=any(default),
        max_mb_per_node=per_node,
        max_mb_per_cpu=per_cpu,
    )


def limit_of(settings: Mapping[str, str], name: str) -> int | None:
    """A limit among settings; None for UNLIMITED, or if it is not there."""
    text = settings.get(name, "")
    return int(text) if text.isdecimal() else None


def parse_nodes(text: str, details: str = "") -> list[Node]:
    """sinfo's lines; numbers may end in `+` where nodes differ.

    Args:
        details: `scontrol show node -o`, which alone says what a site keeps for the system.
    """
    nodes = []
    records = parse_records(details, key="NodeName")
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 8:
            continue
        name, partition, cpus, mem_mb, gres, features, state, cores = fields
        node = Node(
            name=name,
            partition=partition.rstrip("*"),
            is_default_partition=partition.endswith("*"),
            cpus=_leading_int(cpus),
            mem_mb=_leading_int(mem_mb),
            gpus_by_type=parse_gpus(gres),
            features=tuple(feature for feature in features.split(",") if feature and feature != "(null)"),
            state=state,
            threads_per_core=_threads_per_core(_leading_int(cpus), cores),
        )
        nodes.append(_without_kept(node, records.get(name, {})))
    return nodes


def _without_kept(node: Node, details: Mapping[str, str]) -> Node:
    """The node without the cores and the memory that its site keeps for the system."""
    # CPUSpecList holds CPUs of the whole cores that CoreSpecCount names; SLURM before 22.05 has no CPUEfctv.
    cores = limit_of(details, "CoreSpecCount") or 0
    cpus = limit_of(details, "CPUEfctv") or node.cpus - cores * node.threads_per_core
    kept_mb = limit_of(details, "MemSpecLimit") or 0
    return node.at_most(
        cpus=cpus,
        mem_mb=node.mem_mb - kept_mb,
        cpu_rule=f"{cpus} of {node.cpus} CPUs (CoreSpecCount)",
        mem_rule=f"{node.mem_mb - kept_mb} of {node.mem_mb} MB (MemSpecLimit)",
    )


def _threads_per_core(cpus: int, cores: str) -> int:
    """CPUs of a core, of sinfo's `sockets:cores:threads`; a site may count cores only as CPUs, or hide some."""
    numbers = [_leading_int(part) for part in cores.split(":")]
    if len(numbers) != 3 or 0 in numbers:
        return 1
    sockets, cores_per_socket, threads = numbers
    return 1 if cpus <= sockets * cores_per_socket else threads


def parse_gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:8(S:0-1),nvme:1` -> {"a100": 8}; `gpu:8` -> {"": 8}."""
    gpus: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.split(":")
        if parts[0] != "gpu":
            continue
        kind = parts[1] if len(parts) > 2 or (len(parts) == 2 and not parts[1].isdecimal()) else ""
        count = int(parts[-1]) if parts[-1].isdecimal() else 1
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _leading_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
