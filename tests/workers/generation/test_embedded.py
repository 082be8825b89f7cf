"""The engine of a generation server is the one that the plan describes."""

from pathlib import Path

from corral.workers.engine.engine import GenerationEngine
from corral.workers.engine.requests import GenerationRequest
from corral.workers.engine.sampling import SamplingParams
from corral.workers.generation.embedded import load_engine
from tests.workers.engine.tiny_models import save_tiny_model
from tests.workers.generation.servers import server_spec


def logprobs_of(engine: GenerationEngine) -> tuple[float, ...]:
    sampling = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    return engine.generate([GenerationRequest(request_id="a", prompt=(5, 9, 3), sampling=sampling)])[0].output_logprobs


def test_a_server_rounds_its_weights_if_the_plan_says_so(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    spec = server_spec("hf", directory)
    engine = spec.engine.model_copy(update={"quantization": "int8"})
    exact = logprobs_of(load_engine(spec, device="cpu", seed=1))
    rounded = logprobs_of(load_engine(spec.model_copy(update={"engine": engine}), device="cpu", seed=1))
    assert exact == logprobs_of(GenerationEngine(directory))
    assert rounded == logprobs_of(GenerationEngine(directory, quantization="int8")) != exact
