"""The laws of growth, and the sums of the model, of tests/benchmarks/scale."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.scale.figures import MEASURED
from tests.benchmarks.scale.growth import law
from tests.benchmarks.scale.model import Estimate, Server, estimates, rounded

SIZES = (10, 100, 1_000, 10_000)


def test_a_law_is_that_of_what_is_added() -> None:
    assert law(dict.fromkeys(SIZES, 50.0)) == "constant"
    assert law({n: 50 + 20 * math.log10(n) for n in SIZES}) == "logarithmic"
    assert law({n: 1_000 + 0.5 * n for n in SIZES}) == "linear, 0.5 each"
    assert law({n: 1_000 + 0.01 * n for n in SIZES}) == "constant", "it adds a tenth"
    assert law({10: 40.0, 10_000: 54.0}) == "constant", "that is noise"
    assert law({10: 60.0, 10_000: 110.0}, "cpu") == "constant"


def test_the_least_limit_ends_first() -> None:
    server = Server(cores=10, usable=0.5, sync=100, sessions=2)
    assert server.by_cpu(50) == pytest.approx(100_000)
    assert server.by_sessions(100, 1) == pytest.approx(10_000)
    estimate = Estimate("work", {"this": 2_000.0, "that": 1_234.0}, "sums")
    assert estimate.first == "that"
    assert str(estimate).startswith("estimate: work: 1,200/s, then: that")
    assert rounded(87_654) == "88,000"


def test_the_model_computes_with_the_kept_figures() -> None:
    few, many = (list(estimates(MEASURED, Server(cores=cores))) for cores in (8, 64))
    assert len(few) == len(many) > 10
    for small, large in zip(few, many, strict=True):
        assert 0 < small.limits[small.first] <= large.limits[large.first], small
