"""A storage with a vanishing or broken entry: it hides nothing, and nothing is deleted on a doubt."""

import os
import threading

import pytest

from platform.boundary.storage import RemoteStorage, open_storage
from platform.checkpoint import catalogue, manifest
from platform.checkpoint.catalogue import Lease, find_newest_checkpoint, load_manifest, verify_checkpoint
from platform.checkpoint.manifest import Refused
from platform.checkpoint.saver import CheckpointSaver
from tests.harness.storage_job import Job, meta, values

SHAPES = {"a": (6, 4), "b": (5,)}
LATER = "step-00000009-000009-abcdef"


def save(storage, step: int) -> str:
    return Job.whole(values(SHAPES, step), 2).save(storage, step)


@pytest.fixture
def storage(tmp_path):
    """With checkpoints of steps 1 and 2."""
    checkpoints = open_storage(str(tmp_path / "checkpoints"))
    save(checkpoints, 1), save(checkpoints, 2)
    return checkpoints


def dangling(path) -> None:
    path.symlink_to(path.parent / "nowhere")


def loop(path) -> None:
    path.symlink_to(path)


BROKEN = {
    "a dangling link": dangling,
    "a loop of links": loop,
    "a pipe": os.mkfifo,
    "an empty directory": lambda path: path.mkdir(),
    "a file": lambda path: path.write_bytes(b"\xff"),
}
NAMES = [
    b".probe-0badf00d",
    b"\xff\xfe not text",
    b"lease-000001-0000000g",
    "step-\u0661\u0662345678-000003-abcdef".encode(),
]


