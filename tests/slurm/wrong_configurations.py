"""Experiments that are right in themselves or nearly, and that the test cluster can never run: one mistake each.

The cluster: 4 nodes n1..n4 of 8 CPUs, 8000 MB and 8 GPUs without a type; partitions debug (default), spot, and short
(n1 only, one node a job, one minute); no features, reservations or accounting.
"""

from dataclasses import dataclass

from tests.experiments.broken_yaml import BrokenCase

VALID_SLURM = """\
experiment: async_ppo
name: small-grpo
seed: 3
allocation: hf:d1+fsdp:d1
actor:
  path: model
ppo:
  kl: {coef: 0.0}
rollout:
  max_head_offpolicyness: 1
  sampling:
    max_new_tokens: 8
dataset:
  path: train.jsonl
  max_prompt_tokens: 16
train_batch_size: 8
launch:
  layout: auto
  time_limit: 1:00:00
groups:
  master_worker:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  gserver_manager:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  model_worker:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  generation_server:
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
  rollout_worker:
    count: 2
    scheduling: {cpu: 1, gpu: 0, mem: 500M}
"""

CAN_NEVER_RUN = 5
WRONG_VALUE = 2


@dataclass(frozen=True, kw_only=True)
class RefusedCase(BrokenCase):
    """As a broken case, with the exit code of rl-submit."""

    base: str = VALID_SLURM
    exit_code: int = CAN_NEVER_RUN


def _launch(text: str) -> tuple[str, str]:
    """One more line at the end of `launch`: line 20."""
    return ("  time_limit: 1:00:00\n", f"  time_limit: 1:00:00\n  {text}\n")


_TRAINER = "  model_worker:\n    scheduling: {cpu: 1, gpu: 0, mem: 500M}\n"
_SERVER = "  generation_server:\n    scheduling: {cpu: 1, gpu: 0, mem: 500M}\n"
_ROLLOUT = "    count: 2\n    scheduling: {cpu: 1, gpu: 0, mem: 500M}\n"


def _trainer(scheduling: str) -> tuple[str, str]:
    """Another scheduling of the model workers: line 26."""
    return (_TRAINER, f"  model_worker:\n    scheduling: {{{scheduling}}}\n")


def _server(scheduling: str) -> tuple[str, str]:
    """Another scheduling of the generation servers: line 28."""
    return (_SERVER, f"  generation_server:\n    scheduling: {{{scheduling}}}\n")


def _rollout(text: str) -> tuple[str, str]:
    """Other rollout workers: from line 30."""
    return (_ROLLOUT, text)


NAME_CASES = (
    RefusedCase(
        name="unknown-partition",
        edit=_launch("partition: shrt"),
        words=("no partition 'shrt'", "debug*, short, spot", "did you mean 'short'", "checked with: sinfo"),
        line=20,
    ),
    RefusedCase(
        name="partition-like-no-other",
        edit=_launch("partition: h100"),
        words=("no partition 'h100'", "choose one of these", "launch.partition: h100"),
        line=20,
    ),
    RefusedCase(
        name="second-partition-of-a-list",
        edit=_launch("partition: debug,spto"),
        words=("no partition 'spto'", "did you mean 'spot'"),
        line=20,
    ),
    RefusedCase(
        name="unknown-partition-of-a-group",
        edit=_server("cpu: 1, mem: 500M, partition: gpus"),
        words=("no partition 'gpus'", "groups.generation_server.scheduling.partition"),
        line=28,
    ),
    RefusedCase(
        name="unknown-node",
        edit=_launch("nodelist: n7"),
        words=("no node of partition 'debug' is called 'n7'", "n1, n2, n3, n4", "launch.nodelist"),
        line=20,
    ),
    RefusedCase(
        name="unknown-nodes-of-a-range",
        edit=_launch('nodelist: "n[3-5]"'),
        words=("is called 'n5'", "launch.nodelist"),
        line=20,
    ),
    RefusedCase(
        name="unknown-excluded-node",
        edit=_launch("exclude: node1"),
        words=("no node is called 'node1'", "launch.exclude", "sinfo"),
        line=20,
    ),
    RefusedCase(
        name="node-of-another-partition",
        edit=_launch("nodelist: n2\n  partition: short"),
        overrides=("launch.time_limit=1", "launch.signal_before_end_s=5"),
        words=("no node of partition 'short' is called 'n2'", "n1"),
        line=20,
    ),
    RefusedCase(
        name="node-wanted-and-excluded",
        edit=_launch("nodelist: n2\n  exclude: n2"),
        words=("n2 is in nodelist and in exclude", "launch.exclude"),
        line=21,
        exit_code=WRONG_VALUE,
    ),
    RefusedCase(
        name="more-nodes-named-than-needed",
        edit=_launch('nodelist: "n[1-3]"'),
        words=("nodelist names 3 nodes", "needs 1", "at most 1"),
        line=20,
    ),
    RefusedCase(
        name="every-node-excluded",
        edit=_launch('exclude: "n[1-4]"'),
        words=("can never start", "exclude fewer nodes", "launch.exclude"),
        line=20,
    ),
    RefusedCase(
        name="unknown-feature",
        edit=_launch("constraint: h100"),
        words=("no node of partition 'debug' has the feature 'h100'", "there are: none", "remove it"),
        line=20,
    ),
    RefusedCase(
        name="feature-of-an-expression",
        edit=_launch('constraint: "[rack1|rack2]&ib"'),
        words=("the feature 'rack1', 'rack2', 'ib'",),
        line=20,
    ),
    RefusedCase(
        name="unknown-reservation",
        edit=_launch("reservation: workshop"),
        words=("no reservation is called 'workshop'", "remove it", "scontrol show reservation"),
        line=20,
    ),
    RefusedCase(
        name="unknown-gpu-type",
        edit=_trainer("cpu: 1, gpu: 1, gpu_type: a100, mem: 500M"),
        words=("no node of partition 'debug' offers gpu:a100", "(it has gpu)", "leave gpu_type out"),
        line=26,
    ),
)

