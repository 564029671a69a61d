"""A tensor scheme of your own: a YAML file that says which axis splits which dim, and a run on four processes.

    python examples/own_scheme.py

The file is examples/conf/tensor/length_and_heads.yaml. There is no other code: which collectives the operations need
follows from the layouts, an illegal layout is refused by name before a process starts, and the losses are those of a
run that splits nothing. By command: `python -m platform.launch --config-dir examples/conf tensor=length_and_heads ...`
"""

from pathlib import Path

from platform.api import communication, compose, describe, plan, run

CONF = Path(__file__).parent / "conf"
SIZES = ["model.layers=1", "model.d_model=32", "model.length=16", "model.vocab=64", "train.global_batch=4"]
COMMON = [*SIZES, "data=synthetic", "train.steps=3", "cluster.device=cpu"]
OWN = ["tensor=length_and_heads", "tensor.axes.s=2", "tensor.axes.h=2", "cluster=processes", "run.dir=runs/own_scheme"]
SERIAL = ["tensor=serial", "cluster=inline", "run.dir=runs/own_scheme_serial"]


def main() -> None:
    own, serial = compose(*COMMON, *OWN, config_dir=CONF), compose(*COMMON, *SERIAL)
    print(describe(planned := plan(own)))
    print("bytes that a step moves, by kind and axes:", communication(planned))

    parallel, alone = run(own), run(serial)
    print(f"\n{'step':>4}  {'4 processes':>12}  {'1 process':>12}")
    for mine, its in zip(parallel.metrics, alone.metrics, strict=True):
        print(f"{mine.step:>4}  {mine.loss:>12.6f}  {its.loss:>12.6f}")
        assert abs(mine.loss - its.loss) < 1e-4


if __name__ == "__main__":
    main()
