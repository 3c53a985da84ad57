"""Tickets: who has the job's key can make them, nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.ticket import is_genuine, job_of, make_key, make_ticket, part_of

KEY = bytes(range(32))
TICKET = make_ticket("demo.v2", "1f3a/7/0/1/2", KEY)


def test_a_ticket_is_the_same_whenever_it_is_made() -> None:
    assert make_ticket("demo.v2", "1f3a/7/0/1/2", KEY) == TICKET
    assert is_genuine(TICKET, KEY)
    assert job_of(TICKET) == "demo.v2"


def test_keys_differ_and_tell_jobs_apart() -> None:
    other = make_key()
    assert make_key() != other
    assert not is_genuine(TICKET, other)


@given(place=st.integers(0, len(TICKET) - 1), character=st.characters())
def test_no_character_can_be_changed(place: int, character: str) -> None:
    changed = TICKET[:place] + character + TICKET[place + 1 :]
    assert is_genuine(changed, KEY) == (changed == TICKET)


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    assert not is_genuine(text, KEY)
    assert job_of(text) in text


def test_what_is_said_of_a_ticket_does_not_open_its_part() -> None:
    key = make_key()
    ticket = make_ticket("job.1", "uid/1/7/0/2/0", key)
    assert part_of(ticket) == "job.1/uid/1/7/0/2/0"
    assert not is_genuine(part_of(ticket), key)
    assert part_of("no-ticket") == "no-ticket"
