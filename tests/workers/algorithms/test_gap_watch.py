"""The embedded engine generates, the training engine computes the same again: what the comparison finds, and says."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral.experiments.config.algorithm import PPOConfig
from corral.experiments.config.rollout import SamplingConfig
from corral.experiments.worker_specs import BehaviourSpec
from corral.scheduling.packing import MicroBatchSpec
from corral.workers.algorithms.base import response_mask
from corral.workers.algorithms.gap_watch import FirstPass
from corral.workers.algorithms.ppo_actor import PPOActorInterface
from corral.workers.backends.base import LossOutput, TokenScores
from corral.workers.backends.micro_batches import MicroBatch, make_micro_batches, plan_micro_batches
from corral.workers.data.sequence_sample import SequenceSample
from corral.workers.engine.batch import ContinuousBatch
from corral.workers.engine.decoder import Decoder
from corral.workers.engine.requests import GenerationRequest, StopFinish
from corral.workers.engine.sampling import SamplingParams
from corral.workers.episodes.partial_answer import PartialAnswer
from corral.workers.episodes.trajectories import make_sample
from corral.workers.requests.messages import TrainNotice
from tests.workers.backends.training_helpers import optimizer_config, tiny_engine
from tests.workers.engine.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.episodes.one_turn import judged_answers

TEMPERATURE = 0.8
SAMPLED = BehaviourSpec(sampling=SamplingConfig(temperature=TEMPERATURE))
EXACT = 1e-3
NUM_PROMPTS, GROUP_SIZE = 8, 4
Step = tuple[dict[str, float], list[TrainNotice]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Maker:
    """The embedded engine over a copy of a model's weights, which nobody updates."""

    model: Any

    @classmethod
    def of(cls, directory: Path, *, dtype: torch.dtype = torch.float32) -> "Maker":
        return cls(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval())

    def answers(
        self, *, version: int, temperature: float = TEMPERATURE, own: Sequence[float] = (), **sampling: Any
    ) -> SequenceSample:
        """Groups of answers, which say that they are of this version.

        Args:
            own: a temperature of each prompt, which its answers tell.
        """
        rng = np.random.default_rng(version)
        prompts = [rng.integers(0, VOCAB_SIZE, 5 + number).tolist() for number in range(NUM_PROMPTS)]
        with torch.no_grad():
            batch = ContinuousBatch(
                Decoder(self.model),
                eos_token_ids=(),
                max_running_requests=NUM_PROMPTS * GROUP_SIZE,
                max_total_tokens=4096,
                seed=version,
                version=f"0.{version}",
            )
            outputs = batch.generate(
                GenerationRequest(
                    request_id=f"{number}/{answer}",
                    prompt=tuple(prompt),
                    sampling=SamplingParams(
                        max_new_tokens=8 + 4 * answer,
                        temperature=own[number] if own else temperature,
                        sampling_seed=answer,
                        **sampling,
                    ),
                )
                for number, prompt in enumerate(prompts)
                for answer in range(GROUP_SIZE)
            )
        made = [
            PartialAnswer(
                max_new_tokens=20,
                output_ids=list(output.output_ids),
                logprobs=list(output.output_logprobs),
                spans=list(output.weight_versions),
                stopped=isinstance(output.finish_reason, StopFinish),
            )
            for output in outputs
        ]
        groups = [made[start : start + GROUP_SIZE] for start in range(0, len(made), GROUP_SIZE)]
        return SequenceSample.gather(
            [
                make_sample(
                    f"0:p{number}",
                    judged_answers(prompts[number], group, [float(i % 2) for i in range(len(group))]),
                    temperature=own[number] if own else None,
                )
                for number, group in enumerate(groups)
            ]
        )


class Training:
    """A PPO actor without the decoupled loss: no other forward pass than that of the train step computes anything."""

    def __init__(self, directory: Path, *, behaviour: BehaviourSpec = SAMPLED, lr: float = 1e-2, **config: Any) -> None:
        self.engine = tiny_engine(directory, optimizer=optimizer_config(lr=lr), max_tokens=100)
        settings = PPOConfig(use_decoupled_loss=False, early_stop_imp_ratio=None, **config)
        self.actor = PPOActorInterface(settings, behaviour=behaviour)

    def train(self, sample: SequenceSample, *, version: int) -> tuple[dict[str, float], list[TrainNotice]]:
        return self.actor.train_step(self.engine, sample, version=version), self.actor.take_notices()


