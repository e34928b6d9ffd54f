"""A trainer without training in mode none: serves version 0, makes version 1, which is not served, then version 2,
which is.

python restart_child.py MODEL PORT FOLDER [FLAG VALUE ...]      each line on stdin lets it continue
"""

import contextlib
import sys
from functools import partial

from atroposlib.config import load_config
from atroposlib.logs import configure_logging
from example_trainer.loop.run import keep_weights
from example_trainer.settings.config import TrainerConfig
from tests.integration.bridge_child import change, connect


def main(model_name: str, port: str, folder: str, *flags: str) -> None:
    configure_logging("child")
    arguments = [
        "--model-name",
        model_name,
        "--vllm-port",
        port,
        "--save-path",
        f"{folder}/checkpoints",
        "--log-dir",
        folder,
    ]
    config = load_config(TrainerConfig, [*arguments, "--vllm-restart-interval", "2", *flags], prog="restart_child")
    bridge, model = connect(config, model_name)
    with contextlib.closing(bridge):
        for version in range(3):
            report = bridge.sync(version, partial(change, model) if version else keep_weights)
            print(f"SYNCED {version} serves {report.policy_version} stall {report.stall_s:.2f}", flush=True)
            if report.policy_version == version:
                print(f"PARITY {bridge.parity_probe():.3e}", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