SIZE_CASES = (
    RefusedCase(
        name="cpus-of-one-task",
        edit=_trainer("cpu: 9, gpu: 0, mem: 500M"),
        words=("model_worker wants 9 CPUs in one task", "has 8 (n1, n2, n3, n4)", "groups.model_worker.scheduling.cpu"),
        line=26,
    ),
    RefusedCase(
        name="memory-of-one-task",
        edit=_server("cpu: 1, gpu: 0, mem: 9G"),
        words=("generation_server wants 9216 MB of memory in one task", "has 8000", "at most 8000 fits"),
        line=28,
    ),
    RefusedCase(
        name="no-core-left-for-the-supervisor",
        edit=_trainer("cpu: 8, gpu: 0, mem: 500M"),
        words=("model_worker wants 8 CPUs", "supervisor", "groups.model_worker.scheduling.cpu"),
        line=26,
    ),
    RefusedCase(
        name="no-memory-left-for-the-supervisor",
        edit=_server("cpu: 1, gpu: 0, mem: 7500M"),
        words=("generation_server wants 7500 MB", "groups.generation_server.scheduling.mem"),
        line=28,
    ),
    RefusedCase(
        name="elastic-task-too-big",
        edit=_server("cpu: 1, mem: 500M}\n    elastic: {count: 1, scheduling: {cpu: 99, mem: 500M, partition: spot}"),
        words=("elastic generation_server wants 99 CPUs", "groups.generation_server.elastic.scheduling.cpu"),
        line=29,
    ),
    RefusedCase(
        name="described-nodes-have-too-many-cpus",
        edit=_rollout("    count: 12\n    scheduling: {cpu: 1, gpu: 0, mem: 200M}\ncluster:\n  cpus_per_node: 64\n"),
        words=("CPUs on one node", "has 8", "set cluster.cpus_per_node to at most 8", "cluster.cpus_per_node: 64"),
        line=33,
    ),
    RefusedCase(
        name="described-nodes-have-too-much-memory",
        edit=_rollout("    count: 2\n    scheduling: {cpu: 1, gpu: 0, mem: 4G}\ncluster:\n  mem_per_node: 64G\n"),
        words=("MB of memory on one node", "has 8000", "cluster.mem_per_node: 65536"),
        line=33,
    ),
    RefusedCase(
        name="described-nodes-have-too-many-gpus",
        edit=("hf:d1+fsdp:d1", "hf:d5+fsdp:d5"),
        overrides=(
            "groups.model_worker.scheduling.gpu=1",
            "groups.generation_server.scheduling.gpu=1",
            "cluster.gpus_per_node=16",
            "cluster.cpus_per_node=20",
        ),
        words=("CPUs on one node", "cluster.cpus_per_node", "at most 8"),
    ),
    RefusedCase(
        name="more-nodes-than-there-are",
        edit=_rollout("    count: 20\n    scheduling: {cpu: 2, gpu: 0, mem: 500M}\n"),
        words=("needs 8 nodes", "partition 'debug' has 4 such nodes of 4", "count 10 fits", "20 x 2 CPU = 8 nodes"),
        line=30,
    ),
    RefusedCase(
        name="more-training-ranks-than-nodes",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: hf:d1+fsdp:d8"),
        overrides=("groups.model_worker.scheduling.cpu=4",),
        words=("needs 8 nodes", "has 4 such nodes of 4", "d for model_worker 4 fits", "allocation: hf:d1+fsdp:d8"),
        line=4,
    ),
    RefusedCase(
        name="a-thousand-tasks",
        edit=_rollout("    count: 1000\n    scheduling: {cpu: 1, gpu: 0, mem: 200M}\n"),
        words=("nodes", "has 4 such nodes", "groups.rollout_worker.count: 1000", "fits"),
        line=30,
    ),
    RefusedCase(
        name="more-nodes-than-the-partition-allows",
        edit=_launch("partition: short"),
        overrides=(
            "launch.time_limit=1",
            "launch.signal_before_end_s=5",
            "groups.rollout_worker.count=9",
            "groups.rollout_worker.scheduling.cpu=1",
        ),
        words=("needs 2 nodes", "partition 'short' has 1", "partition 'debug' (4 such nodes)"),
    ),
    RefusedCase(
        name="more-nodes-than-the-trial-may-use",
        edit=_rollout("    count: 9\n    scheduling: {cpu: 2, gpu: 0, mem: 500M}\ncluster:\n  max_nodes: 2\n"),
        words=("2 node", "no room left", "lower"),
    ),
    RefusedCase(
        name="components-of-a-heterogeneous-job-together",
        edit=("allocation: hf:d1+fsdp:d1", "allocation: hf:d3+fsdp:d3"),
        overrides=(
            "groups.model_worker.scheduling.cpu=5",
            "groups.generation_server.scheduling.cpu=5",
            "groups.generation_server.scheduling.partition=spot",
        ),
        words=("hetjob", "6 nodes together, and there are 4", "never share a node"),
        line=4,
    ),
    RefusedCase(
        name="jobs-together",
        edit=("  layout: auto", "  layout: jobs"),
        overrides=("groups.rollout_worker.count=16", "groups.rollout_worker.scheduling.cpu=2"),
        words=("its jobs need 37 CPUs together, and there are 32 on the 4 nodes", "rollout_worker.count: 16"),
    ),
)

