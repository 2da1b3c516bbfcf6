"""`brimful.Classifier`: the answers of transformers' own pipelines, on any head, any text and in any company."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import brimful as package
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, ModelError, OptionError
from brimful.levers import facts
from brimful.levers.execution import ExecutionMode
from brimful.levers.precision import choose_precision
from brimful.models import onednn_prepack
from brimful.models.packed import packed_forward
from brimful.models.packed.packed_forward import PaddedModel
from brimful.step.forward import LayoutForward
from failing_allocator import FailingAllocator
from heads.tiny_heads import save_head
from same import SCORE, same_objects
from tiny import FAMILIES
from tiny_files import BAD, GOOD, review, save_base, save_classifier, save_tokenizer
from trained_tokenizers import bare_byte_level, byte_level, minilm

TEXTS = [review(i % 3 == 0, i) * (1 + i % 4) for i in range(20)] + ["good", "the ." * 5]
PAIRS = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
#: Names of the outputs and the stated task of models.
HEADS: dict[str, tuple[list[str], str | None]] = {
    "one label": (["bad", "fair", "good"], None),
    "several labels": (["bad", "fair", "good"], "multi_label_classification"),
    "one output, no task": (["relevant"], None),
    "a number": (["stars"], "regression"),
    "several numbers": (["x", "y"], "regression"),
}
CALLS: list[dict[str, Any]] = [{}, {"top_k": None}, {"top_k": 1}, {"function_to_apply": "none", "top_k": 2}]
NLI = ["contradiction", "neutral", "entailment"]
#: Largest difference of a logit, of a size about 1, that neighbours may make: the order of sums in fp32, and two steps
#: between numbers in bf16.
NEIGHBOURS = {"fp32": 2e-6, "bf16": 2**-7}


def pipeline(model: Path, task: str = "text-classification") -> Any:
    return transformers.pipeline(task, model=str(model), device="cpu")


def fp32(model: Path, **options: Any) -> package.Classifier:
    return package.Classifier(model, precision="fp32", **options)


class Heard(Callbacks):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, message: str) -> None:
        self.warnings.append(message)


# The pipeline for texts and pairs


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("head", HEADS)
def test_answers_and_their_shapes_are_those_of_the_pipeline(head: str, tmp_path: Path) -> None:
    labels, problem_type = HEADS[head]
    model = save_classifier(tmp_path, labels, problem_type=problem_type, type_vocab_size=2)
    plain = pipeline(model)
    with fp32(model) as classifier:
        for call in CALLS:
            same_objects(classifier(TEXTS, **call), plain(TEXTS, **call))
            same_objects(classifier(TEXTS[:1], **call), plain(TEXTS[:1], **call))
            same_objects(classifier(TEXTS[0], **call), plain(TEXTS[0], **call))
            same_objects(classifier(PAIRS, **call), plain(PAIRS, **call))
            same_objects(classifier(PAIRS[0], **call), plain(PAIRS[0], **call))
            same_objects(classifier(TEXTS, pairs=TEXTS[::-1], **call), plain(PAIRS, **call))


@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize(
    "family", ["bert", "roberta", "distilbert", "modernbert", "modernbert-mean", "qwen3", "deberta-v2", "mpnet", "gpt2"]
)
def test_families_packed_and_padded(family: str, packing: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["a", "b", "c"], family)
    with fp32(model, packing=packing) as classifier:
        same_objects(classifier(TEXTS, top_k=None), pipeline(model)(TEXTS, top_k=None, batch_size=4))
        assert classifier.recipe is not None
        levers = {lever.name: lever.value for lever in classifier.recipe.levers}
        assert levers["packing"] == ("packed" if packing == "auto" else "padded")
        assert packing == "auto" or levers["attention"] in ("sdpa", "eager")


def test_texts_of_one_length_share_a_batch_where_padding_changes_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FNet reads its padding: each answer is the one that the text has alone."""
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.FNetConfig(**sizes, max_position_embeddings=80, num_labels=3, initializer_range=0.5)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    plain, shapes, real = pipeline(tmp_path), [], LayoutForward._logits_SC

    def seen(forward: LayoutForward, inputs: Any) -> Any:
        shapes.append(tuple(inputs.ids_RL.shape))
        assert inputs.mask_RL.all()
        return real(forward, inputs)

    with fp32(tmp_path) as classifier:
        same_objects(classifier(TEXTS), [plain(text)[0] for text in TEXTS])
        monkeypatch.setattr(LayoutForward, "_logits_SC", seen)
        classifier.logits(TEXTS * 3)
        lengths = [length for _, length in shapes]
        assert len(lengths) == len({*lengths})
        assert max(rows for rows, _ in shapes) >= 3
        whole = classifier.logits(TEXTS * 3)
        with pytest.warns(UserWarning, match="memory ran out in classification"), FailingAllocator([5]):
            found = classifier.logits(TEXTS * 3)
        np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("model_type", ["bart", "t5"])
