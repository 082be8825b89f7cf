"""What a worker of a trial is given, in a test's own process."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from corral.experiments.plan import RunPlan
from corral.experiments.trial.directory import TrialDirectory
from corral.experiments.trial.secrets import TrialSecrets
from corral.experiments.trial.worker_record import WorkerRecord
from corral.name_resolve.base import NameService
from corral.name_resolve.keys import TrialKeys
from corral.workers.lifecycle.presence import Presence
from corral.workers.lifecycle.worker import WorkerContext
from corral.workers.streams.security import StreamSecurity


@contextmanager
def worker_context(
    plan: RunPlan, kind: str, *, names: NameService, secrets: TrialSecrets, incarnation: str = ""
) -> Iterator[WorkerContext]:
    """The context of the first worker of a kind, present until the block ends; by default an incarnation of its own."""
    keys = TrialKeys(plan.trial.uuid)
    incarnation = incarnation or uuid.uuid4().hex
    identity = WorkerRecord(kind=kind)
    with (
        StreamSecurity(secrets, kind, trial_uuid=plan.trial.uuid) as security,
        Presence(names, keys.worker(kind, 0), owner=incarnation, ttl_s=60.0, identity=identity) as presence,
    ):
        yield WorkerContext(
            plan=plan,
            kind=kind,
            index=0,
            attempt=0,
            incarnation=incarnation,
            address="127.0.0.1",
            trial=TrialDirectory(plan.trial.directory),
            names=names,
            keys=keys,
            secrets=secrets,
            security=security,
            presence=presence,
        )
