"""The layouts that there are: which jobs a trial asks for, and what they are to each other.

packed   [head]                            one job
hetjob   [head] [component] ...            one heterogeneous job
jobs     [head] [group] [group] ...        a job each
any      ... + [elastic] [elastic] ...     and a job for each elastic worker
"""

from typing import Literal

LayoutKind = Literal["packed", "hetjob", "jobs"]
AskedLayout = Literal["auto", LayoutKind]
"""As `launch.layout` may say."""
