"""Before a submission: what the trial asks for is checked against the cluster, planned, and shown to SLURM.

    RunPlan --times--> sinfo, scontrol --names, sizes--> plan_layout --counts--> sbatch --test-only --> Preflight
                             |                                                                              |
                       no answer: a warning, and SLURM alone decides                 ConfigError, UnsatisfiableError

A trial is refused for what no waiting cures; a refusal by SLURM itself names the request and its configuration key.
Nodes that are down and a start that is not yet possible are warnings, and where `sbatch --test-only` refuses for them,
its refusal is one too: sbatch takes such a job, and it waits. Nothing is written outside a temporary folder.

A cluster that is not there: its shape, as somebody types it -> where a trial would run on it, and whether it fits.

    --shape 4x8x80G ──► ClusterShape ──► memory of each GPU ──► plan_layout on such nodes ──► Preflight

Nothing is asked of SLURM, and nothing of this machine. CPUs and host memory of the nodes are those of the
configuration; where it does not say them, there are as many as the workers ask for.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigProblem, ConfigSource, KeyPath, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.leftovers import temporary_folder
from corral.launcher.layout.layout import Allocation, Layout, PlacedTrial
from corral.launcher.layout.planner import plan_layout
from corral.launcher.runners.runner import PROGRAM_RUNTIMES
from corral.launcher.slurm.client import Complaint, SlurmClient, SlurmError, SlurmUnreachableError
from corral.launcher.slurm.sbatch import (
    extra_job_options,
    refusal_command,
    render_extra_job,
    render_script,
    sbatch_options,
)
from corral.launcher.submit.asks import (
    Ask,
    asks_of,
    check_asks,
    check_values,
    node_local_warning,
    raise_problems,
    shapes_for,
)
from corral.launcher.submit.check_layout import check_layout, check_limits, parts_of, summary_of
from corral.launcher.submit.check_memory import check_memory
from corral.launcher.submit.cluster import ClusterFacts, read_cluster, seconds_of_moment
from corral.launcher.submit.plan_text import count_of, describe
from corral.launcher.trial.processes import user_name
from corral.scheduling.scheduling import GIB_MB
from corral.scheduling.slurm_formats import parse_memory_mb

_FAR_AWAY_S = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A trial that can run where it is to run, as far as anybody can tell."""

    layout: Layout | None
    """None where there are no jobs."""
    checks: tuple[str, ...]
    """The findings, in a few words each."""
    warnings: tuple[str, ...]


