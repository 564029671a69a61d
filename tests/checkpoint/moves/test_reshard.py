"""What one job saved, any other job restores, bit by bit, reading each byte once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.boundary.storage import open_storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, find_tiling_faults, list_written_parts, split_flat_range
from platform.checkpoint.buffer import FileImage
from platform.checkpoint.catalogue import find_newest_checkpoint, load_manifest
from platform.checkpoint.manifest import Corrupt, Refused, check_tensors
from platform.checkpoint.moves import read_tensor, restore_checkpoint
from platform.plan.layout import Layout, Mesh, locate_block, pad_to_multiple
from tests.harness.storage_job import Counting, Job, values

SHAPES = {"a": (13, 6), "b": (5, 4, 7), "c": (31,), "d": (), "e": (3, 17), "f": (9, 2), "g": (1, 1, 23)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Small tensors are cut as large ones are."""
    for name in ("checkpoint.blocks", "boundary.sealed_blocks", "checkpoint.moves"):
        monkeypatch.setattr(f"platform.{name}.LARGEST_BLOCK", 64)
    monkeypatch.setattr("platform.checkpoint.blocks.LARGEST_ROW", 16)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), writers=st.integers(1, 5), readers=st.integers(1, 5), budget=st.integers(16, 3000))
def test_any_tiling_to_any_other(tmp_path_factory, seed, writers, readers, budget):
    draw = np.random.default_rng(seed)
    tensors = values(SHAPES, seed % 1000)
    storage = Counting(open_storage(str(tmp_path_factory.mktemp("storage"))))
    directory = Job.random(tensors, writers, draw).save(storage)
    newest = find_newest_checkpoint(storage)
    assert newest.directory == directory and not newest.refused
    storage.read_bytes = 0
    reader = Job.random(tensors, readers, draw)
    reader.check(reader.restore(storage, directory, newest.manifest, budget=budget))
    needed = sum(t.numel() * t.element_size() for t in tensors.values())
    assert newest.manifest.nbytes == storage.read_bytes == needed  # each byte stored once, read once


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_replicas_share_the_writing_and_the_reading(tmp_path, world_size):
    tensors = values({f"w{i}": (40, 8) for i in range(12)})
    storage = Counting(open_storage(str(tmp_path)))
    job = Job.whole(tensors, world_size)
    directory = job.save(storage)
    manifest = load_manifest(storage, directory)
    equal = manifest.nbytes / world_size
    assert all(abs(size - equal) <= 64 + 16 for size in manifest.files.values())
    job.check(job.restore(storage, directory, manifest))
    assert storage.read_bytes == manifest.nbytes


def test_a_strided_block_of_many_readers_costs_no_extra_byte(tmp_path):
    """Stored by rows, wanted by columns: every reader's part is strided in the files."""
    tensors = values({"w": (64, 64)})
    storage = Counting(open_storage(str(tmp_path)))
    rows = Job(tensors, {"w": [(r, Box((16 * r, 0), (16, 64))) for r in range(4)]}, 4)
    columns = Job(tensors, {"w": [(r, Box((0, 16 * r), (64, 16))) for r in range(4)]}, 4)
    directory = rows.save(storage)
    columns.check(columns.restore(storage, directory, load_manifest(storage, directory)))
    assert storage.read_bytes == 64 * 64 * 8


def test_one_process_reads_a_tensor_and_nothing_else(tmp_path):
    tensors = values({"w": (512, 8), "x": (100,)})
    storage = Counting(open_storage(str(tmp_path)))
    directory = Job.whole(tensors).save(storage)
    manifest = load_manifest(storage, directory)
    got = read_tensor(storage, directory, manifest, "w")
    assert torch.equal(got, tensors["w"])
    assert storage.read_bytes == got.numel() * got.element_size()
    assert torch.equal(read_tensor(storage, directory, manifest, "x"), tensors["x"])


def test_precision_may_change(tmp_path):
    tensors = {"w": torch.randn(7, 5, dtype=torch.float32)}
    storage = open_storage(str(tmp_path))
    job = Job.whole(tensors)
    directory = job.save(storage)
    for dtype in (torch.float64, torch.bfloat16):
        job.check(job.restore(storage, directory, load_manifest(storage, directory), dtype=dtype))


