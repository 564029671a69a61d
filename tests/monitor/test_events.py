"""Every kind of event is written as it is read; the page of the run directory lists them, and the keys of a row."""

import json
import re
from pathlib import Path

import pytest

from platform.boundary.schema import Malformed
from platform.monitor import Journal, JsonLines, MetricsRow, events
from tests.harness.happenings import EXAMPLES

ROOT = Path(__file__).parents[2]
KEPT = sorted(ROOT.glob("tests/**/run/journal.jsonl"))


@pytest.mark.parametrize("word", events.EVENTS)
def test_an_event_is_read_as_it_was_written(tmp_path, word):
    path = tmp_path / "journal.jsonl"
    line = json.dumps({"time": 1.5, "generation": 3, "event": word, **EXAMPLES[word]}) + "\n"
    path.write_text(line)
    [event] = events.read_events(path)
    assert type(event) is events.EVENTS[word] and (event.time, event.generation, event.word) == (1.5, 3, word)
    Journal(path).write(event)
    again = path.read_text().splitlines()[1]
    assert re.sub(r'"time": [\d.]+', '"time": 1.5', again) + "\n" == line, "another order, another text"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parts[-3])
def test_a_kept_journal_is_written_to_the_byte(path):
    assert [json.dumps(events.event_to_plain(e)) for e in events.read_events(path)] == path.read_text().splitlines()


def test_a_later_version_s_events_and_fields_are_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    head = {"time": 1.5, "generation": 3}
    lines = [{**head, "event": "promoted", "step": "a text"}, {**head, "event": "hiring", "count": 2, "why": 5}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unknown, hiring = events.read_events(path)
    assert unknown == events.JournalEvent(**head) and hiring == events.Hiring(**head, count=2)


@pytest.mark.parametrize(
    "line", [{"event": "hiring"}, {"event": "hiring", "count": "2"}, {"event": "done", "step": -1}]
)
def test_an_event_of_another_shape_is_refused(line):
    with pytest.raises(Malformed):
        events.parse_event({"time": 1.5, "generation": 3, **line})


def test_secrets_stay_out_and_the_word_stays(tmp_path, monkeypatch):
    from platform.boundary import redaction

    monkeypatch.setattr(redaction, "_known", {"waiting": "***"})
    Journal(tmp_path / "journal.jsonl").write(events.Waiting(alive=1, reason="waiting for more"))
    [line] = JsonLines.read_objects(tmp_path / "journal.jsonl")
    assert (line["event"], line["reason"]) == ("waiting", "*** for more")


def listed(header: str) -> list[str]:
    """Return the words in the first column of a table of docs/run-directory.md."""
    page = (ROOT / "docs" / "run-directory.md").read_text()
    [rows] = re.findall(rf"^\| {header} \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.M)
    return sorted(name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1]))


def test_the_page_of_the_run_directory_lists_every_event():
    assert listed(r"events \| when") == sorted(events.EVENTS)


def test_the_page_of_the_run_directory_lists_every_key_of_the_metrics():
    assert listed(r"key \| meaning") == sorted(MetricsRow.__dataclass_fields__)
