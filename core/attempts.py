"""Which attempt of a request is the newest: how a role tells a late message from a new one.

Every message between roles names a `JobKey`. A role asks this book before it looks at its jobs;
what is older than the newest attempt it knows, or was closed here, is ignored and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from headrace.core.ids import JobKey, RequestId


class Verdict(StrEnum):
    NEW = "new"  # a request or an epoch not seen before
    CURRENT = "current"  # the newest epoch of its request, not closed here
    LATE = "late"  # an older epoch, or closed here


class Attempts:
    """The newest epoch of each of the last `bound` requests, and whether it was closed.

    Mutable, owned by one role. A forgotten request counts as new again; the bound must exceed the
    number of live jobs many times over, and nothing is held for a message but memory."""

    def __init__(self, bound: int = 8192) -> None:
        self._bound = bound
        self._newest: OrderedDict[RequestId, tuple[int, bool]] = OrderedDict()

    def look(self, key: JobKey) -> Verdict:
        """What `key` is; changes nothing."""
        known = self._newest.get(key.request_id)
        if known is None or key.epoch > known[0]:
            return Verdict.NEW
        if key.epoch < known[0] or known[1]:
            return Verdict.LATE
        return Verdict.CURRENT

    def begin(self, key: JobKey) -> Verdict:
        """The same answer; a new key becomes the newest of its request."""
        verdict = self.look(key)
        if verdict is Verdict.NEW:
            self._put(key, closed=False)
        return verdict

    def close(self, key: JobKey) -> None:
        """Nothing more is done here for `key`, known before or not. Idempotent."""
        if self.look(key) is not Verdict.LATE:
            self._put(key, closed=True)

    def __len__(self) -> int:
        return len(self._newest)

    def _put(self, key: JobKey, *, closed: bool) -> None:
        self._newest[key.request_id] = (key.epoch, closed)
        self._newest.move_to_end(key.request_id)
        while len(self._newest) > self._bound:
            self._newest.popitem(last=False)
