"""Ranks as threads on a double of NCCL that is as strict as NCCL may be: nobody gets stuck, and the numbers are those
of one process."""

from __future__ import annotations

from math import nan

import pytest
import torch

from platform.plan.layout import Mesh
from platform.plan.step_collectives import process_groups
from platform.predict.make_plan import make_plan
from platform.runtime import process_groups as torch_distributed
from platform.runtime.communicator import Aborted, Communicator
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.process_groups import ProcessGroups, join_default_group
from platform.train.rank_parameters import RankWeights
from tests.doubles.strict_nccl import GPU, Stuck, World, run_strictly
from tests.harness.oracle import compute, configure, examine, prove

STAGES = Mesh.arrange_axes({"stage": 3, "t": 2})
PLANS = {
    "1f1b": {"pipeline": "1f1b", "stages": 3, "layers": 3},
    "gpipe": {"pipeline": "gpipe", "stages": 2},
    "interleaved": {"pipeline": "interleaved", "stages": 2, "chunks": 2, "layers": 4},
    "zb_h1": {"pipeline": "zb_h1", "stages": 3, "layers": 3},
    "sub-grids": {"branch": "dsp_csub", "branch_axes": {"g": 2}, "microbatch": 4},
    "gathered again": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}, "gathered": "again", "microbatch": 4},
    "split vocab": {"tensor": "3d", "axes": {"x": 2, "y": 1, "z": 2}, "data": 2, "zero": 1, "microbatch": 4},
}


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_on_strict_groups_equals_one_process(name, early, monkeypatch):
    c = configure(**{"microbatch": 1, **PLANS[name]})
    plan = make_plan(c)
    axes, neighbours = process_groups(plan), plan.neighbour_stages
    work = lambda groups: compute(c, plan, groups)  # noqa: E731
    _, results = run_strictly(monkeypatch, plan.mesh, work, axes, neighbours, early=early)
    examine(c, plan, results)


def test_both_stages_that_send_first_are_stuck(monkeypatch):
    """The negative control: what `open_stage_connections` did before it let the lower stage send first."""

    def meet(self: Communicator, neighbours):
        stage = self.coordinates["stage"]
        for pair in neighbours:
            if stage in pair:
                peer = sum(pair) - stage
                sending = self.send(torch.zeros(1), peer)
                self.receive((1,), torch.float32, peer).wait()
                sending.wait()

    pairs = [(0, 1), (1, 2)]
    run_strictly(monkeypatch, STAGES, lambda groups: None, (), pairs)
    monkeypatch.setattr(Communicator, "open_stage_connections", meet)
    with pytest.raises(Stuck, match="the first send"):
        run_strictly(monkeypatch, STAGES, lambda groups: None, (), pairs)


def test_a_direction_of_its_own_for_every_pair_of_stages(monkeypatch):
    """Both stages may have sent and not yet received: in one queue for both directions they would be stuck."""

    def work(groups):
        if (stage := groups.coordinates["stage"]) == 2:
            return 2.0
        sending = groups.send(torch.full((1,), float(stage)), 1 - stage)
        got = groups.receive((1,), torch.float32, 1 - stage).wait().item()
        sending.wait()
        return got

    pairs = [(0, 1), (1, 2)]
    assert run_strictly(monkeypatch, STAGES, work, (), pairs)[1] == [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]
    monkeypatch.setattr(torch_distributed, "_line_ranks", lambda mesh, a, b: _line(mesh, *sorted((a, b))))
    monkeypatch.setattr(World, "split_group", _one_queue_per_pair)
    with pytest.raises(Stuck):
        run_strictly(monkeypatch, STAGES, work, (), pairs)


_line = torch_distributed._line_ranks


def _one_queue_per_pair(self, parent_pg=None, split_ranks=None, timeout=None):
    """Return the group of these ranks that there is already, if there is one."""
    known = self.issued.setdefault((self.here.rank, "pairs"), {})
    key = tuple(map(tuple, split_ranks))
    if key not in known:
        known[key] = _split(self, split_ranks=split_ranks)
    return known[key]


@pytest.mark.parametrize("messages", [1, 2])
def test_with_one_hardware_queue_a_message_that_cannot_start_holds_all_that_follows(messages, monkeypatch):
    """The second one waits for the first to be received, after a sum of which its sender is a part."""

    def work(groups):
        stage = groups.coordinates["stage"]
        sent = [groups.send(torch.full((1,), 1.0 + i), 1) for i in range(messages)] if stage == 0 else []
        total = groups.launch("all_reduce", torch.ones(1), ("stage",)).wait().item()
        received = [groups.receive((1,), torch.float32, 0) for _ in range(messages)] if stage == 1 else []
        return total, [handle.wait().item() for handle in (*sent, *received)]

    def run(connections):
        return run_strictly(monkeypatch, STAGES, work, [("stage",)], [(0, 1)], connections=connections)[1]

    expected = [(3.0, [1.0, 2.0][:messages])] * 4 + [(3.0, [])] * 2
    assert run(8) == expected
    if messages == 1:  # it has started: the queue goes on
        assert run(1) == expected
    else:
        with pytest.raises(Stuck, match=r"rank 0: send in \(0, 2\) to start.*rank 2: \('all_reduce"):
            run(1)


