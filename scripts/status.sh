#!/usr/bin/env bash
# Usage: scripts/status.sh [RUN_DIR]
#
# One line per service: its name, pid, port, health, and the last line of its log. Without an argument every run of
# runs/ that has records. Health: "healthy" answers its health address, "no answer" does not (yet), "running" has no
# address to ask, "dead" is no longer there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=scripts/lib/services.sh
source "$root/scripts/lib/services.sh"

# health NAME URL
health() {
  if ! is_alive "$1"; then
    echo dead
  elif [[ -z $2 ]]; then
    echo running
  elif http_ok "$2"; then
    echo healthy
  else
    echo "no answer"
  fi
}

# last_line LOG: of a regular file, as much as fits.
last_line() { if [[ -f $1 && ! -L $1 ]]; then printable "$(tail -c 4096 "$1" | tail -n 1 | cut -c1-160)"; fi; }

# show_run DIR
show_run() {
  local name url port
  use_run "$1"
  echo "$(printable "$run_dir")"
  for name in "${service_names[@]}"; do
    record_field "$name" url
    url=$REPLY
    port=$(sed -nE 's|^http://[^/]*:([0-9]+).*|\1|p' <<<"$url")
    printf '  %-8s pid %-8s port %-6s %-10s %s\n' \
      "$name" "${service_pid[$name]}" "${port:--}" "$(health "$name" "$url")" "$(last_line "${service_log[$name]}")"
  done
}

main() {
  local runs
  case ${1:-} in
    -h | --help) print_help "${BASH_SOURCE[0]}" ;;
    -*) unknown_flag "$1" --help ;;
    '')
      mapfile -t runs < <(recorded_runs "$root/runs")
      if ((${#runs[@]} == 0)); then say "No run has services: nothing in $root/runs/*/pids"; fi
      for run in "${runs[@]}"; do show_run "$run"; done
      ;;
    *)
      if [[ ! -d $1 ]]; then usage_error "no such run folder: $1"; fi
      if [[ ! -d $1/pids ]]; then say "$1 has no services recorded: it ended by itself or never ran" && exit; fi
      show_run "$1"
      ;;
  esac
}

main "$@"
