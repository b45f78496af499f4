"""What may happen next in a world, how it happens, and what must be true after every step."""

from __future__ import annotations

from typing import Any

from headrace.core.states import TERMINAL_REQUEST_STATES, RequestEvent
from headrace.decode.handoff import DecodeEvent, DecodeState
from headrace.prefill.binding import BindState
from headrace.prefill.jobs import JobState

R, P, D = "router", "prefill", "decode"


def enabled(world: Any, most: dict[str, int]) -> list[str]:
    """Names of the next steps, faults as long as there are fewer than `most` of their kind."""
    names = [f"deliver {a} {b}" for (a, b), link in world.links.items() if link]
    for key, job in world.prefill.jobs.items():
        names += [f"seal {key.request_id}"] * (job.state is JobState.RUNNING)
        names += [f"told {key.request_id}"] * (job.state is JobState.SEALING)
    for key, job in world.decode.jobs.items():
        ready = job.state is DecodeState.LOADING and job.writing is None
        names += [f"loaded {key.request_id}"] * (job.writing is not None)
        names += [f"start {key.request_id}"] * ready
        names += [f"answer {key.request_id}"] * (job.state is DecodeState.REPLAYING)
    names += ["orphan"] * bool(world.orphans)
    for ticket in world.tickets.values():
        if ticket.state not in TERMINAL_REQUEST_STATES:
            names.append(f"abort {ticket.request}")
    names += ["crash prefill", "crash decode", "timeout"]
    return [n for n in names if world.used.get(n.split()[0], 0) < most.get(n.split()[0], 99)]


def do(world: Any, name: str) -> None:
    """One step and a look at the invariants. Raises what the parts raise, and `AssertionError`."""
    again(world, name)
    check(world)


def again(world: Any, name: str) -> None:
    """One step without the look."""
    what, *about = name.split()
    world.used[what] = world.used.get(what, 0) + (what in ("abort", "crash", "timeout"))
    if what == "deliver":
        kind, key = world.links[about[0], about[1]].popleft()
        getattr(world, f"{about[1]}_hears")(about[0], kind, key)
    elif what in ("seal", "told"):
        job = _one(world.prefill.jobs, about[0])
        world.seal(job) if what == "seal" else world.all_sealed(job)
    elif what in ("loaded", "start", "answer"):
        getattr(world, what)(_one(world.decode.jobs, about[0]))
    elif what == "orphan":
        ticket, block = world.orphans.pop(0)
        world.engine.guard.leave(ticket, block, complete=True)
        world.admit()
    elif what == "abort":
        ticket = world.tickets[about[0]]
        world.move(ticket, RequestEvent.CLIENT_GONE)
        world.withdraw(ticket)
    elif what == "crash":
        crash(world, about[0])
    else:
        timeout(world)


def crash(world: Any, part: str) -> None:
    """SIGKILL: what it knew and what was on its links is gone, its peers see them close."""
    for pair, link in world.links.items():
        if part in pair:
            link.clear()
    if part == P:
        world.new_prefill()
        for job in list(world.decode.jobs.values()):
            world.end_decode(job, DecodeEvent.PREFILL_GONE)
    else:
        world.new_decode()
        for job in list(world.prefill.jobs.values()):
            world.decode_gone(job)
    for ticket in world.tickets.values():
        world.lost(ticket, part)


def timeout(world: Any) -> None:
    """A lease time passes. Who lives has renewed its leases; a live prefill job shows that to the
    decode job that it is bound to, or asks its router once more."""
    world.clock.advance(31.0)
    for key in (*world.prefill.jobs, *world.decode.jobs):
        world.store.renew(key)
    world.store.expire()
    world.early.expire(world.clock.now_s())
    bound = {
        job.binding.decode_key
        for job in world.prefill.jobs.values()
        if job.binding.state is BindState.BOUND and not job.binding.told
    }
    waits = (DecodeState.QUEUED_OPEN, DecodeState.AWAITING)
    for key, job in list(world.decode.jobs.items()):
        if job.state in waits and key not in bound:
            world.end_decode(job, DecodeEvent.STALLED)
    for key, job in world.prefill.jobs.items():
        if job.binding.state is BindState.ASKED or job.binding.told:
            world.links[P, R].append(("wanted", key))


def check(world: Any) -> None:
    """True in every state: one owner a block and slot, one end a request."""
    leases = [job.lease for job in world.decode.jobs.values() if job.lease is not None]
    world.engine.reclaim()
    world.engine.blocks.check([block for lease in leases for block in lease.blocks])
    world.engine.slots.check([lease.slot for lease in leases])
    own = [block for lease in leases for block in lease.blocks[lease.n_shared :]]
    assert len(own) == len(set(own)), "a block has two owners"
    written = {block for _, block in world.orphans}
    assert not written & set(own), "a block is somebody's while another writes into it"
    assert all(ticket.ends <= 1 for ticket in world.tickets.values()), "two ends"


def check_end(world: Any) -> None:
    """Nothing more happens by itself. After lease times, too, there is nothing left."""
    for _ in range(8):
        while names := enabled(world, {"abort": 0, "crash": 0, "timeout": 0}):
            do(world, names[0])
        do(world, "timeout")
    for ticket in world.tickets.values():
        assert ticket.ends == 1, f"{ticket.request} is {ticket.state} for ever"
    assert not world.prefill.jobs and not world.decode.jobs, "a job for ever"
    assert len(world.store) == 0, "a lease for ever"
    assert len(world.early) == 0, "a frame for ever"
    pool, slots = world.engine.blocks, world.engine.slots
    assert (pool.n_available, slots.n_free) == (pool.n_blocks, slots.n_slots), "held for ever"


def fingerprint(world: Any) -> tuple[Any, ...]:
    """Everything that decides what can still happen. Worlds with one are the same world."""
    now = world.clock.now_s()
    return (
        tuple(
            (t.state, t.epoch, t.tries, t.ends, t.told, t.prefill, t.decode)
            for t in world.tickets.values()
        ),
        tuple(tuple(link) for link in world.links.values()),
        tuple(
            (k, j.state, j.binding.state, j.binding.message, j.binding.told, len(j.product), j.sent)
            for k, j in world.prefill.jobs.items()
        ),
        tuple(
            (k, j.state, j.writing, j.waiting, tuple(j.lease.blocks) if j.lease else None,
             j.lease.n_shared if j.lease else None, tuple(j.handoff.here))
            for k, j in world.decode.jobs.items()
        ),
        tuple(sorted((k, v) for k, v in world.prefill.attempts._newest.items())),
        tuple(sorted((k, v) for k, v in world.decode.attempts._newest.items())),
        tuple(sorted((k, le.expires_s - now) for k, le in world.store._leases.items())),
        tuple(sorted((k, until - now) for k, until in world.store._over.items())),
        tuple((k, since - now, len(m)) for k, (since, m) in world.early._held.items()),
        tuple(block for _, block in world.orphans),
        tuple(sorted(world.engine.blocks._by_digest.items())),
        tuple(sorted(world.used.items())),
    )  # fmt: skip


def _one(jobs: dict[Any, Any], request: str) -> Any:
    return next(job for key, job in jobs.items() if key.request_id == request)
