"""One language, in whole sentences: the rules of `tests.house.language`, each with a number that may only fall."""

from __future__ import annotations

import pytest

from tests.house.language import RULES, broken

# How often each rule is still broken. Write the new number here when it falls; it must not rise.
MOST = {
    "relative_subjects": 0,
    "dialect": 3,
    "notes_without_noun": 0,
    "long_docstrings": 378,
    "undocumented": 0,
    "checkers": 0,
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_broken_more_often(rule):
    breaches = broken(rule)
    count = sum(map(len, breaches.values()))
    assert count <= MOST[rule], f"{count}: see `python -m tests.house.language {rule}`"


BROKEN = [
    ("relative_subjects", 'def f():\n    """Return a list. Those that remain are kept."""'),
    ("relative_subjects", 'class A:\n    """Store of blocks; What is left is deleted."""'),
    ("dialect", 'def f():\n    """Return the ranks of those that vote."""'),
    ("dialect", 'def f():\n    """Return the lines that the user is told."""'),
    ("notes_without_noun", '"""Blocks.\n\n    offset      where it begins"""'),
    ("notes_without_noun", 'def f():\n    """Return a block. `a`: the rank; `b`: what it holds."""'),
    ("long_docstrings", 'def f():\n    """Return one,\n    or two."""\n    return 1'),
    ("undocumented", "class A:\n    def f():\n        a = 1\n        b = 2\n        return a + b"),
    ("checkers", "def check_it() -> list[str]: ..."),
    ("checkers", "def wrong_data() -> Iterator[str]: ..."),
    ("checkers", "def violations_of_data() -> None: ..."),
]
CLEAN = """
class Blocks(Ours):
    def check_sizes(self) -> None:
        '''Raise unless the sizes agree.'''

def violations_of_data() -> Iterator[str]:
    '''Yield a line per violation. `a`: the key; `b`: True if it is set.'''
"""


@pytest.mark.parametrize(("rule", "source"), BROKEN)
def test_a_broken_rule_is_seen(rule, source):
    assert len(list(RULES[rule](source))) == 1


@pytest.mark.parametrize("rule", RULES)
def test_clean_language_breaks_no_rule(rule):
    assert list(RULES[rule](CLEAN)) == []


def test_an_override_says_what_the_method_above_says():
    source = "class A(NoClassOfOurs):\n    def f():\n        a = 1\n        b = 2\n        return a"
    assert list(RULES["undocumented"](source)) == []
