"""A generation that compiles rehearses before its first step; where a rank cannot compile, the run says so."""

from platform.cluster.control import former
from platform.predict import recorded_passes
from tests.doubles.fake_crew import Dead
from tests.harness.scripted_run import events, once_each


def calls(drive):
    return [call for call, _ in drive.crew.calls]


def test_every_generation_rehearses_when_its_state_is_there(config, drive):
    config.train.compile = "on"
    assert drive({"step(3)": [{1: Dead}]}) == 0 and once_each(config)
    order = [call for call in calls(drive) if call in ("build", "recover", "rehearse", "step(1)", "step(3)")]
    assert order[:8] == ["build", "rehearse", "step(1)", "step(3)", "build", "recover", "rehearse", "step(3)"]
    assert not any(running.get("uncompiled") for running in events(config, "running"))


def test_negative_control_what_compiles_nothing_rehearses_nothing(config, drive):
    assert drive() == 0 and config.train.compile == "auto"  # on CPUs
    assert "rehearse" not in calls(drive)


def test_one_line_says_which_rank_cannot_compile_what(config, drive):
    config.train.compile = "on"
    assert drive(prepare=lambda crew: crew.uncompiled.update({2: "block: E: no", 3: "block: E: neither"})) == 0
    why = "rank2[data2] cannot compile block: E: no"
    assert [line for line in drive.out.splitlines() if "compile" in line] == [f"compile  off: {why}"]
    assert [running["uncompiled"] for running in events(config, "running")] == [why]


def test_every_generation_records_its_passes_where_its_device_can(config, drive, monkeypatch):
    """Though nothing is compiled; and the run says so, or why not."""
    for module in (former, recorded_passes):
        monkeypatch.setattr(module, "RECORDING", {"cpu"})
    config.train.global_batch, config.train.microbatch = 16, 1  # passes beside which no collective runs
    assert drive() == 0 and "rehearse" in calls(drive)
    said = [line for line in drive.out.splitlines() if line.startswith("graphs")]
    assert said == ["graphs   passes are recorded, but where a log says why not"]


def test_negative_control_what_records_nothing_says_why(config, drive, monkeypatch):
    for module in (former, recorded_passes):
        monkeypatch.setattr(module, "RECORDING", {"cpu"})
    config.train.graphs = "off"
    assert drive() == 0 and "rehearse" not in calls(drive)
    assert "graphs   none: train.graphs=off" in drive.out.splitlines()
