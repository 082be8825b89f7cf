#!/bin/sh
# Type checkers follow directories, not import hooks: show them this checkout as a directory named `corral`.
set -e
mypy=$(realpath "$(command -v "${MYPY:-mypy}")")
view=$(mktemp -d)
trap 'rm -rf "$view"' EXIT
mkdir "$view/corral"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$view/corral" 2>/dev/null || true
cd "$view/corral"
"$mypy" --cache-dir "${TMPDIR:-/tmp}/corral-mypy-cache" "$@"
