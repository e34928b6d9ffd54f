"""What may import what: each contract of pyproject.toml holds, and notices a planted violation."""

from copy import deepcopy
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract
from importlinter.domain.contract import Contract

from benchmarks.code_size import circles

CONFIGURATION = read_configuration(str(Path(__file__).parents[3] / "pyproject.toml"))
TYPES: dict[str, type[Contract]] = {
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
    "protected": ProtectedContract,
}
# By how a contract's name begins: an import that breaks it, and no other.
PLANTED = {
    "The launcher stands on the trainer": ("vllm_patching.transport", "example_trainer.errors"),
    "Inside the trainer imports go down": ("example_trainer.data.packing", "example_trainer.loss.terms"),
    "Inside the launcher imports go down": ("atropos_launcher.services.records", "atropos_launcher.console.progress"),
    "Inside atroposlib imports go down": ("atroposlib.wire.batching", "atroposlib.logs"),
    "Inside the batching API imports go down": ("atroposlib.api.state.queue", "atroposlib.api.journal.journal"),
    "Inside the environment framework imports go down": ("atroposlib.envs.rollouts", "atroposlib.envs.failures"),
    "The wire is msgspec": ("atroposlib.wire.batching", "pydantic"),
    "atroposlib and the environments load neither": ("atroposlib.grading.extraction", "torch"),
    "Nothing in the product imports atroposlib.compat": ("example_trainer.plot", "atroposlib.compat.io"),
    "The sampler doctor needs no vLLM": ("sampler_doctor.servers.find", "vllm_patching.version"),
    "Inside the sampler doctor imports go down": ("sampler_doctor.servers.sampler", "sampler_doctor.reference"),
    "vLLM is reached through": ("vllm_patching.memory.arena", "vllm"),
    "The trainer loads nothing that only": ("example_trainer.loss.batch_gradients", "vllm_patching.worker"),
    "The launcher loads neither": ("atropos_launcher.placement.gpus", "torch"),
    "--help and --dry-run load no torch": ("example_trainer.settings.servers", "transformers"),
}


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    """Who imports whom, as the sources say; nothing is imported for it."""
    packages = CONFIGURATION["session_options"]["root_packages"]
    return grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)


CONTRACTS = [
    TYPES[options["type"]](options["name"], CONFIGURATION["session_options"], options)
    for options in CONFIGURATION["contracts_options"]
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_contract_holds_and_a_planted_import_breaks_it(contract: Contract, imports: grimp.ImportGraph) -> None:
    importer, imported = next(edge for start, edge in PLANTED.items() if contract.name.startswith(start))
    assert importer in imports.modules
    planted = deepcopy(imports)
    assert contract.check(deepcopy(imports), verbose=False).kept
    if imported not in planted.modules:
        planted.add_module(imported, is_squashed=True)
    planted.add_import(importer=importer, imported=imported)
    assert not contract.check(planted, verbose=False).kept


def test_no_modules_import_each_other_in_a_circle(imports: grimp.ImportGraph) -> None:
    assert circles(imports) == []
    planted = deepcopy(imports)
    planted.add_import(importer="atroposlib.files", imported="atroposlib.config")
    assert ["atroposlib.config", "atroposlib.files"] in circles(planted)