def test_a_text_that_holds_the_end_token(model_type: str, packing: str, tmp_path: Path) -> None:
    """An encoder-decoder's head takes rows together only where they hold as many of them."""
    model = save_head(tmp_path, model_type)
    end = transformers.AutoTokenizer.from_pretrained(model).eos_token
    texts = [*TEXTS[:6], f"good {end} the film", f"bad {end} {end} was", *TEXTS[6:9]]
    plain = pipeline(model)
    with fp32(model, packing=packing) as classifier:
        same_objects(classifier(texts), [plain(text)[0] for text in texts])


@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_decoder_whose_configuration_names_no_padding(family: str, packing: str, tmp_path: Path) -> None:
    """The tokenizer's padding token is padding to the head too, which reads the last token before it."""
    model = save_classifier(tmp_path, ["a", "b", "c"], family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(4)
    tokenizer.save_pretrained(model)
    plain = pipeline(model)
    with fp32(model, packing=packing) as classifier:
        same_objects(classifier(TEXTS), [plain(text)[0] for text in TEXTS])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoConfig(
            vocab_size=99, hidden_size=16, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            window_size=8, pad_token_id=0, initializer_range=0.3,
        ),
        transformers.OpenAIGPTConfig(
            vocab_size=99, n_embd=16, n_layer=2, n_head=4, pad_token_id=0, initializer_range=0.3
        ),
        transformers.XLNetConfig(vocab_size=99, d_model=16, n_layer=2, n_head=4, d_inner=24, initializer_range=0.3),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_token_types_that_a_model_embeds_as_words(config: Any, tmp_path: Path) -> None:
    """The configurations name no number of types, and a tokenizer that gives types changes the answers."""
    config.num_labels = 3
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with fp32(tmp_path, max_length=64) as classifier:
        for texts in (TEXTS, PAIRS):
            plain = pipeline(tmp_path)
            same_objects(classifier(texts, top_k=None), plain(texts, top_k=None, truncation=True, max_length=64))


@pytest.mark.slow
def test_more_texts_than_a_window_come_in_their_order(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["a", "b", "c"])
    many = [f"{TEXTS[i % 20]} {GOOD[i % 5]}" for i in range(4096 + 900)]
    with fp32(model) as classifier:
        found, logits_NC = classifier(many), classifier.logits(many)
        places = [0, 1, 4094, 4095, 4096, 4097, 4995]
        same_objects([found[place] for place in places], pipeline(model)([many[place] for place in places]))
    assert (len(found), logits_NC.shape, logits_NC.dtype) == (4996, (4996, 3), np.float32)
    assert [answer["label"] for answer in found] == ["abc"[best] for best in logits_NC.argmax(axis=1)]


def test_logits_are_the_models_own(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["a", "b", "c"])
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    encode = transformers.AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        expected_NC = np.concatenate([plain(**encode(text, return_tensors="pt")).logits.numpy() for text in TEXTS])
    with fp32(model) as classifier:
        np.testing.assert_allclose(classifier.logits(TEXTS), expected_NC, atol=1e-5)
        assert np.isnan(classifier.logits([None, "good"])).tolist() == [[True] * 3, [False] * 3]
        assert classifier.logits([]).shape == (0, 3)
        assert classifier.equivalence is not None
        assert classifier.equivalence.passed
        assert classifier.fallback is None
        equivalence = classifier.verify(TEXTS)
    assert (equivalence.num_rows, equivalence.num_flips, equivalence.passed) == (len(TEXTS), 0, True)


# The pipeline for zero-shot


@pytest.mark.sampled
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2"])
def test_zero_shot_is_that_of_the_pipeline(family: str, packing: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, NLI, family)
    plain = pipeline(model, "zero-shot-classification")
    with fp32(model, packing=packing) as classifier:
        for labels in ("good", ["bad", "good"], GOOD + BAD):
            for multi_label in (False, True):
                expected = plain(TEXTS[:8], candidate_labels=labels, multi_label=multi_label)
                same_objects(classifier(TEXTS[:8], labels=labels, multi_label=multi_label), expected)
        given: dict[str, Any] = {"hypothesis_template": "it felt {} and {{very}} long ."}
        expected = plain(TEXTS[0], candidate_labels=GOOD, **given)
        same_objects(classifier(TEXTS[0], labels=GOOD, **given), expected)


def test_zero_shot_with_labels_of_each_text(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, NLI)
    plain = pipeline(model, "zero-shot-classification")
    labels = [GOOD, ["a"], [], ["b", *GOOD]]
    with fp32(model) as classifier:
        found = classifier(TEXTS[:4], labels=labels)
        expected = [plain(text, candidate_labels=own) for text, own in zip(TEXTS, labels, strict=False) if own]
        same_objects([found[0], found[1], found[3]], expected)
        assert (found[2]["labels"], found[2]["scores"]) == ([], [])
        assert classifier([], labels=[]) == []
        same_objects(classifier(TEXTS[:2], labels=np.array(["a", "b"])), classifier(TEXTS[:2], labels=["a", "b"]))
        for wrong in (labels[:3], [["a", "a"]] * 4, [["a"], "b", ["c"], ["d"]], [[""]] * 4):
            with pytest.raises(OptionError):
                classifier(TEXTS[:4], labels=wrong)


def test_zero_shot_and_texts_take_turns(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, NLI)
    texts, zero_shot = pipeline(model), pipeline(model, "zero-shot-classification")
    with fp32(model) as classifier:
        for _ in range(2):
            same_objects(classifier(TEXTS), texts(TEXTS))
            same_objects(classifier(TEXTS[:3], labels=GOOD), zero_shot(TEXTS[:3], candidate_labels=GOOD))
        without = classifier([None, "good"], labels=["a", "b"])
        assert without[0] == {"sequence": None, "labels": [], "scores": []}
        assert sorted(without[1]["labels"]) == ["a", "b"]


def test_a_model_that_names_no_entailment_is_used_with_a_warning_and_one_output_not_at_all(tmp_path: Path) -> None:
    heard = Heard()
    with fp32(save_classifier(tmp_path / "two", ["no", "yes"]), callbacks=heard) as classifier:
        assert classifier("good", labels=["a", "b"])["sequence"] == "good"
    assert any("no label of the model begins with 'entail'" in said for said in heard.warnings)
    with fp32(save_classifier(tmp_path / "one", ["yes"])) as classifier, pytest.raises(ModelError, match="zero-shot"):
        classifier("good", labels=["a", "b"])


# Any text

NASTY = [
    "",
    " \t\n\u3000",
    "good",
    "x" * 100_000,
    "a b " * 25_000,
    "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "\x00",
    "a\x00b",
    "\x01\x07\x1b[31m\x7f\x9b\x85\u2028",
    "e\u0301" * 50,
    "\ufffe\uffff\U0010ffff\ufeff",
    "[CLS] [SEP] [PAD] <s> </s>",
]
LONE = ["\ud800", "good \udfff", "\udc80\ud800"]


@pytest.fixture(scope="module")
def nasty_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Any, Any]]]:
    """Our classifier and the pipeline, of a model with BERT's own word pieces and of one with bytes."""
    folder, pairs = tmp_path_factory.mktemp("nasty"), []
    for family, tokenizer in (("bert", minilm()), ("roberta", byte_level())):
        model = FAMILIES[family].model(3, vocab_size=len(tokenizer), type_vocab_size=2)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        pairs.append((fp32(folder / family, max_length=64), pipeline(folder / family)))
    yield pairs
    for ours, _ in pairs:
        ours.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*cannot be encoded:UserWarning")
