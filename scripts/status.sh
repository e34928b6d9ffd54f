#!/usr/bin/env bash
# Usage: scripts/status.sh [RUN]; --help lists the flags.
#
# `atropos status`: what runs, how it fares, and what came of earlier runs.
exec "$(dirname "$0")/setup.sh" --run status "$@"
