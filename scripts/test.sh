#!/usr/bin/env bash
# Usage: scripts/test.sh [PYTEST ARGUMENTS]
#
# Sets up if needed, then ruff, mypy and the whole pytest suite, of which the last line is pytest's own summary. Arguments go to pytest:
# scripts/test.sh tests/unit -k queue. Two tests run at a time, as much of the time is waiting; -n 0 runs one. Stops at the first of the
# three that fails, with its exit status.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"

case ${1:-} in
  -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
esac
cd "$root"
"$root/scripts/setup.sh"
say "ruff"
.venv/bin/ruff check .
say "mypy"
.venv/bin/python -m mypy atroposlib environments example_trainer vllm_patching scripts
say "pytest (each test at most 300 s)"
exec .venv/bin/python -m pytest -n 2 --no-loadscope-reorder "$@"