def test_equal_weights_agree_and_that_is_told_once(weights: Path) -> None:
    training = Training(weights, lr=1e-30)  # the weights stay those of the maker, whatever the version is called
    maker = Maker.of(weights)
    stats, notices = training.train(maker.answers(version=0), version=0)
    assert stats["gap/tokens"] == NUM_PROMPTS * (8 + 12 + 16 + 20)
    assert 0.0 < stats["gap/max"] < 1e-5 and stats["gap/alarm"] == 0.0
    assert 0.0 < stats["gap/unequal_fraction"] < 1.0  # see the test of the first place that differs
    (notice,) = notices
    assert not notice.is_alarm and notice.causes == []
    assert re.fullmatch(r"logprob check: OK, max difference .*e-0. nats \(version 0\)", notice.text)
    assert "0:p" in notice.details and "100% of the step's tokens were compared" in notice.details
    stats, notices = training.train(maker.answers(version=1), version=1)
    assert stats["gap/max"] < 1e-5 and notices == []


def test_numbers_that_are_the_trainers_own_are_equal_bit_for_bit(weights: Path) -> None:
    training = Training(weights)
    sample = Maker.of(weights).answers(version=0)
    own = training.actor.inference(training.engine, sample)["logprobs"]
    stats, (notice,) = training.train(sample.with_key("old_logprobs", own), version=0)
    assert stats["gap/max"] == stats["gap/unequal_fraction"] == stats["gap/kl"] == 0.0
    assert notice.text == "logprob check: OK, max difference 0 nats (version 0)"


def test_the_place_of_the_largest_difference_is_named(weights: Path) -> None:
    training = Training(weights, n_minibatches=1)
    sample = Maker.of(weights).answers(version=0)
    recorded = np.asarray(sample.data["old_logprobs"]).copy()
    lengths = sample.answer_lengths("old_logprobs")
    sixth_answer = sum(lengths[:5])  # the second one to prompt p1, of 6 tokens
    recorded[sixth_answer + 6 - 1 + 3] -= 0.25
    stats, (notice,) = training.train(sample.with_key("old_logprobs", recorded), version=0)
    assert stats["gap/max"] == pytest.approx(0.25, abs=1e-4) and stats["gap/position"] == 3.0
    assert stats["gap/of_allowed"] == pytest.approx(stats["gap/max"] / EXACT)
    assert "the largest at token 3 of 0:p1#1" in notice.details
    assert any("in 1 of 32 answers only" in cause for cause in notice.causes)


def test_tokens_that_were_given_in_between_are_not_compared(weights: Path) -> None:
    sample = Maker.of(weights).answers(version=0)
    place = sum(sample.answer_lengths("old_logprobs")[:5]) + 6 - 1  # of the first token of an answer; 5 more before it
    recorded, mask = sample.data["old_logprobs"].copy(), sample.data["prompt_mask"].copy()
    recorded[[place + 1, place + 3]] += [-9.0, -0.25]
    mask[place + 5 + 1 + 1] = True
    versions = np.where(np.arange(len(recorded)) == place + 1, -1, sample.data["versions"])
    for key, array in (("old_logprobs", recorded), ("prompt_mask", mask), ("versions", versions)):
        sample = sample.with_key(key, array)
    stats, (notice,) = Training(weights).train(sample, version=0)
    assert stats["gap/tokens"] == NUM_PROMPTS * (8 + 12 + 16 + 20) - 1 and stats["gap/coverage"] == 1.0
    assert stats["gap/max"] == pytest.approx(0.25, abs=1e-4) and stats["gap/position"] == 2.0
    assert "the largest at token 2 of 0:p1#1" in notice.details


def test_another_temperature_is_an_alarm_that_names_both(weights: Path) -> None:
    stats, (notice,) = Training(weights).train(Maker.of(weights).answers(version=0, temperature=1.0), version=0)
    assert stats["gap/alarm"] == 1.0 and notice.is_alarm
    assert notice.causes[0].startswith("temperature: another one explains")
    assert "about 0.9" in notice.causes[0] or "about 1" in notice.causes[0]
    assert "rollout.sampling.temperature 0.8" in notice.causes[0]


