"""Choose the next schedule until there is none that could show something new.

Two schedules that differ only in the order of steps which have nothing to do with each other give
the same result. So the search follows C. Flanagan and P. Godefroid, "Dynamic partial-order
reduction for model checking software" (POPL 2005), with sleep sets: it runs a schedule to its end,
finds the steps that depend on each other and might have come the other way round, and tries that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.explore.scheduler import Event


@dataclass
class Node:
    """A place in a schedule: which session went on, and which have yet to be tried."""

    events: dict[int, Event]  # the next of each session that could go on
    asleep: dict[int, Event]
    chosen: int
    wanted: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass
class Search:
    """All schedules of a case, as far as `most` goes."""

    most: int
    tried: int = 0
    repeated: int = 0  # schedules that were given up, because another has shown the same
    diverged: int = 0  # a schedule that did not go as it did before
    over: bool = False
    stack: list[Node] = field(default_factory=list)
    cut: bool = False  # this schedule shows nothing new from here on

    def choose(self, events: list[Event], place: int) -> int:
        """Which of the sessions that could go on does; its position."""
        by_actor = {event.actor: event for event in events}
        actors = [event.actor for event in events]
        if place < len(self.stack):
            chosen = self.stack[place].chosen
            if chosen in by_actor:
                self.stack[place].events = by_actor
                return actors.index(chosen)
            self.diverged += 1
            del self.stack[place:]
        if self.cut:
            return 0
        asleep: dict[int, Event] = {}
        last = -1
        if self.stack:
            before = self.stack[-1]
            last = before.chosen
            taken = before.events[last]
            tried = {a: before.events[a] for a in before.done if a in before.events}
            asleep = {
                actor: event
                for actor, event in (before.asleep | tried).items()
                if actor != last and not event.depends(taken)
            }
        free = [actor for actor in actors if actor not in asleep]
        if not free:
            self.cut = True
            self.repeated += 1
            return 0
        chosen = last if last in free else free[0]
        self.stack.append(Node(by_actor, asleep, chosen, {chosen}))
        return actors.index(chosen)

    def learn(self, trace: list[Event]) -> None:
        """Note what a schedule has shown, and make ready for the next one."""
        self.tried += 1
        self.find_races(trace[: len(self.stack)])
        self.cut = False
        while self.stack:
            node = self.stack[-1]
            node.done.add(node.chosen)
            left = sorted(node.wanted - node.done - set(node.asleep))
            if left:
                node.chosen = left[0]
                break
            self.stack.pop()
        self.over = not self.stack or self.tried >= self.most

    @property
    def whole(self) -> bool:
        """Whether every schedule was tried that could differ."""
        return not self.stack

    def find_races(self, trace: list[Event]) -> None:
        before: list[int] = []  # for each step, a bit for each step that had to come before it
        last: dict[int, int] = {}
        for j, event in enumerate(trace):
            past = 0
            if event.actor in last:
                past = before[last[event.actor]] | 1 << last[event.actor]
            race = None
            known = past
            for i in range(j - 1, -1, -1):
                if known >> i & 1 or trace[i].actor == event.actor:
                    continue
                if trace[i].depends(event):
                    if race is None:
                        race = i
                    known |= before[i] | 1 << i
            before.append(known)
            last[event.actor] = j
            if race is not None:
                node = self.stack[race]
                if event.actor in node.events:
                    node.wanted.add(event.actor)
                else:
                    node.wanted |= set(node.events)
