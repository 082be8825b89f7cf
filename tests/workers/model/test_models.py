"""What a rank makes of model function calls: outputs, updates, weights and checkpoints of its roles."""

import shutil
import weakref
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from corral.experiments.config.model import LoraConfig, ModelConfig
from corral.experiments.config.rollout import RewardConfig
from corral.experiments.worker_specs import ModelRoleSpec, ModelWorkerSpec
from corral.scheduling.keys import BUILT_IN_KEYS, Key, built_in, merge_keys
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.interfaces import InterfaceSettings
from corral.workers.algorithms.sft import SFTInterface
from corral.workers.backends.base import AnyEngine, Numbers
from corral.workers.backends.fsdp.engine import FSDPEngine
from corral.workers.backends.parallel_context import ParallelContext
from corral.workers.checkpoint.durable_file import no_progress
from corral.workers.checkpoint.file_delta import read_header
from corral.workers.checkpoint.manifest import write_manifest
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.lifecycle.worker import BadConfigurationError
from corral.workers.model.data_store import DataStore
from corral.workers.model.models import Models
from corral.workers.requests.messages import Inference, Initialize, Reallocate, SaveCheckpoint, TrainStep
from tests.workers.backends.test_packing_proof import CHANGED
from tests.workers.backends.test_packing_proof import save as save_kind
from tests.workers.backends.training_helpers import (
    load_reference,
    make_sample,
    optimizer_config,
    read_weights,
    save_tiny_model,
)

UIDS = ["0:0", "0:1"]
PLACES = {name: ParallelContext() for name in ("actor/0", "ref/0", "critic/0")}
SAMPLE = make_sample([[6], [9]])


def specification(folder: Path) -> ModelWorkerSpec:
    """An actor that is trained and a reference that is only read."""
    actor = ModelRoleSpec(role="actor", model=ModelConfig(path=folder / "actor"), optimizer=optimizer_config())
    reference = ModelRoleSpec(role="ref", model=ModelConfig(path=folder / "ref"), optimizer=None)
    keys = ("input_ids", "prompt_mask")
    train = ModelFunctionCall(
        name="actor_train",
        model_name=ModelName("actor"),
        call_type=CallType.TRAIN_STEP,
        implementation="sft",
        n_seqs=2,
        input_keys=keys,
    )
    inference = ModelFunctionCall(
        name="ref_inf",
        model_name=ModelName("ref"),
        call_type=CallType.INFERENCE,
        implementation="sft",
        n_seqs=2,
        input_keys=keys,
        output_keys=("ref_logprobs",),
        output_key_remap={"logprobs": "ref_logprobs"},
    )
    return ModelWorkerSpec(
        index=0,
        world_size=1,
        roles=[reference, actor],
        calls=[inference, train],
        tokenizer=folder / "actor",
        takes_samples=True,
        dataset=None,
        evaluation=None,
        reward=RewardConfig(),
        total_steps=4,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "actor", seed=1)
    save_tiny_model(tmp_path / "ref", seed=2)
    return tmp_path


def models_of(folder: Path, store: DataStore) -> Models:
    return Models(specification(folder), store, PLACES, seed=0, secrets=())


def initialize(models: Models, weights: Path, state: Path | None = None) -> None:
    states = {"actor": str(state)} if state else {}
    request = Initialize(weights={"actor": str(weights)}, states=states, step=0)
    models.initialize(request, on_progress=lambda: None)


def train(models: Models, version: int) -> None:
    reply = models.train_step(TrainStep(mfc="actor_train", uids=UIDS, version=version))
    assert (reply.num_updates, reply.num_nonfinite, reply.is_damaged) == (1, 0, False)


def filled_store() -> DataStore:
    store = DataStore()
    store.put(SAMPLE)
    return store


