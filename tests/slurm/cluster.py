"""A throw-away SLURM cluster on this machine: real slurmctld and slurmd, virtual nodes, fake GPUs, as any user.

    directory/  slurm.conf gres.conf munge.key  log/  state/  spool/  dev/gpu0 -> /dev/null

    running_cluster()                                        4 nodes of 8 CPUs, 8 GPUs, 8000 MB; no accounting
    running_cluster(accounts=True)                           slurmdbd with accounts and limits (accounting.py)
    running_cluster(threads_per_core=2)                      the same 8 CPUs, on 4 cores
    running_cluster(limits_memory=True)                      real cgroups: who uses more than it asked for is killed
    running_cluster(settings={"MaxMemPerCPU": 1000})         other lines of slurm.conf
    running_cluster(of_nodes="CoreSpecCount=2")              more about every node
    running_cluster(job_submit="function slurm_job_submit...")   a site's job_submit.lua

The fixtures `accounting_cluster` and `threaded_cluster` of conftest.py share one of their kind. To run what is made for
`cluster` (make_slurm_trial, start_job) on another one, a test file overrides that fixture:

    @pytest.fixture
    def cluster(accounting_cluster: Cluster) -> Cluster:
        return accounting_cluster

Partitions: debug (default, preempts spot), spot (requeued after GraceTime; `scontrol update partitionname=spot
gracetime=20` lengthens it) and short (one minute, one node).

Everything listens on loopback or in the directory; nothing needs root, systemd or cgroups, but for the cluster that has
real ones; processes are ended by their ids. Facts that shape it: a fake GPU has to be a device node, and a link to
/dev/null counts as one; UNIX sockets need short paths, so the cluster lives in a short temporary directory; slurmd
share a host by `-N` and a port each.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from corral.launcher.slurm.client import clean_environment
from tests.slurm import accounting
from tests.slurm.accounting import user_name

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
"""Of version 1."""
_NAME = "test"
_SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")
_START_TIMEOUT_S = 120.0


def missing_programs(*, accounts: bool = False) -> list[str]:
    """What has to be installed before a cluster can start."""
    programs = (*DAEMONS, *COMMANDS, *(accounting.PROGRAMS if accounts else ()))
    return [program for program in programs if _which(program) is None]


@cache
def slurm_version() -> tuple[int, int]:
    """Of the SLURM that is installed: (22, 5) for 22.05.8."""
    said = subprocess.run([_which("slurmd") or "slurmd", "-V"], capture_output=True, text=True, timeout=10, check=True)
    major, minor = said.stdout.split()[1].split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a cluster is made of."""

    num_nodes: int = 4
    cpus: int = 8
    """CPUs of a node as SLURM counts them: hardware threads."""
    threads_per_core: int = 1
    gpus: int = 8
    mem_mb: int = 8000
    accounts: bool = False
    limits_memory: bool = False
    job_submit: str | None = None
    """job_submit.lua, which sees every job before SLURM takes it."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """More lines of slurm.conf, or others in place of those that are there."""
    of_nodes: str = ""
    """More settings of every node."""


class Cluster:
    """A running cluster; `environment` lets SLURM's commands find it."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        self._directory = directory
        self._num_nodes = shape.num_nodes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._shape = shape
        self._host = socket.gethostname().split(".")[0]
        self.config_path = directory / "slurm.conf"
        self.environment = clean_environment() | {
            "SLURM_CONF": str(self.config_path),
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]),
        }

    def start(self) -> None:
        for folder in ("log", "state", "spool", "dev"):
            (self._directory / folder).mkdir()
        for index in range(self._num_nodes):
            (self._directory / "spool" / f"n{index + 1}").mkdir()
        for index in range(self._shape.gpus):
            (self._directory / "dev" / f"gpu{index}").symlink_to("/dev/null")
        self._start_munge()
        ports = _free_ports(self._num_nodes + 2)
        self._write_config(ports)
        if self._shape.accounts:
            self._start_accounting(ports[-1])
        self._spawn("slurmctld", "-D", "-c", "-i", "-f", str(self.config_path))
        self._wait_for(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld to answer")
        if self._shape.accounts:
            # After the controller, which tells slurmdbd that GPUs are counted too.
            self._change_accounts(accounting.requests(_NAME))
        for index in range(self._num_nodes):
            self._spawn("slurmd", "-D", "-N", f"n{index + 1}", "-f", str(self.config_path), name=f"slurmd-n{index + 1}")
        self._wait_for(self._all_idle, f"{self._num_nodes} nodes to be idle")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs one of SLURM's commands against this cluster."""
        return subprocess.run(
            command,
            cwd=self._directory,  # where a job without --output leaves its file
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def kill_node(self, name: str) -> None:
        """A node crashes: slurmd, then the steps' daemons before their tasks, so that nobody reports an exit."""
        self._processes[f"slurmd-{name}"].kill()
        self._processes.pop(f"slurmd-{name}").wait()
        steps = list(self._processes_of_node(name))
        for is_daemon in (True, False):
            for pid, is_step_daemon in steps:
                if is_step_daemon is is_daemon:
                    _kill(pid)

    def start_node(self, name: str) -> None:
        """The node is back, and idle again once it has registered."""
        self._spawn("slurmd", "-D", "-N", name, "-f", str(self.config_path), name=f"slurmd-{name}")
        self._wait_for(lambda: self._resume(name) == "idle", f"node {name} to be idle")

    def stop_controller(self) -> None:
        """slurmctld stops answering; what runs goes on."""
        controller = self._processes.pop("slurmctld")
        controller.terminate()
        controller.wait(timeout=20)

    def start_controller(self) -> None:
        """slurmctld is back with the state that it saved."""
        self._spawn("slurmctld", "-D", "-i", "-f", str(self.config_path))
        self._wait_for(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld to answer")

    def update_config(self, **settings: object) -> None:
        """Changes settings of slurm.conf (`MinJobAge=2`) and lets the daemons read it again."""
        self.config_path.write_text(_with_settings(self.config_path.read_text(), settings))
        self.run("scontrol", "reconfigure")

    def _resume(self, name: str) -> str:
        state = self.run("sinfo", "-h", "-N", "-n", name, "-p", "debug", "-o", "%T").stdout.strip()
        if state.startswith(("down", "drain")):
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        return state

    def _processes_of_node(self, name: str) -> Iterator[tuple[int, bool]]:
        """Process ids of a node's steps, and whether each is a step's daemon."""
        for pid in self._leftovers():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            is_daemon = command.startswith(b"slurmstepd")
            # A step's daemon keeps the descriptors of its node's spool folder; its tasks carry the node's name.
            if f"SLURMD_NODENAME={name}".encode() in environment or (is_daemon and self._daemon_node(pid) == name):
                yield pid, is_daemon

    def _daemon_node(self, pid: int) -> str:
        sockets = Path("/proc/net/unix").read_text().splitlines()
        inodes = set(_descriptors(pid))
        for line in sockets:
            fields = line.split()
            if len(fields) == 8 and f"socket:[{fields[6]}]" in inodes and f"{self._directory}/spool/" in fields[7]:
                return Path(fields[7]).parent.name
        return ""

    def stop(self) -> None:
        """Ends jobs politely, then daemons, then what they left."""
        if "slurmctld" in self._processes and self._processes["slurmctld"].poll() is None:
            self.run("scancel", "--state=PENDING,RUNNING,SUSPENDED", f"--user={os.getuid()}")
            deadline = time.monotonic() + 5.0
            while self.run("squeue", "-h").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        served = [self._processes.pop(name, None) for name in ("slurmdbd", "mariadbd", "munged")]
        self._end(list(self._processes.values()))
        for pid in self._leftovers():
            os.kill(pid, signal.SIGKILL)
        for process in served:  # each after those that use it
            self._end([process] if process else [])
        if self._shape.limits_memory:
            for index in range(self._num_nodes):  # jobs remove theirs, slurmd leaves its own
                with suppress(OSError):
                    (MEMORY_GROUPS / f"slurm_n{index + 1}").rmdir()

    def _start_munge(self) -> None:
        key = self._directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        paths = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self._directory / name}" for option, name in paths.items()]
        log = f"--log-file={self._directory / 'log' / 'munged.log'}"
        self._spawn("munged", "--foreground", "--force", "--num-threads=2", log, *options)
        self._wait_for(lambda: (self._directory / "munge.sock").exists(), "munged's socket")

    def _start_accounting(self, port: int) -> None:
        directory = self._directory
        accounting.install_database(directory, _which("mariadb-install-db") or "mariadb-install-db")
        self._spawn("mariadbd", *accounting.database_arguments(directory))
        self._wait_for(accounting.database_socket(directory).exists, "MariaDB's socket")
        accounting.write_config(directory, host=self._host, port=port)
        # libmariadb looks here for the server on this machine.
        self._spawn("slurmdbd", "-D", environment={"MYSQL_UNIX_PORT": str(accounting.database_socket(directory))})
        self._wait_for(lambda: self.run("sacctmgr", "-n", "show", "qos").returncode == 0, "slurmdbd to answer")
        self._change_accounts([["add", "cluster", _NAME]])

    def _change_accounts(self, requests: Sequence[Sequence[str]]) -> None:
        for request in requests:
            added = self.run("sacctmgr", "-i", *request)
            if added.returncode:
                raise RuntimeError(f"sacctmgr {' '.join(request)}: {added.stdout}{added.stderr}")

    def _write_config(self, ports: list[int]) -> None:
        shape, directory, host, user = self._shape, self._directory, self._host, user_name()
        gres = f"Gres=gpu:{shape.gpus}" if shape.gpus else ""
        nodes = "\n".join(
            f"NodeName=n{index + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={shape.cpus} Sockets=1 "
            f"CoresPerSocket={shape.cpus // shape.threads_per_core} ThreadsPerCore={shape.threads_per_core} "
            f"RealMemory={shape.mem_mb} {gres} {shape.of_nodes} State=UNKNOWN"
            for index, port in enumerate(ports[1:-1])
        )
        text = f"""
ClusterName={_NAME}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.sock,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
KillWait=3
MinJobAge=60
SlurmdTimeout=120
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=1 MaxTime=INFINITE State=UP
PartitionName=short Nodes=n1 MaxTime=1 DefaultTime=1 MaxNodes=1 State=UP
""".lstrip()
        settings = dict(shape.settings)
        if shape.accounts:
            settings = accounting.controller_settings(directory, port=ports[-1]) | settings
        if shape.job_submit is not None:
            settings["JobSubmitPlugins"] = "lua"
            (directory / "job_submit.lua").write_text(shape.job_submit)
        if shape.limits_memory:
            # Nodes of two clusters have one name, and their jobs a folder each in the machine's only tree of groups.
            settings |= {"TaskPlugin": "task/cgroup", "FirstJobId": random.randrange(1000, 1_000_000)}
        self.config_path.write_text(_with_settings(text, settings))
        device = f"gpu[0-{shape.gpus - 1}]" if shape.gpus > 1 else "gpu0"
        names = f"n[1-{self._num_nodes}]" if self._num_nodes > 1 else "n1"
        line = f"NodeName={names} Name=gpu File={directory}/dev/{device}\n" if shape.gpus else ""
        (directory / "gres.conf").write_text(line)
        if shape.limits_memory:
            (directory / "cgroup.conf").write_text("ConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n")
        elif slurm_version() >= (24, 5):
            # It looks for cgroups even where no plugin uses them; older ones do not know the word.
            (directory / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").stdout.split()
        return states == ["idle"] * self._num_nodes

    def _spawn(
        self, program: str, *arguments: str, name: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        name = name or program
        with (self._directory / "log" / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [_which(program) or program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self.environment, **(environment or {})},
                start_new_session=True,
            )

    def _wait_for(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not is_true():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}: {self._said(name)}")
            if time.monotonic() > deadline:
                said = {name: self._said(name) for name in self._processes}
                raise TimeoutError(f"waited {_START_TIMEOUT_S:.0f} s for {what}: {said}")
            time.sleep(0.05)

    def _said(self, name: str) -> str:
        logs = [self._directory / "log" / f"{name}{suffix}" for suffix in (".out", ".log")]
        return "\n".join(log.read_text(errors="replace")[-1000:] for log in logs if log.exists())

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _leftovers(self) -> Iterator[int]:
        """Steps of this cluster and their tasks.

        Tasks carry its configuration path and a job's id; a step's daemon, which newer SLURM starts without that
        path, has a socket in the cluster's directory.
        """
        mark = f"SLURM_CONF={self.config_path}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            is_daemon = command.startswith(b"slurmstepd")
            is_task = any(name.startswith(b"SLURM_JOB_ID=") for name in environment)
            if (mark in environment and (is_task or is_daemon)) or (is_daemon and self._daemon_node(int(entry.name))):
                yield int(entry.name)


@contextmanager
def running_cluster(
    *,
    num_nodes: int = 4,
    cpus: int = 8,
    threads_per_core: int = 1,
    gpus: int = 8,
    mem_mb: int = 8000,
    accounts: bool = False,
    limits_memory: bool = False,
    job_submit: str | None = None,
    settings: Mapping[str, object] | None = None,
    of_nodes: str = "",
) -> Iterator[Cluster]:
    """A cluster for the length of a with statement; the arguments are those of `Shape`."""
    shape = Shape(
        num_nodes=num_nodes,
        cpus=cpus,
        threads_per_core=threads_per_core,
        gpus=gpus,
        mem_mb=mem_mb,
        accounts=accounts,
        limits_memory=limits_memory,
        job_submit=job_submit,
        settings=settings or {},
        of_nodes=of_nodes,
    )
    directory = Path(tempfile.mkdtemp(prefix="slurm."))
    directory.chmod(0o755)  # munged refuses a socket that its clients could not reach
    cluster = Cluster(directory, shape)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _with_settings(config: str, settings: Mapping[str, object]) -> str:
    """slurm.conf with these lines, and without others of their names."""
    lines = [line for line in config.splitlines() if line.partition("=")[0] not in settings]
    first = next(index for index, line in enumerate(lines) if line.startswith("NodeName="))
    lines[first:first] = [f"{name}={value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _descriptors(pid: int) -> Iterator[str]:
    """What a process has open; it may close any, and end, meanwhile."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def _free_ports(count: int) -> list[int]:
    """Consecutive free ports below those that the kernel gives to outgoing connections."""
    for _ in range(100):
        first = random.randrange(20000, 31000)
        ports = list(range(first, first + count))
        if not any(_is_taken(port) for port in ports):
            return ports
    raise RuntimeError(f"found no {count} consecutive free ports in 20000..31000")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
