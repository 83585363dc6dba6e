"""Errors cross the wire and stay what they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from colibri.protocol.errors import ColibriError, InvalidRequest, Overloaded


def descendants(cls: type[ColibriError]) -> Iterator[type[ColibriError]]:
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)


ERRORS = [cls for cls in descendants(ColibriError) if cls.__module__ == ColibriError.__module__]


@pytest.mark.parametrize("cls", [cls for cls in ERRORS if "type" in vars(cls)])
def test_an_error_arrives_as_the_class_that_was_sent(cls: type[ColibriError]) -> None:
    received = ColibriError.from_wire(cls("words", where="there", hint="do this", figure=7).to_wire())
    assert type(received) is cls
    assert (received.message, received.where, received.hint) == ("words", "there", "do this")
    assert received.extra == {"figure": 7}


def test_every_name_on_the_wire_is_one_class() -> None:
    names = [cls.type for cls in ERRORS if "type" in vars(cls)]
    assert len(names) == len(set(names))


def test_an_error_says_where_what_and_what_to_do_in_a_line() -> None:
    assert str(InvalidRequest("is missing", where="prompt", hint="give one")) == "prompt: is missing (give one)"


def test_an_unknown_type_keeps_its_words() -> None:
    error = ColibriError.from_wire({"type": "too_modern", "message": "words", "hint": "update"})
    assert type(error) is ColibriError
    assert str(error) == "words (update)"


@pytest.mark.parametrize("wire", [{}, {"type": 7, "message": None}, {"self": 1, "message": [], "where": 3, "hint": {}}])
def test_a_map_of_any_shape_becomes_an_error(wire: dict[str, object]) -> None:
    assert isinstance(ColibriError.from_wire(wire), ColibriError)


def test_figures_cannot_overwrite_what_an_error_says() -> None:
    wire = Overloaded("full", where="queue", **{"type": "other"}).to_wire()
    assert wire == {"type": "overloaded", "message": "full", "where": "queue"}
