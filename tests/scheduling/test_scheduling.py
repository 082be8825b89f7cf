"""What worker groups ask for: defaults, checks with the field's name, and values that survive a JSON file."""

from typing import Any

import pytest
from pydantic import ValidationError

from corral.experiments.loading.schema import purpose
from corral.scheduling.scheduling import ExperimentScheduling, Scheduling, TasksGroup, default_scheduling


def test_defaults_are_those_of_the_reference_system() -> None:
    sizes = {kind: (task.cpu, task.gpu, task.mem) for kind, task in default_scheduling().items()}
    assert sizes == {
        "master_worker": (16, 0, 20_480),
        "model_worker": (2, 1, 61_440),
        "generation_server": (4, 1, 61_440),
        "gserver_manager": (4, 0, 10_240),
        "rollout_worker": (4, 0, 20_480),
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cpu", 0, "cpu"),
        ("gpu", -1, "gpu"),
        ("gpu", 0.5, "gpu"),
        ("mem", 0, "mem"),
        ("mem", "lots", "20G"),
        ("nodelist", "n1;rm", "nodelist"),
        ("nodelist", "", "nodelist"),
        ("exclude", "n1 n2", "exclude"),
        ("partition", "gpu\n#SBATCH --uid=0", "control character"),
        ("account", "$(id)", "account"),
        ("qos", "a b", "qos"),
        ("constraint", "a`b", "constraint"),
        ("reservation", "r\x00", "control character"),
        ("container_image", "image\n", "control character"),
        ("container_image", " ", "leave it out"),
        ("container_mounts", ["/a"], "/host/path:/container/path"),
        ("container_mounts", ["relative:/b"], "/host/path:/container/path"),
        ("container_mounts", ["/a:/b,/c:/d"], "commas"),
        ("env_vars", {"A B": "1"}, "letters"),
        ("env_vars", {"A": "x\ny"}, "environment variable A"),
        ("env_vars", {"SLURM_NTASKS": "1"}, "SLURM's commands"),
        ("time_limit", "1 day", "DAYS-HOURS"),
        ("time_limit", 86400, "must be quoted"),
        ("extra_sbatch_arguments", ["--mem=1G"], "use the field mem"),
        ("gpu_type", "a100", "no effect"),
        ("gpus", 3, "gpus"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_and_rule(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Scheduling.model_validate({"cpu": 1, "mem": 100, field: value})
    assert message in str(refusal.value)


def test_a_scheduling_cannot_be_changed() -> None:
    scheduling = default_scheduling()["master_worker"]
    with pytest.raises(ValidationError, match="frozen"):
        scheduling.cpu = 1


def test_full_scheduling_survives_json() -> None:
    scheduling = Scheduling(
        cpu=8, gpu=2, gpu_type="a100", mem=1000, nodelist="n[1-3],n7", exclude="n2", partition="gpu,long",
        account="proj@lab", qos="high", constraint="[rack1*2&ib]", reservation="week", container_image="docker://nvcr.io#nvidia/pytorch:25.01",
        container_mounts=("/data:/data:ro",), env_vars={"A": "x y'\"$"}, time_limit="2-12:00:00",
        extra_sbatch_arguments=("--exclusive", "--begin=now+1hour"),
    )  # fmt: skip
    assert Scheduling.model_validate_json(scheduling.model_dump_json()) == scheduling


def test_every_field_is_documented() -> None:
    undocumented = [name for name in Scheduling.model_fields if not purpose(Scheduling, (name,))]
    assert undocumented == []


def asynchronous() -> ExperimentScheduling:
    return ExperimentScheduling(
        model_worker=TasksGroup(count=4, scheduling=default_scheduling()["model_worker"]),
        generation_server=TasksGroup(count=2, scheduling=default_scheduling(gpus_per_server=2)["generation_server"]),
        gserver_manager=TasksGroup(count=1, scheduling=default_scheduling()["gserver_manager"]),
        rollout_worker=TasksGroup(count=3, scheduling=default_scheduling()["rollout_worker"]),
    )


def test_groups_are_found_by_kind() -> None:
    groups = asynchronous()
    kinds = [kind for kind, _ in groups.items()]
    assert kinds == ["master_worker", "model_worker", "generation_server", "gserver_manager", "rollout_worker"]
    assert groups["rollout_worker"].count == 3
    assert {kind: group.count for kind, group in groups.items()}["model_worker"] == 4


def test_an_absent_group_is_named_with_those_that_exist() -> None:
    groups = ExperimentScheduling(model_worker=TasksGroup(count=1, scheduling=default_scheduling()["model_worker"]))
    assert groups.get("rollout_worker") is None
    with pytest.raises(KeyError, match="no rollout_worker; it has master_worker, model_worker"):
        groups["rollout_worker"]


def test_a_trial_has_one_master_and_one_manager() -> None:
    two = TasksGroup(count=2, scheduling=default_scheduling()["gserver_manager"])
    with pytest.raises(ValidationError, match="gserver_manager must have count 1, got 2"):
        ExperimentScheduling(gserver_manager=two)
    with pytest.raises(ValidationError, match="master_worker must have count 1"):
        ExperimentScheduling(master_worker=two)


def test_experiment_scheduling_survives_json() -> None:
    groups = asynchronous()
    assert ExperimentScheduling.model_validate_json(groups.model_dump_json()) == groups