TIME_CASES = (
    RefusedCase(
        name="longer-than-the-partition-allows",
        edit=("  time_limit: 1:00:00\n", "  time_limit: 10:00\n  partition: short\n"),
        words=("time limit 00:10:00", "partition 'short' allows (MaxTime 00:01:00)", "'debug' or 'spot'"),
        line=19,
    ),
    RefusedCase(
        name="signalled-as-soon-as-it-runs",
        edit=("  time_limit: 1:00:00\n", "  time_limit: '3'\n"),
        words=("a time limit of 00:03:00 leaves no time", "launch.signal_before_end_s", "at least '00:04:00'"),
        line=19,
        exit_code=WRONG_VALUE,
    ),
    RefusedCase(
        name="signal-as-long-as-the-time-limit",
        edit=_launch("signal_before_end_s: 3600"),
        words=("a time limit of 01:00:00 leaves no time", "launch.time_limit: 1:00:00"),
        line=19,
        exit_code=WRONG_VALUE,
    ),
    RefusedCase(
        name="partition-whose-own-limit-is-signalled-at-once",
        edit=("  time_limit: 1:00:00\n", "  partition: short\n"),
        words=(
            "that of partition 'short', 00:01:00, leaves no time",
            "here launch.time_limit may be at most '00:01:00', and launch.signal_before_end_s below 30",
            "scontrol show partition",
        ),
    ),
    RefusedCase(
        name="bogus-time",
        edit=("  time_limit: 1:00:00", "  time_limit: bogus"),
        words=("launch.time_limit", "'bogus'", "HOURS:MINUTES:SECONDS"),
        line=19,
        exit_code=WRONG_VALUE,
    ),
    RefusedCase(
        name="deadline-in-the-past",
        edit=_launch("extra_sbatch_arguments: [--deadline=2024-01-01]"),
        words=("SLURM refuses", "time limit is invalid", "launch.time_limit"),
        line=19,
    ),
    RefusedCase(
        name="deadline-before-the-begin",
        edit=_launch("extra_sbatch_arguments: [--deadline=now+2hours, --begin=now+3hours]"),
        words=("SLURM refuses", "Incompatible begin and deadline", "launch.extra_sbatch_arguments"),
        line=20,
    ),
    RefusedCase(
        name="begin-that-is-no-moment",
        edit=_launch("extra_sbatch_arguments: [--begin=whenever]"),
        words=("SLURM refuses", "Invalid --begin", "launch.extra_sbatch_arguments"),
        line=20,
    ),
)

OPTION_CASES = (
    RefusedCase(
        name="option-that-sbatch-does-not-have",
        edit=_launch("extra_sbatch_arguments: [--nosuch=3]"),
        words=("SLURM refuses", "--nosuch=3", "launch.extra_sbatch_arguments", "asked for: head: 1 x"),
        line=20,
    ),
    RefusedCase(
        name="license-that-nobody-has",
        edit=_launch('extra_sbatch_arguments: ["--licenses=matlab:1"]'),
        words=("SLURM refuses", "license", "launch.extra_sbatch_arguments.0: --licenses=matlab:1"),
        line=20,
    ),
    RefusedCase(
        name="value-that-sbatch-cannot-read",
        edit=_launch("extra_sbatch_arguments: [--switches=x]"),
        words=("SLURM refuses", "--switches", "launch.extra_sbatch_arguments"),
        line=20,
    ),
    RefusedCase(
        name="option-that-corral-owns",
        edit=_launch("extra_sbatch_arguments: [--nodes=2]"),
        words=("--nodes", "follows from the groups", "launch.extra_sbatch_arguments"),
        line=20,
        exit_code=WRONG_VALUE,
    ),
    RefusedCase(
        name="name-of-many-words",
        edit=("name: small-grpo", "name: " + "x" * 200),
        words=("name", "64"),
        line=2,
        exit_code=WRONG_VALUE,
    ),
)

REFUSED_CASES = (*NAME_CASES, *SIZE_CASES, *TIME_CASES, *OPTION_CASES)
