"""A refusal of `sbatch --test-only`, told with what was asked for and the key that it is about.

SlurmError (its complaint) + plan --explain_refusal--> UnsatisfiableError
"""

from collections.abc import Mapping, Sequence

from corral.experiments.errors import ConfigProblem, ConfigSource, KeyPath, UnsatisfiableError
from corral.experiments.plan import RunPlan
from corral.launcher.slurm.client import SlurmError
from corral.launcher.slurm.complaints import Complaint

_EXTRA: KeyPath = ("launch", "extra_sbatch_arguments")
_FIELD_BY_COMPLAINT: Mapping[Complaint, str] = {
    Complaint.RESERVATION: "reservation",
    Complaint.ACCOUNT: "account",
    Complaint.QOS: "qos",
    Complaint.LIMIT: "qos",  # an account's limits hold for all of its QOS, a QOS is what one can choose
    Complaint.FEATURE: "constraint",
    Complaint.NODE_NAMES: "nodelist",
    Complaint.TIME_LIMIT: "time_limit",
    Complaint.TIME: "begin",
    Complaint.PARTITION: "partition",
}
_LIMIT_HINT = (
    "ask for less, for a shorter time, or for another QOS; sacctmgr show qos, and sacctmgr show assoc user=$USER, "
    "list the limits"
)


def explain_refusal(
    error: SlurmError, plan: RunPlan, allocations: Sequence[str], source: ConfigSource, *, command: str
) -> UnsatisfiableError:
    """SLURM's own refusal, with what was asked for beside it and the key that it is about, as far as it says so.

    Args:
        error: the answer of `sbatch --test-only`.
        allocations: what was asked for, a line each.
        command: the command that shows the answer.
    """
    path, shown, place = _blamed(error, plan, source)
    if error.complaint is Complaint.LIMIT:
        hint = _LIMIT_HINT
    elif path:
        hint = "correct it"
    else:
        hint = "ask for less, or for something else; the administrators know this site's rules"
    problem = ConfigProblem(
        message="\n".join([f"SLURM refuses this trial: {error.said}", *(f"asked for: {line}" for line in allocations)]),
        hint=hint,
        path=path,
        shown=shown,
        place=place,
        evidence=command,
    )
    return UnsatisfiableError([problem]).located(source)


def _blamed(error: SlurmError, plan: RunPlan, source: ConfigSource) -> tuple[KeyPath, str, str]:
    """The key, its value and, where it is an item of a list, the item's place."""
    index = _named_argument(error, plan.launch.extra_sbatch_arguments)
    if index is not None:
        return _EXTRA, plan.launch.extra_sbatch_arguments[index], source.place((*_EXTRA, index))
    field = _FIELD_BY_COMPLAINT.get(error.complaint, "")
    value = getattr(plan.launch, field) if field else None
    return (("launch", field), str(value), "") if value else ((), "", "")


def _named_argument(error: SlurmError, arguments: Sequence[str]) -> int | None:
    """Which of the extra options sbatch names: `--nice` itself, or `license` of `--licenses`."""
    names = [argument.partition("=")[0] for argument in arguments]
    exact = [index for index, name in enumerate(names) if name in error.said]
    alike = [index for index, name in enumerate(names) if name.strip("-").rstrip("s") in error.said.lower()]
    return next(iter([*exact, *alike]), None)
