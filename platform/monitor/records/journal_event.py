"""Base classes of the journal's events, which enter each kind of event in one table by its word. Words are data that
older journals hold: another name of a class changes none."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Annotated, Any, ClassVar, dataclass_transform

from platform.boundary.schema import Span
from platform.monitor.records import records
from platform.monitor.records.records import Seconds, Steps

EVENTS: dict[str, type[JournalEvent]] = {}  # word in the journal -> class


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Registered:
    """Base that makes its subclasses frozen dataclasses, and enters them in EVENTS by their word; a group has none."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    word: ClassVar[str]

    def __init_subclass__(cls, word: str = "") -> None:
        """Make a kind of journal event a frozen dataclass, and enter it in EVENTS by its `word`; groups have none."""
        dataclass(frozen=True, kw_only=True)(cls)
        if word:
            cls.word = word
            EVENTS[word] = cls  # type: ignore[assignment]


class JournalEvent(_Registered):
    """Event of a run, a line of its journal; a line of a kind that this version does not know becomes one without
    further fields. The journal sets `time`, seconds since the epoch, and `generation`, formations of the mesh so
    far."""

    word: ClassVar[str] = "journal_event"  # of a line of an unknown kind
    time: Seconds = 0.0
    generation: Annotated[int, Span(0, 10**9)] = 0

    def own(self) -> dict[str, Any]:
        """Return the fields of a journal's event as plain data, without `time` and `generation`: the fields of its own
        class, then of its groups (Committed, End)."""
        values = records.plain(self)
        groups = type(self).__mro__[: -len(JournalEvent.__mro__)]
        return {name: values[name] for group in groups for name in group.__annotations__ if name in values}


class Committed(JournalEvent):
    """Event that also reports committed work: `useful_seconds` of the steps committed since the previous event that
    did."""

    useful_seconds: Seconds | None = None


class End(Committed):
    """Last event of a driver but for its account (Goodput). `step`: the step that its workers have reached; `saved`:
    the step of the newest checkpoint. The steps in between are lost with the workers' memory."""

    step: Steps = 0
    saved: Steps | None = None
    steps_lost: Steps | None = None
    lost_seconds: Seconds | None = None
