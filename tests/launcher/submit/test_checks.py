"""What sinfo and scontrol say, beside what trials ask for: tables of clusters that no test machine has."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.errors import NO_SOURCE, ConfigError, ConfigSource, Location, UnsatisfiableError, located
from corral.experiments.plan import RunPlan
from corral.launcher.layout.layout import Layout
from corral.launcher.layout.planner import plan_layout
from corral.launcher.slurm.accounts import Accounts, Limits
from corral.launcher.slurm.client import Complaint, SlurmError, complaint_of
from corral.launcher.slurm.parse import Node, parse_nodes
from corral.launcher.slurm.verdict import Holder
from corral.launcher.submit.asks import asks_of, check_asks, check_values, node_local_warning, shapes_for
from corral.launcher.submit.check_layout import check_layout, parts_of, summary_of
from corral.launcher.submit.cluster import ClusterFacts, most_common_shape
from corral.launcher.submit.preflight import explain_refusal
from corral.scheduling.placement import NodeShape
from corral.scheduling.scheduling import ElasticTasks, ExperimentScheduling, Scheduling, TasksGroup
from corral.scheduling.slurm_formats import expand_host_list
from tests.launcher.trials import make_plan

SITE = """\
h1|h100*|64|500000|gpu:h100:8(S:0-1)|ib,rack1|idle|2-00:00:00
h2|h100*|64|500000|gpu:h100:8(S:0-1)|ib,rack2|mix|2-00:00:00
h3|h100*|64|500000|gpu:h100:8(S:0-1)|ib,rack2|drain|2-00:00:00
h1|big|64|500000|gpu:h100:8(S:0-1)|ib,rack1|idle|infinite
h2|big|64|500000|gpu:h100:8(S:0-1)|ib,rack2|mix|infinite
h3|big|64|500000|gpu:h100:8(S:0-1)|ib,rack2|drain|infinite
h4|big|64|500000|gpu:h100:8(S:0-1)|ib|idle|infinite
h5|big|64|500000|gpu:h100:8(S:0-1)|ib|idle|infinite
a1|mixed|64|500000|gpu:a100:4,nvme:1|old|idle|1:00:00
a2|mixed|128|900000|gpu:h100:4,gpu:a100:2|old|idle|1:00:00
c1|cpu|32|200000|(null)|(null)|idle|30
c2|cpu|32|200000|(null)|(null)|idle|30
"""

PARTITIONS: Mapping[str, Mapping[str, str]] = {
    "h100": {"State": "UP", "MaxTime": "2-00:00:00", "MaxNodes": "UNLIMITED", "AllowAccounts": "physics,biology"},
    "big": {"State": "UP", "MaxTime": "UNLIMITED", "MinNodes": "4", "AllowQos": "ALL", "DenyQos": "low"},
    "mixed": {"State": "UP", "MaxTime": "01:00:00", "MaxCPUsPerNode": "16", "MaxMemPerNode": "100000"},
    "cpu": {"State": "UP", "MaxTime": "00:30:00", "MaxNodes": "1", "DefaultTime": "00:30:00"},
    "closed": {"State": "INACTIVE"},
    "booked": {"State": "UP", "ReqResv": "YES"},
}


def _facts(text: str = SITE, **values: Any) -> ClusterFacts:
    return ClusterFacts(nodes=parse_nodes(text), partitions=values.pop("partitions", PARTITIONS), **values)


_DETAILS = "NodeName=n1 CoresPerSocket=8 CPUTot=8 {0} RealMemory=8000 State=IDLE ThreadsPerCore=1 Partitions=debug"


def _site(details: str = "", *, config: Mapping[str, str] | None = None, **partition: str) -> ClusterFacts:
    """Four nodes of 8 CPUs and 8000 MB in one partition."""
    names = [f"n{number}" for number in range(1, 5)]
    nodes = parse_nodes(
        "".join(f"{name}|debug*|8|8000|(null)|(null)|idle|1:8:1\n" for name in names),
        "\n".join(_DETAILS.format(details).replace("n1", name) for name in names) if details else "",
    )
    return ClusterFacts(nodes=nodes, partitions={"debug": {"Default": "YES", **partition}}, config=config or {})


def _task(**resources: int) -> RunPlan:
    """Master and manager of one CPU each, and one model worker."""
    task = Scheduling(**({"cpu": 1, "mem": 64} | resources))
    plan = _plan(model_workers=1, servers=0)
    return _replanned(plan, model_worker=TasksGroup(count=1, scheduling=task))


def _planned(plan: RunPlan, facts: ClusterFacts) -> Layout:
    return plan_layout(plan, shapes_for(asks_of(plan, NO_SOURCE), plan, facts))


@pytest.mark.parametrize("details", ["CPUEfctv=6 CoreSpecCount=2 CPUSpecList=6-7", "CoreSpecCount=2 MemSpecLimit=0"])
def test_cores_that_a_site_keeps_for_the_system_are_not_planned_with(details: str) -> None:
    facts, plan = _site(details), _task(cpu=5)
    _check(plan, facts)
    assert _planned(plan, facts).head.num_nodes == 2  # with those of master, manager and supervisor there are 8
    with pytest.raises(UnsatisfiableError, match=r"wants 7 CPUs.* has 6 .*6 of 8 CPUs \(CoreSpecCount\)"):
        _check(_task(cpu=7), facts)
    with pytest.raises(UnsatisfiableError) as caught:
        _planned(_task(cpu=6), facts)  # which fits a node, but for the supervisor's CPU
    assert "a node has 6, of which 1 stays free" in str(caught.value)
    assert "6 of 8 CPUs (CoreSpecCount)" in str(caught.value)


def test_two_threads_of_each_core_that_is_kept_are_away() -> None:
    (node,) = parse_nodes("n1|debug*|8|8000|(null)|(null)|idle|1:4:2\n", "NodeName=n1 CPUTot=8 CoreSpecCount=1")
    assert node.cpus == 6


def test_memory_that_a_site_keeps_for_the_system_is_not_planned_with() -> None:
    facts = _site("CPUEfctv=8 MemSpecLimit=1000")
    assert {node.mem_mb for node in facts.members("debug")} == {7000}
    with pytest.raises(UnsatisfiableError, match=r"7000 .*7000 of 8000 MB \(MemSpecLimit\)"):
        _check(_task(mem=7001), facts)


@pytest.mark.parametrize(
    "config",
    [
        {"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CORE"},
        {"SelectType": "select/linear", "SelectTypeParameters": "NONE"},
    ],
)
def test_where_memory_is_not_counted_jobs_ask_for_none_and_are_placed_by_cpus(config: Mapping[str, str]) -> None:
    facts, plan = _site(config=config), _task(mem=1 << 20)
    _, warnings = _check(plan, facts)
    assert any("does not count memory" in line for line in warnings)
    layout = _planned(plan, facts)
    assert layout.head.mem_mb_per_node == 0 and {step.mem_mb for step in layout.steps.values()} == {0}
    assert plan.cluster.memory_option(mem_mb=0, cpus=1, rules=layout.head.memory) == {}
    # A default would be asked for, and not be had.
    with_default = _planned(plan, _site(config=config, DefMemPerCPU="100")).head.memory
    assert plan.cluster.memory_option(mem_mb=0, cpus=1, rules=with_default) == {"mem": "0"}


def test_a_partition_may_count_memory_where_the_cluster_does_not() -> None:
    config = {"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CORE"}
    assert _site(config=config, SelectTypeParameters="CR_CORE_MEMORY").memory("debug").is_counted
    assert not _site(config=config, SelectTypeParameters="NONE").memory("debug").is_counted


def test_memory_given_in_the_configuration_places_workers_where_slurm_counts_none() -> None:
    facts = _site(config={"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CORE"})
    plan = _plan(cluster={"mem_per_node": 4096}, model_workers=3, servers=0)
    task = Scheduling(cpu=1, mem=2900)
    layout = _planned(_replanned(plan, model_worker=TasksGroup(count=3, scheduling=task)), facts)
    assert layout.head.num_nodes == 3 and layout.head.mem_mb_per_node == 0


@pytest.mark.parametrize("source", ["cluster", "partition"])
@pytest.mark.parametrize("mem_request", ["node", "cpu"])
def test_memory_takes_cpus_where_a_cpu_may_have_so_much(mem_request: str, source: str) -> None:
    limit = {"MaxMemPerCPU": "500"}
    facts = _site(config=limit) if source == "cluster" else _site(config={"MaxMemPerCPU": "100"}, **limit)
    plan = _plan(cluster={"mem_request": mem_request}, task={"mem": 700}, model_workers=1, servers=0)
    _check(plan, facts)
    layout = _planned(plan, facts)
    assert (layout.head.num_nodes, layout.head.cpus_per_node, layout.head.mem_mb_per_node) == (1, 7, 3 * 700 + 1024)
    option = plan.cluster.memory_option(mem_mb=3124, cpus=7, rules=layout.head.memory)
    assert option == ({"mem": "3124M"} if mem_request == "node" else {"mem-per-cpu": "447M"})


def test_memory_that_would_take_more_cpus_than_a_node_has_is_refused_by_the_limits_name() -> None:
    with pytest.raises(UnsatisfiableError, match=r"wants 5120 MB.* has 4000 .*8 CPUs x MaxMemPerCPU 500"):
        _check(_task(mem=5120), _site(config={"MaxMemPerCPU": "500"}))
    with pytest.raises(UnsatisfiableError, match=r"wants 5120 MB.* has 4500 .*MaxMemPerNode"):
        _check(_task(mem=5120), _site(config={"MaxMemPerNode": "4500"}))
    # A partition's limit of either kind replaces the cluster's.
    _check(_task(mem=5120), _site(config={"MaxMemPerCPU": "500"}, MaxMemPerNode="7000"))


@pytest.mark.parametrize(
    ("config", "partition", "words"),
    [
        ({"SelectType": "select/linear", "SelectTypeParameters": "CR_MEMORY"}, {}, "nodes (select/linear)"),
        ({}, {"OverSubscribe": "EXCLUSIVE"}, "nodes (OverSubscribe=EXCLUSIVE)"),
        ({"SelectTypeParameters": "CR_SOCKET_MEMORY"}, {}, "sockets (CR_Socket)"),
    ],
)
def test_a_plan_says_what_jobs_get_whole(config: Mapping[str, str], partition: Mapping[str, str], words: str) -> None:
    found, _ = _check(_task(), _site(config=config, **partition))
    assert f"jobs get whole {words}, and are charged for them" in found


def _plan(*, cluster: Mapping[str, Any] | None = None, **values: Any) -> RunPlan:
    none = {"cpus_per_node": None, "mem_per_node": None, "gpus_per_node": None}
    return make_plan(Path("/s/exp/trial"), mode="slurm", cluster=none | dict(cluster or {}), **values)


def _check(plan: RunPlan, facts: ClusterFacts) -> tuple[list[str], list[str]]:
    warnings = check_asks(asks_of(plan, NO_SOURCE), plan, facts)
    layout = plan_layout(plan, shapes_for(asks_of(plan, NO_SOURCE), plan, facts))
    parts = parts_of(layout, plan, facts, NO_SOURCE)
    return summary_of(parts), [*warnings, *check_layout(parts)]


def _replanned(plan: RunPlan, **groups: TasksGroup) -> RunPlan:
    everything = {kind: group for kind, group in plan.scheduling.items()} | groups
    return plan.model_copy(update={"scheduling": ExperimentScheduling(**everything)})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"gpu": 1, "gpu_type": "a100"}, ["no node of partition 'h100' offers gpu:a100", "gpu:h100"]),
        ({"gpu": 1, "gpu_type": "h10"}, ["did you mean 'h100'"]),
        ({"gpu": 3, "gpu_type": "a100", "launch": {"partition": "mixed"}, "model_workers": 1, "servers": 0}, []),
        ({"gpu": 5, "gpu_type": "a100", "launch": {"partition": "mixed"}}, ["wants 5 GPUs in one task", "has 4"]),
        ({"gpu": 1, "launch": {"partition": "cpu"}}, ["no node of partition 'cpu' has any", "big, h100, mixed"]),
        ({"launch": {"constraint": "ib&rack3"}}, ["feature 'rack3'", "did you mean 'rack"]),
        ({"launch": {"constraint": "ib&rack2"}}, []),
        ({"launch": {"constraint": "[rack1*1&rack2*2]"}}, []),
        ({"launch": {"partition": "closed"}}, ["partition 'closed' is INACTIVE"]),
        ({"launch": {"partition": "booked"}}, ["takes jobs with a reservation only"]),
        ({"launch": {"account": "chemistry"}}, ["not open to account 'chemistry'", "physics, biology"]),
        ({"launch": {"account": "physics"}}, []),
        ({"launch": {"partition": "big", "qos": "low"}, "model_workers": 40, "gpu": 1}, ["it refuses low"]),
        ({"launch": {"time_limit": "3-0"}}, ["3-00:00:00 is more than", "'big'"]),
        ({"launch": {"partition": "cpu,h100", "time_limit": "1-0"}}, []),
        ({"launch": {"partition": "h100,nosuch"}}, ["no partition 'nosuch'"]),
        ({"launch": {"nodelist": "h[1-2],h9"}}, ["no node of partition 'h100' is called 'h9'", "h1, h2, h3"]),
        (
            {"launch": {"exclude": "gone[0-1439],h1"}},
            ["no node is called 'gone0', 'gone1', 'gone2', 'gone3' and 1436 others"],
        ),
        ({"launch": {"partition": "cpu", "nodelist": "h1"}}, ["no node of partition 'cpu' is called 'h1'", "c1, c2"]),
        ({"launch": {"partition": "big"}}, ["takes jobs of at least 4 (MinNodes)"]),
        (
            {"launch": {"partition": "cpu"}, "task": {"cpu": 14}, "servers": 0, "model_workers": 1},
            ["2 nodes", "MaxNodes 1"],
        ),
        ({"task": {"cpu": 4}, "launch": {"partition": "mixed"}}, []),
        ({"task": {"cpu": 17}, "launch": {"partition": "mixed"}}, ["has 16 (a1, a2; MaxCPUsPerNode)"]),
        ({"task": {"mem": "99G"}, "launch": {"partition": "mixed"}}, ["has 100000 (a1, a2; MaxMemPerNode)"]),
        ({"task": {"mem": "40G"}, "launch": {"partition": "mixed"}}, ["needs 3 nodes", "2 such nodes"]),
        ({"model_workers": 16, "gpu": 1, "servers": 0}, []),
        ({"model_workers": 24, "gpu": 1, "servers": 0}, []),
        ({"model_workers": 32, "gpu": 1, "servers": 0}, ["needs 4 nodes", "has 3 such nodes of 3", "'big' (5 such"]),
        ({"model_workers": 9, "gpu": 1, "servers": 0, "launch": {"exclude": "h[2-3]"}}, ["has 1 such nodes of 3"]),
    ],
    ids=str,
)
def test_a_request_is_compared_with_the_site(plan: dict[str, Any], words: list[str]) -> None:
    if not words:
        _check(_plan(**plan), _facts())
        return
    with pytest.raises(UnsatisfiableError) as refused:
        _check(_plan(**plan), _facts())
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert refused.value.exit_code == 5
    assert all(problem.hint and problem.path for problem in refused.value.problems)


def test_a_partition_that_limits_what_jobs_have_of_a_node_spreads_them_over_more() -> None:
    plan, facts = _plan(task={"cpu": 4}, launch={"partition": "mixed"}), _facts()
    layout = plan_layout(plan, shapes_for(asks_of(plan, NO_SOURCE), plan, facts))
    assert layout.head.num_nodes > 1 and layout.head.cpus_per_node <= 16


def test_servers_wider_than_every_node_are_told_what_to_write_in_the_allocation() -> None:
    servers = TasksGroup(count=2, scheduling=Scheduling(cpu=1, gpu=16, mem=100))
    with pytest.raises(UnsatisfiableError) as refused:
        _check(_replanned(_plan(), generation_server=servers), _facts())
    [problem] = refused.value.problems
    assert "generation_server wants 16 GPUs in one task; the biggest node of partition 'h100' has 8" in problem.message
    assert problem.hint == "at most 8 fits, as t in the allocation" and problem.path == ("allocation",)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        # Partitions of the same nodes, as many sites have them: by day, by night, for as long as one likes.
        (("day", "night", "long"), ["MaxNodes 2 for a job", "partition 'long' (8 such nodes) fits"]),
        (("day", "night"), ["MaxNodes 2 for a job", "lower the groups' counts"]),
    ],
)
def test_a_job_that_is_too_big_for_several_partitions_is_told_which_one_fits(
    names: Sequence[str], words: Sequence[str]
) -> None:
    limits = {"day": "2", "night": "3", "long": "UNLIMITED"}
    facts = _facts(
        "".join(f"n{n}|{name}|8|8000|(null)|(null)|idle|1\n" for n in range(8) for name in names),
        partitions={name: {"State": "UP", "MaxNodes": limits[name]} for name in names},
    )
    with pytest.raises(UnsatisfiableError) as refused:
        _check(_plan(launch={"partition": "day"}, rollout_workers=9, task={"cpu": 3}), facts)
    text = str(refused.value)
    assert all(word in text for word in words) and "night" not in text, text


def test_the_biggest_node_is_named_not_its_neighbours() -> None:
    facts = _facts("mid1|p*|4|4000|gpu:2|(null)|idle|1\ntiny1|p*|2|8000|gpu:1|(null)|idle|1\n", partitions={"p": {}})
    for task, words in (({"cpu": 9}, "has 4 (mid1)"), ({"mem": "9G"}, "has 8000 (tiny1)")):
        with pytest.raises(UnsatisfiableError, match=re.escape(words)):
            _check(_plan(task=task), facts)
    with pytest.raises(UnsatisfiableError, match=re.escape("has 2 (mid1)")):
        _check(_plan(gpu=3), facts)
    with pytest.raises(UnsatisfiableError, match=re.escape("has 4 (mid1)")):
        _check(_plan(task={"cpu": 1}, model_workers=9, cluster={"cpus_per_node": 64}), facts)


def test_a_site_without_gres_takes_trials_with_gpus_only_if_told_that_it_needs_none() -> None:
    facts = _facts(re.sub(r"gpu:[^|]*", "(null)", SITE))
    with pytest.raises(UnsatisfiableError, match=r"no GRES 'gpu'\n(.*\n)?.*cluster\.gpu_request: none"):
        _check(_plan(gpu=1), facts)
    _check(_plan(gpu=1, cluster={"gpu_request": "none", "gpus_per_node": 8}), facts)
    with pytest.raises(UnsatisfiableError, match="(?s)how many GPUs a node has.*cluster.gpus_per_node"):
        _check(_plan(gpu=1, cluster={"gpu_request": "none"}), facts)


@pytest.mark.parametrize("state", ["drain", "down*", "maint", "boot^", "resv", "comp*"])
def test_nodes_in_any_state_are_nodes_and_too_few_of_them_a_warning(state: str) -> None:
    two = "".join(f"n{n}|p*|8|8000|(null)|(null)|{now}|1\n" for n, now in enumerate(("idle", state)))
    facts = _facts(two, partitions={"p": {}})
    _, warnings = _check(_plan(task={"cpu": 1}, model_workers=9), facts)
    told = [warning for warning in warnings if "it waits until nodes are back" in warning]
    is_down = state not in ("boot^", "resv")
    assert len(told) == is_down, warnings
    assert not is_down or f"needs 2 nodes, 1 of partition 'p' are up at present (1 idle, 1 {state})" in told[0]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"nodelist": "n1"}, ""),
        ({"nodelist": "n2"}, "0 of n2 of partition 'p' are up at present (1 down)"),
        ({"nodelist": "n3"}, "0 of n3 of partition 'p' are up and in no reservation of others at present (1 in res"),
        ({"nodelist": "n3", "reservation": "workshop"}, ""),
        ({"nodelist": "n4"}, "(1 in reservation 'course' until 2030-01-01T02:00:00)"),
        ({"nodelist": "n4", "time_limit": "30"}, ""),  # it ends before the course begins
        ({"nodelist": "n4", "time_limit": "61"}, "in reservation 'course'"),
        ({"exclude": "n1,n4"}, "0 of partition 'p' are up and in no reservation of others at present (1 down, 1 in "),
    ],
    ids=str,
)
def test_nodes_that_are_down_or_reserved_for_others_are_waited_for(launch: dict[str, str], words: str) -> None:
    states = {"n1": "idle", "n2": "down", "n3": "idle", "n4": "idle"}
    facts = _facts(
        "".join(f"{name}|p*|8|8000|(null)|(null)|{state}|infinite\n" for name, state in states.items()),
        partitions={"p": {"State": "UP", "MaxTime": "7-0"}},
        reservations={
            "workshop": {"Nodes": "n3", "StartTime": "2029-12-31T23:00:00", "EndTime": "2030-01-01T05:00:00"},
            "course": {"Nodes": "n4", "StartTime": "2030-01-01T01:00:00", "EndTime": "2030-01-01T02:00:00"},
            "licenses": {"Nodes": "(null)", "StartTime": "2029-12-31T23:00:00"},
        },
        asked_at=time.mktime((2030, 1, 1, 0, 0, 0, 0, 0, -1)),
    )
    _, warnings = _check(_plan(launch=launch, task={"cpu": 1}, model_workers=1), facts)
    waits = [warning for warning in warnings if " at present (" in warning]
    assert len(waits) == bool(words) and words in "".join(waits), warnings


def test_jobs_that_only_the_nodes_that_are_up_cannot_hold_together_are_a_warning() -> None:
    lines = "".join(f"n{n}|p*|8|8000|(null)|(null)|{now}|1\n" for n, now in enumerate(("idle", "drain")))
    facts = _facts(lines, partitions={"p": {"State": "UP"}})
    _, warnings = _check(_plan(launch={"layout": "jobs"}, task={"cpu": 2}, model_workers=3), facts)
    assert any("too few for all jobs of this trial together" in warning for warning in warnings), warnings


def test_a_partition_that_is_down_is_waited_for_and_one_that_takes_no_jobs_is_refused() -> None:
    line = "n1|p*|8|8000|(null)|(null)|idle|1\n"
    _, warnings = _check(_plan(), _facts(line, partitions={"p": {"State": "DOWN"}}))
    assert any("partition p is DOWN: the job waits until it is UP again" in warning for warning in warnings)
    for state in ("DRAIN", "INACTIVE"):
        with pytest.raises(UnsatisfiableError, match=f"partition 'p' is {state}: it takes no jobs"):
            _check(_plan(launch={"partition": "p"}), _facts(line, partitions={"p": {"State": state}}))


def test_a_partition_that_slurm_hides_is_known_and_closed() -> None:
    with pytest.raises(UnsatisfiableError, match="(?s)'vip' is open to the groups physics only.*scontrol -a show"):
        _check(_plan(launch={"partition": "vip"}), _facts(closed={"vip": "physics"}))


def test_a_longer_partition_is_not_offered_if_it_is_down() -> None:
    line = "n1|p*|8|8000|(null)|(null)|idle|1\nn1|q|8|8000|(null)|(null)|idle|1\nn1|r|8|8000|(null)|(null)|idle|1\n"
    limits = {
        "p": {"MaxTime": "1:00:00"},
        "q": {"MaxTime": "UNLIMITED", "State": "DOWN"},
        "r": {"MaxTime": "UNLIMITED"},
    }
    with pytest.raises(UnsatisfiableError, match="or choose partition 'r'\n"):
        _check(_plan(launch={"time_limit": "2:00:00"}), _facts(line, partitions=limits))


@pytest.mark.parametrize(
    ("trainers", "servers", "words"),
    [
        (2, 2, []),
        (3, 2, ["hetjob", "never share a node", "need 5 nodes together, and there are 4"]),
        (2, 3, ["never share a node"]),
        (5, 1, ["needs 5 nodes", "has 4 such nodes"]),
    ],
)
def test_components_of_a_heterogeneous_job_need_nodes_of_their_own(
    trainers: int, servers: int, words: list[str]
) -> None:
    facts = _facts(
        "".join(f"n{n}|{name}|8|8000|gpu:8|(null)|idle|infinite\n" for n in range(1, 5) for name in ("one*", "two")),
        partitions={"one": {"State": "UP"}, "two": {"State": "UP"}},
    )
    small = Scheduling(cpu=1, mem=64)
    plan = _replanned(
        _plan(),
        model_worker=TasksGroup(count=trainers, scheduling=Scheduling(cpu=5, mem=64, partition="one")),
        generation_server=TasksGroup(count=servers, scheduling=Scheduling(cpu=5, mem=64, partition="two")),
        master_worker=TasksGroup(count=1, scheduling=small),
        gserver_manager=TasksGroup(count=1, scheduling=small),
    )
    if not words:
        checks, _ = _check(plan, facts)
        assert {"partition one ok", "partition two ok"} <= set(checks)
        return
    with pytest.raises(UnsatisfiableError) as refused:
        _check(plan, facts)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_jobs_may_share_nodes_but_not_exceed_them() -> None:
    facts = _facts("n1|p*|8|8000|(null)|(null)|idle|infinite\n", partitions={"p": {"State": "UP"}})
    launch = {"layout": "jobs"}
    _check(_plan(launch=launch, task={"cpu": 1}, model_workers=2), facts)
    with pytest.raises(UnsatisfiableError, match="its jobs need 13 CPUs together, and there are 8 on the 1 nodes"):
        _check(_plan(launch=launch, task={"cpu": 2}, model_workers=3), facts)


def test_an_elastic_worker_is_checked_alone_and_never_added_up() -> None:
    facts = _facts("n1|p*|8|8000|(null)|(null)|idle|infinite\n", partitions={"p": {"State": "UP"}})
    server = Scheduling(cpu=1, mem=64)

    def plan(cpu: int) -> RunPlan:
        elastic = ElasticTasks(count=2, scheduling=Scheduling(cpu=cpu, mem=64))
        base = _plan(servers=3)  # its workers are those of one fixed and two elastic servers
        return _replanned(base, generation_server=TasksGroup(count=1, scheduling=server, elastic=elastic))

    _check(plan(8), facts)
    with pytest.raises(UnsatisfiableError, match="elastic generation_server wants 9 CPUs"):
        _check(plan(9), facts)


def test_accounts_are_compared_with_what_accounting_says() -> None:
    associations = [
        Limits(holder=Holder.ACCOUNT, name="lab", qos=("high", "normal")),
        Limits(holder=Holder.ACCOUNT, name="team", qos=("normal",)),
    ]
    accounts = Accounts(associations=associations)
    facts = _facts("n1|p*|8|8000|(null)|(null)|idle|infinite\n", partitions={}, accounts=accounts)
    _check(_plan(launch={"account": "lab", "qos": "high"}), facts)
    with pytest.raises(UnsatisfiableError, match="(?s)may not charge account 'labs'.*did you mean 'lab'"):
        _check(_plan(launch={"account": "labs"}), facts)
    with pytest.raises(UnsatisfiableError, match="may not use qos 'high'.*normal"):
        _check(_plan(launch={"account": "team", "qos": "high"}), facts)


@pytest.mark.parametrize(("is_kept", "is_warned"), [(False, True), (True, False), (None, False)])
def test_an_account_without_effect_is_told(is_kept: bool | None, is_warned: bool) -> None:
    facts = _facts("n1|p*|8|8000|(null)|(null)|idle|1\n", partitions={}, accounts=Accounts(is_kept=is_kept))
    _, warnings = _check(_plan(launch={"account": "lab"}), facts)
    assert any("keeps no accounting: account 'lab'" in warning for warning in warnings) == is_warned


def test_only_a_partition_without_any_limit_brings_the_warning_about_backfill() -> None:
    unlimited, limited = (
        {"h100": {"MaxTime": "UNLIMITED"}},
        {"h100": {"MaxTime": "UNLIMITED", "DefaultTime": "1:00:00"}},
    )
    assert any("backfill" in warning for warning in _check(_plan(), _facts(partitions=unlimited))[1])
    assert _check(_plan(), _facts(partitions=limited))[1] == []
    assert _check(_plan(launch={"time_limit": "1:00:00"}), _facts(partitions=unlimited))[1] == []


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"time_limit": "3"}, "a time limit of 00:03:00 leaves no time to train"),
        ({"time_limit": "3:30"}, ""),  # four minutes, as SLURM rounds it
        ({"time_limit": "4", "signal_before_end_s": 210}, "set time_limit to at least '00:05:00'"),
        ({"time_limit": "1", "signal_before_end_s": 10}, ""),
        ({"time_limit": "1:00:00", "signal_before_end_s": 3600}, "launch.time_limit: 1:00:00"),
    ],
    ids=str,
)
def test_a_time_limit_that_is_signalled_at_once_is_refused(launch: dict[str, Any], words: str) -> None:
    plan = _plan(launch=launch)
    if not words:
        check_values(asks_of(plan, NO_SOURCE), plan, NO_SOURCE)
        return
    with pytest.raises(ConfigError) as refused, located(NO_SOURCE, plan):
        check_values(asks_of(plan, NO_SOURCE), plan, NO_SOURCE)
    assert words in str(refused.value) and refused.value.exit_code == 2


def test_the_key_that_is_given_is_blamed_for_a_signal_that_comes_too_early() -> None:
    """The time limit may be a profile's or a group's, and the signal what somebody typed."""

    def blamed(plan: RunPlan, *given: tuple[str, ...]) -> tuple[str | int, ...]:
        source = ConfigSource(location_by_path={path: Location(Path("x.yaml"), 1) for path in given})
        with pytest.raises(ConfigError) as refused:
            check_values(asks_of(plan, source), plan, source)
        return refused.value.problems[0].path

    short = _plan(launch={"time_limit": "2"})
    late = _plan(launch={"time_limit": "60", "signal_before_end_s": 3600})
    assert blamed(short, ("launch", "time_limit")) == ("launch", "time_limit")
    assert blamed(late, ("launch", "signal_before_end_s")) == ("launch", "signal_before_end_s")
    task = Scheduling(cpu=1, mem=64, time_limit="2")
    of_group = _replanned(_plan(), model_worker=TasksGroup(count=2, scheduling=task))
    assert blamed(of_group) == ("groups", "model_worker", "scheduling", "time_limit")


def test_jobs_beside_the_trials_own_may_be_short_since_nobody_signals_them() -> None:
    server, short = Scheduling(cpu=1, mem=64), Scheduling(cpu=1, mem=64, time_limit="2")
    elastic = TasksGroup(count=1, scheduling=server, elastic=ElasticTasks(count=2, scheduling=short))
    for plan in (
        _replanned(_plan(servers=3), generation_server=elastic),
        _replanned(_plan(launch={"layout": "jobs"}), model_worker=TasksGroup(count=2, scheduling=short)),
    ):
        check_values(asks_of(plan, NO_SOURCE), plan, NO_SOURCE)


@pytest.mark.parametrize(
    ("settings", "launch", "is_refused"),
    [
        ({"MaxTime": "00:03:00"}, {}, True),
        ({"MaxTime": "UNLIMITED", "DefaultTime": "00:03:00"}, {}, True),
        ({"MaxTime": "1:00:00", "DefaultTime": "00:03:00"}, {"time_limit": "30"}, False),
        ({"MaxTime": "1:00:00", "DefaultTime": "00:03:00"}, {"signal_before_end_s": 60}, False),
        ({"MaxTime": "1:00:00", "DefaultTime": "NONE"}, {}, False),
    ],
    ids=str,
)
def test_a_partitions_own_time_limit_counts_where_none_is_asked_for(
    settings: dict[str, str], launch: dict[str, Any], is_refused: bool
) -> None:
    facts = _facts("n1|p*|8|8000|(null)|(null)|idle|1\n", partitions={"p": settings})
    if not is_refused:
        _check(_plan(launch=launch), facts)
        return
    with pytest.raises(
        UnsatisfiableError, match="(?s)that of partition 'p', 00:03:00, leaves no time.*launch.time_limit"
    ):
        _check(_plan(launch=launch), facts)


def test_a_refusal_of_slurm_is_told_with_its_key_and_what_was_asked_for() -> None:
    plan = _plan(launch={"extra_sbatch_arguments": ["--licenses=a:1", "--nice=x"], "qos": "q"})

    def explained(said: str) -> str:
        error = SlurmError(f"sbatch failed with exit 1: {said}", complaint=complaint_of(said), output=said)
        refusal = explain_refusal(error, plan, ["head: 1 x (3 CPUs, 64 MB)"], command="sbatch --test-only x")
        return refusal.problems[0].showing(plan).render()

    assert "launch.extra_sbatch_arguments.0: --licenses=a:1" in explained("Invalid license specification")
    assert "launch.extra_sbatch_arguments.1: --nice=x" in explained("Invalid --nice value")
    assert "launch.qos: q" in explained("Invalid qos specification")
    assert "asked for: head: 1 x (3 CPUs, 64 MB)" in explained("something new")
    assert explained("something new").endswith("checked with: sbatch --test-only x")
    limit = explained("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)")
    assert "launch.qos: q" in limit and "sacctmgr show qos" in limit and "launch.account" not in limit


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Complaint.NO_ANSWER),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Complaint.UNREACHABLE),
        ("slurm_load_jobs error: Invalid job id specified", Complaint.NO_SUCH_JOB),
        ("scancel: error: Kill job error on job id 7: Job/step already completing or completed", Complaint.HAS_ENDED),
        ("allocation failure: Requested node configuration is not available", Complaint.NODES),
        ("allocation failure: Required node not available (down, drained or reserved)", Complaint.NODES),
        ("allocation failure: Invalid time specified", Complaint.TIME),
        ("Requested time limit is invalid (missing or exceeds some limit)", Complaint.TIME_LIMIT),
        ("Required partition not available (inactive or drain)", Complaint.PARTITION),
        ("Access denied to requested reservation", Complaint.RESERVATION),
        ("Invalid account or account/partition combination specified", Complaint.ACCOUNT),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", Complaint.LIMIT),
        ("Invalid qos specification", Complaint.QOS),
        ("Invalid feature specification", Complaint.FEATURE),
        ("sbatch: error: invalid number of nodes (-N 2-1)", Complaint.NODE_NAMES),
        ("sbatch: unrecognized option '--nosuch=3'", Complaint.OTHER),
    ],
)
def test_what_slurm_complains_of_is_a_value(said: str, complaint: Complaint) -> None:
    assert complaint_of(said) is complaint


def test_a_node_is_taken_to_be_as_most_usable_nodes_are() -> None:
    facts = _facts()
    assert most_common_shape(facts.members("h100")) == NodeShape(cpus=64, gpus=8, mem_mb=500000)
    # As common as the other, and bigger.
    mixed = [node for node in facts.nodes if node.partition == "mixed"]
    assert most_common_shape(mixed) == NodeShape(cpus=128, gpus=6, mem_mb=900000)
    assert most_common_shape(facts.members("closed")) is None


def test_a_trial_is_planned_on_nodes_of_a_partition_that_could_run_it() -> None:
    """One partition for all: many small nodes, a few with GPUs, fewer with those that are asked for."""
    lines = [f"c{n}|all*|16|64000|(null)|(null)|idle|1\n" for n in range(9)]
    lines += [f"v{n}|all*|32|128000|gpu:v100:2|old|idle|1\n" for n in range(4)]
    lines += [f"g{n}|all*|64|256000|gpu:h100:4,gpu:mig:4|new|idle|1\n" for n in range(2)]
    facts = _facts("".join(lines), partitions={"all": {"State": "UP"}})

    def shape(**plan: Any) -> NodeShape:
        wanted = _plan(**plan)
        return shapes_for(asks_of(wanted, NO_SOURCE), wanted, facts)[None]

    assert shape() == NodeShape(cpus=16, gpus=0, mem_mb=64000)
    assert shape(gpu=1) == NodeShape(cpus=32, gpus=2, mem_mb=128000)
    assert shape(gpu=1, gpu_type="h100") == NodeShape(cpus=64, gpus=4, mem_mb=256000)
    assert shape(launch={"constraint": "new"}) == NodeShape(cpus=64, gpus=8, mem_mb=256000)
    assert shape(launch={"constraint": "new|old"}) == NodeShape(cpus=16, gpus=0, mem_mb=64000)
    assert shape(task={"cpu": 20}) == NodeShape(cpus=32, gpus=2, mem_mb=128000)
    assert shape(launch={"exclude": "v[0-3]"}, task={"cpu": 20}) == NodeShape(cpus=64, gpus=8, mem_mb=256000)
    assert shape(launch={"nodelist": "g0"}).cpus == 64


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([("idle", 8), ("idle", 8), ("idle", 64)], 8),
        ([("down*", 8), ("drain", 8), ("idle", 64)], 64),
        ([("down*", 8), ("down*", 8), ("drain", 64)], 8),
    ],
)
def test_nodes_that_are_down_count_only_where_none_is_up(nodes: Sequence[tuple[str, int]], shape: int) -> None:
    lines = "".join(f"n{i}|p*|{cpus}|1000|(null)|(null)|{state}|1\n" for i, (state, cpus) in enumerate(nodes))
    found: list[Node] = parse_nodes(lines)
    found_shape = most_common_shape(found)
    assert found_shape is not None and found_shape.cpus == shape


def test_a_mistyped_range_of_hosts_does_not_fill_the_memory() -> None:
    assert expand_host_list("n[1-999999999]") == ["n1-999999999"]
    assert len(expand_host_list("n[1-9999]")) == 9999


def test_a_folder_that_only_one_node_sees_is_told(tmp_path: Path) -> None:
    assert "/tmp" in (node_local_warning(Path("/tmp/trials/x")) or "")
    (tmp_path / "link").symlink_to("/dev/shm")
    assert "/dev/shm" in (node_local_warning(tmp_path / "link" / "x") or "")
    assert node_local_warning(Path("/runs/alice/x")) is None
    assert node_local_warning(Path("/home/me/corral/x")) is None
