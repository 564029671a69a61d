"""One storage, one driver at a time: the newest."""

import threading

import pytest

from platform.boundary.local_files import LocalStorage
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import Lease, Superseded, find_newest_checkpoint, list_attempts
from platform.checkpoint.saver import CheckpointSaver
from tests.harness.storage_job import Job, meta, values


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return LocalStorage(tmp_path) if request.param == "local" else open_storage(f"memory://{tmp_path}")


def test_the_newest_driver_holds_it(storage):
    first = Lease.take(storage, "process 1")
    first.check_held()
    second = Lease.take(storage, "process 2")
    assert second.epoch == first.epoch + 1
    second.check_held()
    with pytest.raises(Superseded, match="epoch 1.*held by process 2"):
        first.check_held()
    third = Lease.take(storage, "process 3")
    assert third.epoch == 3
    with pytest.raises(Superseded):
        second.check_held()


def test_a_lease_that_somebody_removed_is_taken_again_unless_another_was_faster(storage):
    lease = Lease.take(storage, "process 1")
    for name in storage.list_sizes(""):
        storage.delete(name)
    lease.check_held()
    assert len(storage.list_sizes("")) == 1
    for name in storage.list_sizes(""):
        storage.delete(name)
    Lease.take(storage, "process 2")
    with pytest.raises(Superseded, match="held by process 2"):
        lease.check_held()


def test_of_many_at_once_one_holds_it(storage):
    together = threading.Barrier(8)
    leases = []

    def take(number):
        together.wait()
        leases.append(Lease.take(storage, f"process {number}"))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def holds(lease):
        try:
            lease.check_held()
        except Superseded:
            return False
        return True

    assert sum(holds(lease) for lease in leases) == 1


def test_other_files_are_left_alone(storage):
    storage.write("lease-notes.txt", [memoryview(b"ours")])
    Lease.take(storage, "process 1")
    Lease.take(storage, "process 2")
    assert "lease-notes.txt" in storage.list_sizes("") and len(storage.list_sizes("")) == 2


def test_a_storage_that_does_not_answer_is_no_loss_of_the_lease(storage):
    lease = Lease.take(storage, "process 1")

    def broken(path):
        raise OSError("gone")

    storage.list_sizes = broken
    with pytest.raises(OSError, match="gone"):
        lease.check_held()


def test_an_older_driver_commits_nothing_more(tmp_path):
    """Two drivers of one run: the older one is told so at its next save, and leaves nothing behind."""
    storage, step = LocalStorage(tmp_path), Job.whole(values({"w": (4, 4)}), 2)
    older = CheckpointSaver(storage, pause=0, lease=Lease.take(storage, "the older"))
    assert saved(older, storage, step, 1) == ["checkpoint"]
    newer = CheckpointSaver(storage, pause=0, lease=Lease.take(storage, "the newer"))
    assert saved(older, storage, step, 2) == ["superseded"]
    assert [a.step for a in list_attempts(storage)] == [1]
    assert saved(newer, storage, step, 2) == ["checkpoint"]
    assert find_newest_checkpoint(storage).manifest.meta.step == 2


def test_a_driver_that_is_superseded_while_it_writes(tmp_path):
    storage, step = LocalStorage(tmp_path), Job.whole(values({"w": (4, 4)}), 2)
    older = CheckpointSaver(storage, pause=0, lease=Lease.take(storage, "the older"))
    assert saved(older, storage, step, 1, meanwhile=lambda: Lease.take(storage, "the newer")) == ["superseded"]
    assert list_attempts(storage) == []


def saved(saver, storage, job, step, meanwhile=lambda: None) -> list[str]:
    def write(directory):
        reports = job.write(storage, directory)
        meanwhile()
        return reports

    saver.start_save(job.shapes, meta(step), write)
    saver.wait()
    return [event["event"] for event in saver.poll_events()]
