#!/usr/bin/env bash
# Usage: scripts/test.sh [--fast | --nightly] [PYTEST ARGUMENTS]
#
# Sets up if needed, then runs ruff, the import contracts, mypy and pytest, whose summary is the last line. Stops at the
# first that fails, with its exit status. Two tests run at a time, as much of the time is waiting. Of the drills that are
# alike (marked `rotating`) a third runs for each commit; --third all runs all of them.
#
#   --fast      every test that starts no process and takes less than about 5 s: 6 minutes on two cores (more the
#               first time, when mypy knows no file yet)
#   --nightly   the long drills too, and all that rotate
#   -n 0, ...   everything else goes to pytest: scripts/test.sh tests/unit -k queue, scripts/test.sh -m services
exec "$(dirname "$0")/setup.sh" --test "$@"
