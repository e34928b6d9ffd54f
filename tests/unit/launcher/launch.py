"""A launcher for the tests: `python launch.py RUN_DIR '{"services": [...], "limits": {...}}'`."""

import json
import sys
from pathlib import Path

from atropos_launcher.console.console import PlainConsole
from atropos_launcher.service import Service
from atropos_launcher.services import supervisor as of_services
from atropos_launcher.services.supervisor import Limits, Supervisor

of_services.NOTE_EVERY_S = 0.5  # shared memory: a test waits for the next note
SHOWN = {"": "Held-out accuracy", "trainer": "Step [0-9]+/"}


def main() -> int:
    run_dir, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    services = [Service(**{**service, "command": tuple(service["command"])}) for service in plan["services"]]
    with Supervisor(run_dir, services, PlainConsole(run_dir, SHOWN), Limits(**plan["limits"])) as supervisor:
        return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
