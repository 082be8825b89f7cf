"""Which test shows what each field of a call, of a hook and of a request does: change the field, and that test fails.

A field, a hook or a request that is new has no entry here, and one that is gone has one too many: both fail.
"""

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from corral.scheduling import model_function_call as graph
from corral.scheduling.model_function_call import (
    ModelFunctionCall,
    ModelName,
    OffloadHook,
    PublishWeightsHook,
    PullWeightsHook,
    PushWeightsHook,
)
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.requests.messages import (
    ClearDataCache,
    DataTransfer,
    Evaluate,
    Fetch,
    Generate,
    Give,
    Inference,
    Initialize,
    LoadRows,
    Reallocate,
    Reject,
    Request,
    SaveCheckpoint,
    SaveWeights,
    TrainStep,
    WorkerRequest,
    Written,
)

TESTS = Path(__file__).parents[1]
ITSELF = "itself"
"""Of a class without fields."""

CALLS = "workers/master/test_calls.py"
MODELS = "workers/model/test_models.py"
WORKER = "workers/model/test_model_worker.py"
STEP = "workers/master/test_step_runner.py"
STREAM = "workers/requests/test_client_and_handler.py"
SPLIT = "workers/master/test_split_placement.py"
DEFERRED = "workers/requests/test_deferred_answers.py"
PLANE = "workers/model/test_data_plane.py"
SHARED = "workers/shared_prompts/test_engine.py"
SYNCHRONOUS = "integration/test_synchronous_ppo.py"
SAME_TRAINING = f"{SYNCHRONOUS}::synchronous_ppo_and_asynchronous_ppo_at_eta_0_are_the_same_training"

NEW_WEIGHTS = f"{CALLS}::new_weights_are_published_and_pushed_after_the_train_step_in_the_order_of_its_hooks"
REPORTS = f"{WORKER}::one_rank_reports_what_is_equal_on_all"
AT_ONCE = f"{WORKER}::what_is_answered_at_once_is_done_by_its_part"
BEHIND = f"{WORKER}::what_is_copied_for_a_commit_is_written_while_other_requests_run"
IN_TURN = f"{WORKER}::what_waits_for_its_turn_is_done_by_the_models"
NAMED_KEYS = f"{MODELS}::a_key_of_the_users_own_goes_from_call_to_call_under_the_name_that_the_graph_gives_it"
MOVED_WEIGHTS = f"{MODELS}::weights_move_from_one_model_into_another_and_may_be_averaged"
EACH_ROLE = f"{MODELS}::every_trained_role_goes_on_from_its_own_weights_and_numbers"
LOOKED_AT = f"{CALLS}::held_out_rows_are_dealt_to_a_call_that_evaluates_and_one_rank_reports"
OWN_SHARE = f"{STREAM}::each_worker_gets_its_own_share_and_nothing_of_the_others"
AROUND = dict.fromkeys(
    ("take", "offloads"), f"{WORKER}::inputs_are_taken_before_a_call_and_its_model_is_moved_away_after_it"
)

CALL = {
    "name": f"{CALLS}::the_name_says_which_call_a_rank_runs",
    "model_name": f"{CALLS}::role_and_replica_say_which_ranks_are_asked",
    "call_type": f"{CALLS}::the_kind_says_what_a_rank_is_asked_and_one_rank_of_a_train_step_reports",
    "implementation": NAMED_KEYS,
    "n_seqs": f"{STEP}::a_call_waits_for_its_own_keys_and_takes_as_many_as_it_says",
    "input_keys": f"{CALLS}::what_a_call_reads_goes_to_its_ranks_and_nothing_else",
    "output_keys": f"{CALLS}::what_a_call_makes_is_known_to_lie_where_it_was_made",
    "input_key_remap": NAMED_KEYS,
    "output_key_remap": NAMED_KEYS,
    "micro_batches": f"{MODELS}::each_call_cuts_its_samples_as_it_says",
    "pre_hooks": f"{CALLS}::weights_are_pulled_before_the_call",
    "post_hooks": NEW_WEIGHTS,
}

