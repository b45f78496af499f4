"""prefill: runs encoder rows of long prompts and hands their blocks to a decode replica.

A `PrefillJob` becomes rows in an engine of the encoder half. Complete blocks and the window record
at p are sealed in the host's arena under a lease of the job and announced to decode at once
(`BlocksReady`, `WindowReady`, `PrefillDone`); neither Redis nor a disk is on the way. What the
store already has is announced without running a row. A prefill replica never retries: it reports
a failure to decode and router, and what it sealed is found by the next attempt.
Begin at `role.py`; the states of a job are a table in `jobs.py`, the formulas in `core.rows`.
"""

from headrace.prefill.role import PrefillReplica, run_prefill

__all__ = ["PrefillReplica", "run_prefill"]
