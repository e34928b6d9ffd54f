"""`atropos agent-endpoint`: OpenAI's and Anthropic's APIs for agents, whose tokens are kept for training."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from atroposlib.agents.flags import PROG, AgentEndpointConfig
from atroposlib.config import load_config
from atroposlib.flags import keys_of, make_parser


def parser() -> ArgumentParser:
    """For help and completion."""
    return make_parser(keys_of(AgentEndpointConfig), PROG, str(AgentEndpointConfig.__doc__), defaults={})


def main(argv: Sequence[str]) -> NoReturn:
    """Become the endpoint, whose packages neither the launcher nor help loads."""
    load_config(AgentEndpointConfig, argv, prog=PROG)
    os.execv(sys.executable, [sys.executable, "-u", "-m", "atroposlib.agents.serve", *argv])