@pytest.mark.parametrize("by", [1.0, 1.25])
def test_answers_are_compared_at_the_temperature_of_their_row(by: float, weights: Path) -> None:
    own = [0.5, 0.8, 1.0, 1.6] * 2
    sample = Maker.of(weights).answers(version=0, own=own)
    told = np.repeat(own, GROUP_SIZE).astype(np.float32) * np.float32(by)
    behaviour = SAMPLED.model_copy(update={"has_row_temperatures": True})
    training = Training(weights, behaviour=behaviour, n_minibatches=1)
    stats, (notice,) = training.train(sample.with_key("temperatures", told), version=0)
    assert notice.is_alarm == (by != 1.0) == (stats["gap/max"] > 1e-5)
    if notice.is_alarm:
        assert notice.causes[0].startswith("temperature: another one explains")
        assert re.search("about 0.(79|8.?) times what the trainer computes with, as rows say it", notice.causes[0])


def test_a_generator_in_bfloat16_is_an_alarm_that_names_its_arithmetic(weights: Path) -> None:
    sample = Maker.of(weights, dtype=torch.bfloat16).answers(version=0)
    stats, (notice,) = Training(weights).train(sample, version=0)  # it was set to float32
    assert EXACT < stats["gap/max"] < 0.5 and notice.is_alarm
    assert notice.causes[0].startswith("arithmetic: the differences are small and follow no pattern")
    known = SAMPLED.model_copy(update={"dtype": "bfloat16"})
    stats, (notice,) = Training(weights, behaviour=known, gap_alarm=EXACT).train(sample, version=0)
    assert notice.is_alarm and "the generator computes in bfloat16, the trainer in float32" in notice.causes[0]
    _, (notice,) = Training(weights, behaviour=known).train(sample, version=0)
    assert not notice.is_alarm


def test_a_generator_that_keeps_old_weights_is_an_alarm_at_its_first_token_of_the_new_version(weights: Path) -> None:
    training, maker = Training(weights), Maker.of(weights)
    _, (notice,) = training.train(maker.answers(version=0), version=0)
    assert not notice.is_alarm
    stats, (notice,) = training.train(maker.answers(version=1), version=1)
    assert stats["gap/alarm"] == 1.0 and notice.is_alarm
    assert "agreed until version 0, so those of version 1 have not reached the generator" in notice.causes[0]
    assert training.train(maker.answers(version=2), version=2)[1] == []  # told already
    _, (notice,) = training.train(Maker(training.engine.model).answers(version=3), version=3)
    assert not notice.is_alarm and notice.text.startswith("logprob check: OK, max difference ")


def test_tokens_of_older_weights_may_differ_by_what_was_learned(weights: Path) -> None:
    training, maker = Training(weights), Maker.of(weights)
    stats, _ = training.train(maker.answers(version=0), version=0)
    assert "drift/mean" not in stats and stats["drift/moved"] > EXACT
    stats, notices = training.train(maker.answers(version=0), version=1)
    assert stats["gap/tokens"] == 0.0 and notices == [] and "gap/max" not in stats
    assert EXACT < stats["drift/mean"] < stats["drift/allowed"] and stats["drift/prompts"] == NUM_PROMPTS
    assert stats["gap/coverage"] == 1.0 and stats["gap/alarm"] == 0.0


def test_tokens_that_no_measured_update_is_known_of_are_not_compared(weights: Path) -> None:
    training, maker = Training(weights), Maker.of(weights)
    stats, notices = training.train(maker.answers(version=2), version=3)
    assert stats["gap/coverage"] == 0.0 and notices == [] and "gap/alarm" not in stats
    stats, _ = training.train(maker.answers(version=3), version=4)
    assert stats["gap/coverage"] == 1.0


def test_what_updates_moved_is_there_after_a_resume(weights: Path) -> None:
    training, maker = Training(weights), Maker.of(weights)
    training.train(maker.answers(version=0), version=0)
    resumed = Training(weights)
    resumed.actor.load_state_dict(training.actor.state_dict())
    stats, _ = resumed.train(maker.answers(version=0), version=1)
    assert stats["gap/coverage"] == 1.0 and stats["drift/allowed"] > EXACT


def test_a_trial_without_tokens_of_older_weights_scores_answers_again_once(weights: Path) -> None:
    training = Training(weights)
    for version in range(3):
        stats, _ = training.train(Maker(training.engine.model).answers(version=version), version=version)
        assert ("drift/moved" in stats) is (version == 0)


