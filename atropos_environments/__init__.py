"""The environments of the checkout, under the name that a wheel installs `environments/` by."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[1] / "environments")]
