"""Event files: `tensorboard --logdir TRIAL_DIRECTORY/tracking`."""

from collections.abc import Mapping
from pathlib import Path

from corral.launcher.tracking.tracker import TrackedTrial, emptied, package


class TensorBoard:
    """Begins anew in an empty folder."""

    def __init__(self, folder: Path, trial: TrackedTrial) -> None:
        """
        Raises:
            ConfigError: if the package is not there.
        """
        self._event = package("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = package("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        writer = package("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(str(emptied(folder)))

    def add(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
