"""Adapters of peft and frozen weights: the plain model's gradient, what is kept and saved, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import brimful
from brimful.core.errors import InputError, ModelError, OptionError, OutputError
from brimful.core.options.train import TrainOptions
from brimful.core.trained_part import FrozenParts
from brimful.kernels.layout import PackedShape, packed_inputs
from brimful.levers.lever import StepWork
from brimful.levers.packing import Packing
from brimful.levers.parameter_efficient import FrozenWeights, TrainedPart, choose_part, describe, frozen_names
from brimful.models.hub.adapters import make_config, merge_adapter
from brimful.models.model_stats import linear_parameters
from brimful.models.packed.equivalence import check_equivalence
from brimful.models.packed.packed_forward import PackedModel, padding_id_of
from commands import call, train_words
from levers.assemblies import assembly_of
from plain import padded
from runs import save_tiny_model, single_label_rows, write_rows
from tiny import FAMILIES, VOCABULARY

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own calls

CPU = torch.device("cpu")


def asked(**options: Any) -> TrainOptions:
    return TrainOptions(data="", model="", output="", **options)


def adapted(model: Any, **options: Any) -> Any:
    """peft's wrapper around a model, by our options, with no adapter at zero: else half of its gradient is."""
    wrapped = choose_part(model, asked(peft="lora", **options), new_parameters=(), base="base")
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=random)
    return wrapped


def sequences() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(5, VOCABULARY, size=length).astype(np.int32) for length in (7, 3, 30, 19)]


def trained_gradient(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {}),
        ("bert", {"lora_r": 3, "lora_alpha": 7, "lora_target_modules": "query,output.dense"}),
        ("modernbert", {}),
        ("llama", {}),
        ("qwen3", {"lora_target_modules": "all-linear"}),
    ],
)
def test_the_packed_gradient_is_that_of_peft_on_padded_rows(family: str, options: dict[str, Any]) -> None:
    plain = FAMILIES[family].model(initializer_range=0.2)
    model = copy.deepcopy(plain)
    model, plain = (adapted(each, **options).get_base_model() for each in (model, plain))
    equivalence = check_equivalence(model, max_length=64, device=CPU, precision="fp32", cache=False)
    assert equivalence.packed, equivalence.reason
    ids = sequences()
    direction = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain.double().train().set_attn_implementation("sdpa")
    expected = plain(**padded(ids, None, padding_id_of(plain.config))).logits
    (expected * direction).sum().backward()
    model.double().train()
    shape = PackedShape(num_tokens=80, num_slots=len(ids), max_length=64)
    row = packed_inputs(ids, shape, padding_id=padding_id_of(model.config), types=None, groups=True)
    assert equivalence.form is not None
    found = PackedModel(model, equivalence.form, plain=True)(row).logits
    (found * direction).sum().backward()
    assert torch.allclose(found, expected, rtol=0, atol=1e-6 * float(expected.detach().norm()))
    ours, theirs = trained_gradient(model), trained_gradient(plain)
    assert ours.keys() == theirs.keys()
    assert any("lora_A" in name for name in ours)
    assert all("lora_" in name or "modules_to_save" in name for name in ours)
    difference = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours])
    norm = torch.cat([each.flatten() for each in theirs.values()]).norm()
    assert difference.norm() <= (2e-6 if FAMILIES[family].partly_fp32 else 1e-12) * norm


