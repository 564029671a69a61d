"""`plan compare`: what is refused, which rows are rivals, fitted constants as a file, and how far it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.predict import measured_runs
from platform.predict.hardware import format_fitted_file
from platform.predict.measured_runs import compare_runs, format_prediction_errors, read_measured_runs, select_moved
from platform.predict.step_price import read_hardware

COLUMNS = "hardware,gpus,layers,d_model,heads,length,vocab,microbatch,global_batch,tensor,axes,seconds"
ROWS = ["h100,2,2,1024,16,512,512,2,4,serial,,0.009", "h100,2,2,1024,16,512,512,2,4,1d,t=2,0.012"]


@pytest.fixture
def table(tmp_path):
    def write(rows, more=""):
        (path := tmp_path / "table.csv").write_text("\n".join([COLUMNS + more, *rows, ""]))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("arguments", "line"),
    {
        "--hardware h1000": "table: hardware h1000: there is no such file; legal: h100",
        "calibrate=0.5 --leave-one-out": "table: --leave-one-out: fits on all other rows, not on calibrate=0.5",
        "--output new.yaml": "table: --output=new.yaml: nothing is fitted without calibrate= or --leave-one-out",
        "calibrate=1 --output new.txt": "table: --output=new.txt: must end in .yaml",
    }.items(),
)
def test_an_argument_that_would_do_nothing_is_refused(arguments, line, table, capsys):
    assert main(["compare", table(ROWS), *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(line)


def test_fitted_constants_are_a_file_that_hardware_takes(table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("like: h800\nlaunch: 9e-6\n")
    small = [row.replace(",1024,16,512,", ",64,4,64,") for row in ROWS]  # the host is all
    for like, rows, moved in (("h100", ROWS, "products"), ("base.yaml", small, "launch")):
        path = table([row.replace("h100", like) for row in rows])
        typed = ["compare", path, "calibrate=1", "--constants", "products,launch", "--output", "new.yaml"]
        assert main([*typed, "--overwrite"]) == 0
        runs = read_measured_runs(path, compose_config)
        (constants,) = compare_runs(runs, [True, True], ("products", "launch")).constants.values()
        assert [*select_moved(constants)] == [moved]  # others stay as they are described
        read_hardware.cache_clear()
        written, fitted = read_hardware("new.yaml"), read_hardware(like).replace_constants({moved: constants[moved]})
        assert (written.launch, written.reached.products) == pytest.approx(
            (fitted.launch, fitted.reached.products), rel=1e-3
        )
        assert replace(fitted, name="new", launch=written.launch, reached=written.reached) == written
        assert main(["--hardware", "new.yaml"]) == 0
        assert "a step on new, predicted" in capsys.readouterr().out
    assert main(typed) == 2 and "exists; --overwrite replaces it" in capsys.readouterr().err
    assert main(["compare", table([ROWS[0], ROWS[1].replace("h100", "h200")]), *typed[2:], "--overwrite"]) == 2
    assert "describes one hardware; rows name h100, h200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "values"),
    {
        "precision": ("bf16", "fp8"),
        "d_ff": ("4096", "2048"),
        "kv_heads": ("16", "4"),
        "model.norm": ("layernorm", "rmsnorm"),
        "release": ("25.02", "25.04"),
        "system": ("ours", "usual"),
    }.items(),
)
def test_rows_of_two_models_or_systems_are_no_rivals(column, values, table):
    for these, groups in ((values[:1] * 2, 1), (values, 0)):
        rows = [f"{row},{value}" for row, value in zip(ROWS, these, strict=True)]
        runs = read_measured_runs(table(rows, f",{column}"), compose_config)
        assert len(compare_runs(runs, [False, False]).score_rankings()) == groups


def test_a_share_above_one_is_said_to_be_a_missing_cause(table):
    runs = [replace(run, seconds=run.seconds / 100) for run in read_measured_runs(table(ROWS), compose_config)]
    comparison = compare_runs(runs, [True, True], ("products", "interference"))
    assert comparison.constants["h100"]["products"] > 1.5
    assert "products: 1.5\n" in format_fitted_file("h100", comparison.constants["h100"], "fitted")  # no file has more
    assert any(line.endswith("is above 1: no speed, but a cause of time that is missing")
               for line in format_prediction_errors(comparison))  # fmt: skip


def test_a_long_table_says_how_far_it_is(table, monkeypatch, capsys):
    assert main(["compare", table(ROWS)]) == 0 and not capsys.readouterr().err
    monkeypatch.setattr(measured_runs, "REPORTED", -1.0)
    assert main(["compare", table(ROWS), "--json"]) == 0
    assert capsys.readouterr().err == "reading row 1 of 2\nreading row 2 of 2\n"