def resize(*sizes):
    """What gives a tensor's storage one size after the other, in numbers of fp32."""
    return lambda x: [x.untyped_storage().resize_(4 * size) for size in sizes]


MEANWHILE = {  # what a rank does to the memory that it has given, and what is then read there
    "nothing": (lambda x: None, 1.0),
    "written": (lambda x: x.fill_(7.0), 7.0),
    "freed": (resize(0), nan),
    "allocated again": (resize(0, 3), nan),
}


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "send"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_what_is_given_is_read_when_it_is_sent(op, meanwhile, monkeypatch):
    """Although the others wait for it already, and the giver has waited for something else."""
    along, across = ("stage", "t") if op == "send" else ("t", "stage")
    change, read = MEANWHILE[meanwhile]

    def start(groups, x):
        if op != "send":
            return groups.launch(op, x, (along,))
        return groups.receive(x.shape, x.dtype, 0) if groups.coordinates[along] else groups.send(x, 1)

    def work(groups):
        position, x = groups.coordinates[along], torch.ones(3)
        handle = start(groups, x) if position < 2 else None
        if position == 0:
            groups.launch("all_reduce", torch.ones(1), (across,)).wait()
            change(x)
        out = handle and handle.wait()
        return out.flatten()[:3].tolist() if position == 1 else None

    results = run_strictly(monkeypatch, STAGES, work, [("t",), ("stage",)], [(0, 1)])[1]
    assert {str(received) for received in results if received is not None} == {str([read] * 3)}


def test_negative_control_memory_of_gradients_that_is_used_again_before_they_are_reduced(monkeypatch):
    """What copies at once does not see it."""
    c = configure(data=2, zero=2, microbatch=1)
    plan = make_plan(c)
    reduce = FlatBucket.start_reduction

    def keep(self):
        sums = self._gradient_sum_buffer()
        reduce(self)
        self.sums = sums

    monkeypatch.setattr(FlatBucket, "start_reduction", keep)
    monkeypatch.setattr(
        RankWeights, "_reduce_bucket", lambda self, flat: flat.start_reduction()
    )  # and goes on without a wait
    prove(c)
    axes, work = process_groups(plan), lambda groups: compute(c, plan, groups)
    examine(c, plan, run_strictly(monkeypatch, plan.mesh, work, axes, early=True)[1])
    with pytest.raises(AssertionError, match="gradient of"):
        examine(c, plan, run_strictly(monkeypatch, plan.mesh, work, axes)[1])


def test_what_a_collective_writes_is_no_number_before_it_has_run(monkeypatch):
    def work(groups):
        x = torch.ones(1)
        handle = groups.launch("all_reduce", x, ("t",), owned=True)
        return [x.item(), handle.wait().item()]

    assert str(run_strictly(monkeypatch, STAGES, work, [("t",)], early=True)[1]) == str([[nan, 2.0]] * 6)
    assert run_strictly(monkeypatch, STAGES, work, [("t",)])[1] == [[1.0, 2.0]] * 6


def test_what_is_in_host_memory_needs_no_group_of_the_device(monkeypatch):
    """Ranks with nothing to send take no part in `transfer`; nothing of it reaches NCCL, lazily connected or not."""

    def work(groups):
        mine = torch.arange(3, dtype=torch.uint8) + groups.rank
        others = [peer for peer in range(6) if peer != groups.rank]
        messages = {peer: torch.empty(groups.rank, dtype=torch.uint8) for peer in others}
        sent = [(peer, torch.full((peer,), groups.rank, dtype=torch.uint8)) for peer in others]
        groups.exchange(sent, list(messages.items()))
        assert groups.all_gather_texts("x" * groups.rank) == ["x" * rank for rank in range(6)]
        assert groups.broadcast_text("y" * 2000 if groups.rank == 0 else None) == "y" * 2000
        out = torch.empty(3, dtype=torch.uint8)
        groups.connect_peers({1: {4}, 4: {1}}.get(groups.rank, set()))
        groups.transfer([(4, mine)] if groups.rank == 1 else [], [(1, out)] if groups.rank == 4 else [])
        rows = groups.collect_numbers(torch.tensor([groups.rank, 1.0], dtype=torch.float64))
        return {peer: m.tolist() for peer, m in messages.items()}, out.tolist() if groups.rank == 4 else None, rows

    world, results = run_strictly(monkeypatch, STAGES, work)
    for rank, (messages, _, _) in enumerate(results):
        assert messages == {peer: [peer] * rank for peer in range(6) if peer != rank}
    assert results[4][1] == [1, 2, 3]
    assert results[0][2].tolist() == [[rank, 1.0] for rank in range(6)] and results[1][2] is None
    assert not any(queue for g in world.groups.values() if g.strict for queue in g.queues)


