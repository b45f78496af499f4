"""State tables: (state, event) -> state. Anything not written here raises with names.

Late and duplicate events have a written answer: they stand in the table's `ignored` set, leave
the state as it is and are counted by the caller (`Step.ignored`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from headrace.core.errors import IllegalTransition

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """Outcome of one event: the state after it, and whether the event was late or a duplicate."""

    state: S
    ignored: bool


class Stateful(Protocol[S]):
    """What a table can move."""

    state: S


class Over(Exception):
    """Something ended while its own task was on its way to the next state."""


class StateTable(Generic[S, E]):
    """An explicit automaton. Immutable; holds no instance state."""

    def __init__(
        self,
        name: str,
        transitions: Mapping[tuple[S, E], S],
        ignored: frozenset[tuple[S, E]] = frozenset(),
    ) -> None:
        both = [pair for pair in transitions if pair in ignored]
        if both:
            raise ValueError(f"{name}: both a transition and ignored: {both}")
        self.name = name
        self.transitions = dict(transitions)
        self.ignored = ignored
        self._steps = {pair: Step(target, ignored=False) for pair, target in transitions.items()}
        self._steps |= {pair: Step(pair[0], ignored=True) for pair in ignored}

    def step(self, state: S, event: E, who: object = "") -> Step[S]:
        """The answer to `event` in `state`. Raises `IllegalTransition` naming all three."""
        step = self._steps.get((state, event))
        if step is not None:
            return step
        raise IllegalTransition(f"{self.name} {who}: event {event} is impossible in state {state}")

    def move(self, what: Stateful[S], event: E, who: object = "") -> bool:
        """Step `what.state`; False when the event was late or a duplicate. Raises as `step`."""
        step = self.step(what.state, event, who)
        what.state = step.state
        return not step.ignored

    def advance(self, what: Stateful[S], event: E, who: object = "") -> None:
        """`move`, for a step that the task of `what` decided on. Raises `Over` when it was late:
        `what` had ended under its task."""
        if not self.move(what, event, who):
            raise Over


class RequestState(StrEnum):
    """A request as its router sees it. Exactly one terminal event reaches the client."""

    ACCEPTED = "accepted"  # validated and tokenised
    PREFILLING = "prefilling"  # a prefill replica runs rows for it; no decode replica knows of it
    BINDING = "binding"  # prefill wants a decode replica; one is being chosen, or waited for
    HANDING_OFF = "handing_off"  # both have it; not everything was announced yet
    DECODING = "decoding"  # a decode replica owns it; no byte was sent yet
    STREAMING = "streaming"  # at least one byte reached the client, or the request was resumed
    RESUMING = "resuming"  # tokens came, then decode was lost; another attempt goes on from them
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestEvent(StrEnum):
    SENT_TO_PREFILL = "sent_to_prefill"
    DECODE_WANTED = "decode_wanted"  # the first PrefillProgress
    SENT_TO_DECODE = "sent_to_decode"  # with a prefill: bound to it
    PREFILL_DONE = "prefill_done"
    TOKENS = "tokens"
    REBIND = "rebind"  # decode was lost before its first token, its prefill was not
    RETRY = "retry"  # another attempt, under a new epoch, from the first token on
    RESUME = "resume"  # another attempt, under a new epoch, that goes on after the tokens received
    FINISH = "finish"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


_R, _E = RequestState, RequestEvent
TERMINAL_REQUEST_STATES = frozenset({_R.FINISHED, _R.FAILED, _R.CANCELLED})
_LIVE = tuple(state for state in _R if state not in TERMINAL_REQUEST_STATES)
UNSENT_REQUEST_STATES = frozenset({_R.PREFILLING, _R.BINDING, _R.HANDING_OFF, _R.DECODING})

REQUEST_TABLE: StateTable[RequestState, RequestEvent] = StateTable(
    "request",
    {
        (_R.ACCEPTED, _E.SENT_TO_PREFILL): _R.PREFILLING,
        (_R.ACCEPTED, _E.SENT_TO_DECODE): _R.DECODING,
        (_R.PREFILLING, _E.DECODE_WANTED): _R.BINDING,
        (_R.PREFILLING, _E.SENT_TO_DECODE): _R.HANDING_OFF,  # bound early
        (_R.BINDING, _E.SENT_TO_DECODE): _R.HANDING_OFF,
        (_R.HANDING_OFF, _E.PREFILL_DONE): _R.DECODING,
        (_R.HANDING_OFF, _E.REBIND): _R.BINDING,
        (_R.DECODING, _E.REBIND): _R.BINDING,
        # Tokens may overtake the prefill's own report.
        **{(s, _E.TOKENS): _R.STREAMING for s in (_R.HANDING_OFF, _R.DECODING, _R.STREAMING)},
        **{(s, _E.RETRY): _R.ACCEPTED for s in UNSENT_REQUEST_STATES},
        **{(s, _E.RESUME): _R.RESUMING for s in (_R.HANDING_OFF, _R.DECODING, _R.STREAMING)},
        (_R.RESUMING, _E.RESUME): _R.RESUMING,  # lost again before anything was sent out
        (_R.RESUMING, _E.TOKENS): _R.RESUMING,  # of the former attempt, on their way to the client
        (_R.RESUMING, _E.SENT_TO_PREFILL): _R.STREAMING,
        (_R.RESUMING, _E.SENT_TO_DECODE): _R.STREAMING,
        # A resumed attempt with a prefill of its own stays what it is for the client.
        **{
            (_R.STREAMING, e): _R.STREAMING
            for e in (_E.DECODE_WANTED, _E.SENT_TO_DECODE, _E.PREFILL_DONE, _E.REBIND)
        },
        **{(s, _E.FINISH): _R.FINISHED for s in _LIVE[1:]},
        **{(s, _E.ERROR): _R.FAILED for s in _LIVE},
        **{(s, _E.CLIENT_GONE): _R.CANCELLED for s in _LIVE},
    },
    ignored=frozenset(
        {(s, e) for s in TERMINAL_REQUEST_STATES for e in _E}
        # Prefill asks again until it is answered.
        | {(s, _E.DECODE_WANTED) for s in (_R.BINDING, _R.HANDING_OFF, _R.DECODING)}
        | {(_R.DECODING, _E.PREFILL_DONE)}
    ),
)


class Visibility(StrEnum):
    """Who can see a stored object. Each step is taken only after the bytes are where it says."""

    RESERVED = "reserved"  # a writer owns the arena slot; nobody may read
    SEALED = "sealed"  # bytes and checksum in the arena, readable by every process of the host
    LISTED = "listed"  # in the Redis index
    DURABLE = "durable"  # after the group sync of its segment
    DROPPED = "dropped"

    __hash__ = str.__hash__  # an Enum's own is a call of Python, and each block asks a dozen times


class VisibilityEvent(StrEnum):
    SEAL = "seal"
    LIST = "list"
    SYNC = "sync"
    UNLIST = "unlist"  # Redis lost it; the bytes are still there
    DROP = "drop"

    __hash__ = str.__hash__


_V, _W = Visibility, VisibilityEvent
VISIBILITY_TABLE: StateTable[Visibility, VisibilityEvent] = StateTable(
    "object",
    {
        (_V.RESERVED, _W.SEAL): _V.SEALED,
        (_V.SEALED, _W.LIST): _V.LISTED,
        (_V.SEALED, _W.SYNC): _V.DURABLE,  # Redis was away: durable first, listed by a rebuild
        (_V.LISTED, _W.SYNC): _V.DURABLE,
        (_V.LISTED, _W.UNLIST): _V.SEALED,
        **{(s, _W.DROP): _V.DROPPED for s in (_V.RESERVED, _V.SEALED, _V.LISTED, _V.DURABLE)},
    },
    ignored=frozenset(
        {(_V.DROPPED, e) for e in _W}
        | {(s, _W.SEAL) for s in (_V.SEALED, _V.LISTED, _V.DURABLE)}  # a second writer: first wins
        | {(_V.LISTED, _W.LIST), (_V.DURABLE, _W.LIST), (_V.DURABLE, _W.SYNC)}
        | {(_V.SEALED, _W.UNLIST), (_V.DURABLE, _W.UNLIST)}
    ),
)


class Grant(StrEnum):
    """An arena slot that a client holds in advance of what it will put there."""

    HELD = "held"  # the client may write it; nobody else may have it
    FILLED = "filled"  # its object is known, or another writer was first
    ENDED = "ended"  # the slot is blank and the store's own again


class GrantEvent(StrEnum):
    COMMIT = "commit"  # the client has written payload and header
    GIVE_BACK = "give_back"
    EXPIRE = "expire"  # held for too long: whoever holds it forgot, or stands still
    CLOSE = "close"  # the client's connection has ended


_G, _H = Grant, GrantEvent
GRANT_TABLE: StateTable[Grant, GrantEvent] = StateTable(
    "grant",
    {
        (_G.HELD, _H.COMMIT): _G.FILLED,
        **{(_G.HELD, e): _G.ENDED for e in (_H.GIVE_BACK, _H.EXPIRE, _H.CLOSE)},
    },
    # A client learns only from its connection's end that its slots were taken away.
    ignored=frozenset({(s, e) for s in (_G.FILLED, _G.ENDED) for e in _H}),
)


class ReplicaState(StrEnum):
    """A replica as routers and the supervisor see it."""

    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"  # socket closed or lease missed; gets no new work
    DRAINING = "draining"  # finishes what it has
    GONE = "gone"


class ReplicaEvent(StrEnum):
    WARM = "warm"
    LOST = "lost"
    BACK = "back"
    DRAIN = "drain"
    LEFT = "left"


_P, _Q = ReplicaState, ReplicaEvent
REPLICA_TABLE: StateTable[ReplicaState, ReplicaEvent] = StateTable(
    "replica",
    {
        (_P.JOINING, _Q.WARM): _P.READY,
        (_P.READY, _Q.LOST): _P.SUSPECT,
        (_P.JOINING, _Q.LOST): _P.SUSPECT,
        (_P.SUSPECT, _Q.BACK): _P.READY,
        (_P.READY, _Q.DRAIN): _P.DRAINING,
        (_P.JOINING, _Q.DRAIN): _P.DRAINING,
        (_P.SUSPECT, _Q.DRAIN): _P.DRAINING,
        **{(s, _Q.LEFT): _P.GONE for s in (_P.JOINING, _P.READY, _P.SUSPECT, _P.DRAINING)},
    },
    ignored=frozenset(
        {(_P.GONE, e) for e in _Q}
        | {(_P.READY, _Q.WARM), (_P.READY, _Q.BACK), (_P.SUSPECT, _Q.LOST)}
        | {(_P.DRAINING, e) for e in (_Q.DRAIN, _Q.LOST, _Q.BACK, _Q.WARM)}
        | {(_P.JOINING, _Q.BACK), (_P.SUSPECT, _Q.WARM)}
    ),
)