def test_what_updates_moved_is_that_of_all_of_them(weights: Path) -> None:
    """One answer of each prompt is scored again: the first of its four."""
    training = Training(weights, n_minibatches=1, sample_reuse=3)
    sample = Maker.of(weights).answers(version=0)
    scored = sample.select_answers(range(0, NUM_PROMPTS * GROUP_SIZE, GROUP_SIZE))
    before = training.actor.inference(training.engine, scored)["logprobs"]
    stats, _ = training.train(sample, version=0)
    after = training.actor.inference(training.engine, scored)["logprobs"]
    apart = (after - before)[response_mask(scored)].astype(np.float64)
    assert training.engine.step == 3
    assert stats["drift/moved"] == pytest.approx(np.abs(apart).mean(), rel=1e-5)


def foreign(sample: SequenceSample) -> SequenceSample:
    """The same answers with the log-probabilities of another model."""
    rng = np.random.default_rng(0)
    recorded = np.asarray(sample.data["old_logprobs"])
    return sample.with_key("old_logprobs", (recorded - rng.uniform(2.0, 6.0, recorded.shape)).astype(np.float32))


def run(weights: Path, ages: Sequence[int], *, is_foreign: Callable[[int], bool], **settings: Any) -> list[Step]:
    """A trial whose answers of each step were made by the weights of so many versions before."""
    training, maker = Training(weights, **settings), Maker.of(weights)
    versions: list[Any] = []
    steps = []
    for version, age in enumerate(ages):
        versions.append({name: tensor.clone() for name, tensor in training.engine.model.state_dict().items()})
        made = max(0, version - age)
        maker.model.load_state_dict(versions[made])
        sample = maker.answers(version=made)
        steps.append(training.train(foreign(sample) if is_foreign(version) else sample, version=version))
    return steps


