"""engine: one replica's step loop over a model; knows sequences, not networks.

`load_engine` makes an `Engine` for a deployment. A `Job` is admitted (`Admission` names the blocks
to fill from outside), started with a `RowPlan` of `headrace.core.rows`, and stepped; every step
is `plan = scheduler.plan(); result = runner.run(plan); events = scheduler.advance(result)`, and
`release` ends it. `Half.ENCODER` makes blocks and window records, `Half.FULL` goes on to tokens.
`EngineDriver` runs an engine in a thread beside an asyncio loop. `LLM` is the `all` role in one
process, offline: the yardstick that other ways to the same text are compared with.
"""

from headrace.engine.driver import EngineDriver
from headrace.engine.engine import BlockWriter, Engine
from headrace.engine.errors import EngineDamaged, NotANumber
from headrace.engine.give_way import Holder, Room, Way, give_way
from headrace.engine.jobs import (
    Admission,
    BlockDone,
    EngineStats,
    Event,
    Fill,
    Job,
    RowsDone,
    SequenceFailed,
    TokenSampled,
    WindowDone,
)
from headrace.engine.llm import LLM, Completion
from headrace.engine.load import load_engine, one_thread_on_cpu, resolve_numerics
from headrace.engine.pictures import Picture, PictureRows, spans_to_run
from headrace.engine.settings import EngineSettings, Half

__all__ = [
    "LLM",
    "Admission",
    "BlockDone",
    "BlockWriter",
    "Completion",
    "Engine",
    "EngineDamaged",
    "EngineDriver",
    "EngineSettings",
    "EngineStats",
    "Event",
    "Fill",
    "Half",
    "Holder",
    "Job",
    "NotANumber",
    "Picture",
    "PictureRows",
    "Room",
    "RowsDone",
    "SequenceFailed",
    "TokenSampled",
    "Way",
    "WindowDone",
    "give_way",
    "load_engine",
    "one_thread_on_cpu",
    "resolve_numerics",
    "spans_to_run",
]
