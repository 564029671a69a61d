"""Every place in the code that gives a hint is reached by a row whose hints are followed, or a reason says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.config.test_bad_input import ALL
from tests.hints.command_rows import ROWS
from tests.hints.conftest import typed_of
from tests.hints.sites import Site, hit, reached, sites

INVENTORY = yaml.safe_load((Path(__file__).parent / "inventory.yaml").read_text())
FOLLOWED = set(INVENTORY["followed"])


def test_every_place_that_gives_a_hint_is_listed(record_count):
    excused = [name for names in INVENTORY["reasons"].values() for name in names]
    names = {site.name for site in sites()}
    assert {*FOLLOWED, *excused} == names, "list it in inventory.yaml, with a row that reaches it or a reason"
    assert len(FOLLOWED) + len(excused) == len(names)
    record_count("hints of the code followed (places)", len(FOLLOWED), len(names))


@pytest.mark.parametrize(("text", "tells"), [("*: *; nearest legal: *", False), ("* is odd; nearest legal: *", True)])
def test_a_text_without_words_of_its_own_tells_nothing(text, tells):
    pattern = ".*".join(map(re.escape, text.split("*")))
    assert hit(Site("", "", 0, 0, pattern), set(), {"x: 3 is odd; nearest legal: 4"}) is tells


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_the_inventory_calls_followed_is_reached(refused, launch_refused):
    lines: set[str] = set()
    with reached() as calls:
        for arguments, *_ in ALL:
            lines |= set(launch_refused(arguments))
        for row in ROWS.strip().splitlines():
            lines |= set(refused(typed_of(row)))
    assert {site.name for site in sites() if hit(site, calls, lines)} == FOLLOWED
