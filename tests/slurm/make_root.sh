#!/bin/sh
# make_root.sh DIR [SUITE]: a Debian tree for in_root.sh (default: trixie, with SLURM 24.11). Needs root and 0.5 GB.
#
# The tree brings SLURM, munge, the database, and by python3 the libraries that modules of any Python are linked to. The
# host's Python, its virtual environment and this checkout are mounted into it: nothing but SLURM differs.
set -eu
root=$1 suite=${2:-trixie}
[ -e "$root/.complete" ] && exit 0
[ "$(id -u)" = 0 ] || { echo "make_root.sh: debootstrap needs root" >&2; exit 2; }
command -v debootstrap >/dev/null || apt-get -qq install -y --no-install-recommends debootstrap >/dev/null || {
    echo "make_root.sh: please install debootstrap" >&2
    exit 2
}
slurm=slurmctld,slurmd,slurm-client,munge,slurmdbd,slurm-wlm-mysql-plugin,mariadb-server-core,mariadb-client-core
mkdir -p "$root"
debootstrap --variant=minbase --include="$slurm,python3,procps" "$suite" "$root" >"$root.log" 2>&1 || {
    tail -5 "$root.log" >&2
    echo "make_root.sh: debootstrap of $suite failed; all of its output is in $root.log" >&2
    exit 1
}
touch "$root/.complete"
