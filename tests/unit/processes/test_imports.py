import gc

import pytest

from atroposlib.processes.imports import collect_again, without_garbage_collection


def test_what_was_made_meanwhile_is_passed_over_by_the_collector_from_then_on() -> None:
    before = gc.get_freeze_count()
    with without_garbage_collection():
        assert not gc.isenabled()
        made: list[list[object]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), without_garbage_collection():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_on_passes_over_nothing() -> None:
    before = gc.get_freeze_count()
    collect_again()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
