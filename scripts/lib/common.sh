# shellcheck shell=bash
# Small helpers of every script here: sourced, never run. Callers set `set -euo pipefail`.

# say TEXT...: one line on the console with the time of day.
say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

# die TEXT...: one line on stderr, exit status 1.
die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# usage_error TEXT...: a wrong command line, exit status 2.
usage_error() { printf '%s: error: %s (--help lists all flags)\n' "${0##*/}" "$*" >&2; exit 2; }

# print_help SCRIPT: the comment block at its top, without the marks.
print_help() { awk 'NR == 1 { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"; }

# nearest WORD CANDIDATE...: the candidate that shares the longest run of leading letters with WORD, nothing when none
# shares two.
nearest() {
  local word=$1 candidate best='' length best_length=1 shorter
  shift
  for candidate in "$@"; do
    shorter=$((${#word} < ${#candidate} ? ${#word} : ${#candidate}))
    for ((length = 0; length < shorter; length++)); do
      [[ ${word:length:1} == "${candidate:length:1}" ]] || break
    done
    if ((length > best_length)); then best=$candidate best_length=$length; fi
  done
  printf '%s' "$best"
}

# unknown_flag FLAG KNOWN...: ends with the nearest known flag.
unknown_flag() {
  local flag=$1 guess known=()
  shift
  known=("${@#--}")
  guess=$(nearest "${flag#--}" "${known[@]}")
  usage_error "unknown flag $flag${guess:+; did you mean --$guess?}"
}

# positive_integer FLAG VALUE: ends unless VALUE is a whole number of at least 1.
positive_integer() { [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] || usage_error "$1 expects a whole number of at least 1, got '$2'"; }

# gpu_count: how many NVIDIA GPUs the driver lists, or CUDA_VISIBLE_DEVICES leaves of them; 0 without a driver.
gpu_count() {
  local -a visible
  if ! command -v nvidia-smi >/dev/null; then
    echo 0
  elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    echo "${#visible[@]}"
  else
    timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
  fi
}

# port_number FLAG VALUE: ends unless VALUE is a TCP port.
port_number() {
  if ! [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || (($2 > 65535)); then
    usage_error "$1 expects a port from 1 to 65535, got '$2'"
  fi
}

# use_python: sets python to ATROPOS_PYTHON as it is (a container's, a cluster's), else to that of .venv, which is set
# up if needed.
use_python() {
  python=${ATROPOS_PYTHON:-$root/.venv/bin/python}
  if [[ -z ${ATROPOS_PYTHON:-} ]]; then
    "$root/scripts/setup.sh"
  elif ! "$python" -c 'from importlib.util import find_spec as f; exit(not (f("torch") and f("vllm")))'; then
    die "ATROPOS_PYTHON=$python does not have torch and vllm; name one that does, or unset it to use .venv"
  fi
}
