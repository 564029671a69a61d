"""Our package is called `platform`, as a module of Python's own is: both must work, everywhere.

The rules come from one fact: `import platform` yields the standard library's module object, to which a `__path__` is
added that leads to our directory.
"""

import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

import platform
from platform.boundary.interrupts import COMMANDS
from tests.test_typing import USER, WRONG, mistakes, mypy

# Run in a child: the standard library's `platform` as it would be without us, and what a user expects of ours.
CHECK = """
import importlib.util, os, pickle, pkgutil, platform, sys
file = os.path.join(os.path.dirname(os.__file__), "platform.py")
spec = importlib.util.spec_from_file_location("pristine", file)
pristine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pristine)
import platform.config.fields, platform.launch
ours = {m.name for m in pkgutil.iter_modules(platform.__path__)}
assert set(vars(platform)) - set(vars(pristine)) <= {"__path__"} | ours, set(vars(platform)) - set(vars(pristine))
assert set(vars(pristine)) <= set(vars(platform))
for name in "system node release version machine python_version python_implementation platform".split():
    assert getattr(platform, name)() == getattr(pristine, name)(), name
assert tuple(platform.uname()) == tuple(pristine.uname())
assert pickle.loads(pickle.dumps(platform.uname())) == platform.uname()
assert platform.__file__ == file
assert importlib.util.find_spec("platform").submodule_search_locations == list(platform.__path__)
assert not {"torch", "ray", "wandb", "hydra"} & set(sys.modules), "launch must be cheap to import: it is the marker"
print(platform.launch.CONF)
"""


def run(*command, cwd, **env) -> subprocess.CompletedProcess[str]:
    """Runs a command without the PYTHONPATH by which the tests find an uninstalled checkout."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=kept | env, capture_output=True, text=True)


def succeed(*command, cwd, **env) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def bare(tmp_path) -> Path:
    """The interpreter of an environment that has what we depend on, and not us: a .pth in a .pth is not read."""
    succeed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    packages = succeed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return directory


def test_no_submodule_has_the_name_of_an_attribute_of_the_standard_module():
    spec = importlib.util.spec_from_file_location("pristine", Path(os.__file__).parent / "platform.py")
    pristine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pristine)
    ours = {module.name for module in pkgutil.iter_modules(platform.__path__)}
    assert "launch" in ours and "uname" in dir(pristine)
    assert not ours & set(dir(pristine))


def test_only_modules_lie_directly_in_the_package(root):
    """`importlib.resources.files("platform")` points at the standard library's directory: data would not be found."""
    files = {p.name for p in (root / "platform").iterdir() if p.is_file() and p.suffix != ".py"}
    assert files == {"_startup.pth", "_startup.start", "__init__.pyi", "py.typed"}


def test_the_marker_is_there(root):
    assert '"launch.py"' in (root / "platform" / "_startup.py").read_text()
    assert (root / "platform" / "launch.py").is_file()


def test_from_the_checkout_uninstalled(bare, root):
    assert succeed(bare, "-c", CHECK, cwd=root).strip() == str(root / "conf")
    assert "steps: 7" in succeed(bare, "-m", "platform.launch", "--cfg", "job", "train.steps=7", cwd=root)


def test_outside_and_uninstalled_python_says_what_the_readme_explains(bare, elsewhere):
    done = run(bare, "-m", "platform.launch", cwd=elsewhere)
    assert done.returncode == 1
    assert "__path__ attribute not found on 'platform' while trying to find 'platform.launch'" in done.stderr


