"""Verdicts on the network between workers, from the kernel's counters of their connections, as the driver saw them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from platform.monitor.records.live import Live, SeenLink
from platform.monitor.verdict.evidence import Evidence
from platform.monitor.verdict.verdict import CERTAIN, GUESS, LIKELY, Verdict

QUIET_SECONDS = 1.5  # without an acknowledgement of bytes that were sent
_SLOWER = 4.0  # times slower than the link was before, or than most others are
_MOST = 0.8  # of the links are as slow as the one that others are compared with, or slower


def cut_link(live: Live) -> Verdict | None:
    """Return the verdict on links over which nothing comes through; None if there are none."""
    nodes = _nodes_of(live)
    stuck = [link for link in live.links if link.queued and link.quiet >= QUIET_SECONDS]
    if not stuck:
        return None
    ends = _ends(stuck, nodes)
    silent = {worker.node.partition("/")[0] for worker in live.workers if worker.owes is not None}
    node = max(ends, key=lambda name: (ends[name], name in silent))
    often = ends[node]
    worst = max(stuck, key=lambda link: link.quiet)
    where = f"between {_name(worst.here, nodes)} and {_name(worst.there, nodes)}"
    who = f"the network of {node} is cut" if often > len(stuck) / 2 and len(ends) > 2 else "a link is cut"
    line = f"{who}: {worst.queued:,} bytes {where} were not acknowledged for {worst.quiet:.1f} s"
    since, details = live.time - worst.quiet, [_link_text(link, nodes) for link in stuck[:8]]
    return Verdict("link", line, node=node, step=live.step + 1, since=since, sure=CERTAIN, details=details)


def slow_link(live: Live) -> Verdict | None:
    """Return the verdict on links that have become far slower than they were; None if there are none."""
    slow = [link for link in live.links if (link.rate or 0.0) * _SLOWER < (link.best or 0.0) and link.rate is not None]
    return _slow(live, slow, LIKELY) if slow else None


def slowest_link(live: Live) -> Verdict | None:
    """Return the verdict on links that are far slower than most; None if there are none."""
    known = sorted((link for link in live.links if link.rate is not None), key=lambda link: link.rate or 0.0)
    usual = known[int(_MOST * len(known))].rate or 0.0 if len(known) > 2 else 0.0
    slow = [replace(link, best=usual) for link in known if (link.rate or 0.0) * _SLOWER < usual]
    return _slow(live, slow, GUESS) if slow else None


def _slow(live: Live, slow: list[SeenLink], sure: str) -> Verdict:
    """Return the verdict on slow links: on the node at which most of them end. `best`: the speed to compare with.

    Of nodes that as many slow links join, the one is named at which others are as slow, though nobody knows what they
    were before, and at which fewest are well: of a ring 0 -> 2 -> 1 -> 0 whose link 0 -> 2 has become slow, node 2.
    """
    nodes, usual = _nodes_of(live), min(link.best or 0.0 for link in slow)
    ends, known = _ends(slow, nodes), {(link.here, link.there) for link in slow}
    others = [link for link in live.links if link.rate is not None and (link.here, link.there) not in known]
    alike = _ends([link for link in others if (link.rate or 0.0) * _SLOWER < usual], nodes)
    well = _ends([link for link in others if (link.rate or 0.0) * _SLOWER >= usual], nodes)
    node = max(ends, key=lambda name: (ends[name], alike[name], -well[name]))
    worst = min(slow, key=lambda link: link.rate or 0.0)
    who = f"the network of {node}" if ends[node] + alike[node] > 1 else f"a link of {node}"
    rate, best = ((speed or 0.0) * 8 / 1e6 for speed in (worst.rate, worst.best))
    line = f"{who} is slow: {rate:.3g} Mbit/s from {_name(worst.here, nodes)} to {_name(worst.there, nodes)}"
    line += f", not {best:.3g} as {'before' if sure == LIKELY else 'most others'}"
    details = [_link_text(link, nodes) for link in slow[:8]]
    return Verdict("link", line, node=node, step=live.step + 1, since=live.called, sure=sure, details=details)


def _ends(links: list[SeenLink], nodes: dict[str, str]) -> Counter[str]:
    """Count how many of some links begin or end at each node."""
    return Counter(node for link in links for node in (_name(link.here, nodes), _name(link.there, nodes)))


def _nodes_of(live: Live) -> dict[str, str]:
    """Return address -> name of the nodes whose workers the driver sees."""
    return {link.here: link.node.partition("/")[0] for link in live.links}


def _name(address: str, nodes: dict[str, str]) -> str:
    """Return the node that has an address, as far as a worker there is known; else the address."""
    return nodes.get(address, address)


def _link_text(link: SeenLink, nodes: dict[str, str]) -> str:
    """Format the speed and the queue of a link, for the details of a verdict."""
    rate = f"{link.rate * 8 / 1e6:.3g} Mbit/s" if link.rate is not None else "speed not known"
    quiet = f", {link.queued:,} bytes not acknowledged for {link.quiet:.1f} s" if link.queued else ""
    return f"{_name(link.here, nodes)} to {_name(link.there, nodes)}: {rate}{quiet}"


def of_links(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a slow link of a run whose steps go on, seen in the last heartbeats."""
    return slow_link(evidence.live) if evidence.live else None
