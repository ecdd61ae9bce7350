"""What the model knows of limits of keys: fair, per_key_limit, per_key_interval, per_key_burst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hypothesis import strategies as st

# Of a new consumer: mostly none; and where histories are about limits.
_SOME: list[dict[str, Any]] = [
    {"per_key_limit": 1}, {"per_key_limit": 2}, {"fair": True},
    {"per_key_interval": "1 hour"}, {"per_key_interval": "2 hours", "per_key_burst": 2},
    {"per_key_limit": 2, "per_key_interval": "1 hour", "per_key_burst": 3, "fair": True},
]  # fmt: skip
LIMITS: Any = st.sampled_from([{}] * 8 + _SOME)
SOME_LIMITS: Any = st.sampled_from(_SOME)

# To a consumer that is in use.
CHANGES: Any = st.sampled_from([
    {"per_key_limit": 1}, {"per_key_limit": 3}, {"per_key_limit": None},
    {"fair": True}, {"fair": False},
    {"per_key_interval": "1 hour"}, {"per_key_interval": "2 hours", "per_key_burst": 2},
    {"per_key_interval": None}, {"per_key_interval": None, "per_key_burst": None},
    {"per_key_limit": None, "per_key_interval": None, "per_key_burst": None, "fair": None},
    {"max_deliver_count": 1}, {"max_deliver_count": 3}, {"max_deliver_count": None},
    {"max_deliver_count": "never"},
    {"backoff": "constant", "backoff_base": None, "backoff_cap": None},
    {"backoff": "linear", "backoff_base": "1 hour", "backoff_cap": "2 hours"},
])  # fmt: skip


@dataclass
class Limits:
    """The limits of a consumer, and what was delivered under them.

    Attributes:
        settings: as they were given, without those that are the default.
        most: messages of a key in flight, at most; more than the setting while something is ready
            that was assigned before it was changed.
        burst: likewise, of those in an interval.
        delivered: keys, and until when a delivery of them counts.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    most: float = inf
    burst: float = inf
    delivered: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settle()

    def __bool__(self) -> bool:
        return any(self.settings.get(s) for s in ("fair", "per_key_limit", "per_key_interval"))

    @property
    def hours(self) -> int:
        """The interval; 0: there is none."""
        return int((self.settings.get("per_key_interval") or "0").split()[0])

    @property
    def allowed(self) -> tuple[float, float]:
        """How many messages of a key may be in flight, and delivered in an interval."""
        burst = (self.settings.get("per_key_burst") or 1) if self.hours else inf
        return self.settings.get("per_key_limit") or inf, burst

    def contradictory(self, changes: dict[str, Any]) -> bool:
        """Whether the settings would contradict each other."""
        after = self.settings | changes
        return (after.get("per_key_burst") or 1) > 1 and not after.get("per_key_interval")

    def change(self, changes: dict[str, Any], clock: int) -> None:
        """New settings; what is ready stays as it was assigned."""
        self.settings = self.settings | changes
        most, burst = self.allowed
        self.most, self.burst = max(self.most, most), max(self.burst, burst)
        # (without an interval, none of them counts any longer)
        self.delivered = [(key, min(until, clock + self.hours)) for key, until in self.delivered]

    def settle(self) -> None:
        """Nothing is ready that was assigned under other settings."""
        self.most, self.burst = self.allowed

    def used(self, clock: int) -> Counter[str]:
        """By key, the deliveries that count."""
        self.delivered = [(key, until) for key, until in self.delivered if until > clock]
        return Counter(key for key, _ in self.delivered)

    def deliver(self, keys: Iterable[str | None], in_flight: Counter[Any], clock: int) -> None:
        """Messages of these keys are delivered together.

        Args:
            keys: of the messages.
            in_flight: by key, what is in claims before.
            clock: the time.
        """
        counts = Counter(key for key in keys if key is not None)
        used = self.used(clock)
        for key, n in counts.items():
            assert n + in_flight[key] <= self.most, (
                f"{n} of {key!r}, {in_flight[key]} in flight, limit {self.most}"
            )
            assert n + used[key] <= self.burst, (
                f"{n} of {key!r}, {used[key]} in {self.hours} h, burst {self.burst}"
            )
        if self.hours:
            self.delivered += [(key, clock + self.hours) for key in counts.elements()]

    def has_room(self, key: str | None, in_flight: Counter[Any], clock: int) -> bool:
        """Whether a message of this key may be delivered."""
        most, burst = self.allowed
        return key is None or (in_flight[key] < most and self.used(clock)[key] < burst)
