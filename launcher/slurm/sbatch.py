"""A layout as batch scripts: options become #SBATCH lines, and the script needs nothing else.

    PlacedTrial --sbatch_options--> [--job-name=..., ":", ...] --trial.sbatch.j2--> {trial}/trial.sbatch --> sbatch
                    --extra_job_options--> [--job-name=..., ...] --extra_job.sbatch.j2--> extra_job.sbatch --> sbatch

No value is ever read by a shell: an option stands on a line of its own, where sbatch reads what is between the quotes,
and control characters, which could start another line, are refused.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.experiments.errors import ConfigError
from corral.experiments.own_python import own_python
from corral.experiments.regular_file import read_regular
from corral.experiments.trial.directory import TrialDirectory
from corral.launcher.layout.layout import Allocation, Layout, PlacedTrial
from corral.launcher.slurm.own_jobs import job_name
from corral.scheduling.scheduling import option_name
from corral.scheduling.slurm_formats import check_plain_text

if TYPE_CHECKING:
    from jinja2 import Environment

COMPONENT_SEPARATOR = ":"
SUPERVISOR_SILENCE_S = 120
_LOOK_INTERVAL_S = 5
_NOT_SHOWN = ("--job-name=", "--comment=", "--output=", "--open-mode=", "--export=", "--signal=", "--requeue")
_BASH_TIMEOUT_S = 10.0
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:=@+/%\[\]-]+")


def submission_command(directory: TrialDirectory) -> str:
    """The call of sbatch that submits a trial, for people; it can be pasted into a shell."""
    return shlex.join(["sbatch", "--parsable", str(directory.sbatch_path)])


def refusal_command(options: Sequence[str]) -> str:
    """A call of sbatch, for people, that shows the same refusal as these options; it submits nothing."""
    shown = [option for option in options if not option.startswith(_NOT_SHOWN)]
    end = shown.index(COMPONENT_SEPARATOR) if COMPONENT_SEPARATOR in shown else len(shown)
    return shlex.join(["sbatch", "--test-only", *shown[:end], "--wrap=true", *shown[end:]])


def render_script(trial: PlacedTrial) -> str:
    """The batch script of a trial, from the shipped template or the user's own.

    Raises:
        ValueError: if the path of the trial or an option holds control characters.
        ConfigError: if SLURM cannot take the path, or the user's own template does not make a script.
    """
    path, template = str(trial.directory.path), trial.plan.launch.sbatch_template
    check_plain_text(path, what="trial directory")
    variables = {
        "sbatch_lines": sbatch_lines(sbatch_options(trial)),
        "supervisor": shlex.join(own_python("-m", "corral.launcher.supervisor", "--trial", path)),
        "directory": path,
        "python": sys.executable,
    }
    if template is None:
        return render_shipped("trial.sbatch.j2", **variables)
    return _render_own_template(template, variables)


def render_extra_job(directory: TrialDirectory) -> str:
    """The batch script of every extra job: it only keeps its nodes.

    Raises:
        ValueError: if the path of the trial holds control characters.
    """
    path = str(directory.path)
    check_plain_text(path, what="trial directory")
    return render_shipped(
        "extra_job.sbatch.j2",
        directory=path,
        alive=str(directory.supervisor_alive_path),
        silence_s=SUPERVISOR_SILENCE_S,
        interval_s=_LOOK_INTERVAL_S,
    )


def extra_job_path(directory: TrialDirectory) -> Path:
    """Where the script of the extra jobs lies."""
    return directory.path / "extra_job.sbatch"


def sbatch_options(trial: PlacedTrial) -> list[str]:
    """Options of the job that a trial starts with: its head, and after each ":" a component of it."""
    options = _allocation_options(trial, 0)
    options += [*_batch_options(trial), f"--signal=B:USR2@{trial.plan.launch.signal_before_end_s}"]
    for index in trial.layout.components[1:]:
        options += [COMPONENT_SEPARATOR, *_allocation_options(trial, index)]
    return _checked(options)


def successor_options(layout: Layout, *, after: str, exclude_nodes: Sequence[str]) -> list[str]:
    """What the job that follows job `after` asks for beside what is in the script.

    Without a ":" sbatch takes options for all components, and an --exclude would replace the component's own.
    """
    options: list[str] = []
    for index in layout.components:
        excluded = _excluded(layout.allocations[index], exclude_nodes) if exclude_nodes else ""
        options += [COMPONENT_SEPARATOR] if options else []
        options += [f"--dependency=afterany:{after}", *([f"--exclude={excluded}"] if excluded else [])]
    return options


def extra_job_options(
    trial: PlacedTrial, allocation: int, *, attempt: int | None = None, exclude_nodes: Sequence[str] = ()
) -> list[str]:
    """Options of the extra job of a group or of an elastic worker; its comment names the attempt that asked for it."""
    options = _allocation_options(trial, allocation, attempt=attempt, exclude_nodes=exclude_nodes)
    return _checked([*options, *_batch_options(trial)])


def sbatch_lines(options: Sequence[str]) -> str:
    """Options as lines of a batch script."""
    return "\n".join(map(_line, options))


def _line(option: str) -> str:
    if option == COMPONENT_SEPARATOR:
        return "#SBATCH hetjob"
    name, has_value, value = option.partition("=")
    return f"#SBATCH {name}={_quoted(value)}" if has_value else f"#SBATCH {name}"


def _quoted(value: str) -> str:
    """As sbatch reads a value of an #SBATCH line: between double quotes only backslash and quote mean something."""
    if _PLAIN_VALUE.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _allocation_options(
    trial: PlacedTrial, index: int, *, attempt: int | None = None, exclude_nodes: Sequence[str] = ()
) -> list[str]:
    """The options of an allocation of any role."""
    plan, allocation = trial.plan, trial.layout.allocations[index]
    tag = {
        "corral": 1,
        "trial_uuid": plan.trial.uuid,
        "directory": str(trial.directory.path),
        "allocation": allocation.name,
        **({} if attempt is None else {"attempt": attempt}),
    }
    memory = plan.cluster.memory_option(
        mem_mb=allocation.mem_mb_per_node, cpus=allocation.cpus_per_node, rules=allocation.memory
    )
    options = [
        f"--job-name={job_name(plan.trial.experiment, plan.trial.trial, allocation.name)}",
        f"--comment={json.dumps(tag, separators=(',', ':'))}",
        f"--nodes={allocation.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={allocation.cpus_per_node}",
        *(f"--{name}={amount}" for name, amount in memory.items()),
    ]
    if allocation.gpus_per_node:
        name, value = plan.cluster.gpu_option(allocation.gpus_per_node, allocation.gpu_type)
        options.append(f"--{name}={value}" if value else f"--{name}")
    values = dict(allocation.options)
    if excluded := _excluded(allocation, exclude_nodes):
        values["exclude"] = excluded
    options += [f"--{option_name(field)}={value}" for field, value in values.items()]
    return [*options, *allocation.extra_arguments]


