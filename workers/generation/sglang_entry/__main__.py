"""Starts SGLang's server on a socket that is bound already; runs in SGLang's own Python.

    python sglang_entry DESCRIPTOR --model-path ... ──► sglang.launch_server --model-path ...

A port that is only named would be anybody's until the weights are loaded. No file of SGLang is changed: its HTTP server
listens on the descriptor, by an option that it has.
"""

import os
import runpy
import sys
from typing import Any

import uvicorn

if __name__ == "__main__":
    descriptor = int(sys.argv.pop(1))
    os.set_inheritable(descriptor, False)  # else children of SGLang would hold the port after it
    configure = uvicorn.Config.__init__

    def configure_on_descriptor(self: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        configure(self, *arguments, **{**options, "fd": descriptor})

    uvicorn.Config.__init__ = configure_on_descriptor
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
