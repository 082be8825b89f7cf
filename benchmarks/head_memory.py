"""What loss and head of a language model cost: made a chunk of tokens at a time, beside whole logits.

    python benchmarks/head_memory.py [--vocabulary 151936] [--hidden 64] [--tokens 8192 16384 32768] [--limit-gb 8]

Each row is a process of its own, on one thread: from hidden states to the gradients of hidden states and weight, by way
of a loss over the log-probabilities, with the entropy beside it. The peak is what the process held in memory more than
before, as the kernel counts it; both gradients are part of it, weight and hidden states are not. Both ways run at the
largest number of tokens (a power of two) whose whole logits stay within the limit: there scores and gradients are
compared. Where whole logits would go beyond it, or beyond the memory that is free, the row says what they would need by
that measurement, and nothing else.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.process_memory import forget_peak, free_bytes, kernel_count  # noqa: E402
from corral.workers.backends.base import TokenScores  # noqa: E402
from corral.workers.backends.chunked_head import score_tokens  # noqa: E402

SEED = 0
GB = 1e9
FEWEST_TOKENS = 256  # the first guess at what whole logits need is measured there
TIMEOUT_S = 1800.0
COMPARED = ("logprobs", "entropy", "of_hidden", "of_weight")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one forward and backward pass."""

    peak_bytes: int
    cpu_s: float
    wall_s: float


def main() -> None:
    """Prints the table and how far the two ways are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151936, help="tokens of it; Qwen's by default")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--limit-gb", type=float, default=8.0, help="of memory that whole logits may take")
    parser.add_argument("--case", nargs=3, metavar=("WAY", "TOKENS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        way, tokens, folder = options.case
        cost = run_case(WAYS[way], int(tokens), options.vocabulary, options.hidden, Path(folder))
        print(json.dumps(asdict(cost)))
        return
    sizes = ["--vocabulary", str(options.vocabulary), "--hidden", str(options.hidden)]
    with tempfile.TemporaryDirectory(prefix="corral-head-") as folder:
        compare(options.tokens, sizes, limit=options.limit_gb * GB, folder=Path(folder))


def compare(tokens: list[int], sizes: list[str], *, limit: float, folder: Path) -> None:
    """Both ways where whole logits fit, then every size."""
    print(f"loss and head, {' '.join(sizes)}, float32, one thread, H x V weight; a process each")
    print(f"{'tokens':>8} {'way':<8} {'peak':>10} {'CPU':>9} {'wall':>9}")
    needed = measure("whole", FEWEST_TOKENS, sizes, folder).peak_bytes / FEWEST_TOKENS
    bound = min(limit, free_bytes())
    fitting = FEWEST_TOKENS
    while 2 * fitting * needed <= bound and 2 * fitting <= max(tokens):
        fitting *= 2
    measured = {way: show(way, fitting, measure(way, fitting, sizes, folder)) for way in WAYS}
    needed = measured["whole"].peak_bytes / fitting
    for count in (count for count in tokens if count != fitting):
        for way in WAYS:
            if way == "whole" and count * needed > bound:
                need = f"not run: would need {count * needed / GB:.0f} GB, {needed / 1e6:.2f} MB a token as measured"
                print(f"{count:>8} {way:<8} {need}")
            else:
                show(way, count, measure(way, count, sizes, folder))
    print(f"\nat {fitting} tokens, largest difference by the largest value of whole logits:")
    for name, difference in differences(folder, fitting).items():
        print(f"    {name:<10} {difference:.1e}")


def show(way: str, tokens: int, cost: Cost) -> Cost:
    """Print one row."""
    row = f"{cost.peak_bytes / GB:>7.2f} GB {cost.cpu_s:>7.1f} s {cost.wall_s:>7.1f} s"
    print(f"{tokens:>8} {way:<8} {row}", flush=True)
    return cost


def measure(way: str, tokens: int, sizes: list[str], folder: Path) -> Cost:
    """One case in a process of its own."""
    command = [sys.executable, __file__, *sizes, "--case", way, str(tokens), str(folder)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
    return Cost(**json.loads(run.stdout))


def differences(folder: Path, tokens: int) -> Mapping[str, float]:
    """How far what both ways gave is apart, by the largest value of each kind."""
    found = {way: np.load(folder / f"{way}-{tokens}.npz", allow_pickle=False) for way in WAYS}
    return {
        name: float(np.abs(found["chunked"][name] - found["whole"][name]).max() / np.abs(found["whole"][name]).max())
        for name in COMPARED
    }


# --- one case -----------------------------------------------------------------------------------------------------


def run_case(way: Callable[..., TokenScores], tokens: int, vocabulary: int, width: int, folder: Path) -> Cost:
    """Forward and backward, once; what came out of it goes to a file, for comparison."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    slopes = torch.randn(tokens, generator=generator) / tokens
    forget_peak()
    before = kernel_count("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    scores = way(hidden, weight, labels)
    torch.autograd.backward((scores.logprobs * slopes).sum())
    cost = Cost(kernel_count("VmHWM") - before, time.process_time() - cpu, time.perf_counter() - wall)
    assert hidden.grad is not None and weight.grad is not None
    results = (scores.logprobs.detach(), scores.entropy, hidden.grad, weight.grad)
    way_name = next(name for name, function in WAYS.items() if function is way)
    np.savez(folder / f"{way_name}-{tokens}.npz", **dict(zip(COMPARED, (one.numpy() for one in results), strict=True)))
    return cost


def whole_scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> TokenScores:
    """As it is usually written: all logits, a softmax of them, and the labels' entries."""
    table = torch.log_softmax(hidden @ weight.T, dim=-1)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return TokenScores(table.gather(1, labels[:, None])[:, 0], entropy)


WAYS: dict[str, Callable[..., TokenScores]] = {"whole": whole_scores, "chunked": score_tokens}


if __name__ == "__main__":
    main()
