"""How idle OpenMP threads of the trainer and of vLLM wait: what the environment says, by the OpenMP that is loaded."""

import os

from example_trainer.openmp import WAITING, waiting


def test_threads_of_libgomp_spin_for_a_bounded_time() -> None:
    assert waiting({}) == {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "6000"}


def test_intels_library_which_knows_no_count_does_not_spin_for_ever() -> None:
    preloaded = {"LD_PRELOAD": "/usr/lib/libtcmalloc.so:/opt/libiomp5.so"}
    assert waiting(preloaded) == {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "1"}


def test_the_process_and_its_children_have_the_variables() -> None:
    assert WAITING.keys() <= os.environ.keys()
