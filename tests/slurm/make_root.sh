#!/bin/sh
# make_root.sh DIR [SUITE]: a Debian tree for in_root.sh (default: trixie, with SLURM 24.11). Needs root and 0.5 GB.
#
# The tree brings SLURM, munge, the database, bubblewrap, and by python3 the libraries that modules of any Python are
# linked to. The host's Python, its virtual environment and this checkout are mounted into it: nothing but SLURM differs.
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
debootstrap --variant=minbase --include="$slurm,bubblewrap,python3,procps" "$suite" "$root" >"$root.log" 2>&1 || {
    tail -5 "$root.log" >&2
    echo "make_root.sh: debootstrap of $suite failed; all of its output is in $root.log" >&2
    exit 1
}
if [ "$suite" = trixie ]; then
    # Its slurmdbd reads no result through its own libmariadb3 ("maximum allowed number of columns (=0)", 11.8.9), but
    # does through the one before, which the loader finds first.
    older=$(mktemp -d)
    trap 'rm -rf "$older"' EXIT
    mkdir "$older/lists" "$older/lists/partial"
    signed=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$signed] http://deb.debian.org/debian bookworm main" >"$older/sources"
    apt_older() {
        apt-get -qq -o Dir::Etc::SourceList="$older/sources" -o Dir::Etc::SourceParts=- \
            -o Dir::State::Lists="$older/lists" -o Dir::State::status=/dev/null \
            -o APT::Sandbox::User=root "$@"
    }
    apt_older update
    (cd "$older" && apt_older download libmariadb3)
    dpkg-deb --extract "$older"/libmariadb3_*.deb "$older/tree"
    cp -L "$older"/tree/usr/lib/*/libmariadb.so.3 "$root/usr/local/lib/"
    chroot "$root" ldconfig
fi
touch "$root/.complete"
