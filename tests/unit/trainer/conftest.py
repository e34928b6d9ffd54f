"""Fixtures of every trainer test."""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.trainer.fakes import model_folder


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny random model, changed as the module's MODEL says."""
    return model_folder(tmp_path_factory.mktemp("model"), **getattr(request.module, "MODEL", {}))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are made in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
