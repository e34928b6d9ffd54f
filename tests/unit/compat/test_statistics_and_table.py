"""`get_std_min_max_avg` and `display_metrics_table`, under the paths that users of 0.4.0 import."""

import math

import pytest

from atroposlib.utils.display import display_metrics_table  # an old path
from atroposlib.utils.metrics import get_std_min_max_avg  # an old path


def test_statistics_are_added_to_the_metrics_that_are_given() -> None:
    metrics = {"other": 1}
    assert get_std_min_max_avg("t", [1.0, 2.0, 6.0], metrics) is metrics
    expected = {"other": 1, "t_mean": 3.0, "t_std": math.sqrt(14 / 3), "t_max": 6.0, "t_min": 1.0}
    assert metrics == pytest.approx(expected)
    assert get_std_min_max_avg("t", [], {}) == {}


def test_a_table_of_metrics_is_printed_without_their_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    display_metrics_table("gsm8k_eval", {"eval/percent_correct": 0.51234}, start_time=10.0, end_time=12.5)
    shown = capsys.readouterr().out
    assert "gsm8k_eval, 2.50 s" in shown
    assert "| percent correct | 0.5123 |" in shown
