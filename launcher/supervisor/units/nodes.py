"""Which restart units run in extra jobs: what became of the nodes of an allocation, told to the unit machine. Pure.

extra jobs --NodesGranted(allocation)--> UnitNodes --unit by unit--> UnitMachine.nodes_granted --> actions
unit machine --CheckNodes(unit)--> UnitNodes --allocation--> extra jobs
"""

from collections.abc import Sequence
from dataclasses import replace

from corral.launcher.extra_jobs.actions import NodesEvent, NodesGranted, NodesLost, NodesNeverCome, NodesStay
from corral.launcher.extra_jobs.specs import EXTRA_JOB_ROLES, fallback_steps
from corral.launcher.layout.layout import Layout
from corral.launcher.supervisor.units.actions import Action, UnitSpec
from corral.launcher.supervisor.units.machine import TRAINER_UNIT, UnitMachine


class UnitNodes:
    """The units of each allocation, and the allocation of each unit."""

    def __init__(self, layout: Layout) -> None:
        self._fallbacks = fallback_steps(layout)
        self._role_by_unit: dict[str, str] = {}
        self._allocation_by_unit: dict[str, str] = {}
        self._units_by_allocation: dict[str, list[str]] = {}
        for index, allocation in enumerate(layout.allocations):
            units = _units_of(layout, index)
            self._role_by_unit |= dict.fromkeys(units, allocation.role)
            self._allocation_by_unit = dict.fromkeys(units, allocation.name) | self._allocation_by_unit
            self._units_by_allocation[allocation.name] = units

    def allocation_of(self, unit: str) -> str:
        """The name of the allocation that a unit runs in."""
        return self._allocation_by_unit[unit]

    def with_needs(self, units: Sequence[UnitSpec]) -> list[UnitSpec]:
        """The restart units, told which of them run in extra jobs."""
        gang = tuple(unit.name for unit in units if self._role_by_unit.get(unit.name) == "group")
        return [
            replace(
                unit,
                needs_nodes=self._role_by_unit.get(unit.name) in EXTRA_JOB_ROLES,
                has_fallback=unit.name in self._fallbacks,
                waits_for=() if unit.is_service or unit.name in gang else gang,
                is_optional=self._role_by_unit.get(unit.name) == "elastic" and unit.name not in self._fallbacks,
            )
            for unit in units
        ]

    def apply(self, action: NodesEvent, machine: UnitMachine, now: float) -> list[Action]:
        """What follows for the units of an allocation from what became of its job."""
        actions: list[Action] = []
        for unit in self._units_by_allocation[action.name]:
            match action:
                case NodesGranted():
                    actions += machine.nodes_granted(unit, now)
                case NodesLost(_, cause):
                    actions += machine.nodes_lost(unit, cause, now)
                case NodesStay():
                    actions += machine.nodes_stay(unit, now)
                case NodesNeverCome(_, cause):
                    actions += machine.cannot_run(cause, now)
        return actions


def _units_of(layout: Layout, allocation: int) -> list[str]:
    ranks = f"{TRAINER_UNIT}/"
    workers = layout.workers_of(allocation)
    return list(dict.fromkeys(TRAINER_UNIT if worker.startswith(ranks) else worker for worker in workers))
