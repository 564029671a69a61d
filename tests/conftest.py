"""Lets a bare `pytest` find our `platform` in an uninstalled checkout, here and in every child process."""

import gc
import logging
import os
import signal
from copy import copy
from pathlib import Path

import platform

ROOT = Path(__file__).resolve().parent.parent
os.environ.pop("RAY_ADDRESS", None)  # no test joins a Ray that it has not started
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many small processes share few cores
os.environ["NO_PROGRESS"] = "1"  # what commands print does not depend on how long they take; test_phases shows it
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and threads that wait spin in the place of others
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
if not hasattr(platform, "__path__"):  # pytest imported the standard library's module before we could
    platform.__path__ = [str(ROOT / "platform")]

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("ours", deadline=None)  # a busy machine is slow, not wrong
hypothesis.settings.register_profile("fewer", deadline=None, max_examples=30)  # of `make test`, where no test says more
hypothesis.settings.load_profile("ours")

# A group of tests is for one process of the suite: a file, which makes once what its tests share, or one of these.
GROUPS = {
    # what starts many processes: never two of them at a time
    "processes": """test_end_to_end.py test_driver.py test_crew.py test_extend.py test_api.py test_examples.py
        test_ray_cluster.py test_name.py test_stage_failures.py test_timeline.py test_kill_by_command.py
        test_resume_by_command.py test_chaos.py test_drivers.py""",
    "peers": "weights tokenizers",  # what compares with other libraries, whose imports take seconds
    "answers": "test_evaluate.py test_generate.py test_tasks.py",  # what asks one model, which is trained for it
    "house": "house",  # what reads the whole package, which is parsed once for all of it
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


NOT_FULL = "not full"


def pytest_configure(config: pytest.Config) -> None:
    """Leave the cases that `make test` does not run out of its collection, which every process of it makes."""
    if config.option.markexpr == NOT_FULL:
        from tests.harness import suite

        suite.full = False
        hypothesis.settings.load_profile("fewer")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Thousands of tests live as long as the session: the garbage collector need not look at them again and again,
    neither while they are made, a fifth of the time that it takes, nor later. What tests make themselves, plans above
    all, is much at a time and soon gone: it looks less often than by default."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


EVERY_ONE = "`make test-all` runs every one"
THINNED = ROOT / "tests" / "thinned.yaml"  # file -> test -> of so many cases `make test` runs one; 0: of none


def thin(items: list[pytest.Item]) -> None:
    """Mark `full` what THINNED leaves out, see `kept`. How many of how many are left is printed at the end."""
    import yaml

    from tests.harness.thinned import kept
    from tests.known_bugs.bugs import cases_that_kill

    families: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("full"):
            families.setdefault((item.nodeid.partition("::")[0], getattr(item, "originalname", "")), []).append(item)
    ran = of = 0
    for file, tests in yaml.safe_load(THINNED.read_text()).items():
        for name, every in tests.items():
            cases = families.get((file, name), [])
            counted = bool(cases) and cases[0].get_closest_marker("counted")
            arguments = [case.callspec.params if hasattr(case, "callspec") else {} for case in cases]
            remaining = kept(arguments, every, bool(counted), cases_that_kill(f"{file.removeprefix('tests/')}::{name}"))
            ran, of = ran + len(remaining), of + len(cases)
            for i, case in enumerate(cases):
                if i not in remaining:
                    case.add_marker(pytest.mark.full)
                elif counted:
                    case.add_marker(pytest.mark.counted(counted.args[0], len(remaining), counted.args[2]), append=False)
    first = next(iter(families.values()))[0]
    first.user_properties.append(("count", (f"tests of {THINNED.relative_to(ROOT)}", ran, of, EVERY_ONE)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the pool of processes or start Ray are of the group of those that start many; the others are of
    that of their file or folder in GROUPS, or of their file. Groups of GROUPS come first, as they take longest. Tests
    marked `gpu` are skipped where there is none; torch is imported only if there is one to skip."""
    if items and items[0].config.option.markexpr == NOT_FULL:
        thin(items)
    order = {}
    for item in items:
        many = "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ray")
        listed = "processes" if many else GROUP_OF.get(item.path.name) or GROUP_OF.get(item.path.parent.name)
        item.add_marker(pytest.mark.xdist_group(listed or item.path.stem))
        order[item] = [*GROUPS].index(listed) if listed else len(GROUPS)
        if counted := item.get_closest_marker("counted"):
            item.user_properties.append(("count", (*counted.args, EVERY_ONE)))
    items.sort(key=order.__getitem__)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def as_a_new_process():
    """Forgets the secrets of the commands that earlier tests gave in this process, where their logs went, what they put
    into its environment, and the operations that they planned, perhaps by a rule with a mistake."""
    from platform.boundary.redaction import forget_secrets
    from platform.model import forget_models
    from platform.plan.plan_builder import forget_planned

    forget_secrets()
    forget_planned()
    forget_models()
    level, environment = logging.root.level, dict(os.environ)
    yield
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    logging.root.setLevel(level)
    # those of basicConfig, whose stream is that test's; pytest's are of types of its own
    for handler in [h for h in logging.root.handlers if type(h) is logging.StreamHandler]:
        logging.root.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def files_composed_once():
    """Keeps what our own files compose to for all tests, as the jobs of one sweep share it; every test sets its values
    anew. Hydra copies all its sources, our schema among them, for every question about a group, lest one changes their
    list: here it copies the list."""
    from hydra._internal.config_repository import CachingConfigRepository

    from platform.config.composition import Composer

    init, chosen, options, swept = Composer.__init__, {}, {}, {}

    def share(self, own, stored):
        init(self, own, stored)
        if not own and not stored:
            self._chosen, self._options, self._swept = chosen, options, swept

    def copied(self, delegate):
        self.delegate, self.cache = copy(delegate), {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composer, "__init__", share)
        patch.setattr(CachingConfigRepository, "__init__", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_fork_server():
    """Lets the crews of all tests in this process have their workers forked by one server, which has imported torch
    when the second one starts."""
    from platform.cluster.crew import forked_workers
    from tests.harness import warm

    with pytest.MonkeyPatch.context() as patch:
        own = forked_workers.ForkServer
        patch.setattr(forked_workers, "ForkServer", lambda place: warm.shared())
        yield own


@pytest.fixture
def own_fork_servers(monkeypatch, one_fork_server):
    """Gives each crew a fork server of its own, as a user's has."""
    from platform.cluster.crew import forked_workers

    monkeypatch.setattr(forked_workers, "ForkServer", one_fork_server)


@pytest.fixture
def warm_server():
    """Starts the fork server that crews share, before a test lists what runs on this machine."""
    from tests.harness import warm

    warm.shared()


@pytest.fixture(scope="session")
def pool():
    """Eight gloo processes."""
    from tests.harness.pool import Pool

    pool = Pool()
    yield pool
    pool.close()


_counts: dict[str, tuple[int, int, str]] = {}


@pytest.fixture
def record_count(request):
    """`record_count(what, ran, of, how)`: how many of how many cases ran, printed once at the end of the session."""

    def record(what, ran, of, how=EVERY_ONE):
        request.node.user_properties.append(("count", (what, ran, of, how)))

    return record


def pytest_runtest_logreport(report):
    _counts.update((what, tuple(rest)) for name, (what, *rest) in report.user_properties if name == "count")


def pytest_terminal_summary(terminalreporter):
    for what, (ran, of, how) in sorted(_counts.items()):
        terminalreporter.write_line(f"{what}: {ran} of {of} cases ({how})")
