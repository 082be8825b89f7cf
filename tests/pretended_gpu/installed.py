"""Importing this gives the process a pretended GPU, where it has no torch for real ones: before torch is imported.

`python -m pytest -p tests.pretended_gpu.installed tests/gpu` runs tests on it; ranks that a test starts have it, too.
"""

import ctypes
import sys

from tests.pretended_gpu.build import library, why_not_pretended

assert "torch" not in sys.modules, "torch has looked for its devices already: import this first"

if why_not_pretended() is None:
    _built = ctypes.CDLL(str(library()))
    from tests.pretended_gpu import cuda, kernels

    cuda.install(_built)
    kernels_of_cpu = kernels.install()
