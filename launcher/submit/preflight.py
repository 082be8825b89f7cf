"""Before a submission: what the trial asks for is checked against the cluster, planned, and shown to SLURM.

    RunPlan --times--> sinfo, scontrol --names, sizes--> plan_layout --counts--> sbatch --test-only --> Preflight
                             |                                                                              |
                       no answer: a warning, and SLURM alone decides                 ConfigError, UnsatisfiableError

Refused is what no waiting cures. Nodes that are down and a start that is not yet possible are warnings, and where
`sbatch --test-only` refuses for them, its refusal is one too: sbatch takes such a job, and it waits.
Nothing is written outside a temporary folder.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigProblem, ConfigSource, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import Allocation, Layout
from corral.launcher.layout.planner import plan_layout
from corral.launcher.runners.containers import PROGRAM_RUNTIMES
from corral.launcher.slurm.client import SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.complaints import Complaint
from corral.launcher.slurm.refusals import explain_refusal
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    refusal_command,
    render_extra_job,
    render_script,
    sbatch_options,
)
from corral.launcher.submit.asks import Ask, asks_of, check_values, partitions_asked, raise_problems, shapes_for
from corral.launcher.submit.check_asks import check_asks, node_local_warning
from corral.launcher.submit.check_layout import Capacity, check_layout, describe
from corral.launcher.submit.check_limits import check_limits
from corral.launcher.submit.check_memory import GpuBudget, check_memory
from corral.launcher.submit.cluster import ClusterFacts, read_cluster
from corral.launcher.trial.processes import user_name

_FAR_AWAY_S = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A trial that can run where it is to run, as far as anybody can tell."""

    layout: Layout | None
    """None where there are no jobs."""
    checks: tuple[str, ...]
    """What was found, in a few words each."""
    warnings: tuple[str, ...]


def check_on_slurm(
    plan: RunPlan,
    directory: TrialDirectory,
    *,
    source: ConfigSource = NO_SOURCE,
    has_checks: bool = True,
    now: datetime | None = None,
) -> Preflight:
    """Plans the allocations of a trial and checks that they can ever start.

    Args:
        directory: its folder; it need not exist.
        has_checks: whether the cluster is compared with the trial; without it is asked only what its nodes are.
        now: the clock; None is the present.

    Raises:
        ConfigError: if values are wrong whatever the cluster.
        UnsatisfiableError: if this cluster cannot run the trial.
        SlurmUnreachableError: if SLURM does not answer at all.
    """
    client = SlurmClient()
    try:
        asks = asks_of(plan, source)
        check_values(asks, plan, source, now=now or datetime.now())
        local = node_local_warning(directory.path)
        warnings = [local] if local else []
        facts = _read(client, asks, warnings, has_checks=has_checks)
        if not has_checks:
            layout = _plan(plan, asks, facts)
            return Preflight(layout=layout, checks=("cluster not checked (--no-checks)",), warnings=tuple(warnings))
        if plan.cluster.gpu_memory is not None:
            warnings += check_memory(plan, GpuBudget(gpu_memory_mb=plan.cluster.gpu_memory), source)
        raise_problems(ConfigError, list(_missing_images(asks, plan)), source)
        try:
            layout, found, doubts = _compare(plan, asks, facts, source)
        except UnsatisfiableError:  # other partitions' nodes may do, and names may be theirs
            facts = _read(client, asks, [], has_checks=True, wants_all_nodes=True) or facts
            layout, found, doubts = _compare(plan, asks, facts, source)
        warnings += doubts
        known = {Complaint.NODES} if found.waits_for_nodes else set()
        if facts is not None and any(facts.begins_later(name) for ask in asks for name in ask.reservations):
            known.add(Complaint.TIME)
        started = _ask_slurm(plan, layout, directory, client, source, known=known)
        warnings += started.warnings
        # SLURM estimates as if a partition that is down were up.
        is_down = facts is not None and facts.are_down(partitions_asked(layout.head.options, facts))
        estimate = () if is_down else started.checks
        return Preflight(layout=layout, checks=(*found.checks, *estimate), warnings=tuple(warnings))
    except ConfigError as error:
        raise error.located(source) from error


def _compare(
    plan: RunPlan, asks: Sequence[Ask], facts: ClusterFacts | None, source: ConfigSource
) -> tuple[Layout, Capacity, list[str]]:
    """The layout, what its nodes are like, and warnings; an UnsatisfiableError for what the cluster never gives."""
    if facts is None:
        return _plan(plan, asks, None), Capacity([], []), []
    warnings = check_asks(asks, plan, facts, source)
    layout = _plan(plan, asks, facts)
    found = check_layout(layout, plan, facts, source)
    return layout, found, [*warnings, *found.waits_for_nodes, *check_limits(layout, plan, facts, source)]


