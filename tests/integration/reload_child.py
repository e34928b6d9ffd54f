"""A trainer without training, of mode reload, that tests can kill, as bridge_child.py.

python -m tests.integration.reload_child MODEL PORT SAVE_PATH ACT

ACT: sync | many | wait | kill-mid-write | kill-mid-read | damage | skip
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from example_trainer.bridges.reload import ReloadBridge
from tests.integration.bridge_child import change, joined, prove, sync_many


def main(model_name: str, port: int, save_path: Path, act: str) -> None:
    bridge, model = joined(model_name, port, weight_bridge_mode="reload", use_shared_memory=False, save_path=save_path)
    assert isinstance(bridge, ReloadBridge)
    if act == "wait":
        sys.stdin.readline()
    elif act == "kill-mid-write":
        form = bridge._trained.form
        bridge._trained = replace(bridge._trained, form=replace(form, write=_write_and_die(form.write)))
    elif act == "kill-mid-read":
        bridge._vllm.ask = _ask_and_die(bridge._vllm.ask)  # type: ignore[method-assign]
    elif act == "damage":
        bridge._vllm.ask = _damage_and_ask(bridge._vllm.ask)  # type: ignore[method-assign]
    if act == "many":
        sync_many(bridge, model)
    else:
        bridge.sync(2 if act == "skip" else 1, lambda: change(model))
    prove(bridge, bridge._vllm)
    bridge.close()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _write_and_die(write: Any) -> Any:
    def written(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        _die()

    return written


def _ask_and_die(ask: Any) -> Any:
    def asked(kind: Any, method: str, path: str, body: Any) -> None:
        threading.Thread(target=ask, args=(kind, method, path, body), daemon=True).start()
        time.sleep(0.2)  # the request is there
        _die()

    return asked


def _damage_and_ask(ask: Any) -> Any:
    def asked(kind: Any, method: str, path: str, body: dict[str, Any]) -> Any:
        (weights,) = Path(body["path"]).glob("*.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
        return ask(kind, method, path, body)

    return asked


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