@settings(max_examples=25)
@given(texts=st.lists(st.text(st.characters(), max_size=80) | st.sampled_from(NASTY + LONE), min_size=1, max_size=6))
@example(texts=NASTY)
@example(texts=NASTY + LONE)
@example(texts=LONE)
def test_any_string_has_the_pipelines_answer_and_what_cannot_be_encoded_has_none(
    texts: list[str], nasty_models: list[tuple[Any, Any]]
) -> None:
    for ours, plain in nasty_models:
        whole = [text for text in texts if not any("\ud800" <= character <= "\udfff" for character in text)]
        expected = iter(plain(whole, top_k=None, truncation=True, max_length=64) if whole else [])
        same_objects(ours(texts, top_k=None), [next(expected) if text in whole else [] for text in texts])


@pytest.mark.slow
@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=4))
@example(pairs=list(zip(NASTY, NASTY[::-1], strict=True)))
@example(pairs=[("", ""), ("", "a"), ("a", ""), ("\x00", "\x00")])
def test_any_pair_of_strings_has_the_pipelines_answer(
    pairs: list[tuple[str, str]], nasty_models: list[tuple[Any, Any]]
) -> None:
    """An empty second text is framed, as Hugging Face's tokenizers do in a list of pairs; a pipeline leaves it out."""
    for ours, plain in nasty_models:
        given_pairs = [{"text": first, "text_pair": second} for first, second in pairs]
        found = ours(given_pairs, top_k=None)
        whole = [place for place, (_, second) in enumerate(pairs) if second]
        asked = [given_pairs[place] for place in whole]
        expected = plain(asked, top_k=None, truncation=True, max_length=64) if asked else []
        same_objects([found[place] for place in whole], expected)
        for place in set(range(len(pairs))) - set(whole):
            encoded = plain.tokenizer([pairs[place][0]], [""], truncation=True, max_length=64, return_tensors="pt")
            with torch.no_grad():
                scores_C = plain.model(**encoded).logits.softmax(-1)[0]
            assert {each["label"]: each["score"] for each in found[place]} == {
                f"LABEL_{i}": pytest.approx(float(score), abs=SCORE) for i, score in enumerate(scores_C)
            }


