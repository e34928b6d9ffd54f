"""The vLLM server refuses every release outside the supported range, before it imports vLLM."""

import pytest
from packaging.version import Version

from vllm_patching import version


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1", "0.32.0", "0.33.0", "0.33.1+cu130"])
def test_releases_of_the_range_are_taken(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(version, "VERSION", Version(release))
    version.check_version()


@pytest.mark.parametrize("release", ["0.25.1", "0.26.0rc2", "0.34.0rc1", "0.34.0.dev5+gabc", "0.34.0", "1.0"])
def test_others_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(version, "VERSION", Version(release))
    with pytest.raises(version.UnsupportedVllm, match=r"outside the supported 0\.26 <= version < 0\.34") as refused:
        version.check_version()
    assert f"vLLM {release} is" in str(refused.value)
