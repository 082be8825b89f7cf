"""Accounting for a throw-away cluster: slurmdbd over a MariaDB of its own, with accounts and limits.

    directory/  mariadb/ (its data and socket)  slurmdbd.conf          users and limits: see `ACCOUNTS` and `QOS`
    slurmctld ── slurmdbd on loopback ── MariaDB on a socket that only this user can reach

Each qos has one limit and is named after it, so that a test says which limit it means. A test that needs another one
changes it by `cluster.run("sacctmgr", "-i", "modify", "qos", ...)` and puts it back; the controller hears of it soon.
"""

import os
import pwd
import subprocess
from pathlib import Path

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")

ACCOUNTS: dict[str, tuple[str, ...]] = {
    "lab": (),
    "few-gpus": ("GrpTRES=gres/gpu=2",),
    "others": (),
}
"""Limits by account. The user may charge all but `others`, by default `lab`, with every qos."""

QOS: dict[str, tuple[str, ...]] = {
    "max-wall": ("MaxWall=00:10:00",),
    "max-cpus-per-user": ("MaxTRESPerUser=cpu=4",),
    "max-cpus-per-job": ("MaxTRESPerJob=cpu=4",),
    "group-cpus": ("GrpTRES=cpu=4",),
    "one-job": ("MaxSubmitJobsPerUser=1",),
    "one-running": ("MaxJobsPerUser=1",),
    "three-running": ("MaxJobsPerUser=3",),
    "deny": ("MaxTRESPerUser=cpu=4", "Flags=DenyOnLimit"),
}
"""Limits by qos, beside SLURM's own `normal`, which has none."""

_INSTALL_TIMEOUT_S = 60.0
_DATABASE_OPTIONS = (
    "--innodb-log-file-size=4M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",  # nothing here outlives the tests
)


def user_name() -> str:
    """Who runs the daemons and the jobs."""
    return pwd.getpwuid(os.getuid()).pw_name


def install_database(directory: Path, install_program: str) -> None:
    """Writes the system tables that MariaDB starts with."""
    data = directory / "mariadb"
    data.mkdir(mode=0o700)
    options = [f"--datadir={data}", f"--user={user_name()}", "--auth-root-authentication-method=normal"]
    command = [install_program, "--no-defaults", *options, "--skip-test-db", "--skip-name-resolve", *_DATABASE_OPTIONS]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    if made.returncode:
        raise RuntimeError(f"mariadb-install-db ended with {made.returncode}: {(made.stdout + made.stderr)[-1000:]}")


def database_socket(directory: Path) -> Path:
    return directory / "mariadb" / "socket"


def database_arguments(directory: Path) -> list[str]:
    """Of mariadbd: the folder around its socket keeps others out, so it asks nobody for a password."""
    data = directory / "mariadb"
    return [
        "--no-defaults",
        f"--datadir={data}",
        f"--user={user_name()}",
        f"--socket={database_socket(directory)}",
        f"--pid-file={data / 'pid'}",
        "--skip-networking",
        "--skip-grant-tables",
        *_DATABASE_OPTIONS,
    ]


def write_config(directory: Path, *, host: str, port: int) -> None:
    """slurmdbd.conf, which slurmdbd wants to be nobody else's."""
    path = directory / "slurmdbd.conf"
    path.touch(mode=0o600)
    path.write_text(
        f"""
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user_name()}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user_name()}
StorageLoc=slurm
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/slurmdbd.pid
""".lstrip()
    )


def controller_settings(directory: Path, *, port: int) -> dict[str, object]:
    """Lines of slurm.conf."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "127.0.0.1",
        "AccountingStoragePort": port,
        "AccountingStoragePass": directory / "munge.sock",  # with munge not a password, but its socket
        "AccountingStorageEnforce": "associations,limits,qos",
        "AccountingStorageTRES": "gres/gpu",
    }


def requests(cluster_name: str) -> list[list[str]]:
    """Arguments of sacctmgr that make the accounts and the limits, in this order."""
    made = [["add", "qos", name, *limits] for name, limits in QOS.items()]
    made += [["add", "account", name, f"cluster={cluster_name}", *limits] for name, limits in ACCOUNTS.items()]
    mine = [name for name in ACCOUNTS if name != "others"]
    made.append(
        ["add", "user", user_name(), f"account={','.join(mine)}", f"defaultaccount={mine[0]}"]
        + [f"qos=normal,{','.join(QOS)}", "defaultqos=normal"]
    )
    return made
