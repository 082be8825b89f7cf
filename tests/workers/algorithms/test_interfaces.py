"""Names that lead to interfaces, losses and advantages, and calls that fit what is declared."""

import sys
from pathlib import Path
from typing import Any

import pytest

from corral.experiments.config.algorithm import ADVANTAGE_NAMES, INTERFACE_NAMES, LOSS_NAMES, KLConfig, PPOConfig
from corral.scheduling.keys import Key
from corral.scheduling.model_function_call import CallType, ModelFunctionCall, ModelName
from corral.workers.algorithms.advantage import ADVANTAGES, AdvantageEstimator, advantage_named
from corral.workers.algorithms.base import ModelInterface, check_call
from corral.workers.algorithms.interfaces import INTERFACES, InterfaceSettings, make_interface
from corral.workers.algorithms.policy_loss import LOSSES, loss_named
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from tests.workers.algorithms.small_engine import SmallEngine
from tests.workers.backends.training_helpers import make_sample

SETTINGS = InterfaceSettings(ppo=PPOConfig(kl=KLConfig(coef=0.1, place="reward"), advantage="gae"))
HEADS = {"ppo_critic": "value", "reward": "scalar", "paired_reward": "scalar"}


def test_the_configuration_names_what_there_is() -> None:
    assert INTERFACES.keys() == set(INTERFACE_NAMES)
    assert LOSSES.keys() == set(LOSS_NAMES)
    assert ADVANTAGES.keys() == set(ADVANTAGE_NAMES)


@pytest.mark.parametrize("implementation", INTERFACES)
def test_every_interface_serves_what_it_declares_with_the_keys_that_it_declares(implementation: str) -> None:
    interface = make_interface(implementation, SETTINGS)
    engine: Any = SmallEngine(HEADS.get(implementation, "lm"))  # type: ignore[arg-type]
    sample = make_sample([[6, 9], [7, 5]])
    sample = sample.with_key("values", SmallEngine("value").forward(sample)["values"])
    assert interface.inputs
    for call_type, keys in interface.inputs.items():
        given = sample.select_keys([key.name for key in keys])
        if call_type is CallType.INFERENCE:
            made = interface.inference(engine, given)
            assert made.keys() == {key.name for key in interface.outputs[call_type]}
            for key in interface.outputs[call_type]:
                assert given.with_key(key, made[key.name]).data[key.name].dtype == key.dtype
        elif call_type is CallType.TRAIN_STEP:
            assert interface.train_step(engine, given, version=0)
            assert engine.step == 1
        else:
            assert interface.evaluate(engine, given)


@pytest.mark.parametrize("implementation", INTERFACES)
def test_calls_of_other_kinds_are_refused(implementation: str) -> None:
    interface, engine = make_interface(implementation, SETTINGS), SmallEngine("lm")
    methods = {
        CallType.INFERENCE: lambda: interface.inference(engine, make_sample([[4, 4]])),
        CallType.TRAIN_STEP: lambda: interface.train_step(engine, make_sample([[4, 4]]), version=0),
        CallType.EVALUATE: lambda: interface.evaluate(engine, make_sample([[4, 4]])),
    }
    for call_type in methods.keys() - interface.inputs.keys():
        with pytest.raises(ValueError, match=f"serves no {call_type.value} call; it serves "):
            methods[call_type]()


def call(call_type: CallType = CallType.TRAIN_STEP, **fields: Any) -> ModelFunctionCall:
    return ModelFunctionCall(
        name="actor_call",
        model_name=ModelName("actor"),
        call_type=call_type,
        implementation="ppo_actor",
        n_seqs=4,
        **fields,
    )


def test_a_call_is_held_against_what_its_interface_declares() -> None:
    actor = PPOActorInterface(PPOConfig(n_minibatches=2))
    keys = ("input_ids", "prompt_mask", "old_logprobs", "rewards")
    check_call(actor, call(input_keys=(*keys, "proximal_logprobs")))
    check_call(actor, call(input_keys=(*keys, "center"), input_key_remap={"center": "proximal_logprobs"}))
    inference = {"input_keys": keys[:2], "output_keys": ("ref_logprobs",)}
    check_call(actor, call(CallType.INFERENCE, output_key_remap={"logprobs": "ref_logprobs"}, **inference))
    with pytest.raises(ValueError, match="does not give PPOActorInterface the key proximal_logprobs"):
        check_call(actor, call(input_keys=keys))
    with pytest.raises(
        ValueError, match="wants ref_logprobs, which PPOActorInterface does not make; it makes logprobs"
    ):
        check_call(actor, call(CallType.INFERENCE, **inference))
    with pytest.raises(ValueError, match="of type evaluate, .* it serves inference, train_step"):
        check_call(actor, call(CallType.EVALUATE))


def test_names_that_lead_nowhere_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no interface 'ppo'; there are ppo_actor, ppo_critic, teacher"):
        make_interface("ppo", SETTINGS)
    with pytest.raises(ValueError, match="no loss 'ppo2'; there are ppo, gspo, cispo"):
        loss_named("ppo2")
    with pytest.raises(ValueError, match="no advantage 'grpo'; there are group_relative"):
        advantage_named("grpo")
    with pytest.raises(ValueError, match="no PPO settings"):
        make_interface("ppo_actor", InterfaceSettings())
    with pytest.raises(ValueError, match="has no callable 'nothing'"):
        make_interface("corral.workers.algorithms.sft:nothing", SETTINGS)
    with pytest.raises(ValueError, match="made a PPOConfig, not a ModelInterface"):
        make_interface(f"{__name__}:not_an_interface", SETTINGS)


def not_an_interface(settings: InterfaceSettings) -> Any:
    return settings.ppo


def test_a_function_and_a_wrapped_function_are_both_losses_and_advantages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_algorithms.py").write_text(
        "from corral.scheduling.keys import Key\n"
        "from corral.workers.algorithms.advantage import AdvantageEstimator\n"
        "from corral.workers.algorithms.policy_loss import PolicyLoss\n"
        "KEY = Key('difficulty', 'per_answer', 'float32')\n"
        "def plain(*arguments): return {'advantages': 1}\n"
        "loss, advantage = PolicyLoss(plain, (KEY,)), AdvantageEstimator(plain, (KEY,))\n"
    )
    try:
        assert advantage_named("own_algorithms:plain").inputs == ()
        assert loss_named("own_algorithms:plain").inputs == ()
        config = PPOConfig(loss="own_algorithms:loss", advantage="own_algorithms:advantage")
        names = [key.name for key in PPOActorInterface(config).inputs[CallType.TRAIN_STEP]]
        assert names.count("difficulty") == 1
    finally:
        sys.modules.pop("own_algorithms", None)


def test_an_estimator_makes_what_it_declares_and_nothing_else() -> None:
    own = Key("weight", "per_shifted_token", "float32")

    def careless(batch: Any, config: PPOConfig) -> dict[str, Any]:
        return {"advantages": 0, "weight": 1}

    assert AdvantageEstimator(careless, outputs=(own,))(None, PPOConfig())["weight"] == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must return \['advantages'\], and returned \['advantages', 'weight'\]"):
        AdvantageEstimator(careless)(None, PPOConfig())  # type: ignore[arg-type]


def test_an_interface_without_a_state_takes_none() -> None:
    ModelInterface().load_state_dict({})
    with pytest.raises(ValueError, match=r"keeps no state, but the checkpoint holds \['total'\]"):
        ModelInterface().load_state_dict({"total": 1.0})
