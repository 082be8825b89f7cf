"""What a reward is: a function from a problem and an answer to a number, async or not. One whose second parameter is
called `answers` or `episodes` gets all of a group, and returns a list.

A reward is named in the experiment file by its import path. It is called in a process without keys, with a deadline;
what it raises is an explicit failure (retried, then counted), never a reward of zero.
"""

from collections.abc import Mapping
from typing import Any

Problem = Mapping[str, Any]
"""One row of the dataset, as it stands in the file."""


class StopTrialError(RuntimeError):
    """Raised by a reward: the trial ends with this message, and is not started again by itself."""
