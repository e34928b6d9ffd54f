"""A LoRA trainer without training, as a process that tests can kill: serves version 0 and 1, says so, and stays.

python lora_child.py MODEL PORT SAVE_PATH
"""

import sys
import time
from pathlib import Path

from atroposlib.logs import configure_logging
from tests.integration.bridge_child import connect
from tests.integration.test_lora import lora_config, move


def main(model_name: str, port: int, save_path: Path) -> None:
    configure_logging("child")
    bridge, model = connect(lora_config(model_name, port, save_path), model_name)
    bridge.sync(0, lambda: None)
    bridge.sync(1, lambda: move(model, 1))
    print("SERVED 1", flush=True)
    time.sleep(300)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
