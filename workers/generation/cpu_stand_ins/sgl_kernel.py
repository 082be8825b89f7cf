"""In place of SGLang's compiled kernels, of which no build for CPUs is published.

SGLang imports names from this package when it starts, whatever it runs on, and on a CPU without AMX then calls none of
them: it has the same operations in plain torch. So every name can be imported here, and a call says which kernel was
wanted. On the path of SGLang's processes only where there is no GPU; see `corral.workers.generation.sglang`.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):  # what Python itself asks of modules
        raise AttributeError(name)

    def kernel(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU; SGLang was expected to use plain torch on a CPU")

    return kernel
