"""Shares: how the clients of one queue divide it, so that none waits for the flood of another.

A server knows its clients by their API keys, and a request is in one of two lanes: *interactive* if
somebody waits for its answer, else *bulk*. A `Share` is a client in a lane.

Between the shares of a lane the order is that of start-time fair queueing (Goyal, Vin and Cheng,
1996), counted in tokens: every share has a virtual time, the tokens it has had, and the one that is
furthest behind goes next. A share that begins to wait starts at the virtual time at which the last
batch of its lane began, so that absence earns it at most a part of one batch. Every sequence of a
batch is chosen this way: a share that had less than its part gets into the very next batch, however
much the others have waiting.

Between the lanes: interactive requests go first, in batches of their own, which end sooner than
full ones. While bulk waits it is credited a ninth of the tokens of each interactive batch; when the
credit covers its next batch, that batch runs. So bulk keeps a tenth of the device under any load.

Of a limited amount, such as the tokens that may wait, a share may hold up to twice what is still
free (dynamic thresholds, Choudhury and Hahne, 1998): two thirds if it is alone, two fifths each if
there are two. So some is free at any time for the next client.

Nothing here locks or waits: `Admission` does, and the event loop of a server needs neither.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

BULK_PART = 9  # tokens of interactive batches for each token that bulk is owed
HOLD = 2  # a share may hold so many times what is free of a limited amount


class Share(NamedTuple):
    """A client in a lane; the queue is divided between these."""

    client: str = ""
    bulk: bool = False


class Ticket(NamedTuple):
    """Whose a request is, and until when its answer is of use."""

    share: Share | None = None  # None: the queue is not divided
    deadline: float = math.inf  # by `time.monotonic`; an answer after it is of no use


class Waiting(Hashable, Protocol):
    """An item of a `FairQueue`."""

    @property
    def tokens(self) -> int:
        """Its length."""
        ...


W = TypeVar("W", bound=Waiting)


def may_take(held: float, free: float) -> bool:
    """Return whether a share that holds `held` of a limited amount may take more of the rest."""
    return not held or held < HOLD * free


class FairLimit:
    """A limited amount that shares take parts of and give back; see the module for its rule."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: Counter[Share] = Counter()

    def has_room(self, share: Share | None, amount: int = 1) -> bool:
        """Return whether a share may take this amount; None is bound by the limit alone."""
        free = self.limit - self.used
        return amount <= free and (share is None or may_take(self._held[share], free))

    def take(self, share: Share | None, amount: int = 1) -> None:
        """Take an amount; `has_room` is not asked again."""
        self.used += amount
        if share is not None:
            self._held[share] += amount

    def give_back(self, share: Share | None, amount: int = 1) -> None:
        """Give back what was taken."""
        self.used -= amount
        if share is not None:
            self._held[share] -= amount
            if not self._held[share]:
                del self._held[share]


