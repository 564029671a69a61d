"""Run a fuzzer: `python -m tests.fuzz NAME --count N --seed S`; prints every failure with its seed, then the counts."""

from __future__ import annotations

import argparse
import importlib
import sys

import tests.conftest  # noqa: F401  our `platform` in an uninstalled checkout
from tests.fuzz.runner import run


def main() -> int:
    """Return 1 where a case failed or a class had fewer than `--least` cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "fuzzer", help="of tests/fuzz: [gpu_|expert_|adapter_]plans, hints, listener, manifests, parsers or values"
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow it")
    parser.add_argument("--step", type=int, default=1, help="between two seeds: K processes take every K-th each")
    parser.add_argument("--least", type=int, default=0, help="cases that every class must have")
    options = parser.parse_args()
    fuzzer = importlib.import_module(f"tests.fuzz.{options.fuzzer}")
    outcome = run(fuzzer, options.seed, options.count, keep_going=True, step=options.step)
    print(f"{sum(outcome.counts.values()):,} cases passed, {len(outcome.failures)} failed; by class:")
    print(outcome.table())
    few = [name for name, count in outcome.counts.items() if count < options.least]
    if few:
        print(f"fewer than {options.least}: {', '.join(few)}")
    return 1 if outcome.failures or few else 0


if __name__ == "__main__":
    sys.exit(main())