def _excluded(allocation: Allocation, nodes: Sequence[str]) -> str:
    """Nodes that failed, beside those that the user excludes."""
    own = [allocation.options["exclude"]] if "exclude" in allocation.options else []
    return ",".join(dict.fromkeys([*own, *nodes]))


def _batch_options(trial: PlacedTrial) -> list[str]:
    directory, path = trial.directory, str(trial.directory.logs_path)
    if "\\" in path:
        raise ConfigError.of(
            f"SLURM cannot write a log below {directory.path}: it drops a backslash from the path of --output",
            hint="choose a folder without one",
            path=("cluster", "fileroot"),
            shown=str(directory.path),
        )
    # sbatch expands %-patterns in the file name: a % of the directory has to be doubled.
    output = f"--output={path.replace('%', '%%')}/slurm-%j.log"
    return [output, "--open-mode=append", "--requeue", "--export=ALL"]


def _checked(options: list[str]) -> list[str]:
    for option in options:
        check_plain_text(option, what="sbatch option")
    return options


def render_shipped(name: str, **variables: Any) -> str:
    """One of corral's own scripts; whatever is not quoted by its template must be plain."""
    return _templates().get_template(name).render(variables)


def _templates() -> "Environment":
    # Not at the top: only submissions render, and every command of the launcher imports this package.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("corral.sbatch_templates", ""),  # what a script of the user's own may include, too
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
    return environment


def _render_own_template(template: Path, variables: dict[str, Any]) -> str:
    """The user's own template, rendered and looked at as far as one can without running it."""
    from jinja2 import TemplateError, TemplateSyntaxError

    def refuse(why: str, hint: str) -> ConfigError:
        return ConfigError.of(
            f"sbatch template {template}: {why}", hint=hint, path=("launch", "sbatch_template"), shown=str(template)
        )

    try:
        source = read_regular(template).decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(f"cannot be read ({error})", "name a readable UTF-8 file, or leave it out") from error
    try:
        script = _templates().from_string(source).render(variables)
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        known = ", ".join(variables)
        raise refuse(
            f"{error.message}{line}", f"variables are {known}; write them as <% {next(iter(variables))} %>"
        ) from error
    if not script.startswith("#!"):
        raise refuse("its first line is no #! line", "start it with #!/bin/bash")
    # sbatch reads no #SBATCH line after the first line that is neither empty nor a comment.
    lines = script.splitlines(keepends=True)
    before_commands = takewhile(lambda line: not line.strip() or line.startswith("#"), lines)
    if variables["sbatch_lines"] not in "".join(before_commands):
        raise refuse(
            "the SBATCH lines are missing before its first command, so the job would not ask for the trial's nodes",
            "put <% sbatch_lines %> right after the #! line",
        )
    if variables["supervisor"] not in script:
        raise refuse("it never becomes the supervisor", "end it with exec <% supervisor %>")
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=_BASH_TIMEOUT_S, check=False
    )
    if checked.returncode != 0:
        raise refuse(f"bash cannot parse it: {' '.join(checked.stderr.split())}", "bash -n shows the same")
    return script


def _comment_text(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