def test_the_plan_s_blocks_with_a_padded_vocab(tmp_path):
    """Rows beyond the vocabulary are not stored, and come back as zeros under another padding."""
    table = {"embedding": torch.randn(61, 12)}

    def job(axes):
        mesh, sizes = Mesh.arrange_axes(axes), {"vocab": pad_to_multiple(61, axes["t"]), "d_model": 12}
        layout = Layout.build_canonical({"vocab": ("t",), "d_model": ("c",)})
        boxes = [
            (r, Box.build_box(locate_block(("vocab", "d_model"), sizes, layout, mesh, mesh.rank_coordinates(r))))
            for r in range(mesh.world_size)
        ]
        return Job(table, {"embedding": boxes}, mesh.world_size)

    storage = open_storage(str(tmp_path))
    directory = job({"data": 2, "t": 4, "c": 1}).save(storage)
    manifest = load_manifest(storage, directory)
    assert manifest.nbytes == 61 * 12 * 4
    other = job({"t": 3, "c": 2})
    restored = other.restore(storage, directory, manifest)
    other.check(restored)
    assert restored[4][0].tensor.shape == (21, 6) and not restored[4][0].tensor[-2:].any()


def test_what_the_checkpoint_does_not_have_is_named(tmp_path):
    storage = open_storage(str(tmp_path))
    directory = Job.whole(values({"a": (4, 2), "b": (3,)})).save(storage)
    manifest = load_manifest(storage, directory)
    with pytest.raises(Refused, match=r"^has no z, and 1 more$"):
        check_tensors(manifest, {"z": (1,), "a": (4, 3)})
    out = Block("a", Box.whole_tensor((4, 3)), torch.zeros(4, 3))
    with pytest.raises(Refused, match=r"^a is \[4, 2\] there, \[4, 3\] here$"):
        restore_checkpoint(
            storage, directory, manifest, [HeldTensor.group_holders("a", torch.float64, (4, 3), [(0, out.box)])], [out]
        )


def test_damage_that_one_rank_sees_stops_all(tmp_path):
    job = Job.whole(values({"a": (64, 8)}), 3)
    storage = open_storage(str(tmp_path))
    directory = job.save(storage)
    manifest = load_manifest(storage, directory)
    file = tmp_path / directory / "blocks-00001.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(Corrupt, match=r"^blocks-00001.bin: bytes \d+ to \d+ \(a \[.*\]\) are not what was written$"):
        job.restore(storage, directory, manifest)


def test_a_checkpoint_that_is_deleted_under_one_rank_stops_all(tmp_path):
    """No rank leaves its peers waiting for what it was to pass on."""
    job = Job.whole(values({"a": (64, 8)}), 3)
    storage = open_storage(str(tmp_path))
    directory = job.save(storage)
    manifest = load_manifest(storage, directory)
    for file in ("manifest.json", "blocks-00001.bin"):
        (tmp_path / directory / file).unlink()
    with pytest.raises(Refused, match="it was deleted while it was read"):
        job.restore(storage, directory, manifest)


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(st.integers(1, 6), max_size=4), data=st.data())
def test_a_stretch_is_its_elements_in_order(shape, data):
    whole = Box.whole_tensor(shape)
    first = data.draw(st.integers(0, whole.num_elements))
    last = data.draw(st.integers(first, whole.num_elements))
    numbers = np.arange(whole.num_elements).reshape(shape)
    parts = [numbers[b.relative_slices(whole)].ravel() for b in split_flat_range(whole, first, last)]
    assert np.concatenate([[], *parts]).tolist() == list(range(first, last))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_gaps_are_named():
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2))]
    assert find_tiling_faults((4, 4), boxes) == []
    assert find_tiling_faults((4, 4), boxes[:2]) == ["[2:4, 2:4] is in no block"]
    assert find_tiling_faults((4, 4), [*boxes, boxes[1]]) == ["[2:4, 0:2] is in several blocks"]
    assert find_tiling_faults((4, 3), boxes) == [
        "[0:2, 0:4] lies outside of [0:4, 0:3]",
        "[2:4, 2:4] lies outside of [0:4, 0:3]",
    ]
    assert find_tiling_faults((), [Box((), ())]) == [] and find_tiling_faults((), []) == ["[] is in no block"]


def test_a_live_tensor_may_change_once_it_is_copied(tmp_path):
    storage = open_storage(str(tmp_path))
    held = HeldTensor.group_holders("w", torch.float32, (8,), [(0, Box.whole_tensor((8,)))])
    live = torch.arange(8.0, requires_grad=True)
    image = FileImage(0, list_written_parts([held], 0))
    image.fill_parts([Block("w", Box.whole_tensor((8,)), live)])
    with torch.no_grad():
        live.add_(1)
    data = storage.url and image.write_file(storage, "x") and storage.read("x/blocks-00000.bin")
    assert np.frombuffer(data, np.float32).tolist() == list(range(8))
