"""Rules that refuse a profile of steps or ranks that a run lacks, or that would be too large."""

from __future__ import annotations

from collections.abc import Iterator

from platform.boundary.refusals import violation
from platform.config.fields import Config
from platform.config.key import refused

EVERY = "all"  # monitor.profile_ranks
MOST_STEPS, MOST_RANKS = 10, 64  # of a profile, each with up to some 10 MB


def violations_of_profile(config: Config) -> Iterator[str]:
    """Yield a refusal line for each thing that is wrong with the steps of `monitor.profile`, or their ranks."""
    key, steps, last = "monitor.profile", config.monitor.profile, config.train.steps
    ranks = config.monitor.profile_ranks
    shown = f"[{', '.join(ranks)}]"
    if ranks and not steps:
        legal = ["monitor.profile=[10,12]", []]
        yield violation("monitor.profile_ranks", shown, "monitor.profile names no steps", legal)
    if steps and len(steps) != 2:
        yield refused(config, key, "must be [] or [FIRST,LAST]", [[steps[0], steps[-1]], []])
    elif steps and not 1 <= steps[0] <= steps[1] <= last:
        first = min(max(1, steps[0]), last)
        constraint = f"must be [FIRST,LAST] with 1 <= FIRST <= LAST <= train.steps={last}"
        yield refused(config, key, constraint, [[first, min(max(first, steps[1]), last)]])
    elif steps and steps[1] - steps[0] >= MOST_STEPS:
        nearest = [steps[0], steps[0] + MOST_STEPS - 1]
        yield refused(
            config, key, f"must be at most {MOST_STEPS} steps, as a trace takes megabytes for each", [nearest]
        )
    if EVERY in ranks and len(ranks) > 1:
        yield violation("monitor.profile_ranks", shown, "must be ranks, or [all] alone", [f"[{EVERY}]"])


def absent_profiles(config: Config, workers: int) -> Iterator[str]:
    """Yield a refusal line per rank of `monitor.profile_ranks` that never exists, as `workers` start the run and it may
    grow to `elastic.max_workers`, and one if there are too many of them."""
    key, ranks, most = "monitor.profile_ranks", config.monitor.profile_ranks, max(workers, config.elastic.max_workers)
    for rank in ranks:
        if rank.isdecimal() and int(rank) >= most:
            yield violation(key, rank, f"must be below the {most} ranks that the run has", [most - 1])
    count = most if ranks == [EVERY] else len(set(ranks))
    if count > MOST_RANKS:
        legal = [[*range(0, most, -(-most // 4))], []]
        yield violation(
            key, f"[{', '.join(ranks)}]", f"{count} ranks; at most {MOST_RANKS} can be profiled at once", legal
        )
