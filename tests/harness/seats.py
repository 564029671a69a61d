"""Seats of a new generation, on machines that are all alike."""

from platform.cluster.control.recruiter import arrange_seats
from platform.plan.layout import Mesh
from platform.train.state_recovery import take_seats


def seated(source, others, size):
    """Return `source` with members at `size` ranks: those that it needs, and `others`."""
    keep = dict(zip(source.kept, source.members_of_ranks(source.kept), strict=True))
    paths = dict.fromkeys([*keep.values(), *others], ("here",))
    return take_seats(source, arrange_seats(paths, Mesh.arrange_axes({"data": size}), keep))
