"""Processor time of the search for a plan of GPT 1T on 3,072 A100 with every key open: of the closed form alone, in
plans per second, and of the whole search with its priced finalists. `python -m benchmarks.searching`."""

from __future__ import annotations

import time

from platform.launch import compose_config
from platform.plan.plan_builder import pause_garbage_collection
from platform.predict.contender_grid import ContenderGrid
from platform.predict.contenders import SearchSpace
from platform.predict.search import search_plans
from platform.predict.step_price import read_hardware

GIVEN = "+experiment=gpt175b", "model=gpt_1t", "plan.search=[all]", "train.global_batch=3072"
WORKERS, MEMORY = 3072, 80e9


def main() -> None:
    """Print a row for each part."""
    config, hardware = compose_config(list(GIVEN)), read_hardware("a100_80g")
    begin = time.process_time()
    with pause_garbage_collection():
        _, judged = ContenderGrid(SearchSpace(config), WORKERS, MEMORY, hardware).rate_contenders()
    closed = time.process_time() - begin
    print(f"| closed form | {judged:,} plans | {closed:.1f} s | {judged / closed:,.0f} plans/s |")
    begin = time.process_time()
    outcome = search_plans(config, WORKERS, MEMORY, hardware)
    whole = time.process_time() - begin
    print(f"| search, with the sketches that are there | {len(outcome.tried)} priced | {whole:.1f} s |  |")


if __name__ == "__main__":
    main()