def test_outputs_lie_beside_the_inputs_under_the_name_that_the_graph_gives_them(folder: Path) -> None:
    store = DataStore()
    store.put(SAMPLE.select_keys(["input_ids", "prompt_mask"]))
    models = models_of(folder, store)
    initialize(models, folder / "actor")
    models.inference(Inference(mfc="ref_inf", uids=UIDS))
    assert {key for key in BUILT_IN_KEYS if store.holds("0:1", key)} == {"input_ids", "prompt_mask", "ref_logprobs"}
    held = store.gather(["0:1"], ["input_ids", "ref_logprobs"])
    ids = torch.from_numpy(np.asarray(held.data["input_ids"], dtype=np.int64))
    with torch.no_grad():
        logits = load_reference(folder / "ref")(input_ids=ids[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
    expected[:1] = 0.0  # the second token belongs to the prompt
    np.testing.assert_allclose(np.asarray(held.data["ref_logprobs"]), expected.numpy(), atol=1e-5)


def test_a_rank_without_samples_takes_part_and_adds_nothing(folder: Path) -> None:
    store = DataStore()
    models = models_of(folder, store)
    initialize(models, folder / "actor")
    models.inference(Inference(mfc="ref_inf", uids=[]))
    assert store.uids == []


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)], ids=["all", "adapters"])
def test_a_save_that_was_copied_holds_what_the_role_was_then(lora: LoraConfig | None, folder: Path) -> None:
    reference, actor = specification(folder).roles
    roles = [reference, actor.model_copy(update={"lora": lora})]
    models = Models(
        specification(folder).model_copy(update={"roles": roles}), filled_store(), PLACES, seed=0, secrets=()
    )
    initialize(models, folder / "actor")
    train(models, 0)
    request = SaveCheckpoint(role="actor", state=str(folder / "s"), weights=str(folder / "w"), copies=False)
    at_once = models.role_save("actor", with_weights=True).write(request, on_progress=no_progress)
    copied = models.role_save("actor", with_weights=True).copied()
    train(models, 1)
    later = msgspec.structs.replace(request, state=str(folder / "s later"), weights=str(folder / "w later"))
    assert copied.write(later, on_progress=no_progress) == at_once
    assert ("adapter/adapter_model.safetensors" in at_once.weights) == (lora is not None)
    changed = msgspec.structs.replace(request, state=str(folder / "s after"), weights=str(folder / "w after"))
    after = models.role_save("actor", with_weights=True).write(changed, on_progress=no_progress)
    assert after.state != at_once.state and after.weights != at_once.weights


def test_weights_lead_from_a_version_before_to_the_present_one(folder: Path) -> None:
    models = models_of(folder, filled_store())
    initialize(models, folder / "actor")
    for name in ("before", "now"):
        (folder / name).mkdir()
    files = models.save_weights("actor", folder / "before", on_progress=no_progress)
    write_manifest(folder / "before", files, {})
    files = models.save_weights("actor", folder / "now", base=folder / "before", on_progress=no_progress)
    assert files["model.safetensors.delta"].size < 0.02 * files["model.safetensors"].size  # nothing was trained
    with open(folder / "now" / "model.safetensors.delta", "rb") as delta:
        assert read_header(delta).result == files["model.safetensors"]


def test_a_new_epoch_loads_what_is_trained_and_keeps_what_is_only_read(folder: Path) -> None:
    models = models_of(folder, filled_store())
    initialize(models, folder / "actor")
    train(models, 0)
    shutil.rmtree(folder / "ref")
    initialize(models, folder / "actor")
    (folder / "now").mkdir()
    models.save_weights("actor", folder / "now", on_progress=no_progress)
    before, now = read_weights(folder / "actor"), read_weights(folder / "now")
    assert all(torch.equal(before[name], now[name]) for name in before)
    models.inference(Inference(mfc="ref_inf", uids=UIDS))


def test_an_old_engine_is_gone_before_a_new_one_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of(folder, filled_store())
    initialize(models, folder / "actor")
    train(models, 0)
    actor = models._models[ModelName("actor")]
    model = weakref.ref(actor.engine.model)
    alive: list[bool] = []
    make = actor._make_engine

    def note(directory: Path) -> FSDPEngine:
        alive.append(model() is not None)
        return make(directory)

    monkeypatch.setattr(actor, "_make_engine", note)
    initialize(models, folder / "actor")
    assert alive == [False]


