"""The least time of an update, by hand, and what binds it."""

from dataclasses import replace

import pytest

from vla_rl.learner.estimates.device import STATE_PASS_BYTES, Workload, roofline, update_flops
from vla_rl.learner.estimates.rank_memory import PolicySize
from vla_rl.learner.estimates.traced_pass import Kept, TracedPass
from vla_rl.learner.flops import DevicePeak

TRACED = TracedPass(
    act_flops=100, update_flops=300, kept=Kept(inside=(), inputs=(), outside=0, largest=0)
)
SIZE = PolicySize(num_trained=10, num_frozen=40, bytes_each=2)
WORK = Workload(decisions=8, epochs=2, steps=4, acting_rows=4, recomputes=False)
PEAK = DevicePeak(flops=100.0, bytes_per_s=1000.0)


def test_arithmetic_and_memory_by_hand() -> None:
    found = roofline(TRACED, SIZE, WORK, PEAK)
    assert found.acting_s == pytest.approx(8.0)  # 8 x 100 / 100; two batches read 200 bytes
    assert found.acting_binds == "compute"
    assert found.learning_s == pytest.approx(48.0)  # 8 x 2 x 300 / 100
    assert found.optimizer_s == pytest.approx(4 * STATE_PASS_BYTES * 10 / 1000)
    assert found.seconds == pytest.approx(8.0 + 48.0 + 1.36)
    assert found.binds == "compute"


def test_recomputing_adds_a_pass_that_acts() -> None:
    assert update_flops(TRACED, recomputes=True) == 400
    found = roofline(TRACED, SIZE, replace(WORK, recomputes=True), PEAK)
    assert found.learning_s == pytest.approx(64.0)


def test_small_batches_read_the_weights_more_often_than_they_compute() -> None:
    # 8 batches of one row, 20 tokens each, 100 bytes of weights: 16 s
    found = roofline(TRACED, SIZE, replace(WORK, acting_rows=1, passes=20), PEAK)
    assert (found.acting_s, found.acting_binds) == (pytest.approx(16.0), "memory bandwidth")


def test_ranks_share_learning_and_not_acting() -> None:
    found = roofline(TRACED, SIZE, replace(WORK, ranks=4), PEAK)
    assert (found.acting_s, found.learning_s) == (pytest.approx(8.0), pytest.approx(12.0))
    assert found.optimizer_s == pytest.approx(0.34)


def test_simulators_bind_where_they_are_slower_than_the_device() -> None:
    work = replace(WORK, simulator_s=40.0, cores=4)  # 8 x 40 / 4 = 80 s
    found = roofline(TRACED, SIZE, work, PEAK)
    assert (found.simulators_s, found.seconds, found.binds) == (80.0, 80.0, "simulators")
    apart = roofline(TRACED, SIZE, replace(work, overlaps=False), PEAK)
    assert apart.seconds == pytest.approx(80.0 + 57.36)


def test_a_device_of_unknown_bandwidth_is_taken_by_its_arithmetic_alone() -> None:
    found = roofline(TRACED, SIZE, replace(WORK, passes=1000), DevicePeak(flops=100.0))
    assert (found.optimizer_s, found.acting_binds) == (0.0, "compute")
