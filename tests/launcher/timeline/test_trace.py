"""The file for Perfetto is what the Trace Event Format says: complete events that nest, and arrows that end."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from corral.experiments.trial.spans import PHASES, Span
from corral.launcher.timeline.reader import trace_of
from tests.trace_format import check_format

WORKERS = ("master_worker/0", "model_worker/0", "rollout_worker/0")
SPANS = st.builds(
    Span,
    worker=st.sampled_from(WORKERS),
    attempt=st.integers(0, 1),
    lane=st.sampled_from([PHASES, "answers"]),
    name=st.sampled_from(["wait", "work"]),
    waits_for=st.sampled_from([(), WORKERS[1:]]),
    start_s=st.floats(1e9, 1e9 + 10.0),
    end_s=st.floats(1e9 + 10.0, 1e9 + 20.0),
)


@given(st.lists(SPANS, max_size=30))
def test_any_spans_make_a_valid_file(spans: Sequence[Span]) -> None:
    content = trace_of(sorted(spans, key=lambda span: span.start_s))
    check_format(content)
    assert sum(event["ph"] == "X" for event in content["traceEvents"]) == len(spans)


def test_a_wait_has_an_arrow_from_what_it_waited_for() -> None:
    spans = [
        Span(worker=WORKERS[0], lane=PHASES, name="train step", start_s=0.0, end_s=5.0, waits_for=(WORKERS[1],)),
        Span(worker=WORKERS[1], lane=PHASES, name="train step", start_s=1.0, end_s=4.0),
        Span(worker=WORKERS[1], lane=PHASES, name="idle", start_s=4.0, end_s=9.0),
    ]
    arrows = [event for event in trace_of(spans)["traceEvents"] if event["ph"] in "sf"]
    assert [(event["pid"], event["ts"]) for event in arrows] == [(2, 4_000_000), (1, 5_000_000)]


def test_two_starts_of_a_worker_are_two_processes() -> None:
    spans = [
        Span(worker=WORKERS[0], incarnation=start, lane=PHASES, name="train", start_s=at, end_s=at + 1.0)
        for at, start in enumerate(("a", "b"))
    ]
    names = [each["args"]["name"] for each in trace_of(spans)["traceEvents"] if each["name"] == "process_name"]
    assert names == [WORKERS[0], f"{WORKERS[0]}, start 2"]
