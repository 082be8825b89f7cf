"""Check of `tracking`: what the supervisor could not run."""

from collections.abc import Iterator
from importlib.util import find_spec

from corral.experiments.config.tracking import PACKAGE_BY_TRACKER, TrackingConfig
from corral.experiments.errors import ConfigProblem


def check_trackers(tracking: TrackingConfig) -> Iterator[ConfigProblem]:
    """Trackers whose packages are not there."""
    for name in tracking.to:
        package = PACKAGE_BY_TRACKER.get(name)
        if package is not None and find_spec(package) is None:
            yield ConfigProblem(
                f"the tracker {name} needs the package {package}, which is not installed here",
                f"pip install 'corral-rl[{name}]', or remove it",
                path=("tracking", "to"),
                is_of_running=True,
            )
