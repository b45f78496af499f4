"""All state tables of the rooms: every pair of state and event has an answer, and ends are ends."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import IllegalTransition
from headrace.core.states import Over, StateTable

# A table that is not listed here is not looked at: the first test compares this with the sources.
MODULES = {
    "core.states": {"request", "object", "grant", "replica"},
    "decode.handoff": {"decode job"},
    "engine.sequence": {"sequence"},
    "prefill.binding": {"bind"},
    "prefill.jobs": {"prefill job"},
    "vision.jobs": {"vision job"},
}


def tables_of(module: str) -> list[StateTable[Any, Any]]:
    names = vars(importlib.import_module(f"headrace.{module}")).items()
    return [one for name, one in names if name.endswith("_TABLE") and isinstance(one, StateTable)]


TABLES = [table for module in MODULES for table in tables_of(module)]
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


@dataclass
class Holder:
    state: StrEnum


def kinds(table: StateTable[Any, Any]) -> tuple[type[StrEnum], type[StrEnum]]:
    """The enumerations of its states and events."""
    state, event = next(iter(table.transitions))
    return type(state), type(event)


def test_every_table_of_the_rooms_is_looked_at(python_sources: dict[Path, str]) -> None:
    made = {
        ".".join(path.with_suffix("").parts)
        for path, source in python_sources.items()
        if "] = StateTable(" in source and path.parts[0] not in ("tests", "bench")
    }
    assert made == set(MODULES)
    assert {module: {t.name for t in tables_of(module)} for module in MODULES} == MODULES


@every_table
def test_every_pair_moves_is_ignored_or_raises_with_names(table: StateTable[Any, Any]) -> None:
    states, events = kinds(table)
    moved = ignored = refused = 0
    for state in states:
        for event in events:
            holder = Holder(state)
            try:
                news = table.move(holder, event, "r#0")
            except IllegalTransition as error:
                refused += 1
                assert all(word in error.message for word in (table.name, state, event, "r#0"))
                assert holder.state is state
            else:
                moved += news
                ignored += not news
                step = table.step(state, event)
                assert (step.state, step.ignored) == (holder.state, not news)
                assert news or holder.state is state
    assert (moved, ignored) == (len(table.transitions), len(table.ignored))
    assert moved + ignored + refused == len(states) * len(events)


@every_table
def test_every_state_but_the_first_is_reached_by_some_event(table: StateTable[Any, Any]) -> None:
    states, _ = kinds(table)
    first = next(iter(states))
    entered = {target for (state, _), target in table.transitions.items() if state is not target}
    assert entered | {first} == set(states)


@every_table
def test_a_task_that_comes_too_late_is_told_that_it_is_over(table: StateTable[Any, Any]) -> None:
    state, event = next(iter(table.ignored))
    holder = Holder(state)
    with pytest.raises(Over):
        table.advance(holder, event, "r#0")
    assert holder.state is state
    state, event = next(iter(table.transitions))
    holder.state = state
    table.advance(holder, event, "r#0")
    assert holder.state is table.transitions[state, event]


def test_a_broken_table_is_caught() -> None:
    """The same assertions over a table with a hole would fail: the pair is refused."""
    table = TABLES[0]
    pair = next(iter(table.transitions))
    hole = StateTable(table.name, {k: v for k, v in table.transitions.items() if k != pair})
    with pytest.raises(IllegalTransition):
        hole.move(Holder(pair[0]), pair[1], "r#0")
