"""Stands where example_trainer/vllm_api_server.py does: same flags, same status, no model; and misbehaves as it is
told.

python fake_vllm_server.py --model FOLDER --served-model-name NAME --port PORT [--start-s 1] [--ignore-term]
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from atroposlib.wire.bridge import read_policy_version


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len")
    parser.add_argument("--gpu-memory-utilization")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--lora-modules")
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--ignore-term", action="store_true")
    return parser.parse_args()


def handler(options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    adapter = (options.lora_modules or "").partition("=")[0]
    status = {
        "enabled": False,
        "model": options.model,
        "served_model": adapter or options.model,
        "dtype": options.dtype,
        "policy_version": int(adapter.removeprefix("policy-v")) if adapter else read_policy_version(options.model),
    }
    replies: dict[str, Any] = {
        "/v1/bridge/status": status,
        "/v1/models": {"data": [{"id": options.served_model_name}]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(replies[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    options = arguments()
    print("FAKE", *sys.argv[1:], flush=True)
    engine = [sys.executable, "-c", "import time; time.sleep(600)"]
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine inherits it
    subprocess.Popen(engine)
    time.sleep(options.start_s)
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(options)).serve_forever()


if __name__ == "__main__":
    main()
