"""Inspection of models, and every way in which it refuses one."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from brimful.core.errors import ModelError
from brimful.models.hub.inspection import ModelFacts, inspect_model, load_tokenizer
from brimful.models.hub.model_config import read_config
from brimful.models.hub.weight_files import find_weights, read_shapes

ENCODERS = ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2", "modernbert"]
FAMILIES = [*ENCODERS, "bart", "t5", "llama", "qwen2", "gpt2"]
LABELS = ("negative", "neutral", "positive")


def inspect(folder: Path | str, *, trust: bool = False, pickled: bool = False) -> ModelFacts:
    return inspect_model(str(folder), trust_remote_code=trust, allow_pickle=pickled)


def edit(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None takes one out."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


# What is known of a model


def test_a_real_base_model(minilm):
    facts = inspect(minilm)
    assert (facts.model_type, facts.max_positions, facts.folder) == ("bert", 512, minilm)
    assert (facts.has_head, facts.label_names, facts.labels_are_placeholders) == (False, None, False)
    assert facts.head_note == "its weights have no classifier.weight, classifier.bias"
    assert facts.weight_files == (minilm / "model.safetensors",)
    assert facts.weight_bytes == 90_868_376
    assert facts.num_parameters == 22_713_216 + 2 * 384 + 2  # body and pooler, and a head of two


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_seen_in_every_family(make_model, family):
    facts = inspect(make_model(family, folder="tuned"))
    assert (facts.has_head, facts.label_names, facts.model_type) == (True, LABELS, family)
    assert not facts.labels_are_placeholders
    facts = inspect(make_model(family, task="Model", folder="base"))
    assert (facts.has_head, facts.label_names) == (False, None)


@pytest.mark.parametrize(
    ("family", "task", "note"),
    [
        ("modernbert", "ForMaskedLM", "its weights have no classifier.weight, classifier.bias"),
        ("bert", "ForMaskedLM", "its weights have no classifier.weight, classifier.bias"),
        ("bert", "ForTokenClassification", "its head is that of BertForTokenClassification"),
        ("llama", "ForCausalLM", "its weights have no score.weight"),
        ("llama", "ForTokenClassification", "its weights have no score.weight"),
    ],
)
def test_heads_of_other_tasks_are_no_classifiers(make_model, family, task, note):
    facts = inspect(make_model(family, task=task))
    assert not facts.has_head
    if task == "ForTokenClassification":
        assert "ForTokenClassification" in facts.head_note
    else:
        assert facts.head_note == note


def test_a_head_of_another_size_than_its_configuration(make_model):
    folder = make_model()
    edit(folder / "config.json", id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    facts = inspect(folder)
    assert not facts.has_head
    assert facts.head_note == "classifier.weight is (3, 32) in its weights and (2, 32) by its config.json"


@pytest.mark.parametrize(
    ("family", "longest"),
    [("bert", 40), ("roberta", 40), ("xlm-roberta", 40), ("bart", 40), ("gpt2", 40), ("modernbert", 40), ("llama", 40)],
)
def test_longest_sequence_is_what_the_model_can_run(make_model, family, longest):
    folder = make_model(family)
    facts = inspect(folder)
    assert facts.max_positions == longest
    if family in ("llama", "modernbert"):
        return  # rotary positions: a limit of training, not of the arithmetic
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.full((1, longest + 1), 7)
    ids[0, -1] = 3  # BART reads the end of text
    model(input_ids=ids[:, 1:])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


@pytest.mark.parametrize("family", ["deberta-v2", "t5"])
def test_relative_positions_have_no_limit(make_model, family):
    assert inspect(make_model(family)).max_positions is None


def test_placeholders_and_labels_without_numbers(make_model):
    assert inspect(make_model(labels=("LABEL_0", "LABEL_1"))).labels_are_placeholders
    folder = make_model(folder="from_one")
    edit(folder / "config.json", id2label={1: "a", 2: "b", 3: "c"})
    facts = inspect(folder)
    assert (facts.has_head, facts.label_names) == (True, None)


def test_shards_are_one_model(make_model):
    facts = inspect(make_model(max_shard_size="20KB"))
    assert len(facts.weight_files) > 2
    assert facts.has_head


def test_inspection_leaves_torch_as_it_was(make_model):
    folder, before = make_model(), torch.get_rng_state()
    inspect(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_named_in_the_configuration_is_not_fetched(make_model):
    folder = make_model()
    edit(folder / "config.json", attn_implementation="someone/kernel", _attn_implementation="someone/kernel")
    assert inspect(folder).config._attn_implementation is None


def test_importing_and_refusing_needs_no_torch(tmp_path):
    code = (
        "import sys; from brimful.models.hub.inspection import inspect_model\n"
        "from brimful.core.errors import ModelError\n"
        f"try: inspect_model({str(tmp_path)!r}, trust_remote_code=False, allow_pickle=False)\n"
        "except ModelError: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "False False\n"


# Where a model is


def test_no_such_folder(make_model, refused, tmp_path):
    make_model(folder="sentiment")
    with refused(f"there is no folder {tmp_path}/sentimnet", hint=f"did you mean {tmp_path}/sentiment?"):
        inspect(tmp_path / "sentimnet")
    with refused("there is no folder", hint=f"there is no folder {tmp_path}/runs either"):
        inspect(tmp_path / "runs" / "sentiment")
    with refused("config.json is a file: a model is a folder", hint=f"give the folder, {tmp_path}/sentiment"):
        inspect(tmp_path / "sentiment" / "config.json")
    (tmp_path / "reviews.csv").write_text("text\n")
    with refused("reviews.csv is a file: a model is a folder", hint="give a folder, or a name on the hub"):
        inspect(tmp_path / "reviews.csv")


def test_a_hub_name_without_a_network(monkeypatch, refused, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with refused(
        "there is no folder someone/some-model, and the hub cannot be reached",
        hint="download it once where there is a network",
    ):
        inspect("someone/some-model")
    with refused("there is no folder bert-base, and the hub cannot be reached", hint="download it once"):
        inspect("bert-base")


def test_a_hub_name_in_the_cache(make_model, monkeypatch, tmp_path):
    cached = tmp_path / "cache" / "models--someone--some-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    make_model().rename(tmp_path / "moved")
    (cached / "snapshots").mkdir()
    (tmp_path / "moved").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    facts = inspect("someone/some-model")
    assert facts.name == "someone/some-model"
    assert facts.folder == cached / "snapshots" / ("0" * 40)


@pytest.mark.parametrize(
    ("status", "code", "message", "hint"),
    [
        (404, "RepoNotFound", "some-model is neither a folder here nor a model on the hub", "spelling"),
        (403, "GatedRepo", "some-model is gated on the hub, and access was not granted", "hf auth login"),
    ],
)
def test_what_the_hub_refuses(monkeypatch, refused, tmp_path, status, code, message, hint):
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    try:
        with refused(message, hint=hint):
            inspect("some-model")
    finally:
        server.shutdown()
        server.server_close()


# config.json


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (None, "has no config.json: it is not the folder of a model", "config.json and the weights"),
        (b'{"model_type": ', "is not JSON: Expecting value at line 1 column 16", "again"),
        (b"[1]", "holds a JSON list, not an object", "again"),
        (b"\xff\xfe", "is not JSON: not UTF-8 text", "again"),
        (b'{"a":' * 100_000, "is not JSON: nested too deep", "again"),
        (b"{}", "has no model_type", '"model_type": "bert"'),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is a git-lfs pointer", "git lfs pull"),
        (b'{"model_type": "brt"}', "this transformers knows no model_type 'brt'", "if it is 'bert', say so"),
        (b'{"model_type": "\\u001b[31m"}', r"knows no model_type '\\x1b[31m'", "a newer transformers"),
        (b'{"model_type": "vit"}', "transformers has no sequence classifier of type 'vit'", "use a text model"),
        (b'{"model_type": "bert", "quantization_config": {"bits": 4}}', "its weights are quantized", "made from"),
        (b'{"model_type": "bert", "hidden_size": "wide"}', "is refused by transformers: ", "again"),
        (b'{"model_type": "bert", "id2label": {"x": "y"}}', "is refused by transformers: ", "again"),
        (
            b'{"model_type": "bert", "num_hidden_layers": 12345}',
            "config.json gives num_hidden_layers as 12345",
            "again",
        ),
        (b'{"model_type": "bert", "num_labels": 9999999}', "config.json gives num_labels as 9999999", "again"),
        (
            b'{"model_type": "bert"}',
            "embeddings.word_embeddings.weight is (64, 32) in its weights and",
            "that of these",
        ),
        (b'{"model_type": "bert", "hidden_size": 30}', "no bert model can be built from its config.json", "again"),
    ],
)
def test_configurations_that_are_refused(make_model, refused, content, message, hint):
    path = make_model() / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    with refused(str(path.parent), message, hint=hint):
        inspect(path.parent)


def test_a_configuration_of_a_far_larger_model(make_model, refused):
    folder = make_model(task="Model")
    edit(folder / "config.json", num_hidden_layers=50)
    with refused("its weights hold 19,520 numbers, and the body of the model in its config.json has", hint="that of"):
        inspect(folder)


def test_own_code_runs_only_when_trusted(own_code, refused, tmp_path):
    folder, canary = own_code, tmp_path / "canary"
    with refused(
        "a classifier of type 'own' is built by Python code that comes with the model", hint="--trust-remote-code"
    ):
        inspect(folder)
    assert not canary.exists()
    facts = inspect(folder, trust=True)
    assert canary.exists()
    assert (facts.model_type, facts.runs_own_code, facts.has_head) == ("own", True, True)


def test_own_code_of_a_known_type_is_not_needed(own_code, tmp_path):
    folder, canary = own_code, tmp_path / "canary"
    edit(folder / "config.json", model_type="bert")
    facts = inspect(folder)
    assert (facts.runs_own_code, facts.has_head, hasattr(facts.config, "auto_map")) == (False, True, False)
    assert not canary.exists()


def test_own_code_without_a_classifier(make_model, refused):
    folder = make_model()
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    with refused("comes with it has no AutoModelForSequenceClassification", hint="use a model that has a classifier"):
        inspect(folder, trust=True)
    edit(folder / "config.json", model_type="vit", auto_map={"AutoModelForSequenceClassification": "own.Own"})
    with refused("a classifier of type 'vit' is built by Python code", hint="--trust-remote-code"):
        inspect(folder)


# Weights


@pytest.mark.parametrize(
    ("found", "message", "hint"),
    [
        (None, "no weights, neither model.safetensors nor model.safetensors.index.json", "with all its files"),
        ("adapter_model.safetensors", "only a PEFT adapter", "merge it into its base model"),
        ("tf_model.h5", "only weights of TensorFlow", "as model.safetensors"),
        ("flax_model.msgpack", "only weights of Flax", "as model.safetensors"),
        ("model-Q4.gguf", "only GGUF weights", "the model they were made from"),
    ],
)
def test_no_weights(make_model, refused, found, message, hint):
    folder = make_model()
    (folder / "model.safetensors").unlink()
    if found:
        (folder / found).touch()
    with refused(str(folder), message, hint=hint):
        inspect(folder)


@pytest.mark.parametrize("kept", [0, 7, 8, 9, 500, -1, -4])
def test_truncated_weights(make_model, refused, kept):
    path = make_model() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with refused(f"{path} is truncated: ", hint="download or copy the model again"):
        inspect(path.parent)


def test_a_pointer_instead_of_weights(make_model, refused):
    path = make_model() / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n")
    with refused(f"{path} is a git-lfs pointer, not the file itself", hint=f"`git lfs pull` in {path.parent}"):
        inspect(path.parent)


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "invalid JSON in header"),
        (b"[]", "invalid JSON in header"),
        ({"a": 1}, "invalid JSON in header"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "missing field `data_offsets`"),
        ({"a": tensor(dtype="Q4")}, "unknown variant `Q4`"),
        ({"a": tensor(shape=[-2])}, "expected usize"),
        ({"a": tensor(shape=[True, 2])}, "expected usize"),
        ({"a": tensor(offsets=[0, 8, 16])}, "invalid JSON in header"),
        ({"a": tensor(shape=[3])}, "invalid shape, data type, or offset"),
        ({"a": tensor(offsets=[8, 0])}, "invalid"),
        ({"a": tensor(offsets=[4, 12])}, "invalid offset for tensor `a`"),
        ({"a": tensor(), "b": tensor(offsets=[4, 12])}, "invalid offset for tensor `b`"),
        ({"a": tensor()}, "file not fully covered"),
    ],
)
def test_corrupt_weights(tmp_path, refused, header, message):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with refused(f"{path} is corrupt: ", message, hint="download or copy the model again"):
        read_shapes(path)


def test_a_header_too_large(tmp_path, refused):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"<!DOCTYPE html><html>")
    with refused("is corrupt: header too large (21 bytes)", hint="again"):
        read_shapes(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 260), value=st.integers(0, 255), cut=st.integers(0, 3))
def test_what_passes_here_passes_in_safetensors(tmp_path, place, value, cut):
    """Any one byte of a file changed, or its end cut off: refused here with our error, or readable there."""
    path = tmp_path / "model.safetensors"
    if not path.exists():
        save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    changed = path.with_name("changed.safetensors")
    changed.write_bytes(content[: len(content) - cut])
    try:
        shapes = read_shapes(changed)
    except ModelError:
        return
    with safe_open(changed, framework="pt") as opened:
        assert {name: tuple(opened.get_tensor(name).shape) for name in opened.keys()} == shapes  # noqa: SIM118


def test_safetensors_refuses_what_is_refused_here(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ModelError):
        read_shapes(path)
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass


def test_shards_that_do_not_make_a_model(make_model, refused):
    folder = make_model(max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    names = sorted(set(places.values()))
    edit(index, weight_map={**places, "more.weight": names[0]})
    with refused("1 tensors it lists are in no file, first 'more.weight'", hint="again"):
        inspect(folder)
    edit(index, weight_map={**places, "more.weight": "../../secret.safetensors"})
    with refused("it names a file outside its folder, '../../secret.safetensors'", hint="again"):
        inspect(folder)
    edit(index, weight_map=[])
    with refused("it has no weight_map from tensors to files", hint="again"):
        inspect(folder)
    edit(index, weight_map=places)
    (folder / names[1]).unlink()
    with refused(f"1 of {len(names)} weight files are missing: {names[1]}", hint="again"):
        inspect(folder)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)


def test_pickles_are_refused_unless_allowed(make_model, refused, tmp_path):
    folder = make_model()
    state = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with refused("its weights are there only as a pickle (pytorch_model.bin)", hint="--allow-pickle loads it"):
        inspect(folder)
    facts = inspect(folder, pickled=True)
    assert (facts.has_head, facts.weight_files) == (True, (folder / "pytorch_model.bin",))
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Canary(tmp_path / "canary"), file)
    with refused("pytorch_model.bin cannot be read as a pickle of tensors: ", hint="again"):
        inspect(folder, pickled=True)
    assert not (tmp_path / "canary").exists()


def test_pickles_in_shards(make_model, refused):
    folder = make_model()
    state = transformers.BertForSequenceClassification.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    names = list(state)
    for number, part in enumerate((names[:5], names[5:])):
        torch.save({name: state[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    places = {name: f"pytorch_model-{int(name not in names[:5])}.bin" for name in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with refused("only as a pickle (pytorch_model.bin.index.json)", hint="--allow-pickle"):
        inspect(folder)
    assert find_weights(folder, allow_pickle=True).shapes["classifier.weight"] == (3, 32)


# Tokenizers


def test_the_tokenizer_of_a_real_model_pads_and_cuts_only_when_asked(minilm):
    tokenizer = load_tokenizer(inspect(minilm))
    assert json.loads((minilm / "tokenizer.json").read_text())["padding"]["strategy"] == {"Fixed": 128}
    assert len(tokenizer.backend_tokenizer.encode("a good film").ids) == 5
    assert len(tokenizer.backend_tokenizer.encode("good " * 300).ids) == 302


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder_pads_with_its_end_of_text_on_the_right(make_model, family):
    folder = make_model(family)
    edit(folder / "tokenizer_config.json", padding_side="left")
    tokenizer = load_tokenizer(inspect(folder))
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.padding_side) == ("<eos>", 5, "right")
    assert tokenizer(["good film", "bad"], padding=True)["attention_mask"] == [[1, 1], [1, 0]]


def test_a_decoder_that_names_its_padding_keeps_it(make_model):
    assert load_tokenizer(inspect(make_model("llama", pad_token_id=0))).pad_token == "[PAD]"


@pytest.mark.slow
def test_tokenizers_that_are_refused(make_model, refused):
    folder = make_model()
    path = folder / "tokenizer.json"
    content = path.read_text()
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with refused(f"{path} is a git-lfs pointer", hint="git lfs pull"):
        inspect(folder)
    path.write_text('{"version": ')
    with refused("its tokenizer cannot be loaded: ", hint="again"):
        load_tokenizer(inspect(folder))
    path.unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    with refused("its tokenizer has no vocabulary", hint="again"):
        load_tokenizer(inspect(folder))
    edit(folder / "tokenizer_config.json", tokenizer_class="CanineTokenizer")
    with refused("its tokenizer, CanineTokenizer, has no fast form", hint="use a model whose tokenizer has one"):
        load_tokenizer(inspect(folder))
    (folder / "tokenizer_config.json").unlink()
    with refused("has no tokenizer files", hint="copy tokenizer.json"):
        inspect(folder)
    path.write_text(content)
    assert load_tokenizer(inspect(folder)).is_fast


def test_padding_tokens_that_are_refused(make_model, refused):
    folder = make_model("gpt2")
    edit(folder / "tokenizer_config.json", eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    with refused("its tokenizer has neither a padding nor an end-of-text token", hint="as pad_token"):
        load_tokenizer(inspect(folder))
    folder = make_model("llama", folder="small", vocab_size=5)
    with refused("its padding token is number 5, and the model embeds 5 tokens", hint="name a token below that"):
        load_tokenizer(inspect(folder))


def test_configurations_are_read_as_data(make_model):
    assert read_config(make_model())["model_type"] == "bert"
