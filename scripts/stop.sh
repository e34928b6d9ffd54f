#!/usr/bin/env bash
# Usage: scripts/stop.sh [RUN | --all]; --help lists the flags.
#
# `atropos stop`: ends what a launcher started, and nothing else on the machine.
exec "$(dirname "$0")/setup.sh" --run stop "$@"