def test_what_cannot_be_encoded_is_counted_aloud(tmp_path: Path) -> None:
    heard = Heard()
    with fp32(save_classifier(tmp_path, ["a", "b"]), callbacks=heard) as classifier:
        found = classifier(["good", "\ud800", None, "bad"])
        assert [answer["label"] is None for answer in found] == [False, True, True, False]
        assert found[1] == {"label": None, "score": None}
    assert heard.warnings == ["1 of 4 texts cannot be encoded (half a surrogate pair): no answer"]


def test_a_text_without_any_token_has_no_answer(tmp_path: Path) -> None:
    tokenizer = bare_byte_level()
    model = FAMILIES["gpt2"].model(3, vocab_size=len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["", "a", "", "the film"]
    with fp32(tmp_path) as classifier:
        found = classifier(texts, top_k=None)
    assert (found[0], found[2]) == ([], [])
    same_objects([found[1], found[3]], pipeline(tmp_path)(["a", "the film"], top_k=None))


@pytest.mark.parametrize("kind", ["canine", "funnel"])
def test_texts_that_a_model_cannot_take_leave_the_others_their_answers(kind: str, tmp_path: Path) -> None:
    """Too short for its code where no longer one is beside them; where all are, that is the error."""
    heard, long = Heard(), "good the film was bad " * 3
    with fp32(save_head(tmp_path, kind), callbacks=heard, token_budget=32) as classifier:
        with pytest.raises(ModelError, match="cannot run 1 rows of 3 tokens"):
            classifier("good")
        found = classifier([long, "good", long, "bad", long])
        assert [answer["label"] is None for answer in found] == [False, True, False, True, False]
        same_objects([found[0]], pipeline(tmp_path)(long))
        classifier([long, "good"])
    assert sum("cannot run 2 rows of 3 tokens" in warning for warning in heard.warnings) == 1


def test_scores_that_are_not_finite_are_counted_aloud(tmp_path: Path) -> None:
    """Once a call. A text that is none, or that has no candidates, has no answer either, and was not asked about."""
    file, heard = save_classifier(tmp_path, NLI) / "model.safetensors", Heard()
    weights = load_file(file)
    weights["classifier.bias"][:] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with fp32(tmp_path, callbacks=heard) as classifier:
        assert [answer["label"] for answer in classifier(["good", None, "bad"])] == [None] * 3
        assert classifier("good") == [{"label": None, "score": None}]
        classifier(["good", None, "bad"], labels=[["a", "b"], ["a"], []])
    said = "no answer, as the model's scores are not finite"
    counts = ["2 of 3 texts have", "1 of 1 texts has", "1 of 3 texts has"]
    assert heard.warnings == [f"{count} {said}" for count in counts]


# Company


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("precision", list(NEIGHBOURS))
@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_company_changes_a_logit_by_rounding_only(
    family: str, packing: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text alone, among others, in another order, among longer ones, and in micro-batches of another size; weights
    reordered as those of larger models are."""
    monkeypatch.setattr(onednn_prepack, "_LEAST", 1)
    model = save_classifier(tmp_path, ["a", "b", "c"], family)
    long, options = [" ".join(GOOD * 15)] * 40, {"precision": precision, "packing": packing}
    with (
        package.Classifier(model, **options) as classifier,
        package.Classifier(model, token_budget=96, **options) as small,
    ):
        alone_NC = np.concatenate([classifier.logits([text]) for text in TEXTS])
        others = {
            "together": classifier.logits(TEXTS),
            "reversed": classifier.logits(TEXTS[::-1])[::-1],
            "among longer ones": classifier.logits(long + TEXTS + long)[40:-40],
            "in small micro-batches": small.logits(TEXTS),
        }
    for company, logits_NC in others.items():
        print(f"{family}, {packing}, {precision}, {company}: {np.abs(logits_NC - alone_NC).max():.2g}")
        assert np.abs(logits_NC - alone_NC).max() <= NEIGHBOURS[precision], company
        second_N, best_N = np.sort(alone_NC, axis=1)[:, -2:].T
        is_tie_N = (precision != "fp32") & (best_N - second_N < 2 * NEIGHBOURS[precision])
        assert (is_tie_N | (logits_NC.argmax(axis=1) == alone_NC.argmax(axis=1))).all(), company


# What a call may be given


def test_nothing_and_columns_of_arrow(tmp_path: Path) -> None:
    with fp32(save_classifier(tmp_path, ["a", "b"])) as classifier:
        assert classifier([]) == []
        with pytest.warns(UserWarning, match="no label of the model begins with 'entail'"):
            assert classifier([], labels=["a"]) == []
        assert classifier([None]) == [{"label": None, "score": None}]
        assert classifier(None, top_k=None) == []
        for column in (pa.array(TEXTS), pa.chunked_array([TEXTS[:3], TEXTS[3:]]), np.array(TEXTS), tuple(TEXTS)):
            same_objects(classifier(column), classifier(TEXTS))
        assert classifier.labels.names == ("a", "b")


def test_a_closed_classifier_begins_anew(tmp_path: Path) -> None:
    classifier = fp32(save_classifier(tmp_path, ["a", "b"]))
    first = classifier(TEXTS)
    classifier.close()
    assert classifier(TEXTS) == first
    classifier.close()
    classifier.close()


@pytest.mark.parametrize("labels", [None, ["a", "b"]])
def test_processes_that_tokenise_are_kept_until_the_classifier_is_closed(
    labels: list[str] | None, tmp_path: Path
) -> None:
    before = children()
    with fp32(save_classifier(tmp_path, NLI), num_workers=1) as classifier:
        first = classifier(TEXTS[:3], labels=labels)
        wait(lambda: children() > before)
        [worker] = children() - before
        assert classifier(TEXTS[:3], labels=labels) == first
        assert children() - before == {worker}
    assert children() == before


def test_after_a_process_that_tokenises_was_ended_another_one_starts(tmp_path: Path) -> None:
    before = children()
    with fp32(save_classifier(tmp_path, NLI), num_workers=1) as classifier:
        first = classifier(TEXTS[:3], labels=["a", "b"])
        wait(lambda: children() > before)
        [worker] = children() - before
        os.kill(worker, signal.SIGKILL)
        found = []

        def answered() -> bool:
            with contextlib.suppress(DataError):  # until all have noticed, or never, where threads did without it
                found.append(classifier(TEXTS[:3], labels=["a", "b"]))
            return bool(found)

        wait(answered)
        wait(lambda: worker not in children())
        assert found.pop() == first
        wait(answered)
        assert found == [first]


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children() -> set[int]:
    """Processes that this one has started and not waited for."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has just ended
            found.update(map(int, path.read_text().split()))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "more", "said", "hint"),
    [
        ((["a", 3],), {}, "texts[1] is no text: it is of type int", "None for no text"),
        ((["a"],), {"pairs": ["b", "c"]}, "1 texts and 2 pairs", "in the same order"),
        (("a",), {"pairs": ["b"]}, "one text was given and several pairs", "a list of texts"),
        ((["a"],), {"pairs": "b"}, "several texts were given and one pair", "one for each text"),
        ((["a", "b"], ["x", "y"]), {}, "one argument without a name", "labels=..., second texts as pairs=..."),
        ((3,), {}, "texts is int: it must be a list of texts", "[text]"),
        ((b"a",), {}, "texts is bytes: it must be a list of texts", "[text]"),
        (
            (pd.DataFrame({"a": ["b"], "c": ["d"]}),),
            {},
            "texts is a table of 2 columns",
            "brimful.classify(model, table)",
        ),
        (([{"text": "a"}, "b"],), {}, "texts[1] is 'b'", "text_pair"),
        (([{"text": "a", "text_pair": "b"}, {"text": "c"}],), {}, "texts[1] is {'text': 'c'}", "text_pair"),
        (([{"text": "a", "pair": "b"}],), {}, "texts[0] is {'text': 'a', 'pair': 'b'}", "text_pair"),
        ((["a"],), {"top_k": -1}, "top_k is -1", "None is for all"),
        ((["a"],), {"top_k": "all"}, "top_k is all: it must be a whole number", "None is for all"),
        ((["a"],), {"temperature": 1}, "a classifier is not called with temperature", "help(brimful.Classifier"),
        ((["a"],), {"batch_size": 32}, "a classifier is not called with batch_size", "a token_budget"),
        ((["a"],), {"candidate_labels": ["x"]}, "a classifier is not called with candidate_labels", "they are labels"),
        ((["a"],), {"function_to_apply": "tanh"}, "function_to_apply is 'tanh'", "sigmoid, softmax"),
        ((["a"],), {"pairs": ["b"], "labels": ["x"]}, "zero-shot reads one text at a time", "texts or labels"),
        ((["a"],), {"labels": []}, "no candidate labels", "sports,politics"),
        ((["a"],), {"labels": ["x"], "hypothesis_template": "{x}"}, "has no place for a label", "{}"),
        ((["a"],), {"labels": "x, y,x"}, "the candidate label 'x' is there twice", "each once"),
        ((["a"],), {"multi_label": True}, "multi_label is for zero-shot", "give labels"),
        ((["a"],), {"hypothesis_template": "It is {}."}, "hypothesis_template is for zero-shot", "give labels"),
    ],
)
def test_mistakes(words: Any, more: Any, said: str, hint: str, tmp_path: Path) -> None:
    with fp32(save_classifier(tmp_path, NLI)) as classifier, pytest.raises(OptionError) as caught:
        classifier(*words, **more)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"precison": "fp32"}, "Classifier has no option 'precison'", "did you mean precision?"),
        ({"output": "a.csv"}, "Classifier has no option 'output'", ""),
        ({"precision": "fp4"}, "--precision is 'fp4'", "the default is auto"),
        ({"max_length": 1000}, "positions for 80 tokens", "at most 80"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], said: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        package.Classifier(save_classifier(tmp_path, ["a", "b"]), **options)
    assert said in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        package.Classifier(tmp_path)
    with pytest.raises(ModelError, match="no classification head"):
        package.Classifier(save_base(tmp_path / "base"))


