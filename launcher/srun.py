"""Workers as steps of a SLURM allocation: one srun per worker, on the node that placement chose.

    SrunRunner.start --Popen--> srun --exact ... --job-name=rollout_worker-3 --slurmd--> worker

Each step names its CPUs, memory and GPUs: a step that leaves one out takes all of it, and the next step then waits
silently, which among workers that wait for each other is a deadlock.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.launcher.runner import TaskSpec
from corral.launcher.slurm import SlurmClient, SlurmError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResources:
    """What one worker's step asks for."""

    node_index: int
    cpus: int
    mem_mb: int
    gpus: int = 0


def step_name(worker: str) -> str:
    """Name of a worker's step in squeue: rollout_worker/3 is rollout_worker-3."""
    return worker.replace("/", "-")


def srun_command(spec: TaskSpec, resources: StepResources, host: str) -> list[str]:
    """The srun that carries one worker."""
    gpu_option = f"--gpus-per-task={resources.gpus}" if resources.gpus else "--gres=none"
    # Without device cgroups a step without GRES sees every GPU of the node. SLURM takes the variable away on its way to
    # the step, so it is set inside.
    hide_gpus = () if resources.gpus else ("env", "CUDA_VISIBLE_DEVICES=")
    return [
        "srun",
        f"--job-name={step_name(spec.worker)}",
        "--exact",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        f"--cpus-per-task={resources.cpus}",
        f"--mem={resources.mem_mb}M",
        gpu_option,
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--input=none",
        # No --output, in which srun expands patterns: what it inherits is the worker's log already.
        *hide_gpus,
        *spec.command,
    ]


def return_code_of_step(code: int) -> int:
    """srun reports a task killed by signal n as 128 + n; elsewhere in the supervisor that is -n."""
    return 128 - code if 128 < code <= 128 + 64 else code


class SrunTask:
    """One step, seen through its srun."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, name: str, node: str, client: SlurmClient, job_id: str
    ) -> None:
        self._process = process
        self._name = name
        self._node = node
        self._client = client
        self._job_id = job_id

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def node(self) -> str:
        return self._node

    def poll(self) -> int | None:
        code = self._process.poll()
        return None if code is None else return_code_of_step(code)

    def terminate(self) -> None:
        # Through SLURM: a SIGTERM to srun itself would kill the worker at once, without time to finish.
        self._signal_step("TERM")

    def kill(self) -> None:
        if self.poll() is not None:
            return
        self._signal_step("KILL")
        # A second SIGINT/SIGTERM makes srun end its step; SIGKILL of srun alone could leave the worker running.
        self._process.send_signal(signal.SIGTERM)

    def _signal_step(self, name: str) -> None:
        if self.poll() is not None:
            return
        try:
            for step_id in self._client.steps(self._job_id).get(self._name, ()):
                self._client.cancel(step_id, signal_name=name)
        except SlurmError:
            if self.poll() is None:  # the controller does not answer: what is left is srun itself
                self._process.send_signal(signal.SIGTERM)


class SrunRunner:
    """Starts workers as steps of the allocation that this process runs in."""

    def __init__(
        self,
        *,
        client: SlurmClient,
        job_id: str,
        hosts: Sequence[str],
        resources_by_worker: Mapping[str, StepResources],
        bind_address: str,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._hosts = hosts
        self._resources_by_worker = resources_by_worker
        self._bind_address = bind_address
        self._address_by_host: dict[str, str] = {}

    def start(self, spec: TaskSpec) -> SrunTask:
        resources = self._resources_by_worker[spec.worker]
        host = self._hosts[resources.node_index]
        with spec.log_path.open("ab") as log:
            process = subprocess.Popen(
                srun_command(spec, resources, host),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | spec.environment,
                start_new_session=True,
            )
        return SrunTask(process, name=step_name(spec.worker), node=host, client=self._client, job_id=self._job_id)

    def bind_address(self, worker: str) -> str:
        if self._bind_address != "auto":
            return self._bind_address
        host = self._hosts[self._resources_by_worker[worker].node_index]
        return self.address_of(host)

    def address_of(self, host: str) -> str:
        """A node's own address, as the cluster knows it."""
        if host not in self._address_by_host:
            name = self._client.node_address(host)
            self._address_by_host[host] = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0].__str__()
        return self._address_by_host[host]

    def clean_up(self) -> None:
        deadline = time.monotonic() + 15.0
        while steps := [step for ids in self._client.steps(self._job_id).values() for step in ids]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"steps {steps} of an earlier supervisor did not end within 15 s of scancel")
            for step in steps:
                self._client.cancel(step, signal_name="KILL")
            time.sleep(0.2)
