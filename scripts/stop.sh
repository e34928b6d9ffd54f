#!/usr/bin/env bash
# Usage: scripts/stop.sh [RUN_DIR | --all]
#
# Ends what a launcher started, and nothing else on the machine: first the launcher, then the process groups that it
# recorded in RUN_DIR/pids, each checked by its start time. TERM, five seconds of grace, KILL. Without an argument it
# ends the one run of runs/ that has records, and lists them where there are several.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"

# stop_run DIR
stop_run() {
  use_run "$1"
  if [[ -f $run_dir/pids/launcher ]]; then
    read_record launcher
    if is_alive launcher; then
      say "Ending the launcher of $(printable "$run_dir") (pid ${service_pid[launcher]})," \
        "which ends its services (at most 10 s)"
      kill -TERM "${service_pid[launcher]}"
      for ((tenths = 0; tenths < 100; tenths++)); do
        is_alive launcher || break
        sleep 0.1
      done
      use_run "$1" # its records are gone when it has ended well
    fi
  fi
  stop_services
  say "Nothing of $(printable "$run_dir") runs any more"
}

main() {
  local runs
  mapfile -t runs < <(recorded_runs "$root/runs")
  case ${1:-} in
    -h | --help) print_help "${BASH_SOURCE[0]}" ;;
    --all) for run in "${runs[@]}"; do stop_run "$run"; done ;;
    -*) unknown_flag "$1" --all --help ;;
    '')
      case ${#runs[@]} in
        0) say "No run has services: nothing in $root/runs/*/pids" ;;
        1) stop_run "${runs[0]}" ;;
        *) usage_error "several runs have services; name one or --all: ${runs[*]}" ;;
      esac
      ;;
    *)
      if [[ ! -d $1 ]]; then usage_error "no such run folder: $1"; fi
      if [[ ! -d $1/pids ]]; then say "$1 has no services recorded: it ended by itself or never ran" && exit; fi
      stop_run "$1"
      ;;
  esac
}

main "$@"
