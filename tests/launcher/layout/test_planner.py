"""Which layout a trial gets, and where in it each worker runs: tables for the rules, arbitrary groups for the rest."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.experiments.config.cluster import ClusterConfig, LaunchConfig
from corral.experiments.errors import ConfigError
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Layout
from corral.launcher.layout.planner import plan_layout
from corral.launcher.submit.plan_text import render_layout
from corral.scheduling.placement import SLACK_CPUS, SLACK_MEM_MB, NodeShape
from corral.scheduling.scheduling import ElasticTasks, ExperimentScheduling, Scheduling, TasksGroup
from tests.launcher.trials import make_plan

NODE = NodeShape(cpus=8, gpus=8, mem_mb=8000)
BIG = NodeShape(cpus=32, gpus=0, mem_mb=64_000)


def task(**fields: Any) -> Scheduling:
    return Scheduling(**({"cpu": 1, "mem": 100} | fields))


def group(count: int, elastic: ElasticTasks | None = None, **fields: Any) -> TasksGroup:
    return TasksGroup(count=count, scheduling=task(**fields), elastic=elastic)


def planned(groups: dict[str, TasksGroup], *, cluster: dict[str, Any] | None = None, **launch: Any) -> RunPlan:
    """A plan with these groups; its workers are those that plan_layout has to place."""
    scheduling = ExperimentScheduling(**({"master_worker": group(1), "gserver_manager": group(1)} | groups))
    base = make_plan(Path("/s/exp/trial"), mode="slurm")
    (master,) = (worker for worker in base.workers if worker.kind == "master_worker")
    workers = [
        worker.model_copy(update={"kind": kind, "index": index})
        for worker in [master]
        for kind, tasks in scheduling.items()
        for index in range(tasks.total_count)
    ]
    return base.model_copy(
        update={
            "scheduling": scheduling,
            "workers": workers,
            "cluster": ClusterConfig(**(cluster or {})),
            "launch": LaunchConfig(**launch),
        }
    )


def layout_of(groups: dict[str, TasksGroup], **launch: Any) -> Layout:
    return plan_layout(planned(groups, **launch), {None: NODE, "cpu": BIG, "gpu": NODE, "spot": NODE})


def test_every_step_is_planned_with_whole_cores() -> None:
    threaded = NodeShape(cpus=8, gpus=0, mem_mb=8000, threads_per_core=2)
    elastic = ElasticTasks(count=1, scheduling=task(cpu=3, partition="spot"))
    groups = {"rollout_worker": group(3, elastic=elastic, cpu=1)}
    layout = plan_layout(planned(groups, cluster={"gpus_per_node": 0}), {None: threaded, "spot": threaded})
    head, spot = layout.allocations
    # Three cores beside the supervisor's hold three steps: five workers need two nodes.
    assert (head.num_nodes, head.cpus_per_node, spot.cpus_per_node) == (2, 8, 4)
    by_worker = {worker: step.cpus for worker, step in layout.steps.items()}
    assert by_worker.pop("rollout_worker/3") == 4 and set(by_worker.values()) == {2}


def test_groups_that_ask_for_the_same_share_one_allocation() -> None:
    layout = layout_of({"model_worker": group(4, gpu=1), "rollout_worker": group(2)})
    assert (layout.kind, layout.reason) == ("packed", "all groups can share one allocation")
    assert [allocation.role for allocation in layout.allocations] == ["head"]
    head = layout.head
    assert (head.num_nodes, head.cpus_per_node, head.gpus_per_node) == (2, 7 + SLACK_CPUS, 4)
    assert head.mem_mb_per_node == 700 + SLACK_MEM_MB
    assert [layout.steps[f"model_worker/{rank}"].gpu_indices for rank in range(4)] == [(0,), (1,), (2,), (3,)]


def test_a_manager_that_asks_for_a_gpu_is_placed_once() -> None:
    layout = layout_of({"gserver_manager": group(1, gpu=1), "model_worker": group(7, gpu=1, cpu=1, mem=1)})
    assert layout.head.gpus_per_node <= 8
    taken = [(step.node_index, gpu) for step in layout.steps.values() for gpu in step.gpu_indices]
    assert len(taken) == len(set(taken)) == 8


def test_a_group_on_another_partition_gets_a_component_of_its_own() -> None:
    layout = layout_of(
        {"model_worker": group(2, gpu=1, partition="gpu"), "rollout_worker": group(2, partition="cpu", cpu=20)},
    )
    assert layout.kind == "hetjob"
    assert layout.reason == (
        "groups ask for different nodes: partition default (master_worker and gserver_manager), gpu (model_worker), "
        "cpu (rollout_worker)"
    )
    assert [(allocation.role, allocation.options["partition"]) for allocation in layout.allocations] == [
        ("head", "cpu"),
        ("component", "gpu"),
    ]


def test_a_master_that_nobody_forces_elsewhere_rides_where_most_cpus_are_free() -> None:
    layout = layout_of(
        {"model_worker": group(2, gpu=1, partition="gpu"), "rollout_worker": group(1, partition="cpu", cpu=4)},
    )
    assert layout.steps["master_worker/0"].allocation == layout.steps["rollout_worker/0"].allocation == 0
    assert [allocation.num_nodes for allocation in layout.allocations] == [1, 1]


def test_a_master_with_a_partition_of_its_own_stays_there() -> None:
    layout = layout_of({"model_worker": group(2, gpu=1, partition="gpu")}, partition="cpu")
    assert [(allocation.name, allocation.options["partition"]) for allocation in layout.allocations] == [
        ("head", "cpu"),
        ("model_worker", "gpu"),
    ]
    assert layout.workers_of(0) == ["master_worker/0", "gserver_manager/0"]


def test_a_groups_own_value_counts_before_that_of_launch() -> None:
    same = {kind: group(1, partition="gpu") for kind in ("master_worker", "gserver_manager", "model_worker")}
    assert layout_of(same, partition="cpu").head.options["partition"] == "gpu"


def test_naming_the_default_partition_is_no_difference() -> None:
    plan = planned({"model_worker": group(2, partition="gpu"), "rollout_worker": group(1)})
    assert plan_layout(plan, {None: NODE, "gpu": NODE}).kind == "hetjob"
    layout = plan_layout(plan, {None: NODE, "gpu": NODE}, default_partition="gpu")
    assert (layout.kind, layout.head.options) == ("packed", {"partition": "gpu"})


def test_gpu_types_are_components_and_groups_without_gpus_join_one() -> None:
    layout = layout_of(
        {
            "model_worker": group(2, gpu=1, gpu_type="h100"),
            "generation_server": group(2, gpu=1, gpu_type="a100"),
            "rollout_worker": group(2),
        }
    )
    assert [(allocation.gpu_type, allocation.gpus_per_node) for allocation in layout.allocations] == [
        ("h100", 2),
        ("a100", 2),
    ]
    assert layout.steps["rollout_worker/0"].allocation == 0
    assert "gpu_type h100 (model_worker), a100 (generation_server)" in layout.reason


def test_packed_that_is_asked_for_is_refused_where_groups_differ() -> None:
    with pytest.raises(ConfigError, match=r"partition default \(.*\), gpu \(model_worker\)") as refused:
        layout_of({"model_worker": group(1, partition="gpu")}, layout="packed")
    assert refused.value.problems[0].path == ("groups", "model_worker", "scheduling", "partition")
    assert "hetjob or auto" in str(refused.value)


def test_hetjob_that_is_asked_for_without_need_is_one_allocation() -> None:
    layout = layout_of({"model_worker": group(1)}, layout="hetjob")
    assert layout.kind == "packed" and "hetjob would be the same" in layout.reason


def test_jobs_is_a_job_per_group_beside_the_head() -> None:
    layout = layout_of(
        {"model_worker": group(16, gpu=1), "generation_server": group(3, gpu=4), "rollout_worker": group(2)},
        layout="jobs",
        extra_sbatch_arguments=("--begin=now+1hour", "--licenses=a"),
        time_limit="1:00:00",
    )
    assert [(a.name, a.role, a.num_nodes, a.gpus_per_node) for a in layout.allocations] == [
        ("head", "head", 1, 0),
        ("model_worker", "group", 2, 8),
        ("generation_server", "group", 2, 8),
        ("rollout_worker", "group", 1, 0),
    ]
    assert layout.allocations[0].extra_arguments == ("--begin=now+1hour", "--licenses=a")
    assert layout.allocations[1].extra_arguments == ("--licenses=a",)  # asked for once the head has begun
    assert layout.allocations[0].options == layout.allocations[1].options == {"time_limit": "1:00:00"}
    # Only the head keeps a core for the supervisor: eight ranks fill a node of eight CPUs.
    assert layout.allocations[1].cpus_per_node == 8


def test_elastic_workers_come_after_the_fixed_ones_each_in_an_allocation_of_its_own() -> None:
    elastic = ElasticTasks(count=2, scheduling=task(gpu=2, partition="spot", extra_sbatch_arguments=("--nice=5",)))
    layout = layout_of({"generation_server": group(1, elastic, gpu=1)}, extra_sbatch_arguments=["--licenses=a:1"])
    assert layout.kind == "packed"
    assert [(a.name, a.role, a.options, a.extra_arguments) for a in layout.allocations[1:]] == [
        (f"generation_server/{index}", "elastic", {"partition": "spot"}, ("--licenses=a:1", "--nice=5"))
        for index in (1, 2)
    ]
    step = layout.steps["generation_server/2"]
    assert (step.allocation, step.node_index, step.gpu_indices) == (2, 0, (0, 1))


def test_one_sliced_worker_makes_all_gpus_of_its_node_sliced() -> None:
    layout = layout_of({"model_worker": group(2, gpu=1, gpu_binding="slice"), "generation_server": group(10, gpu=1)})
    of_node = {
        node: {step.gpu_binding for step in layout.steps.values() if step.gpus and step.node_index == node}
        for node in range(layout.head.num_nodes)
    }
    assert of_node[0] == {"slice"}
    assert {"per_task"} in of_node.values()


@pytest.mark.parametrize(
    ("ranks", "binding", "bindings"),
    [(2, None, {"slice"}), (1, None, {"per_task"}), (2, "per_task", {"per_task"}), (2, "none", {"none", "per_task"})],
)
def test_training_ranks_of_one_node_reach_each_others_gpus_unless_their_group_says_otherwise(
    ranks: int, binding: str | None, bindings: set[str]
) -> None:
    groups = {"model_worker": group(ranks, gpu=1, gpu_binding=binding), "generation_server": group(2, gpu=1)}
    layout = layout_of(groups)
    assert layout.head.num_nodes == 1
    assert {step.gpu_binding for step in layout.steps.values() if step.gpus} == bindings


def test_components_that_start_together_cannot_have_different_times() -> None:
    with pytest.raises(ConfigError, match="start and end together ask for time_limit 60, 30"):
        layout_of(
            {
                "model_worker": group(1, partition="gpu", time_limit="60"),
                "generation_server": group(1, partition="cpu", time_limit="30"),
            }
        )


def test_a_shape_in_the_configuration_counts_before_that_of_the_cluster() -> None:
    plan = planned({"model_worker": group(4, cpu=2)}, cluster={"cpus_per_node": 3})
    assert plan_layout(plan, {None: NODE}).head.num_nodes == 5
    assert plan_layout(planned({"model_worker": group(4, cpu=2)}), {None: NODE}).head.num_nodes == 2


def test_the_limit_on_nodes_counts_all_components() -> None:
    groups = {"model_worker": group(2, gpu=8, partition="gpu"), "rollout_worker": group(1, partition="cpu")}
    with pytest.raises(ConfigError, match="no room left"):
        plan_layout(planned(groups, cluster={"max_nodes": 2}), {None: NODE, "gpu": NODE, "cpu": BIG})
    with pytest.raises(ConfigError, match="model_worker need nodes of their own"):
        plan_layout(planned(groups, cluster={"max_nodes": 1}), {None: NODE, "gpu": NODE, "cpu": BIG})


def test_the_screen_names_the_layout_its_reason_and_every_node() -> None:
    elastic = ElasticTasks(count=1, scheduling=task(partition="spot"))
    layout = layout_of(
        {
            "model_worker": group(4, gpu=1, partition="gpu"),
            "rollout_worker": group(2, elastic, partition="cpu", cpu=20),
        }
    )
    assert render_layout(layout) == [
        f"plan       hetjob: 1 job of 2 components, 3 nodes, 1 elastic worker ({layout.reason})",
        "  head                 2 x 23 CPUs, 1.293 GiB; partition cpu, time (default)",
        "    n0                 master_worker 0   gserver_manager 0   rollout_worker 0",
        "    n1                 rollout_worker 1",
        "  model_worker         1 x 4 CPUs, 4 GPUs, 400 MiB; partition gpu, time (default)",
        "    n0                 model_worker 0-3 (GPUs 0-3)",
        "  rollout_worker/2     1 x 1 CPUs, 100 MiB; partition spot, time (default)",
    ]


def test_the_screen_shows_the_gpus_of_every_server() -> None:
    layout = plan_layout(
        planned({"generation_server": group(3, gpu=2), "model_worker": group(2, gpu=1)}, cluster={"gpus_per_node": 4}),
        {None: NODE},
    )
    assert [line.split(maxsplit=1) for line in render_layout(layout)[2:]] == [
        ["n0", "master_worker 0   generation_server 0-1 (GPUs 0-1 + 2-3)   gserver_manager 0"],
        ["n1", "model_worker 0-1 (GPUs 2-3)   generation_server 2 (GPUs 0-1)"],
    ]


def test_a_server_wider_than_a_node_is_a_matter_of_the_allocation() -> None:
    with pytest.raises(ConfigError, match="generation_server wants 9 GPUs in one task; a node has 8") as refused:
        layout_of({"generation_server": group(1, gpu=9)})
    assert [problem.path for problem in refused.value.problems] == [("allocation",)]


def test_a_layout_survives_its_file() -> None:
    layout = layout_of({"model_worker": group(2, gpu=1, partition="gpu")})
    assert Layout.from_json(layout.to_json()) == layout


PARTITIONS = st.sampled_from([None, "gpu", "cpu"])
GROUPS = st.fixed_dictionaries(
    {},
    optional={
        kind: st.builds(
            lambda count, cpu, gpu, partition: group(
                count, cpu=cpu, gpu=0 if partition == "cpu" else gpu, partition=partition
            ),
            st.integers(1, 9),
            st.integers(1, 6),
            st.integers(0, 3),
            PARTITIONS,
        )
        for kind in ("model_worker", "generation_server", "rollout_worker")
    },
)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.sampled_from(["auto", "jobs"]))
def test_every_worker_has_one_place_and_no_node_is_asked_for_more_than_it_has(
    groups: dict[str, TasksGroup], asked: str
) -> None:
    shapes = {None: NODE, "cpu": BIG, "gpu": NODE}
    plan = planned(groups, layout=asked)
    layout = plan_layout(plan, shapes)
    assert list(layout.steps) == [f"{worker.kind}/{worker.index}" for worker in plan.workers]
    head = layout.steps["master_worker/0"]
    assert (head.allocation, head.node_index) == (0, 0)
    for index, allocation in enumerate(layout.allocations):
        shape = shapes[allocation.options.get("partition")]
        assert allocation.cpus_per_node <= shape.cpus and allocation.gpus_per_node <= shape.gpus
        steps = [layout.steps[worker] for worker in layout.workers_of(index)]
        assert {step.node_index for step in steps} == set(range(allocation.num_nodes))
        for node in range(allocation.num_nodes):
            here = [step for step in steps if step.node_index == node]
            assert sum(step.cpus for step in here) <= allocation.cpus_per_node
            assert sum(step.mem_mb for step in here) <= allocation.mem_mb_per_node
            gpus = [gpu for step in here for gpu in step.gpu_indices]
            assert len(gpus) == len(set(gpus)) == sum(step.gpus for step in here) <= allocation.gpus_per_node
            assert all(0 <= gpu < allocation.gpus_per_node for gpu in gpus)