SHOWN_BY: Mapping[type, Mapping[str, str]] = {
    ModelFunctionCall: CALL,
    ModelName: dict.fromkeys(("role", "replica_id"), f"{CALLS}::role_and_replica_say_which_ranks_are_asked"),
    MicroBatchSpec: dict.fromkeys(
        ("max_tokens_per_micro_batch", "n_min"), f"{MODELS}::each_call_cuts_its_samples_as_it_says"
    )
    | {"shares_prompts": f"{SHARED}::steps_with_shared_prompts_are_those_with_a_prompt_for_each_answer"},
    PullWeightsHook: dict.fromkeys(("type", "source"), f"{CALLS}::weights_are_pulled_before_the_call"),
    PushWeightsHook: dict.fromkeys(("type", "target", "eta"), NEW_WEIGHTS),
    PublishWeightsHook: {"type": NEW_WEIGHTS},
    OffloadHook: {"type": f"{CALLS}::a_model_is_moved_away_after_its_last_go_on_every_rank"},
    DataTransfer: dict.fromkeys(("transfers", "num_tokens"), f"{PLANE}::any_ownership_becomes_any_layout_bit_for_bit"),
    Fetch: {
        "max_samples": AT_ONCE,
        "wait_s": f"{DEFERRED}::a_waiting_request_without_news_is_answered_when_its_time_is_over",
    },
    LoadRows: {"uids": AT_ONCE},
    Reject: {"uids": AT_ONCE, "rejection": AT_ONCE},
    Give: {"transfers": f"{SPLIT}::a_rank_in_the_middle_of_a_call_gives_what_a_call_elsewhere_reads"},
    ClearDataCache: {"uids": AT_ONCE},
    Initialize: {
        "weights": EACH_ROLE,
        "states": EACH_ROLE,
        "step": f"{WORKER}::a_new_epoch_forgets_the_last_one_then_loads_and_only_then_asks_for_samples",
    },
    Generate: AROUND
    | dict.fromkeys(("mfc", "uids", "orders", "version"), SAME_TRAINING)
    | {
        "tries": "workers/model/test_generator.py"
        "::answers_follow_from_prompt_and_step_and_are_others_after_a_try_without_a_finite_loss"
    },
    Inference: AROUND
    | {
        "mfc": NAMED_KEYS,
        "uids": f"{MODELS}::a_rank_without_samples_takes_part_and_adds_nothing",
    },
    TrainStep: AROUND
    | {"mfc": EACH_ROLE, "uids": f"{CALLS}::each_rank_gets_its_own_samples"}
    | dict.fromkeys(("version", "reports"), REPORTS),
    Evaluate: AROUND | {"mfc": LOOKED_AT, "uids": LOOKED_AT, "reports": REPORTS},
    Reallocate: dict.fromkeys(("source", "target", "eta"), MOVED_WEIGHTS),
    SaveWeights: dict.fromkeys(("role", "directory"), IN_TURN)
    | {"base": f"{MODELS}::weights_lead_from_a_version_before_to_the_present_one"},
    SaveCheckpoint: dict.fromkeys(("role", "state", "weights"), BEHIND)
    | {"copies": f"{WORKER}::without_a_copy_all_is_on_disk_before_the_next_request"},
    Written: {"role": BEHIND},
    WorkerRequest: {
        "request": OWN_SHARE,
        "piggybacked": f"{DEFERRED}::riders_are_done_before_what_carries_them_in_order_and_once",
    },
}


def members(union: Any) -> set[type]:
    """The classes of a union, or of one under Annotated; one class is its own union."""
    inner = get_args(union)
    if not inner:
        return {union} if isinstance(union, type) else set()
    return set().union(*map(members, inner))


def fields_of(cls: Any) -> set[str]:
    if is_dataclass(cls):
        return {field.name for field in fields(cls)}
    return set(getattr(cls, "model_fields", None) or getattr(cls, "__struct_fields__", ())) or {ITSELF}


def test_every_hook_and_every_request_has_its_entries() -> None:
    unions = (graph.PreHook, graph.PostHook, DataTransfer, Request)
    found = set().union(*map(members, unions)) | {ModelFunctionCall, ModelName, MicroBatchSpec, WorkerRequest}
    assert found == set(SHOWN_BY)


@pytest.mark.parametrize("cls", SHOWN_BY, ids=lambda cls: cls.__name__)
def test_every_field_has_a_test_that_is_there(cls: type) -> None:
    assert fields_of(cls) == set(SHOWN_BY[cls])
    for shown_by in SHOWN_BY[cls].values():
        file, _, name = shown_by.partition("::")
        assert f"test_{name}" in names_of_tests(file)


@cache
def names_of_tests(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
