#!/usr/bin/env bash
# Usage: scripts/status.sh [RUN]; --help lists the flags.
#
# `atropos status`: show running and finished runs.
exec "$(dirname "$0")/setup.sh" --run status "$@"
