"""GpuUse of every GPU -> one table for people: who holds how much of what, at the worst moment.

GiB of one GPU                   params   grads   optim   activ   head   buffers    all
───────────────────────────────────────────────────────────────────────────────────────
model_worker 0-31
  actor/0 d32                       3.8     3.8     7.6    36.4    2.0      17.0   70.7
  ref/0 d32                         3.8                                             3.8
  all, in actor_train                                                              74.5
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corral.launcher.submit.memory_plan import GpuUse
from corral.scheduling.memory.gpu import CONTEXT_BYTES, FRAGMENTATION, GIB, PARTS, Part, Peak, usable_bytes
from corral.scheduling.memory.server import ANSWER
from corral.scheduling.worker_numbers import fold_numbers

_HEADINGS: dict[Part, str] = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "head": "head",
    "KV cache": "KV",
    "buffers": "buffers",
}
_MIB = 1 << 20
_WIDTH = 120  # where nobody looks at it on a terminal


def render_memory(uses: Sequence[GpuUse], *, gpu_memory_mb: int | None, width: int | None) -> str:
    """The table, and what of a GPU it leaves out.

    Args:
        gpu_memory_mb: of one GPU; None if nobody says.
        width: columns of the terminal; None if it is none.
    """
    shown = [part for part in PARTS if any(_has(use.peak, part) for use in uses)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column("GiB of one GPU", overflow="fold")
    for heading in [*(_HEADINGS[part] for part in shown), "all"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, use in enumerate(uses):
        if number:
            table.add_row()
        for cells in _rows(use, shown):
            table.add_row(*map(Text, cells))  # what is in brackets must not be taken for markup
    console = Console(width=width or _WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
        console.print(Text(_caption(gpu_memory_mb)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _has(peak: Peak | None, part: Part) -> bool:
    return peak is not None and any(parts.get(part) for parts in peak.parts_by_model.values())


def _rows(use: GpuUse, shown: Sequence[Part]) -> Iterator[list[str]]:
    yield [f"{use.kind} {fold_numbers(use.workers)}"]
    if use.peak is None:
        yield [f"  not known: config.json of {', '.join(use.unknown)}"]
        return
    for model, parts in use.peak.parts_by_model.items():
        cells = [_gib(parts.get(part, 0)) for part in shown]
        yield [f"  {model} {use.dims_by_model[model].short}", *cells, _gib(sum(parts.values()))]
    moment = "" if use.peak.call == ANSWER else f", in {use.peak.call}"
    yield [f"  all{moment}", *[""] * len(shown), _gib(use.peak.total)]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size else ""


def _caption(gpu_memory_mb: int | None) -> str:
    reserve = f"{CONTEXT_BYTES / GIB:.4g} GiB for CUDA and NCCL and {FRAGMENTATION:.0%} for fragmentation"
    if gpu_memory_mb is None:
        return f"Estimated; a GPU needs {reserve} besides. cluster.gpu_memory (80G) compares this with what it has."
    usable = usable_bytes(gpu_memory_mb * _MIB) / GIB
    return f"Estimated; {usable:.1f} of a GPU's {gpu_memory_mb / 1024:.4g} GiB are usable: {reserve} are set aside."
