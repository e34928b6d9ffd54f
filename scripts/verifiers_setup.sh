#!/usr/bin/env bash
# Usage: scripts/verifiers_setup.sh [PACKAGE ...]
#
# Creates .venv-verifiers beside this directory, and installs verifiers 0.4 into it: the versions of scripts/verifiers.lock.
# environments/verifiers_server.py runs tasksets and harnesses in it, apart from everything else, since verifiers needs
# other versions of many packages. Run it as often as you like: what is there is not installed again.
#
#   PACKAGE ...  installs further packages, such as tasksets: a name, a directory or a wheel, as pip takes them. `harbor`
#                makes the environment of scripts/verifiers_harbor.lock, which needs Python 3.12, and has all of the other
#   PYTHON=...   the Python to build on, 3.11 to 3.14 (default: the first of python3.11 to python3.14, python3 that exists)
#   PIP_*        pip's own settings (index, proxy, certificates, cache) are honoured
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-verifiers
lock=$root/scripts/verifiers.lock
oldest=3.11
install_deadline_s=1800

say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# suits PYTHON: whether it runs, is one that what is installed supports, and can make virtual environments.
suits() {
  "$1" -c "import sys, venv, ensurepip; sys.exit(not (${oldest/./, }) <= sys.version_info < (3, 15))" >/dev/null 2>&1
}

choose_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if suits "$candidate"; then echo "$candidate" && return; fi
  done
  die "no Python of $oldest to 3.14 with the venv module found$needed; install one or set PYTHON=/path/to/python$oldest"
}

# install ARGUMENT ...: pip's output goes to a file, whose end is shown if it fails.
install() {
  local log=$venv/setup.log
  timeout --kill-after=10 "$install_deadline_s" \
    "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$lock" "$@" >"$log" 2>&1 </dev/null && return
  tail -n 15 "$log" >&2
  die "pip could not install $*: see $log, 'pip config list' and the network, then run this again"
}

case ${1:-} in
  -h | --help) awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" && exit 0 ;;
  -*) die "unknown flag $1 (--help)" ;;
esac
exec 9>"$root/.venv-verifiers.lock"
flock --nonblock 9 || { say 'Waiting for another setup of verifiers'; flock 9; }
needed=
packages=()
for package; do
  if [[ $package =~ ^(harbor|verifiers\[harbor\])([=\ ]|$) ]]; then needed=', which harbor needs'; else packages+=("$package"); fi
done
set -- "${packages[@]+"${packages[@]}"}"
if [[ $needed || $(cat "$venv/stamp" 2>/dev/null) == "$(sha256sum <"$root/scripts/verifiers_harbor.lock")" ]]; then
  lock=$root/scripts/verifiers_harbor.lock oldest=3.12
fi
stamp=$(sha256sum <"$lock")
if [[ ! -x $venv/bin/python || $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
  python=$(choose_python)
  say "Installing verifiers into .venv-verifiers with $python (0.2 GB to download, 0.6 GB on disk)"
  suits "$venv/bin/python" || "$python" -m venv --clear "$venv"
  install --requirement "$lock"
  "$venv/bin/python" -c 'import verifiers.v1' || die "verifiers cannot be imported: rm -r $venv, and run this again"
  echo "$stamp" >"$venv/stamp"
fi
if (($#)); then
  say "Installing $*"
  install "$@"
fi
say "verifiers $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("verifiers"))') is in .venv-verifiers"