def check_on_slurm(
    plan: RunPlan,
    directory: TrialDirectory,
    *,
    source: ConfigSource = NO_SOURCE,
    has_checks: bool = True,
) -> Preflight:
    """Plans the allocations of a trial and checks that they can ever start.

    Args:
        directory: its folder; it need not exist.
        has_checks: whether the cluster is compared with the trial; without it is asked only what its nodes are.

    Raises:
        ConfigError: if values are wrong whatever the cluster.
        UnsatisfiableError: if this cluster cannot run the trial.
        SlurmUnreachableError: if SLURM does not answer at all.
    """
    checks = _Checks(
        plan=plan, directory=directory, source=source, client=SlurmClient(), asks=asks_of(plan, source), warnings=[]
    )
    check_values(checks.asks, plan, source)
    if local := node_local_warning(directory.path):
        checks.warnings.append(local)
    facts = checks.read(has_checks=has_checks)
    if has_checks:
        layout, found = checks.all(facts)
    else:
        layout, found = checks.planned(facts), ["cluster not checked (--no-checks)"]
    return Preflight(layout=layout, checks=tuple(found), warnings=tuple(checks.warnings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """A trial beside the cluster that it is for."""

    plan: RunPlan
    directory: TrialDirectory
    source: ConfigSource
    client: SlurmClient
    asks: Sequence[Ask]
    warnings: list[str]

    def read(self, *, has_checks: bool, wants_all_nodes: bool = False) -> ClusterFacts:
        """The facts of the cluster; none if it gives no answer."""
        try:
            return read_cluster(
                self.client,
                wanted_partitions=[name for ask in self.asks for name in ask.values.get("partition", "").split(",")],
                wants_all_nodes=wants_all_nodes,
                accounts_of=user_name() if has_checks else None,
            )
        except SlurmUnreachableError:
            raise
        except SlurmError as error:
            if not wants_all_nodes:
                self.warnings.append(f"nodes and partitions could not be checked: {error}")
            return ClusterFacts(nodes=(), partitions={})

    def planned(self, facts: ClusterFacts) -> Layout:
        shapes = shapes_for(self.asks, self.plan, facts)
        return plan_layout(self.plan, shapes, default_partition=facts.default_partition)

    def all(self, facts: ClusterFacts) -> tuple[Layout, list[str]]:
        """The layout, and what was found."""
        if self.plan.cluster.gpu_memory is not None:
            self.warnings.extend(check_memory(self.plan))
        raise_problems(ConfigError, list(_missing_images(self.asks, self.plan)))
        try:
            layout, found, waits = self._compare(facts)
        except UnsatisfiableError:  # other partitions' nodes may do, and names may be theirs
            everything = self.read(has_checks=True, wants_all_nodes=True)
            facts = everything if everything.partitions else facts
            layout, found, waits = self._compare(facts)
        known = {Complaint.NODES} if waits else set()
        if any(facts.begins_later(name) for ask in self.asks for name in ask.names("reservation")):
            known.add(Complaint.TIME)
        started = self._ask_slurm(layout, known)
        # SLURM estimates as if a partition that is down were up.
        is_down = facts.are_down(facts.asked(layout.head.options))
        return layout, found if is_down else [*found, *started]

    def _compare(self, facts: ClusterFacts) -> tuple[Layout, list[str], list[str]]:
        """The layout, what was found, and what waits; an UnsatisfiableError for what the cluster never gives."""
        if not facts.partitions:
            return self.planned(facts), [], []
        warnings = check_asks(self.asks, self.plan, facts)
        layout = self.planned(facts)
        parts = parts_of(layout, self.plan, facts, self.source)
        waits = check_layout(parts)
        self.warnings.extend([*warnings, *waits, *check_limits(parts)])
        return layout, summary_of(parts), waits

    def _ask_slurm(self, layout: Layout, known: Set[Complaint]) -> list[str]:
        """What `sbatch --test-only` says about every job of the trial: when its head would start.

        Args:
            known: complaints of which the user has been warned already.
        """
        plan, directory = self.plan, self.directory
        trial = PlacedTrial(plan=plan, layout=layout, directory=directory)
        with temporary_folder("corral-check-") as folder:
            script, extra_script = folder / "trial.sbatch", folder / "extra_job.sbatch"
            script.write_bytes(os.fsencode(render_script(trial)))
            start_with = [layout.allocations[index] for index in layout.components]
            answers = [self._test(script, [], sbatch_options(trial), start_with, known)]
            extra_script.write_bytes(os.fsencode(render_extra_job(directory)))
            # Those of a group's elastic workers are alike but for their names.
            extra_jobs = {
                describe(one): index
                for index, one in reversed(list(enumerate(layout.allocations)))
                if index not in layout.components
            }
            for index in sorted(extra_jobs.values()):
                options = extra_job_options(trial, index)
                answers.append(self._test(extra_script, options, options, [layout.allocations[index]], known))
        doubts = [one.output for one in answers if isinstance(one, SlurmError) and one.complaint not in known]
        at_present = [f"sbatch takes this job, but could not start it at present: {doubt}" for doubt in doubts]
        self.warnings.extend(dict.fromkeys(at_present))
        start = None if isinstance(answers[0], SlurmError) else re.search(r" to start at (\S+)", answers[0])
        return [f"est. start {_estimate(start[1], now=time.time())}"] if start else []

    def _test(
        self,
        script: Path,
        options: Sequence[str],
        all_options: Sequence[str],
        allocations: Sequence[Allocation],
        known: Set[Complaint],
    ) -> str | SlurmError:
        """SLURM's answer about one job, or its complaint if waiting cures it.

        `all_options` are those of the command line and of the script.
        """
        try:
            return self.client.test_submission(options, script)
        except SlurmUnreachableError:
            raise
        except SlurmError as error:
            if error.complaint in known | {Complaint.TIME}:
                return error
            asked_for, command = [f"{one.name}: {describe(one)}" for one in allocations], refusal_command(all_options)
            raise explain_refusal(error, self.plan, asked_for, command=command) from error


def _missing_images(asks: Sequence[Ask], plan: RunPlan) -> Iterator[ConfigProblem]:
    """Images of Apptainer that are files, and not there; it can also fetch one, by an address."""
    for ask in asks:
        image = ask.task.container_image or ""
        if plan.cluster.container_runtime in PROGRAM_RUNTIMES and image.startswith("/") and not Path(image).exists():
            yield ask.problem(
                "container_image",
                f"there is no image {image} on this machine",
                hint="name one on a file system that the nodes see, too; if only they see it, add --no-checks",
            )


def _estimate(start: str, *, now: float) -> str:
    """A moment that sbatch names, for people: behind a job without a time limit it is centuries away."""
    if (starts_at := seconds_of_moment(start)) is None:
        return start
    away_s = starts_at - now
    return "now" if away_s < 60.0 else "unknown" if away_s > _FAR_AWAY_S else start


_FIELD_BY_COMPLAINT: Mapping[Complaint, str] = {
    Complaint.RESERVATION: "reservation",
    Complaint.ACCOUNT: "account",
    Complaint.QOS: "qos",
    Complaint.LIMIT: "qos",  # an account's limits hold for all of its QOS, a QOS is what one can choose
    Complaint.FEATURE: "constraint",
    Complaint.NODE_NAMES: "nodelist",
    Complaint.TIME_LIMIT: "time_limit",
    Complaint.PARTITION: "partition",
}
_LIMIT_HINT = (
    "ask for less, for a shorter time, or for another QOS; sacctmgr show qos, and sacctmgr show assoc user=$USER, "
    "list the limits"
)


def explain_refusal(
    error: SlurmError, plan: RunPlan, allocations: Sequence[str], *, command: str
) -> UnsatisfiableError:
    """SLURM's own refusal, with what was asked for beside it and the key that it is about, as far as it says so.

    Args:
        error: the answer of `sbatch --test-only`.
        allocations: what was asked for, a line each.
        command: the command that shows the answer.
    """
    path = _blamed(error, plan)
    hint = "correct it" if path else "ask for less, or for something else; the administrators know this site's rules"
    hint = _LIMIT_HINT if error.complaint is Complaint.LIMIT else hint
    message = "\n".join([f"SLURM refuses this trial: {error.output}", *(f"asked for: {line}" for line in allocations)])
    return UnsatisfiableError([ConfigProblem(message, hint, path=path, evidence=command)])


def _blamed(error: SlurmError, plan: RunPlan) -> KeyPath:
    """The extra option that sbatch names, `--nice` itself or `license` of `--licenses`; else what it complains of."""
    names = [argument.partition("=")[0] for argument in plan.launch.extra_sbatch_arguments]
    exact = [index for index, name in enumerate(names) if name in error.output]
    alike = [index for index, name in enumerate(names) if name.strip("-").rstrip("s") in error.output.lower()]
    for index in (*exact, *alike):
        return "launch", "extra_sbatch_arguments", index
    field = _FIELD_BY_COMPLAINT.get(error.complaint, "")
    return ("launch", field) if getattr(plan.launch, field, None) else ()


_SHAPE = re.compile(r"([0-9]{1,5})x([0-9]{1,3})x([0-9]{1,6}[MGTmgt])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """Nodes that are all alike, as far as GPUs go."""

    num_nodes: int
    gpus_per_node: int
    gpu_memory_mb: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def __str__(self) -> str:
        """'4 nodes with 8 GPUs of 80 GiB'."""
        nodes, gpus = count_of(self.num_nodes, "node"), count_of(self.gpus_per_node, "GPU")
        return f"{nodes} with {gpus} of {self.gpu_memory_mb / GIB_MB:.4g} GiB"

    def in_plan(self, plan: RunPlan) -> RunPlan:
        """The plan with these nodes, which have the CPUs and the memory that workers ask for where nobody says it."""
        cluster, groups = plan.cluster, [group for _, group in plan.scheduling.items()]
        cpus, mem_mb = (sum(one.total_count * getattr(one.scheduling, it) for one in groups) for it in ("cpu", "mem"))
        known = {
            "gpus_per_node": self.gpus_per_node,
            "gpu_memory": self.gpu_memory_mb,
            "max_nodes": min(self.num_nodes, cluster.max_nodes or self.num_nodes),
            "cpus_per_node": cluster.cpus_per_node or cpus + 1,
            "mem_per_node": cluster.mem_per_node or mem_mb + GIB_MB,
        }
        return plan.model_copy(update={"cluster": cluster.model_copy(update=known)})

    @classmethod
    def parse(cls, text: str) -> "ClusterShape":
        """Read NODESxGPUSxMEMORY.

        Raises:
            ConfigError: naming the rule, what was written, and an example.
        """
        match = _SHAPE.fullmatch(text.strip())
        numbers = [int(match[1]), int(match[2]), parse_memory_mb(match[3])] if match else []
        if not numbers or min(numbers) < 1:
            raise ConfigError.of(
                f"a cluster's shape is NODESxGPUSxMEMORY, each at least 1, the memory of one GPU with M, G or T, "
                f"got {text!r}",
                hint="write 4x8x80G for 4 nodes with 8 GPUs of 80 GB each",
                place=f"--shape {text}",
            )
        return cls(num_nodes=numbers[0], gpus_per_node=numbers[1], gpu_memory_mb=numbers[2])


def check_on_shape(plan: RunPlan, shape: ClusterShape) -> Preflight:
    """Plans a trial for a cluster of this shape, which is in the plan.

    Raises:
        ConfigError: if a GPU cannot hold what it would have to.
        UnsatisfiableError: if there are too few GPUs or nodes.
    """
    _check_gpus(plan, shape)
    check_memory(plan, is_estimate_enough=True)
    layout = plan_layout(plan)
    checks = [f"imagined cluster of {shape}, nothing is asked of a real one", "memory of every GPU ok"]
    keys = {"CPUs": "cpus_per_node", "host memory": "mem_per_node"}
    if unknown := [name for name, key in keys.items() if plan.config["cluster"][key] is None]:
        checks.append(f"{' and '.join(unknown)} of its nodes not compared")
    return Preflight(layout=layout, checks=tuple(checks), warnings=())


def _check_gpus(plan: RunPlan, shape: ClusterShape) -> None:
    wanted = {kind: group.count * group.scheduling.gpu for kind, group in plan.scheduling.items()}
    if (total := sum(wanted.values())) <= shape.num_gpus:
        return
    parts = " + ".join(f"{count} of {kind}" for kind, count in wanted.items() if count)
    enough = replace(shape, num_nodes=-(-total // shape.gpus_per_node))
    raise UnsatisfiableError.of(
        f"trial can never start: it needs {total} GPUs ({parts}), and {shape} are {shape.num_gpus}",
        hint=f"{enough} are enough; or lower d in the allocation",
        path=("allocation",),
    )
