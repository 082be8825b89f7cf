#!/bin/sh
# in_root.sh DIR PYTHON ARGUMENT...: runs PYTHON inside a tree of make_root.sh, with this checkout at its own path.
#
# Every mount is private to this command and gone with it. Python is the host's: its folders are mounted where they are.
set -eu
root=$(realpath "$1") python=$2
shift
[ -e "$root/.complete" ] || { echo "in_root.sh: $root is no tree of make_root.sh" >&2; exit 2; }
if [ -z "${IN_ROOT_MOUNTS:-}" ]; then
    [ "$(id -u)" = 0 ] || { echo "in_root.sh: mounting needs root" >&2; exit 2; }
    IN_ROOT_MOUNTS=1 exec unshare --mount "$0" "$root" "$@"
fi
unset IN_ROOT_MOUNTS
folders=$("$python" -c '
import os, sys
found = {os.getcwd(), sys.prefix, *sys.path, os.path.realpath(sys.executable)}
if sys.base_prefix != "/usr":  # that of the tree stays; what Python needs of it is in sys.path
    found.add(sys.base_prefix)
print(*sorted(path for path in found if os.path.exists(path)), sep="\n")
')
mount --bind "$root" "$root"  # a mount of its own, which can be the root: nobody makes a user namespace in a chroot
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind /sys "$root/sys"  # by which lscpu knows the cores; without what is mounted in it, such as control groups
mount --bind /etc/hosts "$root/etc/hosts"
echo "$folders" | while read -r path; do
    if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root${path%/*}" && touch "$root$path"; fi
    mount --bind "$path" "$root$path"
done
here=$PWD
cd "$root"
mkdir -p host
pivot_root . host
exec /usr/bin/env -u TMPDIR HOME=/root sh -c 'umount -l /host && cd "$1" && shift && exec "$@"' sh "$here" "$@"
