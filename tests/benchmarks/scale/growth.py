"""By which law a cost grows: constant, logarithmic or linear."""

from __future__ import annotations

import math
from collections.abc import Mapping

CONSTANT = {"cpu": 2.0, "blocks": 1.3}
"""What grows by less than this factor over the whole series is constant. The CPU of the same call
differs by up to a half, as other programs take turns with it in the caches."""

NOISE = {"cpu": 100.0, "blocks": 15.0}
"""So is what grows by less than this."""

LINEAR = 0.45
"""The exponent of the growth itself, in the last step, from which on it is linear."""


def law(series: Mapping[int, float], measure: str = "blocks") -> str:
    """The law of a series, by size.

    A linear cost `a + b n` grows ten times as much in each decade as in the one before, a
    logarithmic one as much. So the exponent of what was added says which it is, whatever `a` is.
    """
    sizes = sorted(series)
    values = [max(series[n], 0.0) for n in sizes]
    within = max(values[0] * CONSTANT[measure], values[0] + NOISE[measure])
    if len(sizes) < 2 or values[-1] <= within:
        return "constant"
    added = values[-1] - values[0]
    before = values[-2] - values[0]
    per_decade = math.log10(sizes[-1] / sizes[-2])
    if len(sizes) > 2 and before > 0 and math.log10(added / before) / per_decade < LINEAR:
        return "logarithmic"
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return f"linear, {slope:.3g} each"