def test_adapters_go_on_beside_the_base_and_not_beside_the_merged_weights_of_a_commit(folder: Path) -> None:
    lora = LoraConfig(rank=2, alpha=4.0)
    reference, actor = specification(folder).roles

    def started(lora: LoraConfig, weights: Path, state: Path | None = None) -> Models:
        roles = [reference, actor.model_copy(update={"lora": lora})]
        models = Models(
            specification(folder).model_copy(update={"roles": roles}), filled_store(), PLACES, seed=0, secrets=()
        )
        initialize(models, weights, state)
        return models

    started(lora, folder / "actor").save_weights("actor", folder / "adapted", on_progress=no_progress)
    lora = lora.model_copy(update={"adapter": folder / "adapted" / "adapter"})
    first = started(lora, folder / "actor")
    for version in (0, 1):
        train(first, version)
    first.save_weights("actor", folder / "weights", on_progress=no_progress)
    first.role_save("actor", with_weights=False).state.write(folder / "state")
    shutil.rmtree(folder / "adapted")  # what training started from is needed once
    second = started(lora, folder / "weights", folder / "state")
    for models, name in ((first, "first"), (second, "second")):
        train(models, 2)
        models.save_weights("actor", folder / name, on_progress=no_progress)
    expected, actual = read_weights(folder / "first"), read_weights(folder / "second")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not torch.equal(
        actual["model.layers.0.mlp.up_proj.weight"],
        read_weights(folder / "weights")["model.layers.0.mlp.up_proj.weight"],
    )


def test_every_trained_role_goes_on_from_its_own_weights_and_numbers(folder: Path) -> None:
    spec = specification(folder)
    counting = spec.calls[1].model_copy(update={"implementation": f"{__name__}:Counting"})
    save_tiny_model(folder / "critic", seed=3)
    critic = spec.roles[1].model_copy(update={"role": "critic", "model": ModelConfig(path=folder / "critic")})
    critic_train = counting.model_copy(update={"name": "critic_train", "model_name": ModelName("critic")})
    calls = [spec.calls[0], counting, critic_train]
    spec = spec.model_copy(update={"roles": [*spec.roles, critic], "calls": calls})

    def started(weights: Path, state: Path | None) -> Models:
        models = Models(spec, filled_store(), PLACES, seed=0, secrets=())
        directories = {role: str(weights / role) for role in ("actor", "critic")}
        states = {role: str(state / role) for role in directories} if state else {}
        models.initialize(Initialize(weights=directories, states=states, step=0), on_progress=no_progress)
        return models

    first = started(folder, None)
    for role in ("actor", "critic", "critic"):
        first.train_step(TrainStep(mfc=f"{role}_train", uids=UIDS, version=0))
    for role in ("actor", "critic"):
        first.save_weights(role, folder / "weights" / role, on_progress=no_progress)
        first.role_save(role, with_weights=False).state.write(folder / "state" / role)
    second = started(folder / "weights", folder / "state")
    assert [second._models[ModelName(role)].engine.step for role in ("actor", "critic")] == [1, 2]
    assert steps_of(second) == [1.0, 2.0]
    for role in ("actor", "critic"):
        second.save_weights(role, folder / "again" / role, on_progress=no_progress)
        before, after = read_weights(folder / "weights" / role), read_weights(folder / "again" / role)
        assert all(torch.equal(before[name], after[name]) for name in before)
    actor, critic = (read_weights(folder / "weights" / role) for role in ("actor", "critic"))
    assert not any(torch.equal(actor[name], critic[name]) for name in actor if name.endswith("proj.weight"))

    # A new epoch with nothing committed starts from the beginning, with these numbers, too.
    weights = {role: str(folder / role) for role in ("actor", "critic")}
    second.initialize(Initialize(weights=weights, states={}, step=0), on_progress=no_progress)
    assert steps_of(second) == [0.0, 0.0]


def steps_of(models: Models) -> list[float]:
    interfaces = [models._models[ModelName(role)]._interfaces for role in ("actor", "critic")]
    return [cast(Counting, of_role[f"{__name__}:Counting"]).steps for of_role in interfaces]