@pytest.mark.parametrize("how", ["wheel", pytest.param("editable", marks=pytest.mark.full)])
def test_installed(bare, root, elsewhere, how):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", bare)
    install = (*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    succeed(*install, *(["--editable"] if how == "editable" else []), root, cwd=elsewhere)

    conf = Path(succeed(bare, "-c", CHECK, cwd=elsewhere).strip())
    assert conf.is_relative_to(root if how == "editable" else bare.parents[1])
    launch = ("--cfg", "job", "-p", "train", "+experiment=gpt_quick", "train.steps=7")
    assert "steps: 7" in succeed(bare, "-m", "platform.launch", *launch, cwd=elsewhere)
    assert "steps: 7" in succeed(bare.parent / "platform-launch", *launch, cwd=elsewhere)
    assert succeed(bare, "-m", "platform", cwd=elsewhere).startswith(os.uname().sysname)
    everybody = "import numpy, torch, ray, wandb, uuid, platform; print(platform.system())"
    assert succeed(bare, "-c", everybody, cwd=elsewhere).strip() == os.uname().sysname
    first = f"import sys; sys.path.insert(0, {str(elsewhere)!r}); import platform.config"  # as a script's own directory
    succeed(bare, "-c", first, cwd=elsewhere)
    files = Path(succeed(bare, "-c", "from platform.api import FILES; print(FILES)", cwd=elsewhere).strip())
    assert files == conf.parent
    for path in (*(p for p in root.glob("jobs/**/*") if p.is_file()), *root.glob("dashboards/*.py")):
        assert (files / path.relative_to(root)).read_bytes() == path.read_bytes()
    job = ("slurm", "+experiment=one_gpu", "data=stdlib", "checkpoint.url=/shared/a")  # its template is found
    assert succeed(bare, "-m", "platform.jobs", *job, cwd=elsewhere).startswith("#!/bin/bash")
    assert list(elsewhere.iterdir()) == []  # no outputs/, no .hydra

    succeed(*pip, "uninstall", "--quiet", "--yes", "elastic-platform", cwd=elsewhere)
    assert run(bare, "-c", "import platform; assert not hasattr(platform, '__path__')", cwd=elsewhere).returncode == 0


INLINE = "+experiment=two_layer cluster=inline train.steps=2 optimizer.warmup_steps=0 tensor.axes.rows=1".split()


@pytest.fixture
def from_wheel(bare, root, elsewhere) -> Path:
    """The interpreter of an environment into which the wheel is installed."""
    install = (sys.executable, "-m", "pip", "--python", bare, "install", "--quiet", "--no-deps", "--no-build-isolation")
    succeed(*install, "--no-index", root, cwd=elsewhere)
    return bare


@pytest.mark.full
def test_the_wheel_alone_trains(from_wheel, root, elsewhere):
    assert "run directory:" in succeed(
        from_wheel, "-m", "platform.launch", *INLINE, "tensor.axes.cols=1", cwd=elsewhere
    )
    shutil.copy(root / "examples" / "callbacks_and_resume.py", elsewhere)
    assert "done: 6 steps" in succeed(from_wheel, "callbacks_and_resume.py", cwd=elsewhere)


@pytest.mark.full
@pytest.mark.timeout(600)  # mypy reads torch
def test_the_wheel_is_typed(from_wheel, elsewhere):
    done = mypy(from_wheel, elsewhere, elsewhere, USER, "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert mistakes(mypy(from_wheel, elsewhere, elsewhere, WRONG, "--strict")) == ["3", "4"]


def test_a_pth_that_imports_the_standard_module_before_ours(bare, root, elsewhere):
    install = (sys.executable, "-m", "pip", "--python", bare, "install", "--quiet", "--no-deps", "--no-build-isolation")
    succeed(*install, "--no-index", "--editable", root, cwd=elsewhere)
    packages = succeed(bare, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere).strip()
    Path(packages, "aa_coverage.pth").write_text("import platform\n")
    succeed(bare, "-c", CHECK, cwd=elsewhere)


def test_pytest_in_an_uninstalled_checkout(bare, root, elsewhere):
    test = elsewhere / "test_it.py"
    test.write_text("import platform.config.fields\n\ndef test_it():\n    assert platform.system()\n")
    conftest = (root / "tests" / "conftest.py").read_text()
    (elsewhere / "conftest.py").write_text(
        conftest.replace("Path(__file__).resolve().parent.parent", f"Path({str(root)!r})")
    )
    succeed(bare, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={root}", test, cwd=elsewhere)


# Imported by the driver and by every worker: each module is there once, whatever it is called, and without a hook.
PROBE = """
import json, os, sys
from pathlib import Path
import platform
import elastic_platform.launch, elastic_platform.plan.operations
from elastic_platform.config.fields import Config

assert "_platform_startup" not in sys.modules
assert platform.system() == os.uname().sysname
for name in ("launch", "plan", "plan.operations", "config.fields"):
    assert sys.modules[f"elastic_platform.{name}"] is sys.modules[f"platform.{name}"], name
    assert sys.modules[f"platform.{name}"].__spec__.name == f"platform.{name}"
home = platform.__spec__.submodule_search_locations[0]
modules = {id(module): module for module in list(sys.modules.values())}.values()
files = [file for m in modules if (file := getattr(m, "__file__", None) or "").startswith(home)]
assert len(files) == len(set(files)) > 20
Path("probes").mkdir(exist_ok=True)
Path("probes", str(os.getpid())).write_text(json.dumps([home, *sys.orig_argv]))
"""
TWO_WORKERS = """+experiment=gpt_quick model.layers=1 model.d_model=32 model.length=16 model.vocab=300 eval.every=0
    monitor.sample=0 train.steps=2 optimizer.warmup_steps=0 parallel.data=1 cluster.device=cpu run.dir=run""".split()


@pytest.fixture
def no_hook(from_wheel, elsewhere) -> Path:
    """The interpreter of an environment into which the wheel is installed, and from which its .pth is deleted."""
    packages = Path(
        succeed(from_wheel, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=elsewhere)[:-1]
    )
    for name in ("zz_platform.pth", "zz_platform.start"):
        (packages / name).unlink()
    assert run(from_wheel, "-c", "import platform; platform.__path__", cwd=elsewhere).returncode == 1
    return from_wheel


def test_without_the_hook_a_process_its_children_and_commands_have_the_package(no_hook, elsewhere):
    (elsewhere / "probe.py").write_text(PROBE)
    for before in ("", "import platform; "):  # somebody may have imported the standard library's module
        succeed(no_hook, "-c", f"{before}import elastic_platform, platform.api, probe", cwd=elsewhere)
    child = "import subprocess, sys, elastic_platform; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    succeed(no_hook, "-c", child, "-c", CHECK, cwd=elsewhere)
    assert succeed(no_hook, "-c", child, "-m", "platform", cwd=elsewhere).startswith(os.uname().sysname)
    assert "KEY=VALUE" in succeed(no_hook, "-c", child, "-m", "platform.evaluate", "--help", cwd=elsewhere)
    missing = "import elastic_platform.nosuch"
    assert "No module named 'elastic_platform.nosuch'" in run(no_hook, "-c", missing, cwd=elsewhere).stderr
    # The probe sees a module that is there twice, and a child that is told nothing has no package.
    late = "import elastic_platform, sys; sys.meta_path.append(sys.meta_path.pop(0)); import probe"
    assert "AssertionError: plan.operations" in run(no_hook, "-c", late, cwd=elsewhere).stderr
    untold = child.replace("check=True", "check=True, env={}")
    assert "No module named 'platform.config'" in run(no_hook, "-c", untold, "-c", CHECK, cwd=elsewhere).stderr
    run_commands(no_hook, elsewhere)


def run_commands(no_hook: Path, elsewhere: Path) -> None:
    before = {*elsewhere.iterdir()}
    steps = ("launch", "--cfg", "job", "-p", "train", "train.steps=7")
    for command in ([no_hook.parent / "elastic-platform"], [no_hook, "-m", "elastic_platform"]):
        assert "steps: 7" in succeed(*command, *steps, cwd=elsewhere)
    assert "steps: 7" in succeed(no_hook, "-m", "elastic_platform.launch", *steps[1:], cwd=elsewhere)
    done = run(no_hook.parent / "elastic-platform", "plam", cwd=elsewhere)
    assert done.returncode == 2 and done.stderr.startswith("elastic-platform: plam: no command; nearest legal: plan, ")
    said = succeed(no_hook.parent / "elastic-platform", "report", "--help", cwd=elsewhere)
    assert said.startswith("usage: python -m elastic_platform report ")  # works when typed, here
    assert {*elsewhere.iterdir()} == before


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_one_without_a_hook_too(name, root, elsewhere):
    done = run(sys.executable, "-m", "elastic_platform", name, "--help", cwd=root)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def losses(directory: Path) -> list[str]:
    return [json.loads(line)["loss"] for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["processes", pytest.param("local", marks=pytest.mark.ray)])
def test_without_the_hook_gpt_quick_trains_the_same(no_hook, elsewhere, tmp_path, cluster):
    (elsewhere / "probe.py").write_text(PROBE)
    options = [*TWO_WORKERS, f"cluster={cluster}"]
    succeed(no_hook.parent / "elastic-platform", "launch", *options, "extend=[probe]", cwd=elsewhere)
    probes = [json.loads(path.read_text()) for path in (elsewhere / "probes").iterdir()]
    assert len(probes) == 3, probes  # the driver and two workers
    assert all(Path(home).is_relative_to(no_hook.parents[1]) for home, *_ in probes)

    hooked = tmp_path / "hooked"
    hooked.mkdir()
    command = [sys.executable, "-m", "platform.launch", *options]
    done = subprocess.run(command, cwd=hooked, capture_output=True, text=True)  # with the tests' PYTHONPATH, if any
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(elsewhere) == losses(hooked) and len(losses(hooked)) == 2


@pytest.mark.ray
def test_in_a_ray_worker(root):
    """Ray's worker has imported the standard library's module long before the driver's paths arrive."""
    import ray

    installed = "_platform_startup" in sys.modules
    environment = {} if installed else {"env_vars": {"PYTHONPATH": str(root)}}
    with tempfile.TemporaryDirectory(prefix="ray") as directory:  # short: sockets lie in it
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            _temp_dir=directory,
            runtime_env=environment,
            log_to_driver=False,
        )
        try:

            @ray.remote
            def compose() -> tuple[str, int]:
                import platform
                from platform.config.fields import Config

                return platform.system(), Config().train.steps

            assert ray.get(compose.remote()) == (os.uname().sysname, 100)
        finally:
            ray.shutdown()
