import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer

PROGRAM = """
import sys
import environments.gsm8k_server
from atroposlib.envs import base, cli, process, serve
from atroposlib.envs.base import *
from atroposlib.utils.tokenizers import load_tokenizer
load_tokenizer(sys.argv[1]).encode("1 + 1")
loaded = sorted(name for name in ("torch", "vllm", "datasets", "sympy", "wandb") if name in sys.modules)
assert not loaded, loaded
assert OpenaiConfig is APIServerConfig
"""


@pytest.mark.services
def test_running_environment_holds_neither_torch_nor_other_heavy_packages(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
