#!/usr/bin/env bash
# Usage: scripts/test.sh [--fast | --nightly] [PYTEST ARGUMENTS]
#
# Sets up if needed, then runs ruff, the import contracts, mypy and pytest, whose summary is the last line. Stops at the
# first that fails, with its exit status. Two tests run at a time, as much of the time is waiting.
#
#   --fast      every test that starts no process and takes less than about 5 s: under 3 minutes on two cores (5 the
#               first time, when mypy knows no file yet)
#   --nightly   the long drills too
#   -n 0, ...   everything else goes to pytest: scripts/test.sh tests/unit -k queue, scripts/test.sh -m services
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }
die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# install_browser: Debian's Chromium, for the tests that show what a web page can do. Only CI installs it; elsewhere
# they are skipped without.
install_browser() {
  local started=$SECONDS log=$root/.venv/setup/logs/chromium.log
  if [[ ${CI:-} != true ]] || command -v chromium >/dev/null; then return; fi
  say "Installing Debian's Chromium (at most 600 s, log ${log#"$root/"})"
  if ! timeout 600 bash -c 'apt-get update && apt-get install -y --no-install-recommends chromium' \
    >"$log" 2>&1 </dev/null; then
    tail -n 5 "$log" >&2
    die "Chromium could not be installed (see $log): install a chromium that is found on PATH"
  fi
  say "    done after $((SECONDS - started)) s"
}

case ${1:-} in
  -h | --help) sed -nE '2,/^set /s/^# ?//p' "${BASH_SOURCE[0]}" && exit 0 ;;
esac
cd "$root"
"$root/scripts/setup.sh"
install_browser
say "ruff, and the formatter"
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
say "import contracts"
.venv/bin/lint-imports --no-logo --cache-dir .venv/setup/imports
say "mypy"
.venv/bin/python -m mypy atroposlib environments example_trainer vllm_patching benchmarks tests
say "pytest (each test at most 300 s)"
exec .venv/bin/python -m pytest -n 2 --no-loadscope-reorder "$@"
