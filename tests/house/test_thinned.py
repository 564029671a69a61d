"""The table of what `make test` leaves to `make test-all` names tests that exist."""

import ast

import yaml


def test_every_entry_is_a_test(root):
    table = yaml.safe_load((root / "tests" / "thinned.yaml").read_text())
    assert table and [*table] == sorted(table)
    for file, tests in table.items():
        functions = {
            node.name for node in ast.walk(ast.parse((root / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert not tests.keys() - {name for name in functions if name.startswith("test_")}, file
        assert all(type(every) is int and every >= 0 and every != 1 for every in tests.values()), file
