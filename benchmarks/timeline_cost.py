"""What the timeline costs: CPU microseconds of a span, and of all spans of a train step beside its time.

    OMP_NUM_THREADS=1 python benchmarks/timeline_cost.py [--trial DIR]

A span is recorded by the thread that works, and encoded and written by another: both are measured. With --trial the
spans and bytes of each step of a trial are counted.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from corral.experiments.trial.spans import Clock, Span, spans_path
from corral.launcher.timeline.reader import spans_of, steps_of
from corral.workers.lifecycle.timeline import Timeline

_SPANS = 10_000  # fewer than may wait for the writing thread
_ROUNDS = 5


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trial", type=Path, help="directory of a trial whose spans are counted")
    trial = parser.parse_args().trial
    record_us, whole_us, num_bytes = _of_a_span()
    print(f"a span: {record_us:.2f} us to record, {whole_us:.2f} us with its writing, {num_bytes:.0f} bytes")
    if trial is not None:
        folder = trial / "timeline"
        steps = steps_of(folder)
        spans = spans_of(folder, list(steps))
        step_s = sum(step.seconds for step in steps.values()) / len(steps)
        per_worker = Counter(span.worker for span in spans)
        busiest, most = per_worker.most_common(1)[0]
        size = sum(path.stat().st_size for path in folder.glob("*.jsonl")) / len(steps)
        print(f"a step of {step_s:.2f} s: {len(spans) / len(steps):.0f} spans of all workers, {size / 1e3:.1f} kB")
        share = most / len(steps) * whole_us * 1e-6 / step_s
        print(f"{busiest}, which has the most: {most / len(steps):.0f} a step, {share:.4%} of its time")


def _of_a_span() -> tuple[float, float, float]:
    """Of the best round: microseconds to record, and of the process for all of it; and bytes."""
    clock = Clock(worker="rollout_worker/0", attempt=0, incarnation="5f2c" * 8, offset_s=1.7e9, error_s=1e-3)
    recording, whole = [], []
    with tempfile.TemporaryDirectory(prefix="corral-timeline-") as folder:
        for _ in range(_ROUNDS):
            path = spans_path(Path(folder), clock.worker)
            path.unlink(missing_ok=True)
            before_s = time.process_time()
            with Timeline(Path(folder), clock, max_mb=64) as timeline:
                began_s = time.thread_time()
                for number in range(_SPANS):
                    timeline.record(_answers(float(number)))
                recording.append(time.thread_time() - began_s)
            whole.append(time.process_time() - before_s)
        return min(recording) / _SPANS * 1e6, min(whole) / _SPANS * 1e6, path.stat().st_size / _SPANS


def _answers(start_s: float) -> Span:
    """As a group of answers is recorded."""
    return Span(
        lane="answers",
        name="generate",
        start_s=start_s + 0.123456,
        end_s=start_s + 1.654321,
        waits_for=("generation_server/1",),
        about="0:problem-12345",
        tokens=1234,
    )


if __name__ == "__main__":
    main()
