"""A worker's command inside its group's container: what goes before it, what srun is told, which variables go along.

    container_runtime: apptainer     srun ... apptainer exec [--nv] --bind ... IMAGE python3 -m corral.workers ...
                       singularity   the same by its older name
                       pyxis         srun --container-image=IMAGE --container-mounts=... python3 -m corral.workers ...

The trial directory is mounted where it is on the host: plan, trial log, checkpoints and rendezvous lie in it. Weights
and data are the user's to mount. Supervisor, Redis and srun stay outside: containers rarely hold SLURM's commands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.experiments.config.cluster import ClusterConfig
from corral.experiments.errors import ConfigError
from corral.scheduling.scheduling import Scheduling

PROGRAM_RUNTIMES = ("apptainer", "singularity")
"""Runtimes that are a program on the node, called by this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainedCommand:
    """A command and its surroundings, as srun has to start it."""

    srun_options: tuple[str, ...] = ()
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of srun's own environment."""


def contain(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    scheduling: Scheduling,
    cluster: ClusterConfig,
    directory: Path,
) -> ContainedCommand:
    """The command as it runs for this group: as it is, or inside the group's image.

    Args:
        command: an interpreter of the host and its arguments; a container has an interpreter of its own.

    Raises:
        ConfigError: if there is an image, and the trial's folder cannot be mounted in it.
    """
    image = scheduling.container_image
    if image is None:
        return ContainedCommand(command=tuple(command), environment=environment)
    inside = (cluster.container_python, *command[1:])
    mounts = (_own_mount(directory), *scheduling.container_mounts)
    if (program := cluster.container_runtime) == "pyxis":
        options = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        if environment:
            # Otherwise the image's own value would win.
            options.append(f"--container-env={','.join(environment)}")
        return ContainedCommand(srun_options=tuple(options), command=inside, environment=environment)
    assert program is not None, "experiments/problems.py refuses an image that nothing could run"
    gpus = ["--nv"] if scheduling.gpu else []
    # Variables by their own variables: --env splits its argument at commas.
    carried = {f"{program.upper()}ENV_{name}": value for name, value in environment.items()}
    return ContainedCommand(
        command=(program, "exec", *gpus, *(f"--bind={mount}" for mount in mounts), image, *inside),
        environment={**environment, **carried},
    )


def _own_mount(directory: Path) -> str:
    path = str(directory)
    if any(character in path for character in ",:"):
        raise ConfigError.of(
            f"the trial directory {path} cannot be mounted in a container: its path holds a comma or a colon",
            hint="choose another name or cluster.fileroot",
            path=("cluster", "fileroot"),
            shown=path,
        )
    return f"{path}:{path}"