class ShareLedger:
    """What each share has waiting and what it has had; decides whose turn it is."""

    def __init__(self) -> None:
        self.tokens: Counter[Share] = Counter()  # that wait
        self.requests: Counter[Share] = Counter()  # inputs that wait
        self.bulk_tokens = 0  # that wait
        self.interactive_at = -math.inf  # when the last interactive request came
        self.changed_at = -math.inf  # when the last one came that was of another share than before
        self._last: Share | None = None
        self._times: dict[Share | None, float] = {}  # virtual: tokens that a share has had
        self._began = [0.0, 0.0]  # virtual time at which the last batch of each lane began
        self._owed = 0.0  # tokens that bulk has earned

    def add(self, share: Share | None, tokens: int, requests: int = 0) -> None:
        """Count what begins to wait; with negative numbers, what ends it."""
        if share is None:
            return
        for counts, number in ((self.tokens, tokens), (self.requests, requests)):
            counts[share] += number
            if not counts[share]:
                del counts[share]
        if share.bulk:
            self.bulk_tokens += tokens

    def arrive(self, share: Share | None, now: float) -> None:
        """Note that a request came."""
        if share != self._last:
            if self._last is not None:
                self.changed_at = now
            self._last = share
        if not _is_bulk(share):
            self.interactive_at = now

    def activate(self, share: Share | None) -> None:
        """Let a share that had nothing in a queue take its turn among those that have."""
        self._times[share] = max(self.turn(share), self._began[_is_bulk(share)])

    def turn(self, share: Share | None) -> float:
        """Return the virtual time of a share; the least goes first."""
        return self._times.get(share, 0.0)

    def begin(self, share: Share | None) -> None:
        """Note that a batch begins, of which this share has the first turn."""
        lane = _is_bulk(share)
        self._began[lane] = max(self._began[lane], self.turn(share))

    def charge(self, share: Share | None, tokens: int) -> float:
        """Count tokens that run, and return the new virtual time of the share."""
        time = self._times[share] = self.turn(share) + tokens
        return time

    def settle(self, bulk: bool, tokens: int) -> None:
        """Count a batch of a lane towards what bulk is owed."""
        if bulk:
            self._owed = max(0.0, self._owed - tokens)
        else:
            self._owed = self._owed + tokens / BULK_PART if self.bulk_tokens else 0.0

    def owes_bulk(self, batch_tokens: int) -> bool:
        """Return whether bulk has earned a batch of what waits of it, which then goes first."""
        return self._owed >= min(batch_tokens, self.bulk_tokens) > 0

    def tokens_ahead(self, share: Share | None, tokens: float, waiting: int) -> float:
        """Return how many tokens run until this many more of a share have, those included.

        `waiting` are all tokens that wait, of which the ledger knows those with a share.
        """
        unknown = max(0, waiting - sum(self.tokens.values()))
        own = tokens + (0 if share is None else self.tokens[share])
        lane = own + min(unknown, own) * (not _is_bulk(share))
        for other, held in self.tokens.items():
            if other != share and other.bulk == _is_bulk(share):
                lane += min(held, own)  # of others, no more runs before than of this share
        if _is_bulk(share):
            return lane + min(waiting - self.bulk_tokens, BULK_PART * lane)
        return lane + min(self.bulk_tokens, lane / BULK_PART)


class FairQueue(Generic[W]):
    """What waits in one queue, by share."""

    def __init__(self, ledger: ShareLedger) -> None:
        self.ledger = ledger
        self.tokens = 0
        self._length = 0
        # Ordered dictionaries as sets: anything is removed, and the first read, in constant time.
        self._waiting: dict[Share | None, OrderedDict[W, None]] = {}

    def __len__(self) -> int:
        return self._length

    def add(self, share: Share | None, item: W) -> None:
        """Add an item behind those of its share."""
        items = self._waiting.get(share)
        if items is None:
            items = self._waiting[share] = OrderedDict()
            self.ledger.activate(share)
        items[item] = None
        self._length += 1
        self.tokens += item.tokens

    def remove(self, share: Share | None, item: W) -> bool:
        """Remove an item; return whether it was here."""
        items = self._waiting.get(share)
        if items is None or item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[share]
        self._length -= 1
        self.tokens -= item.tokens
        return True

    def firsts(self) -> Iterator[W]:
        """Yield the item of each share that waits longest."""
        return (next(iter(items)) for items in self._waiting.values())

    def turn(self) -> float:
        """Return the virtual time of the share that is furthest behind."""
        return min(map(self.ledger.turn, self._waiting))

    def fill(self, pack: Callable[[W], bool], limit: float) -> None:
        """Offer items to `pack` by turns, until it takes the next one of no share.

        Or until it has taken `limit` tokens, but at least one item.
        A share whose next item does not fit waits for the next batch, which begins with it.
        """
        turns = [
            (self.ledger.turn(share), number, share) for number, share in enumerate(self._waiting)
        ]
        heapq.heapify(turns)  # the number, because shares have no order
        self.ledger.begin(turns[0][2])
        rest = limit
        while turns:
            _, number, share = turns[0]
            item = next(iter(self._waiting[share]))
            is_too_long = item.tokens > rest and rest < limit
            if is_too_long or not pack(item):
                heapq.heappop(turns)
                continue
            rest -= item.tokens
            self.remove(share, item)
            turn = self.ledger.charge(share, item.tokens)
            if share in self._waiting:
                heapq.heapreplace(turns, (turn, number, share))
            else:
                heapq.heappop(turns)


def _is_bulk(share: Share | None) -> bool:
    return share is not None and share.bulk
