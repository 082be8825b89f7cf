"""How far each call of a step has come: every sample once, never before its inputs are there."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from corral.scheduling.dataflow import DataflowGraph, build_dataflow
from corral.scheduling.model_function_call import ModelFunctionCall
from corral.workers.master.step_order import StepState


def call(
    name: str, call_type: str = "inference", role: str = "actor", n_seqs: int = 4, **keys: tuple[str, ...]
) -> ModelFunctionCall:
    return ModelFunctionCall.model_validate(
        {"name": name, "model_name": role, "call_type": call_type, "implementation": "x", "n_seqs": n_seqs} | keys
    )


def graph_of(*calls: ModelFunctionCall) -> DataflowGraph:
    return build_dataflow(calls, ["ids"])


BATCH = ["a", "b", "c", "d"]


def test_a_call_waits_for_its_own_keys_and_takes_as_many_as_it_says() -> None:
    graph = graph_of(
        call("ref_inf", role="ref", n_seqs=2, input_keys=("ids",), output_keys=("ref",)),
        call("reader", role="critic", n_seqs=3, input_keys=("ref",), output_keys=("read",)),
    )
    state = StepState(graph, BATCH)
    assert (state.next_slice("ref_inf"), state.next_slice("reader"), state.waits_for("reader")) == (
        ["a", "b"],
        None,
        ["ref_inf"],
    )
    state.finish_slice("ref_inf", ["a", "b"])
    assert (state.next_slice("ref_inf"), state.next_slice("reader")) == (["c", "d"], None)
    state.finish_slice("ref_inf", ["c", "d"])
    assert (state.is_over("ref_inf"), state.next_slice("ref_inf"), state.next_slice("reader")) == (
        True,
        None,
        ["a", "b", "c"],
    )
    assert not state.is_last_slice("reader", ["a", "b", "c"])
    state.finish_slice("reader", ["a", "b", "c"])
    assert (state.next_slice("reader"), state.is_last_slice("reader", ["d"]), state.is_over("reader")) == (
        ["d"],
        True,
        False,
    )
    state.finish_slice("reader", ["d"])
    assert state.is_over("reader")


def test_a_train_step_begins_when_all_calls_on_its_model_have_seen_the_weights_before_it() -> None:
    graph = graph_of(
        call("actor_inf", n_seqs=2, input_keys=("ids",), output_keys=("proximal",)),
        call("probe", input_keys=("ids",), output_keys=("probed",)),
        call("actor_train", "train_step", n_seqs=2, input_keys=("proximal",)),
        call("critic_train", "train_step", role="critic", n_seqs=2, input_keys=("proximal",)),
    )
    state = StepState(graph, BATCH)
    state.finish_slice("actor_inf", ["a", "b"])
    assert state.next_slice("critic_train") == ["a", "b"]
    assert (state.next_slice("actor_train"), state.waits_for("actor_train")) == (None, ["actor_inf", "probe"])
    state.finish_slice("actor_inf", ["c", "d"])
    assert state.waits_for("actor_train") == ["probe"]
    state.finish_slice("probe", BATCH)
    assert state.next_slice("actor_train") == ["a", "b"]


@st.composite
def graphs(draw: st.DrawFn) -> DataflowGraph:
    """Call i makes key i and reads keys of earlier ones; some train; roles and numbers of samples vary."""
    calls, made = [], ["ids"]
    for number in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
        role, n_seqs = draw(st.sampled_from(["actor", "ref", "critic"])), draw(st.integers(1, 5))
        calls.append(
            call(f"call{number}", role=role, n_seqs=n_seqs, input_keys=tuple(reads), output_keys=(f"key{number}",))
        )
        made.append(f"key{number}")
    for role in draw(st.sets(st.sampled_from(["actor", "critic"]))):
        reads = draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
        calls.append(
            call(f"{role}_train", "train_step", role=role, n_seqs=draw(st.integers(1, 5)), input_keys=tuple(reads))
        )
    return build_dataflow(calls, ["ids"])


@given(graphs(), st.integers(1, 7), st.randoms(use_true_random=False))
def test_in_whatever_order_calls_end_each_takes_each_sample_once_after_its_producers(
    graph: DataflowGraph, size: int, random: Random
) -> None:
    batch = [f"s{number}" for number in range(size)]
    state = StepState(graph, batch)
    running: dict[str, list[str]] = {}
    taken: dict[str, list[str]] = {call.name: [] for call in graph.calls}
    while not all(state.is_over(call_.name) for call_ in graph.calls):
        for call_ in graph.calls:
            if call_.name not in running and (uids := state.next_slice(call_.name)) is not None:
                for producer in graph.predecessors(call_.name):
                    assert set(uids) <= set(taken[producer])
                running[call_.name] = uids
        assert running, "some call can always go on"
        name = random.choice(sorted(running))
        state.finish_slice(name, running[name])
        taken[name] += running.pop(name)
    assert all(sorted(uids) == sorted(batch) for uids in taken.values())
