"""Settings for all tests: nothing here is measured by the clock, so hypothesis sets no deadline either.

Clusters, whole trials and gangs of ranks come first: at the end no process should be left alone with a long file.
"""

import pytest
from hypothesis import settings

settings.register_profile("corral", deadline=None)
settings.load_profile("corral")

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
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
