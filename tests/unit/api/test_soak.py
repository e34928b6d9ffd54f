"""A short form of benchmarks/api_soak.py: fifty environments, an API that is killed, a trainer that dies."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.api_soak import Settings, soak


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.slow
def test_every_acknowledged_group_is_trained_on_exactly_once_however_often_the_api_is_killed(tmp_path: Path) -> None:
    ledger = asyncio.run(soak(Settings(seconds=20, kill_every=3, trainer_dies=0.1), tmp_path))
    assert ledger.kills >= 3
    assert ledger.deaths >= 1
    assert len(ledger.acknowledged) > 100
    assert ledger.faults() == {"lost": 0, "repeated": 0, "never acknowledged": 0}, ledger.line()
