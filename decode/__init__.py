"""decode: owns a request until its last token; replays a bounded suffix instead of prefilling.

A `DecodeJob` reserves all blocks and a slot, then waits for a hand-off (`BlocksReady`,
`WindowReady`, `PrefillDone` of a prefill replica) or looks into the store itself; both are the
same objects. What verifies shortens the rows to run; what is missing or damaged is computed, and
the text is the same. Tokens of one step leave in one `TokenBatch` a router. Completed blocks, and
the window records that a next turn starts from, go to the store behind the request's back.
Where slots or blocks lack, streams take turns (`parking.py`): one is parked in the arena.
Begin at `role.py`; a job's states and the book of what came are in `handoff.py`.
"""

from headrace.decode.role import DecodeReplica, run_decode

__all__ = ["DecodeReplica", "run_decode"]
