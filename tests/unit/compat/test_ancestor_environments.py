"""The ancestor's gsm8k_server.py and gsm8k_server_axolotl.py import and configure what these programs do; such programs
load, and `--dry-run` prints their configuration.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.services, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
IMPORTS = """
from datasets import load_dataset
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from tqdm.asyncio import tqdm_asyncio

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from atroposlib.type_definitions import Item, number
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
"""
ENVIRONMENT = """
class Env(BaseEnv):
    name = "gsm8k"

    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer = list()

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="nobody/has-this", group_size=8, use_wandb=True, rollout_server_url="http://localhost:8000",
            total_steps=1000, batch_size=12, steps_per_eval=100, max_token_length=2048, wandb_name="gsm8k",
        )
        return config, SERVERS

    async def get_next_item(self):
        return None

    async def evaluate(self, *args, **kwargs):
        return None

if __name__ == "__main__":
    Env.cli()
"""
PLAIN = 'APIServerConfig(model_name="m", base_url="http://localhost:9001/v1", api_key="x", num_requests_for_eval=256)'
AXOLOTL = '[APIServerConfig(base_url="http://localhost:9001", api_key="x", model_name="m", server_type="trl")]'


@pytest.mark.parametrize(
    ("servers", "url", "kind"),
    [(PLAIN, "http://localhost:9001/v1", "openai"), (AXOLOTL, "http://localhost:9001", "trl")],
    ids=["gsm8k_server", "gsm8k_server_axolotl"],
)
def test_they_load_and_print_their_configuration(tmp_path: Path, servers: str, url: str, kind: str) -> None:
    program = tmp_path / "server.py"
    program.write_text(IMPORTS + ENVIRONMENT.replace("SERVERS", servers))
    done = subprocess.run(
        [sys.executable, program, "serve", "--env.total_steps", "-1", "--dry-run"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert (tree["env"]["group_size"], tree["env"]["batch_size"], tree["env"]["total_steps"]) == (8, 12, -1)
    server = tree["openai"][0] if isinstance(tree["openai"], list) else tree["openai"]
    assert (server["base_url"], server["server_type"]) == (url, kind)
