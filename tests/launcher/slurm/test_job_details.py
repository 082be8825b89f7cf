"""A closer look at a job: what its state and reason leave open is asked, and told with who said so."""

import dataclasses

from corral.launcher.slurm.client import SlurmClient, SlurmUnreachableError
from corral.launcher.slurm.job_queue import SlurmQueue
from corral.launcher.slurm.parse import Node
from tests.launcher.jobs import job_of

NODE = Node(
    name="n1",
    partition="gpu",
    is_default_partition=True,
    cpus=8,
    mem_mb=8000,
    gpus_by_type={},
    features=(),
    state="down*",
)
UP = dataclasses.replace(NODE, name="n2", state="idle")


class Slurm(SlurmClient):
    """Knows one job and some nodes, or nothing."""

    def __init__(self, values: dict[str, str] | None, *nodes: Node) -> None:
        super().__init__()
        self.values = values
        self.known_nodes = list(nodes)
        self.asked = 0

    def job(self, job_id: str) -> dict[str, str] | None:
        self.asked += 1
        if self.values is None:
            raise SlurmUnreachableError("scontrol did not answer within 10 s")
        return self.values

    def nodes(self, partitions: str | None = None, *, in_detail: bool = False) -> list[Node]:
        return [node for node in self.known_nodes if partitions is None or node.partition in partitions.split(",")]


def test_a_job_whose_nodes_are_all_down_is_blocked_and_sinfo_is_named() -> None:
    waiting = job_of(reason="ReqNodeNotAvail, UnavailableNodes:n1")
    for nodes, is_blocked in (((NODE,), True), ((NODE, UP), False), ((), False)):
        found = SlurmQueue(Slurm({"Partition": "gpu", "ReqNodeList": "(null)"}, *nodes)).look_closer(
            waiting, has_run=False
        )
        assert found.is_blocked is is_blocked and bool(found.findings) is is_blocked
    named = SlurmQueue(Slurm({"Partition": "gpu", "ReqNodeList": "n1"}, NODE, UP)).look_closer(waiting, has_run=False)
    assert named.is_blocked and named.findings == ("sinfo says that no node that could run it is up",)


def test_the_exit_code_of_a_failed_job_says_more_than_its_state() -> None:
    found = SlurmQueue(Slurm({"ExitCode": "0:53"})).look_closer(job_of(state="FAILED"), has_run=False)
    assert "folder of the trial directory is missing" in found.note and "ExitCode=0:53" in found.findings[0]


def test_a_node_without_the_interpreter_is_named_as_the_cause() -> None:
    found = SlurmQueue(Slurm({"ExitCode": "127:0"})).look_closer(job_of(state="FAILED"), has_run=False)
    assert "did not find its program" in found.note and "rl-doctor" in found.note


def test_what_slurm_does_not_answer_leaves_the_job_as_squeue_shows_it() -> None:
    for state, reason in (("FAILED", "NonZeroExitCode"), ("PENDING", "ReqNodeNotAvail"), ("PENDING", "QOSMaxCpuLimit")):
        seen = job_of(state=state, reason=reason)
        assert SlurmQueue(Slurm(None)).look_closer(seen, has_run=False) == seen


def test_nothing_is_asked_about_a_job_that_runs_or_waits_for_its_turn() -> None:
    slurm = Slurm({})
    for state, reason in (("RUNNING", "None"), ("PENDING", "Priority"), ("COMPLETED", "None")):
        SlurmQueue(slurm).look_closer(job_of(state=state, reason=reason), has_run=False)
    assert slurm.asked == 0
    waiting = SlurmQueue(slurm).look_closer(job_of(reason="BeginTime"), has_run=True)
    assert waiting.state == "REQUEUED"
