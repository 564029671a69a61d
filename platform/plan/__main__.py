"""`python -m platform.plan +experiment=NAME [key=value ...]` explains the plan of a run without starting it."""

from __future__ import annotations

import argparse
import json
import sys

from platform.config import ConfigError
from platform.launch import REFUSED, compose
from platform.model import build
from platform.plan.explain import explain, render
from platform.train.optimizers import OPTIMIZERS
from platform.train.plan import make_plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m platform.plan", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for platform.launch: +experiment=NAME key=value ...")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--workers", type=int, help="how many there are, where parallel.data=-1")
    parser.add_argument("--workers-per-node", type=int, default=8, help="for counting messages (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_intermixed_args()
    if arguments.workers_per_node < 1:
        parser.error("--workers-per-node must be at least 1")
    try:
        config = compose(arguments.overrides, arguments.config_dir)
        plan = make_plan(config, arguments.workers)
    except ConfigError as error:
        for line in error.violations:
            print(f"config: {line}", file=sys.stderr)
        return REFUSED
    found = explain(
        plan,
        build(config.model),
        moments=OPTIMIZERS[config.optimizer.kind].moments,
        workers_per_node=arguments.workers_per_node,
        dropout=config.model.dropout,
    )
    print(json.dumps(found) if arguments.json else render(plan, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
