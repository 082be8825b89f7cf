"""Settings for all tests: nothing here is measured by the clock, so hypothesis sets no deadline either.

The longest files come first, then clusters, whole trials and trainer groups: at the end no process should be left alone
with a long file.
"""

import gc

import pytest
from hypothesis import settings

settings.register_profile("corral", deadline=None)
settings.load_profile("corral")

gc.disable()  # until all tests are imported, which is a third faster so; each process of them imports all

_LONGEST = (  # in this order: seconds that they compute and wait
    "tests/workers/generation/test_backends.py",
    "tests/integration/test_sglang.py",
    "tests/integration/test_security.py",
    "tests/integration/test_synchronous_ppo.py",
    "tests/integration/test_customized_trial.py",
    "tests/integration/test_megatron.py",
    "tests/slurm/test_failures.py",
)
_LONG = (
    "tests/slurm/",
    "tests/integration/",
    "tests/damage/",
    "tests/workers/generation/",
    "tests/workers/backends/",
    "tests/experiments/trial/",
    "tests/launcher/supervisor/",
    "tests/workers/master/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="of tests/gpu; cpu tries the tests out")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {path: number for number, path in enumerate(_LONGEST)}
    items.sort(
        key=lambda item: order.get(item.nodeid.partition("::")[0], len(order) + (not item.nodeid.startswith(_LONG)))
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
