"""SLURM's text -> values. Pure; what a newer SLURM adds to it is kept or skipped, never an error.

sinfo -o NODE_FORMAT --parse_nodes--> Node      scontrol -o --parse_key_values, parse_records--> settings
squeue -s            --parse_steps--> step ids by name
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NODE_FORMAT = "%N|%P|%c|%m|%G|%f|%t|%z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node in one partition, as sinfo shows it."""

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
    """One `-o` line of scontrol: `JobId=7 JobName=a b Comment={"x": 1}` with values that may hold spaces."""
    matches = list(re.finditer(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/-]*)=", text))
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


def parse_nodes(text: str) -> list[Node]:
    """sinfo's lines; numbers may end in `+` where nodes differ."""
    nodes = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 8:
            continue
        name, partition, cpus, mem_mb, gres, features, state, cores = fields
        nodes.append(
            Node(
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
        )
    return nodes


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
        kind = parts[1] if len(parts) > 2 or (len(parts) == 2 and not parts[1].isdigit()) else ""
        count = int(parts[-1]) if parts[-1].isdigit() else 1
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _leading_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
