"""A worker as a step of an allocation: the environment of a batch step in, the command line of srun out. Pure.

SLURM_JOB_ID, SLURM_HET_SIZE, ... --own_job--> OwnJob
worker, its command, where it runs --srun_command--> srun --jobid=7 --exact ... --job-name=rollout_worker-3 ...

Each step names its CPUs, memory and GPUs: a step that leaves one out takes all of it, and the next step then waits
silently, which among workers that wait for each other is a deadlock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corral.launcher.cluster.own_job import OwnJob
from corral.launcher.layout.layout import RunningAllocation, RunningAllocations, Step
from corral.scheduling.slurm_formats import expand_host_list

if TYPE_CHECKING:
    from corral.launcher.runners.containers import ContainedCommand

# Cuts a worker's devices out of the list that its step has: the step's GPUs need not start at 0.
_CUT_GPUS = """\
wanted=$1 missing=$2 number=0 cut= inherited=$CUDA_VISIBLE_DEVICES
shift 2
rest=$inherited,
while [ -n "$rest" ] && [ "$rest" != , ]; do
  device=${rest%%,*} rest=${rest#*,}
  case ,$wanted, in *,$number,*) cut=${cut:+$cut,}$device missing=$((missing - 1)) ;; esac
  number=$((number + 1))
done
if [ "$missing" -ne 0 ]; then
  echo "GPUs $wanted were planned for this worker, but its step has CUDA_VISIBLE_DEVICES=$inherited" >&2
  exit 1
fi
export CUDA_VISIBLE_DEVICES="$cut"
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """A step of the layout, and what is around it where it runs now."""

    step: Step
    running: RunningAllocation
    node_gpus: int = 0
    """GPUs that the allocation has on the node."""
    sliced_cpus: int = 0
    """CPUs of all workers on the node whose GPUs are cut out of the node's."""

    @property
    def host(self) -> str:
        return self.running.hosts[self.step.node_index]


def own_job(environment: Mapping[str, str]) -> OwnJob | None:
    """The job whose batch step has this environment; None where it is no step of a job."""
    if not environment.get("SLURM_JOB_ID"):
        return None
    allocations = _batch_allocations(environment)
    return OwnJob(
        job_id=environment["SLURM_JOB_ID"],
        restart_count=int(environment.get("SLURM_RESTART_COUNT", "0") or 0),
        host=environment.get("SLURMD_NODENAME") or next(iter(allocations[0].hosts), ""),
        allocations=allocations,
    )


def _batch_allocations(environment: Mapping[str, str]) -> RunningAllocations:
    """The head, and the components of its heterogeneous job."""
    size = int(environment.get("SLURM_HET_SIZE", "0"))
    if size == 0:
        hosts = tuple(expand_host_list(environment.get("SLURM_JOB_NODELIST", "")))
        return {0: RunningAllocation(job_id=environment["SLURM_JOB_ID"], het_group=None, hosts=hosts)}
    return {
        group: RunningAllocation(
            job_id=environment["SLURM_JOB_ID_HET_GROUP_0"],
            het_group=group,
            hosts=tuple(expand_host_list(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])),
            own_job_id=environment[f"SLURM_JOB_ID_HET_GROUP_{group}"],
        )
        for group in range(size)
    }


def step_name(worker: str) -> str:
    """Name of a worker's step in squeue: rollout_worker/3 is rollout_worker-3."""
    return worker.replace("/", "-")


def srun_command(
    worker: str, contained: "ContainedCommand", place: StepPlace, *, counts_gpus: bool = True
) -> list[str]:
    """The srun that carries one worker.

    Args:
        counts_gpus: whether SLURM gives out GPUs here; else a node comes with all of them.
    """
    step, running = place.step, place.running
    is_sliced = step.gpus > 0 and step.gpu_binding == "slice" and counts_gpus
    gpu_options, prefix = _gpu_part(step, place.node_gpus, counts_gpus=counts_gpus)
    return [
        "srun",
        f"--jobid={running.job_id}",
        *([] if running.het_group is None else [f"--het-group={running.het_group}"]),
        f"--job-name={step_name(worker)}",
        "--exact",
        *(["--overlap"] if is_sliced else []),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={place.host}",
        # Overlapping steps get the same cores, as SLURM counts theirs as free: each asks for all that they have.
        f"--cpus-per-task={place.sliced_cpus if is_sliced else step.cpus}",
        *([f"--mem={step.mem_mb}M"] if step.mem_mb else []),
        *gpu_options,
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--input=none",
        *contained.srun_options,
        # No --output, in which srun expands patterns: what it inherits is the worker's log already.
        *prefix,
        *contained.command,
    ]


def _gpu_part(step: Step, node_gpus: int, *, counts_gpus: bool) -> tuple[list[str], list[str]]:
    """Options of srun, and what goes before the command inside the step."""
    planned = ",".join(map(str, step.gpu_indices))
    if not counts_gpus:
        return [], ["env", f"CUDA_VISIBLE_DEVICES={planned}"]
    if not step.gpus:
        # Without device cgroups a step without GRES sees every GPU of the node. SLURM takes the variable away on its
        # way to the step, so it is set inside.
        return ["--gres=none"], ["env", "CUDA_VISIBLE_DEVICES="]
    match step.gpu_binding:
        case "slice":
            return [f"--gres=gpu:{node_gpus}"], ["sh", "-c", _CUT_GPUS, "cut-gpus", planned, str(step.gpus)]
        case "none":
            return [f"--gres=gpu:{step.gpus}"], []
        case "per_task":
            return [f"--gpus-per-task={step.gpus}"], []
