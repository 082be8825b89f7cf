"""What every command asks of a cluster, and a keeper: this user's jobs. It needs no schema, so these start fast."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from corral.experiments.trial.mode import Mode
from corral.launcher.cluster.jobs import Job
from corral.launcher.cluster.own_job import OwnJob


class JobQueue(Protocol):
    """The part of a cluster that knows and ends this user's jobs."""

    @property
    def mode(self) -> Mode:
        """What trials say in their plan that run here."""

    @property
    def identity(self) -> str:
        """Which cluster this machine asks, of several that share a home folder."""

    @property
    def question(self) -> str:
        """What people type to see what `jobs` saw."""

    def is_here(self) -> bool:
        """Whether its commands are on this machine."""

    def jobs(self) -> list[Job]:
        """Every job of this user that the cluster still knows, those that have ended too.

        Raises:
            ClusterError: if it does not say; so does every method that asks, unless it says otherwise.
        """

    def job(self, job_id: str) -> Job | None:
        """One job at this moment, though `jobs` show it no more; None once the cluster has forgotten it."""

    def look_closer(self, job: Job, *, has_run: bool) -> Job:
        """The job with what its state and reason leave open, as far as the cluster says; `has_run`: it was put back."""

    def accounted(self, job_id: str) -> Job | None:
        """The last that is on record of a forgotten job; None where nothing is, or the cluster keeps no records."""

    def cancel(self, job_id: str) -> None:
        """Ends a job; one that has ended already is no error."""

    def own_job(self, environment: Mapping[str, str]) -> OwnJob | None:
        """The job that a process with this environment runs in; None if it runs in none."""

    def failed_nodes(self, hosts: Sequence[str]) -> list[str]:
        """Those of some nodes that have failed; none if the cluster does not say."""
