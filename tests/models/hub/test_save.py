"""Saved models load in plain transformers with equal outputs; a save that fails leaves what was there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from brimful.core.errors import DiskFullError, OutputError
from brimful.core.records import LabelSpace
from brimful.models.hub.inspection import inspect_model, load_tokenizer
from brimful.models.hub.load import load_model
from brimful.models.hub.save import save_model

FAMILIES = ["bert", "roberta", "distilbert", "deberta-v2", "modernbert", "t5", "llama", "gpt2"]
SPACE = LabelSpace(task="single_label", names=("ham", "spam", "eggs"))
TEXTS = ["the film was good", "a very long story and we left early", "bad"]
CARD = "# A model\n\nfor tests, as ever — really\n"


@pytest.fixture
def trained(make_model):
    def make(family="bert", space=SPACE, **more):
        folder = make_model(family, task="Model", folder=f"{family}-base", **more)
        facts = inspect_model(str(folder), trust_remote_code=False, allow_pickle=False)
        return load_model(facts, space, head="new", seed=1), load_tokenizer(facts)

    return make


def logits(model, tokenizer):
    with torch.no_grad():
        return model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_gives_equal_logits(trained, tmp_path, family):
    model, tokenizer = trained(family)
    save_model(model, tokenizer, SPACE, tmp_path / "out" / "model", CARD)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    again_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(logits(again, again_tokenizer), logits(model, tokenizer))
    classify = pipeline("text-classification", model=str(tmp_path / "out" / "model"), device="cpu", top_k=None)
    for text, found in zip(TEXTS, classify(TEXTS, batch_size=3), strict=True):
        alone = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        assert {each["label"]: each["score"] for each in found} == pytest.approx(
            dict(zip(SPACE.names, alone.tolist(), strict=True)), abs=1e-6
        )


def test_a_real_model(minilm, tmp_path):
    facts = inspect_model(str(minilm), trust_remote_code=False, allow_pickle=False)
    model, tokenizer = load_model(facts, SPACE, head="new", seed=1), load_tokenizer(facts)
    save_model(model, tokenizer, SPACE, tmp_path / "model", CARD)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(again, AutoTokenizer.from_pretrained(tmp_path / "model")), logits(model, tokenizer))
    facts = inspect_model(str(tmp_path / "model"), trust_remote_code=False, allow_pickle=False)
    assert (facts.has_head, facts.label_names) == (True, SPACE.names)


@pytest.mark.parametrize(
    ("task", "names", "problem"),
    [
        ("single_label", ("ham", "spam", "eggs"), "single_label_classification"),
        ("multi_label", ("a", "b"), "multi_label_classification"),
        ("regression", ("stars",), "regression"),
    ],
)
def test_what_is_written(trained, tmp_path, task, names, problem):
    space = LabelSpace(task=task, names=names)
    model, tokenizer = trained(space=space)
    save_model(model, tokenizer, space, tmp_path / "model", CARD)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["id2label"] == {str(index): name for index, name in enumerate(names)}
    assert config["label2id"] == {name: index for index, name in enumerate(names)}
    assert (config["problem_type"], config["dtype"]) == (problem, "float32")
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert not [key for key in config if key.startswith("_") or "attn_implementation" in key]
    assert str(tmp_path) not in json.dumps(config)
    assert (tmp_path / "model" / "README.md").read_text(encoding="utf-8") == CARD
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"bert-base", "model"}


def test_names_are_those_of_the_labels_asked_for(trained, tmp_path):
    model, tokenizer = trained()
    save_model(model, tokenizer, LabelSpace(task="multi_label", names=("x", "y", "z")), tmp_path / "model", CARD)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert again.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert again.config.problem_type == "multi_label_classification"
    assert model.config.id2label == dict(enumerate(SPACE.names))


def test_weights_are_saved_in_fp32(trained, tmp_path):
    model, tokenizer = trained()
    model.bfloat16()
    save_model(model, tokenizer, SPACE, tmp_path / "model", CARD)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    assert model.dtype == torch.bfloat16


def test_how_the_model_ran_is_not_saved(trained, tmp_path):
    AttentionInterface.register("of_our_own", sdpa_attention_forward)
    model, tokenizer = trained()
    model.set_attn_implementation("of_our_own")
    save_model(model, tokenizer, SPACE, tmp_path / "model", CARD)
    assert "of_our_own" not in (tmp_path / "model" / "config.json").read_text()
    assert model.config._attn_implementation == "of_our_own"


def test_a_model_with_code_of_its_own_takes_it_along(own_code, tmp_path):
    facts = inspect_model(str(own_code), trust_remote_code=True, allow_pickle=False)
    model, tokenizer = load_model(facts, SPACE, head="new", seed=1), load_tokenizer(facts)
    save_model(model, tokenizer, SPACE, tmp_path / "out", CARD)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnClassifier"
    assert torch.equal(logits(again, tokenizer), logits(model, tokenizer))


def test_saving_says_nothing(trained, tmp_path, capfd):
    model, tokenizer = trained()
    capfd.readouterr()
    save_model(model, tokenizer, SPACE, tmp_path / "model", CARD)
    assert capfd.readouterr() == ("", "")


def test_an_older_model_is_replaced_as_a_whole(trained, tmp_path):
    model, tokenizer = trained()
    out = tmp_path / "out" / "model"
    save_model(model, tokenizer, SPACE, out, "old")
    (out / "stale.txt").touch()
    for left in (".tmp-model-0123abcd", ".old-model"):  # by saves that were killed
        (out.parent / left).mkdir()
    save_model(model, tokenizer, SPACE, out, "new")
    assert (out / "README.md").read_text() == "new"
    assert not (out / "stale.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def saved_or_refused(model, tokenizer, out, refused, number):
    """True if the save went through; False if it was refused as it should be."""
    saved = False
    refusal = refused(f"cannot write {out}: {os.strerror(number)}", hint="free some space", kind=DiskFullError)
    with suppress(pytest.fail.Exception), refusal:
        save_model(model, tokenizer, SPACE, out, "new")
        saved = True
    return saved


@pytest.mark.sampled
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_any_moment(trained, tmp_path, monkeypatch, refused, older, number):
    """Each sync of a save fails in turn: the old model, or none, or the new one whole, and the next save succeeds."""
    model, tokenizer = trained()
    sync, moments = os.fsync, 0
    while True:
        moments += 1
        out, countdown = tmp_path / f"out{moments}" / "model", iter(range(moments - 1))
        out.parent.mkdir()
        if older:
            save_model(model, tokenizer, SPACE, out, "old")

        def fail_at_the_end(descriptor, countdown=countdown):
            if next(countdown, None) is None:
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail_at_the_end)
            if saved_or_refused(model, tokenizer, out, refused, number):
                break
        left = {path.name for path in out.parent.iterdir()}
        if "model" in left:
            assert (out / "README.md").read_text() in ("old", "new")
            AutoModelForSequenceClassification.from_pretrained(out)
        assert left <= {"model", ".old-model"}
        assert "model" in left or not older
        save_model(model, tokenizer, SPACE, out, "newer")
        assert {path.name for path in out.parent.iterdir()} == {"model"}
    assert moments > 7  # five files, their folder, and the one above it


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB, less than the tiniest model."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_is_really_full(trained, small_disk, refused):
    model, tokenizer = trained()
    out = small_disk / "model"
    with refused(f"cannot write {out}: No space left on device", hint="free some space", kind=DiskFullError):
        save_model(model, tokenizer, SPACE, out, CARD)
    assert list(small_disk.iterdir()) == []


def test_a_folder_that_cannot_be_made(trained, tmp_path, refused):
    model, tokenizer = trained()
    (tmp_path / "file").touch()
    with refused("cannot write ", hint="choose another --output", kind=OutputError):
        save_model(model, tokenizer, SPACE, tmp_path / "file" / "model", CARD)


def test_other_errors_leave_nothing_behind(trained, tmp_path, monkeypatch):
    model, tokenizer = trained()

    def fail(folder: Path) -> None:
        raise RuntimeError("of another kind")

    monkeypatch.setattr(tokenizer, "save_pretrained", fail)
    with pytest.raises(RuntimeError, match="of another kind"):
        save_model(model, tokenizer, SPACE, tmp_path / "out" / "model", CARD)
    assert list((tmp_path / "out").iterdir()) == []
