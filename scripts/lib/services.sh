# shellcheck shell=bash
# Starts, awaits, watches and ends the services of a run. Sourced after common.sh by every launcher, by stop.sh and by
# status.sh.
#
#   own_run DIR                      for a launcher: use_run, and all services end with this shell
#   use_run DIR                      the run's folder; records go to DIR/pids/
#   start_service NAME LOG CMD...    starts CMD in a session of its own and writes DIR/pids/NAME
#   await_http NAME URL SECONDS      until URL answers 200; ends early when the service died
#   monitor SECONDS NAME...          until all of these ended with status 0; fails as soon as any service dies
#   stop_services                    ends exactly the recorded process groups: TERM, 5 s of grace, KILL
#
# A record is `key=value` lines: name, pid (= process group = session), start (clock ticks after boot), boot, log, url,
# command. A process is only ever signalled when boot id and start time are those recorded: a pid that was given to
# another process since is left alone. A run directory may come from somebody else: what no launcher writes is refused
# (check_records), and nothing of it reaches the terminal raw. A launcher that dies takes its services along: the kernel
# sends them TERM (setpriv --pdeathsig).

grace_s=5          # from TERM to KILL
poll_s=0.3         # between two looks at the services
declare -A service_pid=() service_start=() service_log=() service_status=()
service_names=()   # in the order they were started
launched_here=()   # those that are children of this shell
follow_labels=()   # what monitor shows: label and pattern of each log, its descriptor, and a line still being written
follow_patterns=() follow_fds=() follow_partial=()

# printable TEXT...: without what a terminal obeys: control characters (C0, DEL, C1) and bytes that are no UTF-8.
printable() {
  printf '%s' "$*" | LC_ALL=C tr -d '\000-\037\177' | iconv -c -f UTF-8 -t UTF-8 | LC_ALL=C sed 's/\xc2[\x80-\x9f]//g'
}

# check_records: ends with an error where DIR/pids holds what no launcher of this user writes: another user's records
# (they could name our processes with their true start times), links (they would lead elsewhere), odd names and values.
check_records() {
  local entry name key value
  if [[ -L $run_dir/pids ]]; then
    die "$(printable "$run_dir")/pids is a link; no launcher made it, so remove it by hand"
  fi
  for entry in "$run_dir"/pids/* "$run_dir"/pids/.[!.]*; do
    [[ -e $entry || -L $entry ]] || continue
    name=${entry##*/}
    if [[ -L $entry || ! -f $entry || ! -O $entry || ! $name =~ ^\.?[A-Za-z0-9_.-]{1,64}$ ]]; then
      die "$(printable "$entry") was not written by a launcher; remove it by hand"
    fi
    [[ $name != shared.memory* && $name != .* ]] || continue
    while IFS='=' read -r key value; do
      case $key in
        pid) [[ $value =~ ^[1-9][0-9]{0,9}$ ]] && ((value > 1)) ;;
        start) [[ $value =~ ^([0-9]{1,20}|none)$ ]] ;;
        url) [[ $value =~ ^(http://[A-Za-z0-9.:_-]+(/[A-Za-z0-9._/-]*)?)?$ ]] ;;
        *) true ;;
      esac || die "$(printable "$entry: $key=$value") was not written by a launcher; remove it by hand"
    done <"$entry"
  done
}

# use_run DIR: makes the folder of records and reads those that are there; one from before a reboot is nobody's.
use_run() {
  run_dir=$1
  service_names=()
  mkdir -p "$run_dir/pids"
  check_records
  local record name
  for record in "$run_dir"/pids/*; do
    name=${record##*/}
    if [[ -f $record && $name != launcher && $name != shared.memory ]]; then
      service_names+=("$name")
      read_record "$name"
    fi
  done
}

# record_field NAME KEY: sets REPLY to a value out of a record, or to nothing. Like all that runs while services do, it
# makes no command substitution: bash 5.2 fails to parse a trap that a signal starts in the middle of one, and the
# services would outlive us.
record_field() {
  local key value
  REPLY=''
  [[ -f $run_dir/pids/$1 ]] || return 0
  while IFS='=' read -r key value; do
    if [[ $key == "$2" ]]; then REPLY=$value; fi
  done <"$run_dir/pids/$1"
}

# read_record NAME: into service_pid, service_start and service_log.
read_record() {
  local boot
  record_field "$1" pid && service_pid[$1]=$REPLY
  record_field "$1" log && service_log[$1]=$REPLY
  service_start[$1]=none
  read -r boot </proc/sys/kernel/random/boot_id
  record_field "$1" boot
  if [[ $REPLY == "$boot" ]]; then record_field "$1" start && service_start[$1]=$REPLY; fi
}