class Counting(SFTInterface):
    """An interface with a number of its own."""

    def __init__(self, settings: InterfaceSettings) -> None:
        self.steps = 0.0

    def train_step(self, engine: AnyEngine, sample: SequenceSample, *, version: int) -> dict[str, float]:
        self.steps += 1.0
        return super().train_step(engine, sample, version=version)

    def state_dict(self) -> Numbers:
        return {"steps": self.steps}

    def load_state_dict(self, state: Numbers) -> None:
        self.steps = float(cast(float, state["steps"]))


NUM_TOKENS, DOUBLED = Key("num_tokens", "per_answer", "float32"), Key("doubled", "per_answer", "float32")


class Counted(SFTInterface):
    """An interface with keys of its own, one of which the graph has no use for."""

    inputs = {CallType.INFERENCE: built_in("input_ids")}
    outputs = {CallType.INFERENCE: (NUM_TOKENS, DOUBLED)}

    def __init__(self, settings: InterfaceSettings) -> None:
        pass

    def inference(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, Any]:
        counts = np.array(sample.answer_lengths(), np.float32)
        return {"num_tokens": counts, "doubled": 2 * counts}


class Doubled(Counted):
    inputs = {CallType.INFERENCE: (*built_in("input_ids"), NUM_TOKENS)}
    outputs = {CallType.INFERENCE: (DOUBLED,)}

    def inference(self, engine: AnyEngine, sample: SequenceSample) -> dict[str, Any]:
        assert sample.data["num_tokens"].dtype == np.float32  # on a rank without samples, too
        return {"doubled": 2 * sample.data["num_tokens"]}


def test_a_key_of_the_users_own_goes_from_call_to_call_under_the_name_that_the_graph_gives_it(folder: Path) -> None:
    common = {"model_name": ModelName("ref"), "call_type": CallType.INFERENCE, "n_seqs": 2}
    counted = {"name": "counted", "implementation": f"{__name__}:Counted", "input_keys": ("input_ids",)}
    doubled = {"name": "doubled", "implementation": f"{__name__}:Doubled", "input_keys": ("input_ids", "lengths")}
    counted |= {"output_keys": ("lengths",), "output_key_remap": {"num_tokens": "lengths"}}
    doubled |= {"output_keys": ("doubled",), "input_key_remap": {"lengths": "num_tokens"}}
    calls = [ModelFunctionCall.model_validate(common | fields) for fields in (counted, doubled)]
    store = DataStore(merge_keys([NUM_TOKENS, DOUBLED, Key("lengths", "per_answer", "float32")]))
    store.put(SAMPLE.select_keys(["input_ids"]))
    models = Models(specification(folder).model_copy(update={"calls": calls}), store, PLACES, seed=0, secrets=())
    initialize(models, folder / "actor")
    models.inference(Inference(mfc="counted", uids=UIDS))
    assert not store.holds("0:1", "doubled"), "the graph has no use for what this call makes of it"
    for uids in ([], UIDS):
        models.inference(Inference(mfc="doubled", uids=uids))
    assert store.gather(UIDS, ["lengths"]).data["lengths"].tolist() == [6.0, 9.0]
    assert store.gather(UIDS, ["doubled"]).data["doubled"].tolist() == [12.0, 18.0]
    assert not store.holds("0:1", "num_tokens")


def test_a_call_that_does_not_fit_its_interface_is_refused_at_the_start(folder: Path) -> None:
    spec = specification(folder)
    blind = spec.calls[1].model_copy(update={"input_keys": ("input_ids",)})
    with pytest.raises(BadConfigurationError, match="does not give SFTInterface the key prompt_mask"):
        Models(spec.model_copy(update={"calls": [spec.calls[0], blind]}), DataStore(), PLACES, seed=0, secrets=())


