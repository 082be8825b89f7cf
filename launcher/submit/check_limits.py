"""Limits of QOS and accounts that a trial can never keep: refused where it names them, a warning for defaults.

layout + accounts --per allocation, and all that start together--> UnsatisfiableError | warnings

SLURM queues such a job without a word, and `sbatch --test-only` says that it can start. A site's own plugin may give a
job another account or QOS than the user's default, so that nothing is refused for a default.
"""

from collections.abc import Iterator, Sequence

from corral.experiments.errors import ConfigProblem, UnsatisfiableError
from corral.launcher.slurm.accounts import Charge, Demand, Excess, excesses, name_of, seconds_of, wall_of
from corral.launcher.slurm.verdict import Holder
from corral.launcher.submit.asks import leaves_time, limit_that_fits, raise_problems
from corral.launcher.submit.check_layout import Part, fixed_of
from corral.launcher.submit.cluster import counted
from corral.scheduling.slurm_formats import format_time_limit


def check_limits(parts: Sequence[Part]) -> list[str]:
    """Compares every job of a trial with the limits that it has to keep; returns warnings.

    Raises:
        UnsatisfiableError: if a limit of an account, QOS or partition that the trial names can never be kept.
    """
    problems: list[ConfigProblem] = []
    warnings: list[str] = []
    fixed = fixed_of(parts)
    for part in parts:
        for excess in _excesses(part, beside=[other for other in fixed if part in fixed and other is not part]):
            problem, holder = _problem(part, excess), excess.limits.holder
            # A partition's QOS holds for all in it.
            if holder is Holder.PARTITION or holder.field in part.allocation.options:
                problems.append(problem)
            else:
                warnings.append(f"{problem.message}; {problem.hint} (checked with: {problem.evidence})")
    raise_problems(UnsatisfiableError, problems)
    return list(dict.fromkeys(warnings))


def _excesses(part: Part, *, beside: Sequence[Part]) -> Iterator[Excess]:
    """What one allocation exceeds, by itself or with those that it starts with."""
    demand, ladder = _charge(part)
    yield from excesses((demand, ladder), [_charge(other) for other in beside])
    given, signal_s = None if demand.time_limit_s else wall_of(ladder), part.signal_s
    if signal_s and given and given.wall_s and not leaves_time(given.wall_s, signal_s):
        said = (
            f"no time limit is asked for, {name_of(given)} gives {format_time_limit(given.wall_s)} (MaxWall), and "
            f"SLURM signals its end {signal_s} s before it (launch.signal_before_end_s)"
        )
        yield Excess(limits=given, setting="MaxWall", said=said, never="train")


def _charge(part: Part) -> Charge:
    options, facts, one = part.allocation.options, part.facts, part.allocation
    # Of several partitions SLURM may take one whose own QOS allows it.
    partition = part.partitions[0] if len(part.partitions) == 1 else ""
    settings = facts.settings(partition)
    ladder = facts.accounts.ladder(
        account=options.get("account"),
        qos=options.get("qos"),
        partition=partition,
        partition_qos=settings.get("QoS", ""),
    )
    of_node = {it.of_accounts: getattr(one, it.of_allocation) for it in counted(part.plan)}
    of_node = {name: amount for name, amount in of_node.items() if amount} | {"node": 1}
    return Demand(
        of_job={name: amount * one.num_nodes for name, amount in of_node.items()},
        of_node=of_node,
        time_limit_s=seconds_of(options.get("time_limit") or settings.get("DefaultTime", "")),
    ), ladder


def _problem(part: Part, excess: Excess) -> ConfigProblem:
    allocation, limits = part.allocation, excess.limits
    field = limits.holder.field
    instead = f"another launch.{field}"
    if limits.holder is Holder.QOS and (others := _other_qos(part, limits.name)):
        instead += f" (you may use {', '.join(others)})"
    if excess.setting == "MaxWall" and limits.wall_s:
        field = "time_limit"
        hint = f"set time_limit to {limit_that_fits(limits.wall_s, part.signal_s)}, or choose {instead}"
    elif excess.counts_jobs and part.layout.kind != "packed":
        hint = f"set launch.layout: packed, which is one job, or choose {instead}"
    else:
        hint = f"ask for less, or choose {instead}"
    of_account = f"assoc account={limits.name} format=account,user"
    what = of_account if limits.holder is Holder.ACCOUNT else f"qos {limits.name} format=name"
    who = "" if allocation.role == "head" or excess.counts_jobs else f" ({allocation.name})"
    return ConfigProblem(
        message=f"trial can never {excess.never}: {excess.said}{who}",
        hint=hint,
        path=part.option_path(field),
        evidence=f"sacctmgr show {what},{excess.setting}",
    )


def _other_qos(part: Part, exceeded: str) -> list[str]:
    association = part.facts.accounts.association(part.allocation.options.get("account"), part.partitions[0])
    return [name for name in association.qos if name != exceeded] if association else []
