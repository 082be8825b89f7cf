"""The names of a trial: who registers where.

    workers/{kind}/{index}           one lease per worker          -> its record
    last_seen/{kind}/{index}         the same without a lease      -> the last record of a worker that froze
    streams/master                   the master's request socket   -> address
    streams/trajectories/{index}     the trajectory receivers      -> address
    generation/manager               the generation-server manager -> address
    generation/servers/{index}       the generation servers        -> address
    generation/weights_in_use        directories of weights that servers read now
    trainer/policy_version           the weights that were published last
    trainer/committed                slot of the trial log's last commit or fall-back
    rendezvous/{incarnation}         where the ranks of one trainer group meet

Names are relative: in Redis they live under `prefix`.
"""

import re
from dataclasses import dataclass

from corral.name_resolve.base import check_name

WORKERS_ROOT = "workers"
LAST_SEEN_ROOT = "last_seen"
_TRIAL_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class TrialKeys:
    """The names of the trial `trial_uuid` (32 hex digits).

    Example:
        TrialKeys("0123456789abcdef0123456789abcdef").worker("rollout_worker", 0)  # "workers/rollout_worker/0"
    """

    trial_uuid: str

    def __post_init__(self) -> None:
        if not _TRIAL_UUID.fullmatch(self.trial_uuid):
            raise ValueError(f"trial_uuid must be 32 lower-case hex digits (uuid4().hex), got {self.trial_uuid!r}")

    @property
    def prefix(self) -> str:
        """What Redis keys of this trial begin with; also the limit of its ACL user."""
        return f"corral/{self.trial_uuid}/"

    def worker_kind_root(self, kind: str) -> str:
        return check_name(f"{WORKERS_ROOT}/{kind}")

    def worker(self, kind: str, index: int) -> str:
        return f"{self.worker_kind_root(kind)}/{_check_index(index)}"

    def master_stream(self) -> str:
        return "streams/master"

    def trajectory_receivers_root(self) -> str:
        return "streams/trajectories"

    def trajectory_receiver(self, index: int) -> str:
        return f"{self.trajectory_receivers_root()}/{_check_index(index)}"

    def manager(self) -> str:
        return "generation/manager"

    def generation_servers_root(self) -> str:
        return "generation/servers"

    def generation_server(self, index: int) -> str:
        return f"{self.generation_servers_root()}/{_check_index(index)}"

    def judges_root(self) -> str:
        return "generation/judges"

    def judge(self, index: int) -> str:
        return f"{self.judges_root()}/{_check_index(index)}"

    def weights_in_use(self) -> str:
        return "generation/weights_in_use"

    def trainer_root(self) -> str:
        return "trainer"

    def policy_version(self) -> str:
        return f"{self.trainer_root()}/policy_version"

    def committed(self) -> str:
        return f"{self.trainer_root()}/committed"

    def prompts(self) -> str:
        return f"{self.trainer_root()}/prompts"

    def trainer_rendezvous(self, incarnation: int | str) -> str:
        return check_name(f"rendezvous/{incarnation}")


def last_seen_key(worker_key: str) -> str:
    """Where the copy of a worker's record is that outlives its lease."""
    return f"{LAST_SEEN_ROOT}/{worker_key.removeprefix(f'{WORKERS_ROOT}/')}"


def _check_index(index: int) -> int:
    if index < 0:
        raise ValueError(f"index must be >= 0, got {index}")
    return index
