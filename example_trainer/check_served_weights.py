"""Whether running vLLM servers compute with the weights of a directory, word by word. `atropos doctor --live` runs it
in a process of its own, because it loads torch.

    vLLM, rank by rank ──checksums of live parameters──┐
    files of a model or checkpoint ──cast and cut as vLLM's──checksums──┴─▶ one finding per server, as a JSON line

It reads the files bucket by bucket, so that no process holds the whole model, and changes nothing.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch
from pydantic import Field, SecretStr, field_validator
from safetensors import SafetensorError
from torch import Tensor

from atroposlib.config import Config, load_config
from atroposlib.wire.bridge import POLICY_FILE, Bucket, Manifest, read_policy_version
from example_trainer.bridges.digest import differing
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.errors import TrainerError
from example_trainer.model.files import WeightFiles
from example_trainer.weights.shards import open_weights
from example_trainer.weights.source import WeightSource, pack

NAMED = 8  # tensors that are named, of those that differ


class LiveConfig(Config):
    """Compare the weights of running vLLM servers with those of a directory."""

    live: tuple[str, ...] = Field(min_length=1, description="URLs of running vLLM servers, comma-separated")
    weights: str | None = Field(
        None, min_length=1, description="directory or Hugging Face id; by default the model that the server loaded"
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="vLLM's --api-key", json_schema_extra={"env": "VLLM_API_KEY"}
    )
    timeout_s: float = Field(120.0, gt=0, le=3600, description="seconds that a server has for each answer")

    @field_validator("live")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            address(url)  # its ValueError
        return value


def address(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`, or `HOST:PORT`. Raises ValueError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not the address of a vLLM server; give http://HOST:PORT")
    return parts.hostname, parts.port


class FileWeights(WeightSource):
    """The weights of a model's or a checkpoint's files. Raises ModelError unless they have every tensor of
    `manifest`.
    """

    def __init__(self, files: WeightFiles, manifest: Manifest) -> None:
        self._files = files
        self._shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
        for name, shape in self._shapes.items():
            files.expect(name, shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def bucket(self, bucket: Bucket) -> Tensor:
        return pack(bucket, self._whole, torch.device("cpu"))

    def _whole(self, name: str) -> Tensor:
        return self._files.part(name, 0, 0, (self._shapes[name] or (1,))[0])


def finding(vllm: VllmClient, weights: str | None) -> dict[str, str]:
    """Compare one server's weights, and return what the doctor prints of it: level, found, remedy."""
    started = time.perf_counter()
    try:
        status, manifest = vllm.status(), vllm.manifest()
        source = weights or manifest.model
        held = read_policy_version(source) if (Path(source) / POLICY_FILE).is_file() else None
        names = differing(FileWeights(open_weights(source), manifest), manifest, vllm, status.policy_version)
    except (TrainerError, OSError, ValueError, SafetensorError) as error:
        return {"level": "fail", "found": f"not compared: {error}", "remedy": ""}
    served, count = f"policy version {status.policy_version}", len(manifest.tensors)
    result = f"{served}, {len(names)} of {count} tensors differ from {source}"
    if not names:
        return {"level": "ok", "found": f"{result} ({time.perf_counter() - started:.1f} s)", "remedy": ""}
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    if held not in (None, status.policy_version):
        remedy = f"that is policy version {held}: give --weights the checkpoint of version {status.policy_version}"
    else:
        remedy = "start the server again if these weights are what it should serve, and report it"
    return {"level": "fail", "found": f"{result}: {shown}", "remedy": remedy}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line per server."""
    config = load_config(LiveConfig, argv, prog="live_weights")
    key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
    for url in config.live:
        vllm = VllmClient(*address(url), key, config.timeout_s)
        print(json.dumps({"url": vllm.url} | finding(vllm, config.weights)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
