"""The simulation of many hosts: what its efficiency is made of, on eight GPUs."""

import random

import pytest

from benchmarks.hosts import measured
from benchmarks.hosts.__main__ import PARTS, figures_of
from benchmarks.hosts.simulate import KEYS, num_learning_gpus, simulate


@pytest.fixture(autouse=True)
def few_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of a quarter of the episodes: what waits and what overlaps stays the same."""
    monkeypatch.setattr(measured, "EPISODES_PER_GPU", 16)


def test_an_update_ahead_fills_eight_gpus_and_a_synchronous_run_waits_for_its_tail() -> None:
    ahead, synchronous = simulate(8), simulate(8, max_staleness=0)
    assert ahead.efficiency >= 0.95
    assert synchronous.efficiency < ahead.efficiency - 0.01
    assert ahead.efficiency <= 1.0


def test_gpus_that_only_learn_or_only_act_are_split_by_what_each_costs() -> None:
    assert num_learning_gpus(8) == 6
    assert simulate(8, 6).efficiency > simulate(8, 4).efficiency + 0.1


def test_lengths_of_episodes_have_the_mean_that_the_page_names() -> None:
    seeds = random.Random(0)
    drawn = [measured.num_decisions(seeds.getrandbits(62)) for _ in range(20_000)]
    assert max(drawn) == measured.MOST_DECISIONS
    assert sum(drawn) / len(drawn) == pytest.approx(25.0, abs=0.3)


def test_numbers_that_were_not_asked_for_are_null_with_the_reason() -> None:
    figures = figures_of([])
    keys = [key for keys in PARTS.values() for key in keys]
    assert set(KEYS) < set(keys)
    assert list(figures) == [*keys, "reasons"]
    assert all(figures[key] is None for key in keys)
    reasons = figures["reasons"]
    assert isinstance(reasons, dict)
    assert reasons["efficiency_8"] == "not asked for: --simulate"
