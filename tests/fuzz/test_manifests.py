"""What strangers wrote, by a fixed seed; and that the fuzzer sees what it looks for."""

import pytest

from platform.checkpoint import manifest as checkpoint_manifest
from tests.fuzz import manifests
from tests.fuzz.runner import run


def test_files_of_strangers():
    outcome = run(manifests, seed=0, count=300)
    assert sum(outcome.counts.values()) == 300 and len(manifests.CLASSES) == len(outcome.counts)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_ten_thousand_files_of_strangers():
    outcome = run(manifests, seed=0, count=10_000)
    assert min(outcome.counts.values()) >= 100, outcome.table()


def test_the_fuzzer_sees_manifests_that_are_believed(monkeypatch):
    """Negative control: were holes and overlaps not looked for, other blocks would be verified."""
    monkeypatch.setattr(checkpoint_manifest.Manifest, "list_faults", lambda self: [])
    monkeypatch.setattr(manifests, "CLASSES", ["manifest: tiling"])
    outcome = run(manifests, seed=0, count=30, keep_going=True)
    assert outcome.failures