def test_a_rank_says_what_models_it_has_loaded(folder: Path) -> None:
    request = Initialize(weights={"actor": str(folder / "actor")}, states={}, step=0)
    reply = models_of(folder, DataStore()).initialize(request, on_progress=no_progress)["actor/0"]
    assert reply.num_parameters == sum(tensor.numel() for tensor in read_weights(folder / "actor").values())
    assert (reply.architecture, reply.num_layers, reply.hidden_size, reply.vocab_size) == ("qwen2", 2, 64, 64)


def test_an_actor_without_its_settings_is_refused(folder: Path) -> None:
    spec = specification(folder)
    calls = [call.model_copy(update={"implementation": "ppo_actor"}) for call in spec.calls]
    with pytest.raises(BadConfigurationError, match="no PPO settings"):
        Models(spec.model_copy(update={"calls": calls}), DataStore(), PLACES, seed=0, secrets=())


def test_a_kind_of_model_that_packed_rows_change_ends_the_worker_as_a_mistake_of_the_users(
    folder: Path, tmp_path: Path
) -> None:
    save_kind("doge", tmp_path, **CHANGED["doge"])
    with pytest.raises(BadConfigurationError, match="model actor/0 of .* 'doge' computes other numbers"):
        initialize(models_of(folder, DataStore()), tmp_path)


@pytest.mark.parametrize(("recompute", "expected"), [("none", 1), ("full", 2)])
def test_a_role_passes_its_layers_again_if_it_says_so(recompute: str, expected: int, folder: Path) -> None:
    spec = specification(folder)
    roles = [spec.roles[0], spec.roles[1].model_copy(update={"recompute": recompute})]
    models = Models(spec.model_copy(update={"roles": roles}), filled_store(), PLACES, seed=0, secrets=())
    initialize(models, folder / "actor")
    passes: list[object] = []
    inside = models._models[ModelName("actor")].engine.model.get_submodule("model.layers.0.input_layernorm")
    inside.register_forward_hook(lambda module, *_: passes.append(module))
    train(models, 0)
    assert len(passes) == expected


@pytest.mark.parametrize(
    ("micro_batches", "expected"),
    [
        (MicroBatchSpec(), [15]),
        (MicroBatchSpec(max_tokens_per_micro_batch=9), [6, 9]),
        (MicroBatchSpec(n_min=2), [6, 9]),
    ],
)
def test_each_call_cuts_its_samples_as_it_says(
    micro_batches: MicroBatchSpec, expected: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = specification(folder)
    tight = spec.calls[0].model_copy(update={"micro_batches": micro_batches})
    models = Models(
        spec.model_copy(update={"calls": [tight, spec.calls[1]]}), filled_store(), PLACES, seed=0, secrets=()
    )
    initialize(models, folder / "actor")
    sizes: list[int] = []
    engine = models._models[ModelName("ref")].engine
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model, "forward", lambda **inputs: sizes.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    )
    models.inference(Inference(mfc="ref_inf", uids=UIDS))
    assert sorted(sizes) == expected


def test_weights_move_from_one_model_into_another_and_may_be_averaged(folder: Path) -> None:
    spec = specification(folder)
    reference, actor_role = spec.roles
    roles = [reference.model_copy(update={"is_averaged": True}), actor_role]
    models = Models(spec.model_copy(update={"roles": roles}), filled_store(), PLACES, seed=0, secrets=())
    initialize(models, folder / "actor")
    actor, ref = (
        {name: tensor.clone() for name, tensor in read_weights(folder / role).items()} for role in ("actor", "ref")
    )
    models.reallocate(Reallocate(source="actor/0", target="ref/0", eta=0.25))
    (folder / "mixed").mkdir()
    models.save_weights("ref", folder / "mixed", on_progress=no_progress)
    for name, tensor in read_weights(folder / "mixed").items():
        torch.testing.assert_close(tensor, 0.25 * actor[name] + 0.75 * ref[name])


def test_a_model_that_was_moved_away_comes_back_with_its_next_call(folder: Path) -> None:
    models = models_of(folder, filled_store())
    initialize(models, folder / "actor")
    engine = models._models[ModelName("ref")].engine
    parameters = list(engine.model.parameters())
    models.offload("ref_inf")
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 0
    models.inference(Inference(mfc="ref_inf", uids=UIDS))
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in parameters)
