"""One storage, one driver at a time: the newest."""

import threading

import pytest

from platform.checkpoint.lease import Lease, Superseded
from platform.checkpoint.storage import Local, connect


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    return Local(tmp_path) if request.param == "local" else connect(f"memory://{tmp_path}")


def test_the_newest_driver_holds_it(storage):
    first = Lease.take(storage, "process 1")
    first.check()
    second = Lease.take(storage, "process 2")
    assert second.epoch == first.epoch + 1
    second.check()
    with pytest.raises(Superseded, match="epoch 1.*held by process 2"):
        first.check()
    third = Lease.take(storage, "process 3")
    assert third.epoch == 3
    with pytest.raises(Superseded):
        second.check()


def test_a_lease_that_somebody_removed_is_lost(storage):
    lease = Lease.take(storage, "process 1")
    for name in storage.list(""):
        storage.delete(name)
    with pytest.raises(Superseded, match="nobody"):
        lease.check()


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
            lease.check()
        except Superseded:
            return False
        return True

    assert sum(holds(lease) for lease in leases) == 1


def test_other_files_are_left_alone(storage):
    storage.write("lease-notes.txt", [memoryview(b"ours")])
    Lease.take(storage, "process 1")
    Lease.take(storage, "process 2")
    assert "lease-notes.txt" in storage.list("") and len(storage.list("")) == 2


def test_a_storage_that_does_not_answer_is_no_loss_of_the_lease(storage):
    lease = Lease.take(storage, "process 1")

    def broken(path):
        raise OSError("gone")

    storage.list = broken
    with pytest.raises(OSError, match="gone"):
        lease.check()
