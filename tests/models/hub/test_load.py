"""Loaded models against transformers' own loading."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from brimful.core.records import LabelSpace
from brimful.models.hub.inspection import head_parameters, inspect_model, load_tokenizer
from brimful.models.hub.load import _never_last, load_model

FAMILIES = ["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert", "bart", "t5", "llama", "gpt2"]
THREE = LabelSpace(task="single_label", names=("negative", "neutral", "positive"))
FIVE = LabelSpace(task="multi_label", names=("a", "b", "c", "d", "e"))
TEXTS = ["the film was good", "a very long story and we left early"]


def inspect(folder):
    return inspect_model(str(folder), trust_remote_code=False, allow_pickle=True)


def load(folder, space=THREE, *, head="kept", seed=3):
    return load_model(inspect(folder), space, head=head, seed=seed)


def equal_weights(one, other):
    return one.state_dict().keys() == other.state_dict().keys() and all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items()
    )


def plain(folder, num_labels=3, seed=3):
    torch.manual_seed(seed)
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=num_labels, ignore_mismatched_sizes=True
    )


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_head_is_the_model_as_transformers_loads_it(make_model, family):
    folder = make_model(family)
    model = load(folder)
    assert equal_weights(model, plain(folder))
    assert not model.training
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_on_a_base_model_is_that_of_transformers_under_the_same_seed(make_model, family):
    folder = make_model(family, task="Model")
    model = load(folder, FIVE, head="new")
    assert equal_weights(model, plain(folder, num_labels=5))
    assert not equal_weights(model, load(folder, FIVE, head="new", seed=4))
    assert model.config.problem_type == "multi_label_classification"
    assert model.config.id2label == dict(enumerate("abcde"))
    assert model.config.label2id == {name: index for index, name in enumerate("abcde")}


def test_a_real_base_model(minilm):
    model = load(minilm, head="new")
    assert equal_weights(model, plain(minilm))
    assert (model.config.num_labels, model.config.dtype) == (3, torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("space", [THREE, FIVE])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "llama"])
def test_a_new_head_takes_nothing_of_a_fine_tuned_one(make_model, family, space):
    folder = make_model(family)
    model, tuned = load(folder, space, head="new"), plain(folder)
    head = head_parameters(model)
    for name, tensor in tuned.state_dict().items():
        now = model.state_dict()[name]
        same = now.shape == tensor.shape and torch.equal(now, tensor)
        constant = len(tensor.unique()) == 1  # biases of zeros and norms of ones begin alike
        assert same == (name not in head) or constant


@pytest.mark.parametrize("task", ["ForTokenClassification", "ForMultipleChoice"])
def test_a_new_head_takes_nothing_of_one_for_another_task(make_model, task):
    folder = make_model(task=task)
    kept = load_file(folder / "model.safetensors")["classifier.weight"]
    space = LabelSpace(task="single_label", names=tuple("abc"[: len(kept)]))
    assert not torch.equal(load(folder, space, head="new").classifier.weight, kept)


def test_what_a_pretrained_model_holds_of_a_head_is_taken(make_model):
    folder = make_model("modernbert", task="ForMaskedLM")
    dense = load_file(folder / "model.safetensors")["head.dense.weight"]
    assert torch.equal(load(folder, head="new").head.dense.weight, dense)


def test_generators_are_left_as_they_are(make_model):
    folder = make_model(task="Model")
    torch.manual_seed(99)
    before = torch.get_rng_state()
    load(folder, head="new")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_bfloat16_checkpoint_becomes_fp32(make_model):
    folder = make_model(dtype=torch.bfloat16)
    model = load(folder)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(model.classifier.weight, stored.float())


def test_a_task_without_classes(make_model):
    model = load(make_model(task="Model"), LabelSpace(task="regression", names=("stars",)), head="new")
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)
    assert model.config.id2label == {0: "stars"}


def test_shards_and_pickles_are_the_same_model(make_model):
    whole = load(make_model(folder="whole"))
    assert equal_weights(whole, load(make_model(folder="shards", max_shard_size="20KB")))
    pickled = make_model(folder="pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(whole.state_dict(), pickled / "pytorch_model.bin")
    assert equal_weights(whole, load(pickled))


def test_the_model_outlives_its_files(make_model):
    folder = make_model()
    model, reference = load(folder), plain(folder).state_dict()["classifier.weight"].clone()
    (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(model.classifier.weight, reference)


def test_loading_says_nothing(make_model, capfd):
    folder = make_model(task="ForMaskedLM")
    capfd.readouterr()
    load(folder, head="new")
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_decoder_reads_the_last_token_before_the_padding(make_model, family):
    folder = make_model(family)
    model, tokenizer = load(folder), load_tokenizer(inspect(folder))
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.get_input_embeddings().padding_idx is None  # or end of text would never be trained
    together = model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_a_decoder_that_names_another_padding_token_than_its_tokenizer(make_model):
    folder = make_model("llama", pad_token_id=0)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<eos>"}))
    assert load(folder).config.pad_token_id == 5


@pytest.mark.parametrize(
    ("more", "decoder", "expected"),
    [
        ([], None, "one that is not there"),
        (["<0xC0>"], None, "<0xC0>"),
        (["\u00c0"], decoders.ByteLevel(), "\u00c0"),
        (["\u00c0"], None, "<s>"),
    ],
    ids=["free", "bytes to fall back to", "bytes", "a letter"],
)
def test_padding_that_no_text_ends_with(more, decoder, expected):
    """Not the end of text, which a text may end with, and not a letter of a vocabulary of letters."""
    words = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "a", *more])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    size = len(words) + (not more)
    assert _never_last(tokenizer, size) == words.get(expected, size - 1)


def without(folder, *names):
    path = folder / "model.safetensors"
    state = load_file(path)
    save_file({name: tensor for name, tensor in state.items() if name not in names}, path, metadata={"format": "pt"})


def test_weights_that_lack_a_part_of_the_body(make_model, refused):
    folder = make_model()
    without(folder, *(f"bert.encoder.layer.1.output.dense.{kind}" for kind in ("weight", "bias")))
    message = (
        "its weights lack 2 tensors of a bert model: bert.encoder.layer.1.output.dense.bias, "
        "bert.encoder.layer.1.output.dense.weight"
    )
    for head in ("kept", "new"):
        with refused(str(folder), message, hint="is config.json that of these weights?"):
            load(folder, head=head)


def test_weights_of_fewer_layers_than_configured(make_model, refused):
    folder = make_model(task="Model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with refused("its weights lack 16 tensors of a bert model: ", " and 12 more", hint="is config.json that"):
        load(folder, head="new")


def test_a_kept_head_that_is_not_there(make_model, refused):
    with refused("its weights lack 2 tensors of a bert model: classifier.bias, classifier.weight", hint="config.json"):
        load(make_model(task="Model"))


def test_a_pooler_that_pretraining_left_out(make_model, refused):
    folder = make_model(task="ForMaskedLM")
    assert equal_weights(load(folder, head="new"), plain(folder))
    folder = make_model(folder="tuned")
    without(folder, "bert.pooler.dense.weight", "bert.pooler.dense.bias")
    with refused("its weights lack 2 tensors of a bert model: bert.pooler.dense.bias", hint="config.json"):
        load(folder)


def test_a_body_of_another_size_than_configured(make_model, refused):
    folder = make_model(task="Model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 65}))
    message = "embeddings.word_embeddings.weight is (64, 32) in its weights and (65, 32) by its config.json"
    with refused(message, hint="is config.json that of these weights?"):
        load(folder, head="new")
