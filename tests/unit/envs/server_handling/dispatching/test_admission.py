"""The gate of one server's requests."""

import pytest

from atroposlib.envs.server_handling.dispatching.admission import AdmissionGate


def test_a_gate_admits_as_many_as_its_capacity() -> None:
    gate = AdmissionGate(2)
    gate.take()
    gate.take()
    assert gate.free == 0
    with pytest.raises(RuntimeError, match="all 2 slots"):
        gate.take()


@pytest.mark.parametrize(("weight", "slots"), [(1.0, 30), (0.5, 15), (0.1, 3), (0.11, 4), (0.01, 1), (0.0, 0)])
def test_a_weight_leaves_its_share_of_the_slots_rounded_up(weight: float, slots: int) -> None:
    gate = AdmissionGate(30)
    gate.set_weight(weight)
    assert gate.limit == slots


def test_a_lowered_weight_admits_nobody_until_enough_have_left() -> None:
    gate = AdmissionGate(4)
    for _ in range(4):
        gate.take()
    gate.set_weight(0.5)
    gate.give_back()
    gate.give_back()
    assert gate.free == 0
    gate.give_back()
    assert gate.free == 1


def test_listeners_hear_of_freed_slots_and_weights() -> None:
    heard: list[int] = []
    gate = AdmissionGate(2)
    gate.listeners.append(lambda: heard.append(gate.free))
    gate.take()
    gate.give_back()
    gate.set_weight(0.5)
    assert heard == [2, 1]


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_a_weight_outside_0_to_1_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"outside 0..1"):
        AdmissionGate(2).set_weight(weight)