# What runs is what was compared


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_texts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Admitted at load, and wrong from then on: the plain path answers, and it is said."""
    model = save_classifier(tmp_path / "model", ["a", "b", "c"])
    with fp32(model) as classifier:
        expected_NC = classifier.logits(TEXTS)
    choose, check = packed_forward.choose_attention, facts.check_equivalence

    def blind(q: Any, k: Any, v: Any, segments: Any, pattern: Any) -> Any:
        one = dataclasses.replace(segments, segment_T=torch.zeros_like(segments.segment_T))
        return packed_forward.reference_attention(q, k, v, one, pattern)

    def admitted(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(packed_forward, "choose_attention", choose)
        found = check(*given, **named)
        monkeypatch.setattr(packed_forward, "choose_attention", lambda *_: blind)
        return found

    monkeypatch.setattr(facts, "check_equivalence", admitted)
    heard: list[str] = []
    callbacks = Callbacks()
    callbacks.warning = heard.append  # type: ignore[method-assign]
    with package.Classifier(model, device="cpu", precision=precision, callbacks=callbacks) as classifier:
        np.testing.assert_allclose(classifier.logits(TEXTS), expected_NC, atol=1e-5)
        assert classifier.fallback in heard
        assert classifier.equivalence is not None
        assert classifier.equivalence.passed
        assert classifier.recipe is not None
        (packing,) = [lever for lever in classifier.recipe.levers if lever.name == "packing"]
        assert (packing.value, packing.reason) == (
            "padded",
            "off: answers of faster ways were not those of the plain model",
        )


def test_a_model_without_half_precision_answers_in_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As FNet on a GPU, where `auto` is bf16; bf16 that was asked for is refused, with the flag."""

    def without_half(self: packed_forward.PaddedModel, given: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("Unsupported dtype BFloat16")
        return logits(self, given)

    model = save_classifier(tmp_path / "model", ["a", "b", "c"])
    logits, choice = packed_forward.PaddedModel._logits, choose_precision
    monkeypatch.setattr(packed_forward.PaddedModel, "_logits", without_half)
    monkeypatch.setattr(
        "brimful.engine.classification.classifier.choose_forward_precision",
        lambda asked, device: choice("bf16" if asked == "auto" else asked, device),
    )
    with package.Classifier(model, device="cpu", packing="off", callbacks=Callbacks()) as classifier:
        found_NC = classifier.logits(TEXTS)
        assert classifier.fallback == (
            "bert of transformers cannot run in half precision: Unsupported dtype BFloat16: fp32 runs instead"
        )
    with package.Classifier(model, device="cpu", packing="off", precision="fp32") as classifier:
        np.testing.assert_allclose(found_NC, classifier.logits(TEXTS), atol=1e-6)
    with (
        package.Classifier(model, device="cpu", packing="off", precision="bf16") as classifier,
        pytest.raises(ModelError, match="cannot run in half precision") as refused,
    ):
        classifier.logits(TEXTS)
    assert "--precision tf32" in str(refused.value.hint)


def test_what_takes_long_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that torch's compiler makes."""
    save_classifier(tmp_path / "model", ("bad", "good"))
    said, callbacks = list[str](), Callbacks()
    monkeypatch.setattr(callbacks, "stage", said.append)
    monkeypatch.setattr(ExecutionMode, "compile_seconds", lambda *_: 25.0)
    with package.Classifier(tmp_path / "model", device="cpu", callbacks=callbacks) as classifier:
        assert len(classifier(TEXTS[:2])) == 2
    assert [each for each in said if "compiling layers: 25 s or more" in each]


@pytest.mark.slow
def test_answers_are_compared_with_a_model_of_its_own_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longformer's are narrow on short rows, but for the plain model that the first answers are held to."""
    save_head(tmp_path / "model", "longformer")
    narrowed, was = list[bool](), PaddedModel.__call__

    def call(self: PaddedModel, *given: Any) -> Any:
        narrowed.append(not self.plain)
        return was(self, *given)

    monkeypatch.setattr(PaddedModel, "__call__", call)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:4]), "utf-8")
    package.classify(tmp_path / "model", rows, output=tmp_path / "out.jsonl", device="cpu")
    assert set(narrowed) == {True, False}
