"""The names of a trial are well-formed, distinct, and where their roots say."""

import pytest

from corral.name_resolve.keys import WORKERS_ROOT, TrialKeys
from tests.name_services import MemoryNameService

KEYS = TrialKeys("0123456789abcdef0123456789abcdef")


def test_every_key_can_be_registered_and_is_found_under_its_root() -> None:
    names = [
        KEYS.worker("rollout_worker", 0),
        KEYS.worker("rollout_worker", 10),
        KEYS.worker("rollout_worker", 1),
        KEYS.worker("master_worker", 0),
        KEYS.master_stream(),
        KEYS.trajectory_receiver(0),
        KEYS.manager(),
        KEYS.generation_server(0),
        KEYS.policy_version(),
        KEYS.trainer_rendezvous(3),
    ]
    with MemoryNameService() as service:
        for name in names:
            service.add(name, "v")  # a name that two methods share would be refused here
        assert list(service.get_subtree("")) == sorted(names)
        assert len(service.get_subtree(WORKERS_ROOT)) == 4
        assert len(service.get_subtree(KEYS.worker_kind_root("rollout_worker"))) == 3
        assert list(service.get_subtree(KEYS.trajectory_receivers_root())) == [KEYS.trajectory_receiver(0)]
        assert list(service.get_subtree(KEYS.generation_servers_root())) == [KEYS.generation_server(0)]


def test_the_prefix_carries_the_identity_of_the_trial() -> None:
    assert KEYS.prefix == "corral/0123456789abcdef0123456789abcdef/"


@pytest.mark.parametrize("trial_uuid", ["", "abc", "*" * 32, "0123456789ABCDEF0123456789ABCDEF", "0" * 33])
def test_a_trial_uuid_is_32_hex_digits(trial_uuid: str) -> None:
    with pytest.raises(ValueError, match="32 lower-case hex digits"):
        TrialKeys(trial_uuid)


def test_parts_that_make_no_name_are_refused() -> None:
    with pytest.raises(ValueError, match="index must be >= 0, got -1"):
        KEYS.worker("rollout_worker", -1)
    with pytest.raises(ValueError, match="empty segment"):
        KEYS.worker_kind_root("")
    with pytest.raises(ValueError, match="names are"):
        KEYS.trainer_rendezvous("a b")
