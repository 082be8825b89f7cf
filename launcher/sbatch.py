"""A packed trial as a call of sbatch: options as an argument list, and a short script that holds nothing but paths.

RunPlan --pack--> PackedLayout --sbatch_options--> ["--job-name=...", ...] --+
                  trial.sbatch.j2 --render_script--> {trial}/trial.sbatch  --+--> sbatch --parsable
"""

import json
import shlex
import sys
from importlib.resources import files
from pathlib import Path

from corral.experiments.plan import RunPlan
from corral.experiments.trial_directory import TrialDirectory, validate_name
from corral.launcher.packed import PackedLayout
from corral.scheduling.slurm_formats import check_plain_text

_OPTION_BY_FIELD = {"time_limit": "time"}  # the others have the name of their option
_MAX_JOB_NAME = 64


def render_script(directory: TrialDirectory, *, attempt: int, python: Path | None = None) -> str:
    """The batch script of one attempt.

    Raises:
        ValueError: if the path of the trial holds control characters.
    """
    # Not at the top: only submissions render, and every command of the launcher imports this package.
    from jinja2 import Environment, StrictUndefined

    path = str(directory.path)
    check_plain_text(path, what="trial directory")
    environment = Environment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML
        # Delimiters that cannot occur in bash: its ${#array[@]} would start a comment of Jinja's default ones.
        variable_start_string="<%",
        variable_end_string="%>",
        comment_start_string="<%#",
        comment_end_string="#%>",
        block_start_string="<%%",
        block_end_string="%%>",
        trim_blocks=True,
    )
    environment.filters["shell"] = shlex.quote
    environment.filters["comment_text"] = _comment_text
    template = environment.from_string((files("corral.sbatch_templates") / "trial.sbatch.j2").read_text())
    return template.render(directory=path, attempt=attempt, python=str(python or sys.executable))


def sbatch_options(plan: RunPlan, layout: PackedLayout, directory: TrialDirectory, *, attempt: int) -> list[str]:
    """Options of sbatch, one argument each; no shell ever reads them."""
    tag = {
        "corral": 1,
        "trial_uuid": plan.trial.uuid,
        "directory": str(directory.path),
        "attempt": attempt,
    }
    options = [
        f"--job-name={job_name(plan.trial.experiment, plan.trial.trial)}",
        f"--comment={json.dumps(tag, separators=(',', ':'))}",
        f"--nodes={layout.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={layout.cpus_per_node}",
        f"--mem={layout.mem_mb_per_node}M",
        # sbatch expands %-patterns in the file name: a % of the directory has to be doubled.
        f"--output={str(directory.logs_path).replace('%', '%%')}/slurm-%j.log",
        "--open-mode=append",
        "--no-requeue",
        f"--signal=B:USR2@{plan.launch.signal_before_end_s}",
        "--export=ALL",
    ]
    if layout.gpus_per_node:
        gpu_type = f"{layout.gpu_type}:" if layout.gpu_type else ""
        options.append(f"--gres=gpu:{gpu_type}{layout.gpus_per_node}")
    options += [f"--{_OPTION_BY_FIELD.get(field, field)}={value}" for field, value in layout.allocation.items()]
    options += layout.extra_arguments
    for option in options:
        check_plain_text(option, what="sbatch option")
    return options


def job_name(experiment: str, trial: str) -> str:
    """What squeue shows; identity is the job id and the uuid in the comment, never this."""
    return f"{validate_name(experiment, what='experiment name')}.{validate_name(trial, what='trial name')}"[
        :_MAX_JOB_NAME
    ]


def _comment_text(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