# process_fields PID: sets REPLY to what /proc/PID/stat says from the state on (the name before it may hold blanks), or
# to nothing.
process_fields() {
  { read -r REPLY <"/proc/$1/stat"; } 2>/dev/null || REPLY=''
  REPLY=${REPLY##*) }
}

# process_start PID: sets REPLY to its start in clock ticks after boot, or to nothing for a process that is gone or a
# zombie.
process_start() {
  local fields
  process_fields "$1"
  read -ra fields <<<"$REPLY"
  REPLY=''
  if [[ -n ${fields[0]:-} && ${fields[0]} != [ZX] ]]; then REPLY=${fields[19]}; fi
}

# write_record NAME PID LOG COMMAND...
write_record() {
  local name=$1 pid=$2 log=$3 fields boot
  shift 3
  read -r boot </proc/sys/kernel/random/boot_id
  process_fields "$pid"
  read -ra fields <<<"$REPLY"
  printf 'name=%s\npid=%s\nstart=%s\nboot=%s\nlog=%s\nurl=\ncommand=%s\n' \
    "$name" "$pid" "${fields[19]:-none}" "$boot" "$log" "${*@Q}" >"$run_dir/pids/.$name.new"
  mv "$run_dir/pids/.$name.new" "$run_dir/pids/$name"
}

# record_url NAME URL: where the service's health is asked.
record_url() { sed -i "s|^url=.*|url=$2|" "$run_dir/pids/$1"; }

# own_run DIR: this shell is the run's launcher. Its end, Ctrl-C and TERM included, ends the services; stop.sh ends it
# first.
own_run() {
  use_run "$1"
  write_record launcher $$ '' "$0"
  trap end_run EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

end_run() {
  local status=$?
  trap '' INT TERM
  trap - EXIT
  stop_services
  if ((status == 130)); then say "Interrupted; what there is so far is in $run_dir"; fi
  exit "$status"
}

# is_alive NAME: whether the very process that was recorded runs.
is_alive() {
  process_start "${service_pid[$1]}"
  [[ -n $REPLY && $REPLY == "${service_start[$1]}" ]]
}

# members NAME: pids of its process group. The kernel gives a group's number to no new process while a member lives, so
# these are ours unless the process of that number is alive and is another than recorded.
members() {
  local group=${service_pid[$1]} pid fields
  process_start "$group"
  [[ ${service_start[$1]} != none && ( -z $REPLY || $REPLY == "${service_start[$1]}" ) ]] || return 0
  for pid in /proc/[0-9]*; do
    process_fields "${pid#/proc/}"
    read -ra fields <<<"$REPLY" # state, parent, group, session
    if [[ -n $REPLY && ${fields[0]} != [ZX] && ${fields[2]} == "$group" && ${fields[3]} == "$group" ]]; then
      echo "${pid#/proc/}"
    fi
  done
}

# start_service NAME LOG COMMAND...: returns when the new process leads its own group, so that it can be signalled from
# then on.
start_service() {
  local name=$1 log=$2 guard=() fields
  shift 2
  if setpriv --help 2>/dev/null | grep -q pdeathsig; then guard=(setpriv --pdeathsig TERM --); fi
  setsid "${guard[@]}" "$@" >>"$log" 2>&1 </dev/null 9>&- &
  write_record "$name" $! "$log" "$@"
  read_record "$name"
  service_names+=("$name") launched_here+=("$name")
  while is_alive "$name"; do
    process_fields $!
    read -ra fields <<<"$REPLY"
    [[ ${fields[2]:-} == "$!" ]] && break
    sleep 0.01
  done
  say "Started $name (pid $!, log $log)"
}

# exit_status NAME: how a dead service of this shell ended, asked once and kept in service_status.
exit_status() {
  local status=0
  if [[ -z ${service_status[$1]:-} ]]; then
    wait "${service_pid[$1]}" 2>/dev/null || status=$?
    service_status[$1]=$status
  fi
}

# describe_status STATUS: "exit status 1", "killed by signal KILL".
describe_status() {
  if (($1 > 128)); then echo "killed by signal $(kill -l $(($1 - 128)))"; else echo "exit status $1"; fi
}

# last_lines LOG: what to show of it on the console.
last_lines() { tail -n 20 "$1" 2>/dev/null | sed 's/^/    /'; }

# report_death NAME: which service died, how, and the last lines of its log.
report_death() {
  exit_status "$1"
  printf '\n%s (pid %s) died: %s. Last lines of %s:\n' \
    "$1" "${service_pid[$1]}" "$(describe_status "${service_status[$1]}")" "${service_log[$1]}" >&2
  last_lines "${service_log[$1]}" >&2
}

# http_ok URL: whether it answers 200 within 3 s; loopback only needs no more than bash.
http_ok() {
  local address=${1#http://} host port path
  path=/${address#*/}
  [[ $address == */* ]] || path=/
  address=${address%%/*} host=${address%:*} port=${address##*:}
  # shellcheck disable=SC2016  # expanded by the inner shell
  timeout 3 bash -c '
    exec 3<>"/dev/tcp/$0/$1" && printf "GET %s HTTP/1.0\r\nHost: %s\r\n\r\n" "$2" "$0" >&3 &&
      read -r _ status _ <&3 && cat <&3 >/dev/null && [[ $status == 200 ]]
  ' "$host" "$port" "$path" 2>/dev/null
}

# await_http NAME URL SECONDS
await_http() {
  local name=$1 url=$2 deadline=$3 started=$SECONDS told=$SECONDS
  record_url "$name" "$url"
  say "Waiting for $name at $url, at most $deadline s (log ${service_log[$name]})"
  until http_ok "$url"; do
    dead_service && return 1
    if ((SECONDS - started >= deadline)); then
      printf '\n%s did not answer at %s within %s s. Last lines of %s:\n' \
        "$name" "$url" "$deadline" "${service_log[$name]}" >&2
      last_lines "${service_log[$name]}" >&2
      return 1
    fi
    if ((SECONDS - told >= 30)); then
      told=$SECONDS
      say "Still waiting for $name at $url, $((deadline - SECONDS + started)) s left"
    fi
    sleep "$poll_s"
  done
  say "$name is up after $((SECONDS - started)) s"
}

# dead_service [NAME...]: reports the first service of this shell that is dead though it should not be; NAMEs may end
# with status 0.
dead_service() {
  local name
  for name in "${launched_here[@]}"; do
    is_alive "$name" && continue
    exit_status "$name"
    if [[ " $* " == *" $name "* && ${service_status[$name]} == 0 ]]; then continue; fi
    report_death "$name"
    return 0
  done
  return 1
}

# follow LABEL LOG PATTERN: monitor shows the log's new lines that match the extended regular expression, without what
# stands before it.
follow() {
  local fd
  touch "$2"
  exec {fd}<"$2"
  follow_labels+=("$1") follow_patterns+=("$3") follow_fds+=("$fd") follow_partial+=('')
}

show_followed() {
  local index line
  for index in "${!follow_fds[@]}"; do
    while IFS= read -r -u "${follow_fds[index]}" line; do
      line=${follow_partial[index]}$line follow_partial[index]=''
      if [[ $line =~ ${follow_patterns[index]}.* ]]; then say "${follow_labels[index]} ${BASH_REMATCH[0]}"; fi
    done
    follow_partial[index]+=$line # a line that is still being written
  done
}

# monitor SECONDS NAME...: once the first of the names has ended, the others have SECONDS.
monitor() {
  local limit=$1 name looks=0 first_end='' left
  shift
  while true; do
    show_followed
    if ((looks++ % 20 == 0)); then note_shared_memory; fi
    if dead_service "$@"; then show_followed && return 1; fi
    left=()
    for name in "$@"; do
      if is_alive "$name"; then left+=("$name"); else : "${first_end:=$SECONDS}"; fi
    done
    if ((${#left[@]} == 0)); then show_followed && return 0; fi
    if [[ -n $first_end ]] && ((SECONDS - first_end > limit)); then
      printf '\n%s still runs %s s after the others ended. Last lines of %s:\n' \
        "${left[*]}" "$limit" "${service_log[${left[0]}]}" >&2
      last_lines "${service_log[${left[0]}]}" >&2
      return 1
    fi
    sleep "$poll_s"
  done
}

# note_shared_memory: keeps boot, inode and name of the shared-memory files that the services have open, for the case
# that one is killed.
note_shared_memory() {
  local name member boot
  read -r boot </proc/sys/kernel/random/boot_id
  for name in "${service_names[@]}"; do
    for member in $(members "$name"); do
      awk -v boot="$boot" 'NF == 6 && $6 ~ "^/dev/shm/[^/]+$" { print boot, $5, $6 }' \
        "/proc/$member/maps" 2>/dev/null || true
    done
  done | cat - "$run_dir/pids/shared.memory" 2>/dev/null | sort -u >"$run_dir/pids/shared.memory.new" || true
  mv "$run_dir/pids/shared.memory.new" "$run_dir/pids/shared.memory"
}

# remove_shared_memory: unlinks what killed services left in /dev/shm, unless another process has it open. A name alone
# proves nothing: the file must be the one that a service had open since this boot.
remove_shared_memory() {
  local path inode noted boot
  [[ -f $run_dir/pids/shared.memory ]] || return 0
  read -r boot </proc/sys/kernel/random/boot_id
  while IFS=' ' read -r noted inode path; do
    if [[ $noted == "$boot" && $path =~ ^/dev/shm/[^/]+$ && -f $path && ! -L $path && -O $path ]] &&
      [[ $(stat -c %i "$path") == "$inode" ]] && ! grep -qsF "$path" /proc/[0-9]*/maps; then
      rm -f "$path"
    fi
  done <"$run_dir/pids/shared.memory"
  rm -f "$run_dir/pids/shared.memory"
}

# signal_groups SIGNAL: to every recorded group that still has members; prints the names of those.
signal_groups() {
  local name pids
  for name in "${service_names[@]}"; do
    mapfile -t pids < <(members "$name")
    ((${#pids[@]})) || continue
    echo "$name"
    # The group and not its members one by one, so that none is missed that was forked since.
    if [[ $1 != 0 ]]; then kill -"$1" -- "-${service_pid[$name]}" 2>/dev/null || true; fi
  done
}

# await_groups_gone SECONDS: whether no recorded group has members left in time.
await_groups_gone() {
  local tenths
  for ((tenths = 0; tenths < $1 * 10; tenths += 2)); do
    [[ -z $(signal_groups 0) ]] && return 0
    sleep 0.2
  done
  return 1
}

# stop_services: at most 9 s, then every recorded group is gone and so are the records. Says what it had to kill.
stop_services() {
  local running left
  [[ -d $run_dir/pids ]] || return 0 # stopped before
  note_shared_memory
  running=$(signal_groups TERM | paste -sd' ')
  if [[ -n $running ]]; then
    say "Ending $running (at most $((grace_s + 2)) s)"
    if ! await_groups_gone "$grace_s"; then
      left=$(signal_groups KILL | paste -sd' ')
      say "Killed after $grace_s s without an end: $left"
      await_groups_gone 2 || say "Still there: $(signal_groups 0 | paste -sd' ')"
    fi
  fi
  remove_shared_memory
  [[ -n $(signal_groups 0) ]] || rm -rf "$run_dir/pids"
}

# port_inode PORT: of the socket that listens on it, or with which a vLLM server that is still starting claims it;
# nothing if it is free.
port_inode() {
  local port
  port=$(printf '%04X' "$1")
  awk -v port=":$port\$" '$2 ~ port && $4 == "0A" { print $10; exit }' /proc/net/tcp /proc/net/tcp6 2>/dev/null
  awk -v name="^@atropos-vllm-.*:$1\$" '$NF ~ name { print $7; exit }' /proc/net/unix 2>/dev/null
}

# port_is_taken PORT: whether anything on this machine listens on it, or is about to.
port_is_taken() { [[ -n $(port_inode "$1") ]]; }

# port_holder PORT: "python3 (pid 123)" for who listens on it, as far as this user may see.
port_holder() {
  local inode link pid
  inode=$(port_inode "$1" | head -n 1)
  for link in /proc/[0-9]*/fd/*; do
    if [[ $(readlink "$link" 2>/dev/null) == "socket:[$inode]" ]]; then
      pid=${link#/proc/} pid=${pid%%/*}
      echo "$(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c1-80)(pid $pid)"
      return
    fi
  done
  echo "a process of another user"
}

# free_port PORT [TAKEN]: PORT, or the next one above on which nothing listens and which is not TAKEN.
free_port() {
  local port=$1
  while port_is_taken "$port" || [[ $port == "${2:-}" ]]; do ((port++)); done
  ((port < 65536)) || die "no free port from $1 up"
  echo "$port"
}

# require_free_port FLAG PORT: ends with who holds it.
require_free_port() {
  local remedy="end that (scripts/stop.sh ends what a launcher started) or choose another port"
  if port_is_taken "$2"; then die "$1 $2 is taken by $(port_holder "$2"); $remedy"; fi
}

# recorded_runs RUNS_DIR: the run directories below it that hold records, newest first, one per line. A name with
# control characters is left out: a line of it could be another directory's name.
recorded_runs() {
  local folder
  for folder in "$1"/*/pids; do
    if [[ -d $folder && $folder != *[[:cntrl:]]* ]]; then
      printf '%s %s\n' "$(stat -c %Y "$folder")" "${folder%/pids}"
    fi
  done | sort -rn | cut -d' ' -f2-
}
