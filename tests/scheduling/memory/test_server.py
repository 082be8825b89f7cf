"""A generation server's memory, by hand for a model whose numbers fit on a line."""

from corral.scheduling.memory.decoder_sizes import DecoderSizes, num_parameters
from corral.scheduling.memory.gpu import ANSWER, PROMPT_TOKENS, Parts, server_on_gpu

SIZES = DecoderSizes(
    num_layers=2,
    hidden_size=8,
    intermediate_size=12,
    vocab_size=10,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=2,
)
MATRICES_OF_A_LAYER = 8 * 8 + 2 * (4 * 8) + 8 * 8 + 3 * (12 * 8)  # q, k and v, o, MLP
NORMS = 2 * 2 * 8 + 8
LIMITS = {"max_total_tokens": 100, "max_running_requests": 3}


def test_weights_and_cache_are_in_the_type_of_the_engine() -> None:
    held = server_on_gpu("server", SIZES, number_bytes=2, **LIMITS).held
    assert num_parameters(SIZES) == 2 * MATRICES_OF_A_LAYER + NORMS + 2 * 80
    assert held["parameters"] == 2 * num_parameters(SIZES)
    assert held["KV cache"] == 100 * 2 * (2 * 2 * 4)  # tokens, bytes, (keys and values) of 2 layers of 4 numbers
    assert held["head"] == 2 * 3 * 10 * 4 and "buffers" not in held


def test_gpus_of_a_server_share_matrices_and_heads_and_each_has_the_norms() -> None:
    held = server_on_gpu("server", SIZES, number_bytes=2, num_gpus=2, **LIMITS).held
    assert held["parameters"] == 2 * (MATRICES_OF_A_LAYER + NORMS + 80)
    assert held["KV cache"] == 100 * 2 * (2 * 2 * 2)
    of_four = server_on_gpu("server", SIZES, number_bytes=2, num_gpus=4, **LIMITS).held
    assert of_four["KV cache"] == held["KV cache"]  # two heads for four GPUs: each has a copy of one


def test_the_embedded_engine_works_in_one_layer_of_the_prompts_that_it_reads_at_a_time_or_in_the_next_tokens() -> None:
    def working(**changes: int) -> Parts:
        return server_on_gpu("server", SIZES, number_bytes=2, is_embedded=True, **(LIMITS | changes)).during(ANSWER)

    stream, projected, rotated = 8, 2 * (8 + 2 * 4), 8 + 4  # what is projected lies side by side in a second copy
    of_token = 2 * (stream + projected + rotated + 4 * 2) + 2 * 8  # sines and cosines; its id and position
    assert working()["activations"] == 100 * of_token and working()["head"] == 3 * 10 * 4
    assert working(max_total_tokens=100_000)["activations"] == PROMPT_TOKENS * of_token
    assert working(max_total_tokens=100_000, longest=9000)["activations"] == 9000 * of_token
    many = working(max_running_requests=1000)
    assert many["head"] == 3 * 1000 * 10 * 4 and "activations" not in many  # logits, their logarithms and exponents


def test_the_embedded_engine_reads_new_weights_beside_the_old_ones() -> None:
    plain = server_on_gpu("server", SIZES, number_bytes=4, is_embedded=True, **LIMITS).held
    assert plain["buffers"] == plain["parameters"] == 4 * num_parameters(SIZES)
    rounded = server_on_gpu("server", SIZES, number_bytes=4, is_embedded=True, is_rounded=True, **LIMITS).held
    assert rounded["parameters"] == plain["parameters"] + 4 * 2 * MATRICES_OF_A_LAYER == rounded["buffers"]