@pytest.mark.parametrize("where", ["beside", "within"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_entry_hides_nothing(storage, what, where):
    newest = find_newest_checkpoint(storage).directory
    for name in NAMES:
        BROKEN[what](storage.root / (newest if where == "within" else "") / os.fsdecode(name))
    assert find_newest_checkpoint(storage).directory == newest and verify_checkpoint(storage, newest)
    assert catalogue.prune_checkpoints(storage, last=2) == [] and len(catalogue.list_attempts(storage)) == 2
    save(storage, 3)
    assert [a.step for a in catalogue.list_attempts(storage)] == [3, 2, 1]
    assert (
        len(catalogue.prune_checkpoints(storage, last=2)) == 1
        and find_newest_checkpoint(storage).manifest.meta.step == 3
    )


@pytest.mark.parametrize("what", ["a dangling link", "a loop of links", "a file", "a pipe"])
def test_what_bears_the_name_of_a_checkpoint_and_is_none_costs_no_other(storage, what):
    BROKEN[what](storage.root / LATER)
    newest = find_newest_checkpoint(storage)
    assert newest.manifest.meta.step == 2 and newest.refused[0][0] == LATER
    before = sorted(os.listdir(storage.root))
    with pytest.raises(OSError):
        catalogue.prune_checkpoints(storage, last=1)
    assert sorted(os.listdir(storage.root)) == before
    saver = CheckpointSaver(storage, last=1)
    job = Job.whole(values(SHAPES, 3), 2)
    saver.start_save(job.shapes, meta(3), lambda directory: job.write(storage, directory))
    assert saver.wait(60)
    assert [event["event"] for event in saver.poll_events()] == ["checkpoint", "checkpoint_prune_failed"]
    assert {a.step for a in catalogue.list_attempts(storage)} == {1, 2, 3, 9}


def test_a_broken_file_of_a_checkpoint_is_a_doubt(storage):
    """Neither marked as corrupt nor deleted: the disk that the link leads to may come back."""
    newest = storage.root / find_newest_checkpoint(storage).directory
    (newest / "blocks-00001.bin").rename(storage.root / "elsewhere")
    dangling(newest / "blocks-00001.bin")
    selection = find_newest_checkpoint(storage)
    assert selection.manifest.meta.step == 1 and selection.sound == (newest.name,)
    with pytest.raises(OSError):
        catalogue.prune_checkpoints(storage, last=1)
    assert not (newest / catalogue.BAD).exists() and len(catalogue.list_attempts(storage)) == 2
    (storage.root / "elsewhere").rename(storage.root / "nowhere")
    (newest / "nowhere").symlink_to(storage.root / "nowhere")
    assert find_newest_checkpoint(storage).manifest.meta.step == 2


def test_a_storage_that_is_a_link_to_nothing_is_not_an_empty_one(tmp_path):
    dangling(tmp_path / "checkpoints")
    with pytest.raises(OSError):
        find_newest_checkpoint(open_storage(str(tmp_path / "checkpoints")))
    assert open_storage(str(tmp_path / "none")).list_sizes("") == {}


def test_entries_that_come_and_go(storage):
    """Listings beside a thread that makes and deletes files: never fewer than what stays."""
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for n in range(20):
                (storage.root / f".probe-{n}").touch()
            for n in range(20):
                (storage.root / f".probe-{n}").unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        short = sum(len(catalogue.list_attempts(storage)) != 2 for _ in range(3000))
    finally:
        stop.set()
        thread.join()
    assert not short


def test_an_entry_that_vanishes_between_the_listing_and_the_look(storage, monkeypatch):
    """Each in turn, at the very moment."""
    scan = os.scandir

    class Vanishing:
        def __init__(self, path):
            self.entries, self.path = scan(path), path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.entries.close()

        def __iter__(self):
            for entry in self.entries:
                if entry.name == "gone":
                    os.unlink(entry.path)
                yield entry

    (storage.root / "gone").touch()
    monkeypatch.setattr("platform.boundary.local_files.os.scandir", Vanishing)
    assert len(storage.list_sizes("")) == 2


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_marked(storage, monkeypatch):
    """By an older driver, say, that does not know yet that it is superseded."""
    newest = find_newest_checkpoint(storage).directory
    read = type(storage).read

    def deleting(self, path, *span):
        data = read(self, path, *span)
        if path == f"{newest}/{manifest.NAME}":
            catalogue.delete_checkpoint(self, newest)
        return data

    monkeypatch.setattr(type(storage), "read", deleting)
    assert find_newest_checkpoint(storage).manifest.meta.step == 1
    assert not (storage.root / newest).exists()


def test_who_only_looks_marks_nothing(storage):
    newest = storage.root / find_newest_checkpoint(storage).directory
    (newest / "blocks-00001.bin").write_bytes(b"")
    assert (
        find_newest_checkpoint(storage, quarantines=False).manifest.meta.step == 1
        and not (newest / catalogue.BAD).exists()
    )
    assert find_newest_checkpoint(storage).manifest.meta.step == 1 and (newest / catalogue.BAD).exists()


def test_names_of_the_same_checkpoint_are_one(storage):
    """One zero more would name it twice, and cost the one before its place among the newest."""
    newest = find_newest_checkpoint(storage).directory
    (storage.root / newest.replace("step-", "step-0")).mkdir()
    (storage.root / newest.replace("-000002-", "-0000002-")).mkdir()
    assert len(catalogue.list_attempts(storage)) == 2
    assert catalogue.prune_checkpoints(storage, last=2) == []


def test_numbers_that_no_driver_wrote_are_not_gone_beyond(storage):
    (storage.root / "step-00000001-999999999999999-abcdef").mkdir()
    with pytest.raises(OSError, match="which no driver wrote"):
        save(storage, 3)
    (storage.root / ("step-00000001-" + "9" * 200 + "-abcdef")).mkdir()
    (storage.root / ("lease-" + "9" * 200 + "-deadbeef")).touch()
    assert len(catalogue.list_attempts(storage)) == 3
    assert Lease.take(storage, "me").epoch == 1
    (storage.root / "lease-999999999999999999-deadbeef").touch()
    with pytest.raises(OSError, match="which no driver wrote"):
        Lease.take(storage, "me")


def test_a_lease_deletes_leases_alone(storage):
    folder = storage.root / "lease-000007-deadbeef"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    dangling(storage.root / "lease-000006-deadbeef")
    (storage.root / "lease-000005-deadbeef").write_bytes(b"\xff\x1b[2J" * 10_000)
    old = Lease.take(storage, "process 8")
    assert old.epoch == 8 and (folder / "mine.txt").read_text() == "mine"
    assert not (storage.root / "lease-000005-deadbeef").exists()
    (storage.root / "lease-000009-deadbeef").write_bytes(b"\xff\x1b[2J" * 10_000)
    with pytest.raises(Exception, match=r"\[2J") as caught:
        old.check_held()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_a_note_in_a_quarantined_checkpoint_is_one_short_line(storage):
    newest = storage.root / find_newest_checkpoint(storage).directory
    (newest / catalogue.BAD).write_bytes(b"\xff\x1b[2J\n" * 100_000)
    with pytest.raises(Refused, match="quarantined: ") as caught:
        load_manifest(storage, newest.name)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_a_remote_listing_with_an_entry_that_tells_nothing(monkeypatch, tmp_path):
    storage = open_storage(f"memory://{tmp_path.name}")
    assert isinstance(storage, RemoteStorage)
    newest = save(storage, 1)
    listed = type(storage._system).ls

    def ls(self, path, **options):
        entries = listed(self, path, **options)
        return [{**e, "size": None} if e["name"].endswith("1.bin") else e for e in entries] + [{"name": f"{path}/odd"}]

    with monkeypatch.context() as patch:
        patch.setattr(type(storage._system), "ls", ls)
        listing = find_newest_checkpoint(storage)
        assert listing.manifest is None and listing.sound == (newest,)
    assert find_newest_checkpoint(storage).directory == newest
