"""Lines that are alike are shown once a minute."""

from atropos_launcher.console.rate_limit import Repeated


def test_alike_lines_are_counted_and_none_is_lost() -> None:
    now = [0.0]
    repeated = Repeated(lambda: now[0])
    assert [repeated.thinned(f"WARNING queue has {n}") for n in range(4)] == ["WARNING queue has 0", None, None, None]
    assert repeated.thinned("WARNING other") == "WARNING other"
    now[0] = 61.0
    assert repeated.thinned("WARNING queue has 9") == "WARNING queue has 9 (3 more like it before)"
    assert repeated.thinned("WARNING queue has 10") is None
    assert repeated.rest() == ["WARNING queue has 10 (earlier)"]
    for n in range(3):
        assert repeated.thinned(f"WARNING queue has {n}") is None
    assert repeated.rest() == ["WARNING queue has 2 (earlier, with 2 more like it before)"]
    assert repeated.rest() == []
