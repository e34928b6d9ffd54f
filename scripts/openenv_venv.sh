#!/usr/bin/env bash
# Usage: scripts/openenv_venv.sh [DIRECTORY]
#
# Makes a virtual environment with the package `openenv`, to run OpenEnv servers in. Atropos needs none of it: it speaks
# their protocol. The default DIRECTORY is .openenv.
set -euo pipefail
if [[ " -h --help " == *" ${1:-none} "* ]]; then
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" && exit 0
fi
release=0.10.0
directory="${1:-.openenv}"
[ -x "$directory/bin/python" ] || "${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check "openenv==$release"
echo "OpenEnv $release is in $directory: run a server with $directory/bin/python"
