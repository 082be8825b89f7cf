"""Before a submission: what the trial asks for is checked against the cluster, planned, and shown to SLURM.

    RunPlan --times--> sinfo, scontrol --names, sizes--> plan_layout --counts--> sbatch --test-only --> Preflight
                             |                                                                              |
                       no answer: a warning, and SLURM alone decides                 ConfigError, UnsatisfiableError

One sinfo and one `scontrol show partition`; nothing is written outside a temporary folder.
"""

import os
import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigProblem, ConfigSource, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.experiments.trial_directory import TrialDirectory
from corral.launcher.layout import Allocation, Layout
from corral.launcher.layout_planner import plan_layout
from corral.launcher.sbatch import COMPONENT_SEPARATOR, member_options, render_holder, render_script, sbatch_options
from corral.launcher.slurm import SlurmClient, SlurmError, SlurmUnreachableError, user_name
from corral.launcher.slurm_asks import Ask, asks_of, check_values, shapes_for
from corral.launcher.slurm_capacity import check_layout, describe
from corral.launcher.slurm_checks import check_asks, explain_refusal, node_local_warning
from corral.launcher.slurm_facts import ClusterFacts, read_cluster

_FAR_AWAY_S = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A trial that its cluster can run, as far as anybody can tell."""

    layout: Layout
    checks: tuple[str, ...]
    """What was found, in a few words each."""
    warnings: tuple[str, ...]


def check_on_slurm(
    plan: RunPlan,
    directory: TrialDirectory,
    client: SlurmClient,
    *,
    source: ConfigSource = NO_SOURCE,
    now: datetime | None = None,
) -> Preflight:
    """Plans the allocations of a trial and checks that they can ever start.

    Args:
        plan: the trial.
        directory: its folder; it need not exist.
        client: the cluster.
        source: where the values came from, for messages.
        now: the clock; None is the present.

    Raises:
        ConfigError: if values are wrong whatever the cluster.
        UnsatisfiableError: if this cluster cannot run the trial.
        SlurmUnreachableError: if SLURM does not answer at all.
    """
    try:
        asks = asks_of(plan, source)
        check_values(asks, source, now=now or datetime.now())
        local = node_local_warning(directory.path)
        warnings = [local] if local else []
        checks: list[str] = []
        facts = _read(client, asks, warnings)
        if facts is not None:
            warnings += check_asks(asks, plan, facts, source)
        layout = _plan(plan, asks, facts)
        if facts is not None:
            checks += check_layout(layout, plan, facts, source)
        start = _ask_slurm(plan, layout, directory, client, source)
        return Preflight(layout=layout, checks=(*checks, *start), warnings=tuple(warnings))
    except ConfigError as error:
        raise error.located(source) from error


def _read(client: SlurmClient, asks: Sequence[Ask], warnings: list[str]) -> ClusterFacts | None:
    try:
        return read_cluster(
            client,
            wants_reservation=any("reservation" in ask.values for ask in asks),
            wants_account=any(name in ask.values for ask in asks for name in ("account", "qos")),
            user=user_name(),
        )
    except SlurmUnreachableError:
        raise
    except SlurmError as error:
        warnings.append(f"nodes and partitions could not be checked: {error}")
        return None


def _plan(plan: RunPlan, asks: Sequence[Ask], facts: ClusterFacts | None) -> Layout:
    if facts is None:
        return plan_layout(plan)
    try:
        shapes = shapes_for(asks, plan, facts)
        return plan_layout(plan, shapes, default_partition=facts.default_partition)
    except ConfigError as error:
        if all(problem.message.startswith("trial can never start") for problem in error.problems):
            raise UnsatisfiableError(map(_with_key, error.problems)) from error
        raise


_WANTS = re.compile(r"(?P<kind>[a-z_]+)(?:/\d+)? (?:must run on node 0 and )?wants [0-9]+ (?P<unit>CPUs|GPUs|MB)\b")
_FIELD_BY_UNIT = {"CPUs": "cpu", "GPUs": "gpu", "MB": "mem"}


def _with_key(problem: ConfigProblem) -> ConfigProblem:
    """A problem of placement, with the key of the group that it is about."""
    match = _WANTS.search(problem.message)
    if problem.path or match is None:
        return problem
    return replace(problem, path=("groups", match["kind"], "scheduling", _FIELD_BY_UNIT[match["unit"]]))


def _ask_slurm(
    plan: RunPlan, layout: Layout, directory: TrialDirectory, client: SlurmClient, source: ConfigSource
) -> list[str]:
    """What `sbatch --test-only` says about every job of the trial; when its head would start."""
    with tempfile.TemporaryDirectory(prefix="corral-check-") as folder:
        script, holder = Path(folder) / "trial.sbatch", Path(folder) / "holder.sbatch"
        script.write_bytes(os.fsencode(render_script(plan, layout, directory)))
        start_with = [one for one in layout.allocations if one.role in ("head", "component")]
        answers = [_test(plan, script, [], sbatch_options(plan, layout, directory), start_with, client, source)]
        members = [index for index, one in enumerate(layout.allocations) if one.role in ("group", "elastic")]
        if members:
            holder.write_bytes(os.fsencode(render_holder(directory)))
        asked: set[str] = set()
        for index in members:
            allocation = layout.allocations[index]
            # Elastic members of a group are alike but for their names.
            text = describe(allocation).partition(": ")[2] + repr(allocation.options)
            if text not in asked:
                asked.add(text)
                options = member_options(plan, layout, index, directory)
                answers.append(_test(plan, holder, options, options, [allocation], client, source))
    start = re.search(r" to start at (\S+)", answers[0])
    return [f"est. start {_estimate(start[1], now=time.time())}"] if start else []


def _estimate(start: str, *, now: float) -> str:
    """A moment that sbatch names, for people: behind a job without a time limit it is centuries away."""
    try:
        away_s = time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")) - now
    except (ValueError, OverflowError):
        return start
    return "now" if away_s < 60.0 else "unknown" if away_s > _FAR_AWAY_S else start


def _test(
    plan: RunPlan,
    script: Path,
    options: Sequence[str],
    all_options: Sequence[str],
    allocations: Sequence[Allocation],
    client: SlurmClient,
    source: ConfigSource,
) -> str:
    """SLURM's answer about one job; `all_options` are those of the command line and of the script."""
    try:
        return client.test_submission(options, script)
    except SlurmUnreachableError:
        raise
    except SlurmError as error:
        said = str(error).partition(": ")[2] or str(error)
        asked_for = [describe(allocation) for allocation in allocations]
        command = _shown_command(all_options)
        raise explain_refusal(said, plan, asked_for, source, command=command) from error


_NOT_SHOWN = ("--job-name=", "--comment=", "--output=", "--open-mode=", "--export=", "--signal=", "--requeue")


def _shown_command(options: Sequence[str]) -> str:
    """A call of sbatch that shows the same refusal; it submits nothing."""
    shown = [option for option in options if not option.startswith(_NOT_SHOWN)]
    end = shown.index(COMPONENT_SEPARATOR) if COMPONENT_SEPARATOR in shown else len(shown)
    return shlex.join(["sbatch", "--test-only", *shown[:end], "--wrap=true", *shown[end:]])
