"""Groups of tests reach the runner of the suite."""

import pytest

from tests.conftest import GROUP_OF, ROOT


def test_groups_name_what_there_is():
    names = {path.name for path in (ROOT / "tests").rglob("*")}
    assert not GROUP_OF.keys() - names


def test_a_group_is_of_one_process(request):
    """The runner knows a test's group by the end of its name; a version of pytest that names tests by other means
    leaves that out, and no group is kept."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@house")  # which GROUPS says of this folder