@pytest.mark.parametrize(
    ("lr", "eta"),
    [
        (1e-3, 1),
        (1e-2, 4),
        # What is between these two, and beside them.
        pytest.param(1e-3, 2, marks=pytest.mark.slow),
        pytest.param(1e-3, 4, marks=pytest.mark.slow),
        pytest.param(1e-2, 1, marks=pytest.mark.slow),
        pytest.param(1e-2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_healthy_trial_never_alarms_however_old_its_answers_are(eta: int, lr: float, weights: Path) -> None:
    steps = run(weights, [eta] * (eta + 5), is_foreign=lambda version: False, lr=lr)
    assert [notice.is_alarm for _, notices in steps for notice in notices] == [False]  # the first finding
    assert all(stats["gap/alarm"] == 0.0 for stats, _ in steps)
    assert all(stats["gap/coverage"] == 1.0 for stats, _ in steps)


def test_steps_without_older_tokens_between_others_leave_no_update_unmeasured(weights: Path) -> None:
    steps = run(weights, [0, 1, 0, 1], is_foreign=lambda version: False, lr=1e-3)
    assert [stats["gap/coverage"] for stats, _ in steps] == [1.0] * 4


def test_foreign_numbers_stay_an_alarm_though_no_token_of_the_present_weights_comes(weights: Path) -> None:
    steps = run(weights, [1] * 8, is_foreign=lambda version: version >= 1, lr=1e-3)
    assert [stats["gap/alarm"] for stats, _ in steps] == [0.0] * 2 + [1.0] * 6  # two looks in a row
    assert steps[1][0]["gap/of_allowed"] == 0.5
    _, (notice,) = steps[2]
    assert notice.is_alarm and "(weights before version 2)" in notice.text and "updates explain" in notice.text
    assert "100% of the step's tokens were compared" in notice.details and "of 8 prompts" in notice.details
    assert notice.causes == []  # differences that are mixed with what was learned name none
    assert not any(notices for _, notices in [steps[1], *steps[3:]])


def test_truncated_sampling_is_no_gap(weights: Path) -> None:
    behaviour = BehaviourSpec(sampling=SamplingConfig(temperature=TEMPERATURE, top_p=0.9, top_k=20))
    sample = Maker.of(weights).answers(version=0, top_p=0.9, top_k=20)
    stats, (notice,) = Training(weights, behaviour=behaviour).train(sample, version=0)
    assert stats["gap/max"] < 1e-5 and not notice.is_alarm


def test_only_what_the_first_mini_batch_computes_counts(weights: Path) -> None:
    """Its forward pass is the only one of the step under the weights that the step begins with."""
    training = Training(weights, n_minibatches=4, sample_reuse=2)
    stats, (notice,) = training.train(Maker.of(weights).answers(version=0), version=0)
    assert training.engine.step == 8
    assert 0 < stats["gap/tokens"] < NUM_PROMPTS * (8 + 12 + 16 + 20)
    assert stats["gap/max"] < 1e-5 and not notice.is_alarm


def micro_batches_of(sample: SequenceSample, *, device: str, max_tokens: int) -> list[MicroBatch]:
    plan = plan_micro_batches(sample, MicroBatchSpec(max_tokens_per_micro_batch=max_tokens))
    return list(make_micro_batches(sample, plan, count=len(plan) + 1, device=torch.device(device)))


def sum_of_logprobs(scores: TokenScores, micro_batch: MicroBatch) -> LossOutput:
    return LossOutput(scores.logprobs.sum(), {})


def test_no_micro_batch_waits_for_the_numbers_of_the_one_before(weights: Path) -> None:
    """Tensors of the device `meta` have no numbers: whoever asks for one gets an error."""
    sample = Maker.of(weights).answers(version=0)
    kept = FirstPass(sum_of_logprobs)
    for micro_batch in micro_batches_of(sample, device="meta", max_tokens=60):
        logprobs = torch.empty_like(micro_batch.labels, dtype=torch.float32).requires_grad_()
        kept(TokenScores(logprobs, torch.empty_like(logprobs)), micro_batch).loss_sum.backward()
    with pytest.raises(NotImplementedError, match="meta"):
        kept.scores_of(sample)


def test_the_scores_of_all_micro_batches_come_to_the_host_in_one_copy(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Maker.of(weights).answers(version=0)
    kept = FirstPass(sum_of_logprobs)
    batches = micro_batches_of(sample, device="cpu", max_tokens=60)
    assert len(batches) > 3 and batches[-1].is_padding
    rng = torch.Generator().manual_seed(1)
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    for micro_batch in batches:
        scores = TokenScores(*(torch.rand(len(micro_batch.labels), generator=rng) for _ in range(2)))
        kept(scores, micro_batch)
        start = 0
        for answer, length in zip(micro_batch.answers, micro_batch.segment_lengths, strict=False):
            some = slice(start, start + length - 1)
            expected[answer] = (scores.logprobs[some], scores.entropy[some])
            start += length - 1
    copies: list[torch.Size] = []
    to_host = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: (copies.append(tensor.shape), to_host(tensor))[1])
    logprobs, entropy = kept.scores_of(sample)
    assert copies == [(2, sum(sample.answer_lengths("old_logprobs")))]
    in_order = [expected[answer] for answer in sorted(expected)]
    np.testing.assert_array_equal(logprobs, torch.cat([one for one, _ in in_order]).numpy())
    np.testing.assert_array_equal(entropy, torch.cat([one for _, one in in_order]).numpy())


def queries_token_by_token(model: Any, ids: Tensor) -> Tensor:
    """[T, hidden] of the first layer as the engine decodes them, all at position 0, where rotation changes nothing."""
    seen: list[Tensor] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen.extend([queries.flatten(1)] if layer == 0 else [])
        return queries.flatten(1)

    decoder = Decoder(model)
    decoder.reserve_positions(1)
    for one in ids:
        decoder.hidden_states(one[None], torch.zeros(1, dtype=torch.int64), attend)
    return torch.cat(seen)


def test_engine_and_trainer_are_equal_bit_for_bit_up_to_the_first_matrix_product(weights: Path) -> None:
    """Embedding and norm are; a product's rounding depends on how many rows it has, and so does all that follows."""
    model = Maker.of(weights).model
    ids = torch.arange(VOCAB_SIZE)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        normed = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        projected = attention.q_proj(normed)
        torch.testing.assert_close(queries_token_by_token(model, ids), projected, atol=1e-5, rtol=0.0)
        attention.q_proj.weight.copy_(torch.eye(*attention.q_proj.weight.shape))  # exact, in whatever order it adds
        attention.q_proj.bias.zero_()
        assert torch.equal(queries_token_by_token(model, ids), normed)
