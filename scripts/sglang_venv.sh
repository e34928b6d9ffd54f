#!/usr/bin/env bash
# Usage: scripts/sglang_venv.sh
#
# Creates .venv-sglang beside this directory, for the tests of the weight bridge `sglang` against SGLang's own code: the
# packages of scripts/sglang.lock over those of the project's environment, which stays as it is. There are no CUDA
# packages in it and no kernels, so SGLang cannot serve a model from it. Run it as often as you like.
#
#   ATROPOS_PYTHON=...   the Python that has the project's packages (default: .venv's)
#   PIP_*                pip's own settings (index, proxy, certificates, cache) are honoured
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv-sglang
lock=$root/scripts/sglang.lock
python=${ATROPOS_PYTHON:-$root/.venv/bin/python}
install_deadline_s=1800

say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

case ${1:-} in
  -h | --help) awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}" && exit 0 ;;
  ?*) die "unknown argument $1 (--help)" ;;
esac
"$python" -c 'import torch, transformers' 2>/dev/null || die "$python has no PyTorch: run scripts/setup.sh, or set ATROPOS_PYTHON"
exec 9>"$venv.lock"
flock --nonblock 9 || { say 'Waiting for another setup of SGLang'; flock 9; }
stamp=$(sha256sum <"$lock")
if [[ $(cat "$venv/stamp" 2>/dev/null) != "$stamp" ]]; then
  say "Installing SGLang's Python code into .venv-sglang (0.2 GB to download, 1.3 GB on disk)"
  [[ -x $venv/bin/python ]] || "$python" -m venv --without-pip "$venv"
  timeout --kill-after=10 "$install_deadline_s" "$python" -m pip --python "$venv/bin/python" install \
    --disable-pip-version-check --no-deps --only-binary :all: --requirement "$lock" >"$venv/setup.log" 2>&1 </dev/null ||
    { tail -n 15 "$venv/setup.log" >&2; die "pip failed: see $venv/setup.log, then run this again"; }
  own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/project.pth"
  echo "$stamp" >"$venv/stamp"
fi
say "SGLang $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("sglang"))') is in .venv-sglang"