def _missing_images(asks: Sequence[Ask], plan: RunPlan) -> Iterator[ConfigProblem]:
    """Images of Apptainer that are files, and not there; it can also fetch one, by an address."""
    for ask in asks:
        image = ask.task.container_image or ""
        if plan.cluster.container_runtime in PROGRAM_RUNTIMES and image.startswith("/") and not Path(image).exists():
            yield ask.problem(
                "container_image",
                f"there is no image {image} on this machine",
                hint="name one on a file system that the nodes see, too; if only they see it, add --no-checks",
                shown=image,
            )


def _read(
    client: SlurmClient, asks: Sequence[Ask], warnings: list[str], *, has_checks: bool, wants_all_nodes: bool = False
) -> ClusterFacts | None:
    try:
        return read_cluster(
            client,
            wanted_partitions=[name for ask in asks for name in ask.values.get("partition", "").split(",")],
            wants_all_nodes=wants_all_nodes,
            accounts_of=user_name() if has_checks else None,
        )
    except SlurmUnreachableError:
        raise
    except SlurmError as error:
        warnings.append(f"nodes and partitions could not be checked: {error}")
        return None


def _plan(plan: RunPlan, asks: Sequence[Ask], facts: ClusterFacts | None) -> Layout:
    if facts is None:
        return plan_layout(plan)
    return plan_layout(plan, shapes_for(asks, plan, facts), default_partition=facts.default_partition)


class _Answer(NamedTuple):
    """What SLURM says about the jobs of a trial."""

    checks: list[str]
    warnings: list[str]


def _ask_slurm(
    plan: RunPlan,
    layout: Layout,
    directory: TrialDirectory,
    client: SlurmClient,
    source: ConfigSource,
    *,
    known: Set[Complaint],
) -> _Answer:
    """What `sbatch --test-only` says about every job of the trial; when its head would start.

    Args:
        known: complaints of which the user has been warned already.
    """
    ask = partial(_test, plan, client, source, known | {Complaint.TIME})
    with tempfile.TemporaryDirectory(prefix="corral-check-") as folder:
        script, extra_script = Path(folder) / "trial.sbatch", Path(folder) / "extra_job.sbatch"
        script.write_bytes(os.fsencode(render_script(plan, layout, directory)))
        start_with = [layout.allocations[index] for index in layout.components]
        answers = [ask(script, [], sbatch_options(plan, layout, directory), start_with)]
        extra_jobs = [index for index in range(len(layout.allocations)) if index not in layout.components]
        if extra_jobs:
            extra_script.write_bytes(os.fsencode(render_extra_job(directory)))
        asked: set[str] = set()
        for index in extra_jobs:
            allocation = layout.allocations[index]
            # Those of a group's elastic workers are alike but for their names.
            text = describe(allocation).partition(": ")[2] + repr(allocation.options)
            if text not in asked:
                asked.add(text)
                options = extra_job_options(plan, layout, index, directory)
                answers.append(ask(extra_script, options, options, [allocation]))
    doubts = dict.fromkeys(
        answer.said for answer in answers if isinstance(answer, SlurmError) and answer.complaint not in known
    )
    warnings = [f"sbatch takes this job, but could not start it at present: {said}" for said in doubts]
    head = answers[0]
    start = None if isinstance(head, SlurmError) else re.search(r" to start at (\S+)", head)
    return _Answer([f"est. start {_estimate(start[1], now=time.time())}"] if start else [], warnings)


def _estimate(start: str, *, now: float) -> str:
    """A moment that sbatch names, for people: behind a job without a time limit it is centuries away."""
    try:
        away_s = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - now
    except (ValueError, OverflowError):
        return start
    return "now" if away_s < 60.0 else "unknown" if away_s > _FAR_AWAY_S else start


def _test(
    plan: RunPlan,
    client: SlurmClient,
    source: ConfigSource,
    tolerated: Set[Complaint],
    script: Path,
    options: Sequence[str],
    all_options: Sequence[str],
    allocations: Sequence[Allocation],
) -> str | SlurmError:
    """SLURM's answer about one job, or its complaint if that is tolerated.

    `all_options` are those of the command line and of the script.
    """
    try:
        return client.test_submission(options, script)
    except SlurmUnreachableError:
        raise
    except SlurmError as error:
        if error.complaint in tolerated:
            return error
        asked_for = [describe(allocation) for allocation in allocations]
        raise explain_refusal(error, plan, asked_for, source, command=refusal_command(all_options)) from error