def test_an_adapter_is_drawn_as_peft_draws_it() -> None:
    model, other = FAMILIES["bert"].model(), FAMILIES["bert"].model()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    choose_part(model, asked(peft="lora", seed=5, lora_dropout=0.3), new_parameters=(), base="base")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    peft.get_peft_model(other, peft.LoraConfig(task_type="SEQ_CLS", lora_dropout=0.3))
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, rows, and one run of an adapter on them, with dropout in both."""
    folder = tmp_path_factory.mktemp("adapter")
    save_tiny_model(folder / "base", dropout=0.1)
    write_rows(folder / "rows.jsonl", single_label_rows(64))
    run_adapter(folder, "run")
    return folder


def run_adapter(folder: Path, name: str, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "peft": "lora", "lora_r": 4, "lora_dropout": 0.2, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-2,
    }  # fmt: skip
    return brimful.train(
        folder / "rows.jsonl", model=folder / "base", output=folder / name, batch_size=8, device="cpu",
        eval_split=0.0, **settings | options,
    )  # fmt: skip


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**padded(sequences(), None, 0)).logits
    return found


@pytest.mark.slow
def test_model_holds_the_adapter_as_peft_reads_it(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = folder / "run" / "model"
    names = {path.name for path in model.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    auto = peft.AutoPeftModelForSequenceClassification.from_pretrained(model, num_labels=3)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
    expected = logits_of(peft.PeftModel.from_pretrained(base, model))
    assert torch.equal(logits_of(auto), expected)
    rows = single_label_rows(5, seed=9)
    with brimful.Classifier(model, device="cpu") as classifier:
        answers = classifier([row["text"] for row in rows])
    assert {answer["label"] for answer in answers} <= {"low", "middle", "high"}
    run_adapter(folder, "merged", merge=True)
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged" / "model")
    assert torch.allclose(logits_of(merged), expected, atol=1e-6)
    assert not any("lora" in name for name in load_file(folder / "merged" / "model" / "model.safetensors"))
    with brimful.Classifier(folder / "merged" / "model", device="cpu") as classifier:
        again = classifier([row["text"] for row in rows])
    assert [each["label"] for each in again] == [each["label"] for each in answers]
    assert [each["score"] for each in again] == pytest.approx([each["score"] for each in answers], abs=1e-5)


def test_a_loop_of_ones_own_trains_an_adapter_in_its_wrapper() -> None:
    wrapped = adapted(FAMILIES["bert"].model(initializer_range=0.2))
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    step = brimful.Step(wrapped, num_steps=2, batch_size=4, device="cpu", learning_rate=1e-2)
    assert step.packed
    rows = [{"input_ids": ids, "labels": number % 3} for number, ids in enumerate(sequences())]
    for _ in range(2):
        assert step.run(step.batch(rows)).read().applied
    assert all("lora_" in name or "modules_to_save" in name for name in step.state().weights)
    after = step.release()
    assert after is wrapped
    moved = {name for name, p in after.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert moved == {name for name, p in after.named_parameters() if p.requires_grad}


def test_checkpoints_hold_what_is_trained_and_resume_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "run" / "checkpoints" / "step-00000003" / "weights.safetensors")
    assert all("lora_" in name or name.startswith("classifier.modules_to_save") for name in weights)
    again = folder / "again"
    run_adapter(folder, "again")
    whole = load_file(folder / "run" / "model" / "adapter_model.safetensors")
    for path in (again / "model").iterdir():
        path.unlink()
    (again / "model").rmdir()
    for path in (again / "checkpoints" / "step-00000006").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match="passed over"):
        run_adapter(folder, "again", resume=True)
    resumed = load_file(again / "model" / "adapter_model.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_merged_model_is_told(folder: Path) -> None:
    words = train_words(folder / "rows.jsonl", folder / "base", folder / "plain", "--peft", "lora", "--merge")
    said = call(*words, "--max-steps", 2, "--device", "cpu", "--learning-rate", 1e-3)
    assert f"{folder}/plain/model (the adapter is merged: a plain model)" in said.err


@pytest.mark.slow
def test_the_command_line_takes_an_adapter(folder: Path) -> None:
    done = call("classify", folder / "run" / "model", folder / "rows.jsonl", "--limit", 3)
    assert done.code == 0, done.err
    assert [json.loads(line)["label"] in ("low", "middle", "high") for line in done.out.splitlines()] == [True] * 3


def test_the_model_of_an_adapter_is_trained_further(folder: Path, tmp_path: Path) -> None:
    """All of it, merged."""
    brimful.train(
        folder / "rows.jsonl", model=folder / "run" / "model", output=tmp_path / "run", batch_size=8, device="cpu",
        eval_split=0.0, max_steps=1, learning_rate=1e-2,
    )  # fmt: skip
    embeddings = "embeddings.LayerNorm.weight"  # which the adapter leaves alone
    before = load_file(folder / "base" / "model.safetensors")[embeddings]
    assert not torch.equal(before, load_file(tmp_path / "run" / "model" / "model.safetensors")[f"bert.{embeddings}"])
    exported = load_file(brimful.export(tmp_path / "run") / "model.safetensors")
    assert torch.equal(
        exported[f"bert.{embeddings}"], load_file(tmp_path / "run/model/model.safetensors")[f"bert.{embeddings}"]
    )
    with pytest.raises(OptionError, match=r"--merge: .* has no adapter"):
        brimful.export(tmp_path / "run", merge=True, overwrite=True)


def test_a_checkpoint_becomes_an_adapter(folder: Path, tmp_path: Path) -> None:
    brimful.export(folder / "run", output=tmp_path / "exported", step=6)
    brimful.export(folder / "run", output=tmp_path / "merged", step=6, merge=True)
    from transformers import AutoModelForSequenceClassification

    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
    adapted = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "exported"))
    assert torch.allclose(logits_of(whole), adapted, atol=1e-6)
    found = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    whole = load_file(folder / "run" / "model" / "adapter_model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_run_is_not_resumed_on_other_frozen_weights(folder: Path) -> None:
    weights = folder / "base" / "model.safetensors"
    before = weights.read_bytes()
    try:
        weights.write_bytes(before[:-4] + bytes(4))
        with pytest.raises(OutputError, match=r"model\.safetensors has changed"):
            run_adapter(folder, "run", resume=True)
    finally:
        weights.write_bytes(before)


@pytest.mark.slow
def test_frozen_weights_are_kept_in_the_precision_of_products_and_saved_as_they_were(folder: Path) -> None:
    run = run_adapter(folder, "bf16", peft=None, lora_r=None, lora_dropout=None, freeze="layers 0", precision="bf16")
    lines = {lever.name: lever for lever in run.recipe.levers}
    assert lines["trained_weights"].arithmetic == "training"
    assert lines["frozen_weights"].value == "bf16"
    saved = load_file(folder / "bf16" / "model" / "model.safetensors")
    base = load_file(folder / "base" / "model.safetensors")
    moved = {name for name in base if not torch.equal(base[name], saved[f"bert.{name}"])}
    assert {name for name in moved if name.startswith("encoder.layer.1.")}
    assert not {name for name in moved if name.startswith("encoder.layer.0.")}
    weights = load_file(folder / "bf16" / "checkpoints" / "step-00000006" / "weights.safetensors")
    assert weights
    assert not any(".layer.0." in name for name in weights)


@pytest.mark.parametrize(
    ("freeze", "value"), [("all-but-head", "the head alone"), ("embeddings", "all but embeddings")]
)
def test_the_recipe_names_what_is_trained(freeze: str, value: str) -> None:
    part = assembly_of(FAMILIES["bert"].model(), freeze=freeze).lever(TrainedPart)
    assert part.value == value


def test_a_run_of_an_earlier_version_goes_on_with_its_head(folder: Path) -> None:
    """Its recipe has the same part by another name."""
    run = run_adapter(folder, "head", peft=None, lora_r=None, lora_dropout=None, freeze="all-but-head")
    file = folder / "head" / "run.json"
    assert '"the head alone"' in file.read_text("utf-8")
    file.write_text(file.read_text("utf-8").replace('"the head alone"', '"all but all-but-head"'), "utf-8")
    (folder / "head" / "model" / "config.json").unlink()
    again = {"peft": None, "lora_r": None, "lora_dropout": None, "freeze": "all-but-head", "max_steps": 7}
    assert run.steps == 6
    assert run_adapter(folder, "head", **again, resume=True).steps == 7


def test_the_plan_counts_frozen_weights_once() -> None:
    model = FAMILIES["bert"].model()
    assembly = assembly_of(model, precision="bf16", peft="lora")
    assembly.weights_on_disk = True
    part = assembly.find(TrainedPart)
    assert part is not None
    assembly.find(Packing)
    frozen = assembly.find(FrozenWeights)
    assert frozen is not None
    linear = linear_parameters(model)
    for p in model.parameters():
        halved = id(p) in linear and not p.requires_grad
        assert p.dtype == (torch.bfloat16 if halved else torch.float32)
    work = StepWork.of(model, np.array([5, 9]), flops_per_s=1e12, bytes_per_s=1e12)
    assert part.trained == work.num_trained
    assert 2 < work.passes < 3
    halved_bytes = sum(2 * p.numel() for p in model.parameters() if p.dtype == torch.bfloat16)
    assert frozen.cost(work).resident_bytes == -halved_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["ia3", "loha", "dora", "rslora", "vera"])
def test_its_kin_run_packed_load_and_merge(method: str, tmp_path: Path) -> None:
    model = FAMILIES["bert"].model(initializer_range=0.2)
    wrapped = choose_part(model, asked(peft=method), new_parameters=(), base="base")
    equivalence = check_equivalence(model, max_length=32, device=CPU, precision="fp32", cache=False)
    assert equivalence.packed, equivalence.reason
    before = logits_of(model)
    wrapped.save_pretrained(tmp_path, save_embedding_layers=False)
    plain = FAMILIES["bert"].model(initializer_range=0.2)
    assert torch.allclose(
        logits_of(peft.PeftModel.from_pretrained(plain, tmp_path).get_base_model()), before, atol=1e-5
    )
    assert torch.allclose(logits_of(merge_adapter(wrapped)), before, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peft": "lora", "lora_modules_to_save": "poooler"}, "no module of that name"),
        ({"peft": "lora", "lora_modules_to_save": "embeddings"}, "peft could not load what it would save"),
        ({"peft": "ln_tuning"}, "--peft does not work on this model"),
    ],
)
def test_an_adapter_that_could_not_be_loaded_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        choose_part(FAMILIES["bert"].model(), asked(**options), new_parameters=(), base="base")


def test_what_cannot_be_merged_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["query"], "layer_replication": [[0, 2], [1, 2]]})
    )
    config = str(tmp_path / "adapter_config.json")
    given: dict[str, Any] = {"new_parameters": (), "base": "base"}
    assert choose_part(FAMILIES["bert"].model(3), asked(peft=config), **given) is not None
    with pytest.raises(OptionError, match="cannot be merged: its layer_replication") as caught:
        choose_part(FAMILIES["bert"].model(3), asked(peft=config, merge=True), **given)
    assert caught.value.hint == "leave out --merge"


def test_a_config_file_says_it_all(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 5, "target_modules": ["key"], "inference_mode": True}))
    config = make_config(asked(peft=str(file), lora_alpha=10))
    assert (config.r, config.lora_alpha, config.inference_mode) == (5, 10, False)
    assert describe(str(file), config) == "lora r=5 lora_alpha=10 lora_dropout=0.0 on key"


def test_a_folder_called_as_a_method_is_no_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lora").mkdir()  # the output of a run, perhaps
    monkeypatch.chdir(tmp_path)
    assert make_config(asked(peft="lora")).peft_type == "LORA"
    with pytest.raises(OptionError, match=r"lora/adapter_config.json cannot be read"):
        make_config(asked(peft="./lora"))


def test_a_pooler_that_no_file_holds_is_trained_and_saved() -> None:
    model = FAMILIES["bert"].model()
    names = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    choose_part(model, asked(peft="lora"), new_parameters=names, base="base")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.replace("dense.", "dense.modules_to_save.default.") for name in names} <= trained
    frozen = frozen_names(FAMILIES["bert"].model(), FrozenParts.parse("all-but-head"), names)
    assert not frozen & {*names, "classifier.weight"}


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "distilbert", "deberta-v2", "roberta"])
def test_parts_are_frozen_by_name(family: str) -> None:
    model = FAMILIES[family].model()
    names = {name for name, _ in model.named_parameters()}
    embeddings = frozen_names(model, FrozenParts.parse("embeddings"))
    assert embeddings
    assert all("embed" in name.lower() for name in embeddings)
    assert not any("layers." in name or "layer." in name for name in embeddings)
    first = frozen_names(model, FrozenParts.parse("layers 0"))
    assert first == {name for name in names if ".0." in name and "layer" in name.lower()}
    both = frozen_names(model, FrozenParts.parse("embeddings, layers 0-0"))
    assert both == embeddings | first
    assert frozen_names(model, FrozenParts.parse(r"regex:bias$|norm")) <= names
    body = frozen_names(model, FrozenParts.parse("all-but-head"))
    assert body == {name for name in names if name.startswith(model.base_model_prefix + ".")}


@pytest.mark.parametrize("family", ["bart", "mbart", "t5", "bloom", "xlm", "gpt2", "mpnet"])
def test_embeddings_are_frozen_with_positions_and_norms_wherever_they_stand(family: str) -> None:
    model = FAMILIES[family].model()
    tables = r"embeddings?\.|embed_\w+\.|shared\.|wte\.|wpe\.|layernorm_embedding|layer_norm_emb|embeddings_layernorm"
    expected = {name for name, _ in model.named_parameters() if re.search(tables, name)}
    assert frozen_names(model, FrozenParts.parse("embeddings")) == expected


def test_weights_that_a_model_does_not_train_stay_untrained() -> None:
    model = FAMILIES["bert"].model()
    fixed = model.get_parameter("bert.embeddings.position_embeddings.weight").requires_grad_(False)
    choose_part(model, asked(freeze="layers 0"), new_parameters=(), base="base")
    assert not fixed.requires_grad


REFUSED = {
    "no such method": ({"peft": "lorra"}, "names no method and no file"),
    "prompts": ({"peft": "prompt_tuning"}, "does not work here"),
    "steps of its own": ({"peft": "adalora"}, "changes ranks in every step"),
    "no rank": ({"peft": "ia3", "lora_r": 4}, "ia3 has no r"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_work_are_refused(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(OptionError, match=said):
        make_config(asked(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_r": 4}, "without --peft"),
        ({"merge": True}, "without --peft"),
        ({"peft": "lora", "freeze": "embeddings"}, "both given"),
        ({"freeze": "embedings"}, "names no part"),
        ({"freeze": "layers 5-2"}, "layers 5-2"),
        ({"freeze": "regex:("}, "no regular expression"),
        ({"peft": "lora", "lora_r": 0}, "greater than 0"),
        ({"peft": "lora", "lora_dropout": 1.0}, "below 1"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        asked(**options)


@pytest.mark.parametrize(
    ("freeze", "said"),
    [("layers 0-7", "the model has 2"), ("regex:nothing_like_it", "no parameter"), ("regex:.", "nothing to train")],
)
def test_parts_that_a_model_does_not_have_are_refused(freeze: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        frozen_names(FAMILIES["bert"].model(), FrozenParts.parse(freeze))


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        ({"lora_target_modules": "q_proj"}, "none of its modules is called q_proj", "query,key,value,dense"),
        (
            {"lora_target_modules": "regex:.*proj"},
            r"none of its modules matches regex:\.\*proj",
            "query,key,value,dense",
        ),
        ({"peft": "adaption_prompt"}, "adaption_prompt knows no model of type bert", "use lora"),
        ({"peft": "ln_tuning"}, "Please specify `target_modules`", "as in --lora-target-modules query,key,value,dense"),
    ],
)
def test_targets_that_a_model_does_not_have_are_refused(options: dict[str, str], said: str, hint: str) -> None:
    """With names that it has, or a method that works on it."""
    part = asked(**{"peft": "lora", **options})
    with pytest.raises(OptionError, match=f"does not work on this model: .*{said}") as caught:
        choose_part(FAMILIES["bert"].model(), part, new_parameters=(), base="base")
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "hint"),
    [("lorra", "did you mean lora?"), ("nothing", "lora, rslora, dora, ia3, loha, lokr, vera, oft, ...")],
)
def test_methods_that_work_are_named(given: str, hint: str) -> None:
    with pytest.raises(OptionError, match="names no method and no file") as caught:
        make_config(asked(peft=given))
    assert (caught.value.hint or "").startswith(hint)


def test_files_that_are_no_configuration_are_told_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("text,label")
    for name, said in (("missing.json", "cannot be read: there is no such file"), ("rows.json", "is not JSON")):
        with pytest.raises(OptionError, match=f"{name} {said}\n") as caught:
            make_config(asked(peft=str(tmp_path / name)))
        assert "adapter_config.json, or a method, as lora" in (caught.value.hint or "")


def test_an_adapter_that_changes_the_base_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "init_lora_weights": "olora"}))
    with pytest.raises(OptionError, match="changes the base model's weights"):
        choose_part(FAMILIES["bert"].model(), asked(peft=str(file)), new_parameters=(), base="base")


@pytest.fixture
def torn(folder: Path, tmp_path: Path) -> Path:
    """The saved adapter without the name of its model."""
    for path in (folder / "run" / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    return tmp_path


def test_an_adapter_without_its_model_is_refused(torn: Path) -> None:
    with pytest.raises(ModelError, match="does not say of which model"):
        brimful.Classifier(torn, device="cpu")


def test_an_adapter_on_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an adapter itself"):
        brimful.train(
            folder / "rows.jsonl", model=folder / "run" / "model", output=tmp_path / "run", peft="lora", max_steps=1
        )
