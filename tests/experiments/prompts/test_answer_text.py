"""Texts and bytes of what models say, with tokenizers of the forms of the field: of bytes, and of sentencepiece."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from corral.experiments.prompts import tokens
from corral.experiments.prompts.row_prompts import PromptEncoder
from corral.experiments.prompts.tokens import answer_text, encode_answer, encode_prompt, token_bytes
from corral.workers.episodes.partial_answer import PartialAnswer, stopper
from tests.chat_models import VOCABULARY, ids_of, write_chat_tokenizer


def of_bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>", "<end>")])
    return tokenizer


def of_sentencepiece() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581Paris", "\u2581\u2581", "a", "b"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    replaced = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [replaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    return tokenizer


def test_an_answer_is_all_that_was_said_but_for_the_token_that_ended_it() -> None:
    tokenizer = of_bytes()
    end = tokenizer.token_to_id("<end>")
    ids = tokenizer.encode("<think>a</think> 4\u00e96<end>").ids
    assert answer_text(tokenizer, ids, ends={end}) == "<think>a</think> 4\u00e96"
    assert answer_text(tokenizer, [*ids[:-1], end, end], ends={end}) == "<think>a</think> 4\u00e96<end>"
    assert answer_text(tokenizer, ids, ends=()) == "<think>a</think> 4\u00e96<end>"
    assert answer_text(tokenizer, []) == answer_text(tokenizer, [end], ends=[end]) == ""


@pytest.mark.parametrize("text", ["\U0001f600", "\u00e9t\u00e9", " x\n", "\u2581", "<think>"])
def test_the_bytes_of_all_tokens_are_the_text(text: str) -> None:
    tokenizer = of_bytes()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(token_bytes(tokenizer, token) for token in ids).decode() == text


def test_tokens_of_sentencepiece_keep_their_blanks_and_their_bytes() -> None:
    tokenizer = of_sentencepiece()
    paris, two, one, a = map(tokenizer.token_to_id, ("\u2581Paris", "\u2581\u2581", "\u2581", "a"))
    assert answer_text(tokenizer, [paris, one, a]) == " Paris a"
    assert answer_text(tokenizer, [two, a]) == "  a" and answer_text(tokenizer, [a, paris]) == "a Paris"
    assert [token_bytes(tokenizer, token) for token in (paris, two, a)] == [b" Paris", b"  ", b"a"]
    bytes_of_face = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "\U0001f600".encode()]
    assert b"".join(token_bytes(tokenizer, token) for token in bytes_of_face).decode() == "\U0001f600"


def test_a_stop_text_may_be_a_special_token() -> None:
    tokenizer = of_bytes()
    answer = PartialAnswer(max_new_tokens=20, output_ids=tokenizer.encode("ab</think>cd").ids)
    answer.logprobs = [0.0] * len(answer.output_ids)
    watch = stopper(tokenizer, ["</think>"])
    assert watch is not None
    watch(answer)
    assert answer_text(tokenizer, answer.output_ids) == "ab</think>"


def test_a_long_text_has_the_ids_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, text = of_bytes(), "1+\u00e9 <think>x" * 20
    ids = encode_prompt(tokenizer, text), encode_answer(tokenizer, text)
    monkeypatch.setattr(tokens, "_LONG_TEXT", 10)
    assert (encode_prompt(tokenizer, text), encode_answer(tokenizer, text)) == ids


def test_rows_of_ids_may_have_all_ids_of_the_model(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_chat_tokenizer(tmp_path, "qwen"))
    size = len(VOCABULARY)
    with pytest.raises(ValueError, match=f"token id {size}, and model .* has those below {size}"):
        encoder.encode([size])
    for config in ({"vocab_size": size + 8}, {"text_config": {"vocab_size": size + 8}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
        assert PromptEncoder(tmp_path).encode([size + 7]) == [size + 7]
        with pytest.raises(ValueError, match=f"has those below {size + 8}"):
            PromptEncoder(tmp_path).encode([size + 8])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids_of("<|eot|>")}))
    assert PromptEncoder(tmp_path).answer_ends == (*ids_of("<|eot|>"), *ids_of("<|im_end|>"))
