"""The book of attempts: new, current and late, in any order of arrival, within its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.attempts import Attempts, Verdict
from headrace.core.ids import JobKey, RequestId


def key(request: str, epoch: int) -> JobKey:
    return JobKey(RequestId(request), epoch)


def test_an_attempt_is_new_once_then_current_then_late() -> None:
    book = Attempts()
    assert book.begin(key("a", 0)) is Verdict.NEW
    assert book.begin(key("a", 0)) is Verdict.CURRENT
    book.close(key("a", 0))
    assert book.begin(key("a", 0)) is Verdict.LATE
    assert book.begin(key("a", 1)) is Verdict.NEW
    assert book.look(key("a", 0)) is Verdict.LATE


def test_closing_an_unknown_key_makes_its_frames_late_and_a_newer_epoch_new() -> None:
    book = Attempts()
    book.close(key("a", 3))
    assert [book.look(key("a", e)) for e in (2, 3, 4)] == [Verdict.LATE, Verdict.LATE, Verdict.NEW]


def test_closing_an_older_epoch_leaves_the_newer_one_alone() -> None:
    book = Attempts()
    book.begin(key("a", 5))
    book.close(key("a", 4))
    assert book.look(key("a", 5)) is Verdict.CURRENT


steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(("begin", "close")))
)


@given(steps)
def test_the_book_agrees_with_the_whole_history(history: list[tuple[str, int, str]]) -> None:
    book = Attempts()
    begun: dict[str, set[int]] = {"a": set(), "b": set()}
    closed: dict[str, set[int]] = {"a": set(), "b": set()}
    for request, epoch, action in history:
        seen = begun[request] | closed[request]
        newest = max(seen, default=-1)
        if epoch > newest:
            expected = Verdict.NEW
        elif epoch < newest or epoch in closed[request]:
            expected = Verdict.LATE
        else:
            expected = Verdict.CURRENT
        assert book.look(key(request, epoch)) is expected
        if action == "begin":
            assert book.begin(key(request, epoch)) is expected
            begun[request].add(epoch)
        else:
            book.close(key(request, epoch))
            closed[request].add(epoch)


def test_the_book_stays_within_its_bound_and_forgets_the_oldest() -> None:
    book = Attempts(bound=3)
    for request in "abcd":
        book.begin(key(request, 7))
    assert len(book) == 3
    assert book.look(key("a", 0)) is Verdict.NEW
    assert book.look(key("b", 0)) is Verdict.LATE
