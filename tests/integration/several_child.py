"""A trainer without training that feeds several servers, as a process of its own: python several_child.py [trainer
flags]

For every line on stdin it makes a new version, syncs it, and prints {"version", "servers", "parity", "seconds"}; at the
end of stdin it ends its session. Looks for servers that were left out at every sync.
"""

import json
import sys
import time

from atroposlib.config import load_config
from atroposlib.logs import configure_logging
from example_trainer.bridges import broadcast
from example_trainer.settings.config import TrainerConfig
from tests.integration.bridge_child import change, connect


def main() -> None:
    configure_logging("child")
    config = load_config(TrainerConfig, prog="several_child")
    broadcast.READMIT_S = 0.0
    bridge, model = connect(config, config.model_name)
    bridge.sync(0, lambda: None)
    print(json.dumps({"version": 0}), flush=True)
    for version, _ in enumerate(sys.stdin, start=1):
        start = time.monotonic()
        report = bridge.sync(version, lambda: change(model))
        row = {
            "version": version,
            "servers": report.servers,
            "seconds": time.monotonic() - start,
            "parity": bridge.parity_probe(),
        }
        print(json.dumps(row), flush=True)
    bridge.close()


if __name__ == "__main__":
    main()