def test_a_group_of_the_whole_world_is_the_world(monkeypatch):
    axes = [("t",), ("stage",), ("stage", "t")]
    world, _ = run_strictly(monkeypatch, STAGES, lambda groups: groups.barrier(), axes)
    assert [g.members for g in world.groups.values() if g.strict].count(tuple(range(6))) == 1
    assert all(group.connected for group in world.groups.values())


def test_a_first_call_waits_for_nobody(monkeypatch):
    """Groups are connected while they form, so that the host goes on at once, whoever comes later."""

    def work(groups):
        now = groups.rank == 0
        early = groups.launch("all_reduce", torch.ones(1), ("t",)) if now else None
        groups.collect_numbers(torch.zeros(1, dtype=torch.float64))
        return (early or groups.launch("all_reduce", torch.ones(1), ("t",))).wait().item()

    assert run_strictly(monkeypatch, STAGES, work, [("t",)])[1] == [2.0] * 6

    def lazily(store, rank, size, device):
        join_default_group(store, rank, size, device)
        torch_distributed.dist.group.WORLD.connected = False

    monkeypatch.setattr("tests.doubles.strict_nccl.join_default_group", lazily)
    monkeypatch.setattr(
        ProcessGroups, "open_stage_connections", Communicator.open_stage_connections
    )  # which connects groups along axes
    monkeypatch.setattr(ProcessGroups, "_create_groups", _new_groups)
    with pytest.raises(Stuck, match="to connect"):  # the negative control
        run_strictly(monkeypatch, STAGES, work, [("t",)])


def test_what_was_read_after_an_abort_counts_for_nothing(monkeypatch):
    def work(groups):
        total = groups.launch("all_reduce", torch.ones(2), ("t",)).wait()
        assert groups.read_numbers(total) == [2.0, 2.0]
        groups.abort()
        with pytest.raises(Aborted):
            groups.read_numbers(total)
        groups.abort()  # again, when the generation is left
        groups.close()

    world, _ = run_strictly(monkeypatch, STAGES, work, [("t",)])
    assert all(group in world.aborted[rank] for group in world.groups.values() for rank in group.members)


def _new_groups(self, groups):
    return torch_distributed.dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])[0]


def _hang_and_abort(groups):
    """Hang in a collective of two groups, whose peer never comes, and abort them."""
    if groups.rank == 0:
        for axes in [("t",), ("stage",)]:
            groups.launch("all_reduce", torch.ones(1), axes)
        groups.abort()


def test_all_groups_are_aborted_at_once(monkeypatch):
    axes = [("t",), ("stage",)]
    run_strictly(monkeypatch, STAGES, _hang_and_abort, axes, [(0, 1), (1, 2)])

    def one_after_the_other(self):
        for group in sorted(self._own_groups(), key=lambda g: g.members):
            group.abort()

    monkeypatch.setattr(ProcessGroups, "_abort_transport", one_after_the_other)
    with pytest.raises(Stuck, match="waits for another group"):  # the negative control
        run_strictly(monkeypatch, STAGES, _hang_and_abort, axes, [(0, 1), (1, 2)])


def test_groups_that_became_one_are_found_while_forming(monkeypatch):
    """torch's colours are hashes: two groups of a split may get the same one."""
    monkeypatch.setattr(World, "split_group", _split_with_one_color)
    with pytest.raises(RuntimeError, match="6 ranks are in the group along .* of 2"):
        run_strictly(monkeypatch, STAGES, lambda groups: None, [("t",)])


def _split_with_one_color(self, *args, **kwargs):
    self.color = lambda ranks: 0
    return _split(self, *args, **kwargs)


_split = World.split_group


def test_a_split_reads_the_ranks_of_its_world(monkeypatch):
    def work(groups):
        torch_distributed.dist.group.WORLD._get_backend(GPU).options.global_ranks_in_group = []
        with pytest.raises(AssertionError, match="torch crashes"):
            groups._create_groups([[0], [1]])

    run_strictly(monkeypatch, Mesh.arrange_axes({"stage": 1, "data": 2}), work, [("data",)])


@pytest.mark.parametrize("neighbours", [[(0, 1), (1, 2)], [(0, 1), (0, 2), (1, 2)]], ids=["chain", "odd ring"])
def test_the_world_is_split_once_per_axis_and_a_few_times_for_all_lines(neighbours, monkeypatch):
    """However many groups there are: each is otherwise a collective of the whole world, one after the other."""
    world, _ = run_strictly(monkeypatch, STAGES, lambda groups: None, [("t",), ("stage",)], neighbours)
    assert world.calls == {"split_group": 2 + 2 * (len(neighbours) if len(neighbours) == 3 else 2)}


def test_gloo_has_one_group_down_the_stages(monkeypatch):
    def work(groups):
        groups.abort()
        ways = {way: group is None for way, group in groups._lines.items()}
        return ways, groups._lines[1, 0] is groups._lines[2, 1]

    world, results = run_strictly(monkeypatch, STAGES, work, [("t",)], [(0, 1), (1, 2)], torch.device("cpu"))
    default_upwards = {(0, 1): True, (1, 0): False, (1, 2): True, (2, 1): False}
    assert results == [(default_upwards, True)] * 6 and not world.aborted and GPU.type == "cuda"
