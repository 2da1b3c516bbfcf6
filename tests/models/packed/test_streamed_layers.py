"""Weights of layers that come for their turn: the same logits bit for bit, two layers on the device, and refusals."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful
from brimful.core.errors import OptionError
from brimful.core.options.classify import ClassifyOptions
from brimful.core.records import LabelSpace
from brimful.hardware.process_settings import give_back_freed_memory
from brimful.levers.streaming import Streaming
from brimful.models.hub.inspection import inspect_model
from brimful.models.hub.load import load_model
from brimful.models.model_stats import layers_of
from brimful.models.packed.check_inputs import padded_rows
from brimful.models.packed.packed_forward import PaddedModel
from brimful.models.packed.streamed_layers import StreamedLayers, end_streaming, own_parameters
from forked_ranks import Forked
from levers.assemblies import assembly_of
from runs import tiny_tokenizer
from tiny import FAMILIES, sequences

pytestmark = pytest.mark.filterwarnings("ignore:.* saves nothing on a CPU")

CPU = torch.device("cpu")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return PaddedModel(model)(padded_rows(sequences([5, 30, 12]), model.config)).logits


@pytest.mark.parametrize("stored", ["host", "disk"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "deberta-v2"])
def test_logits_are_the_same_pass_after_pass(family: str, stored: str, tmp_path: Path) -> None:
    model = FAMILIES[family].model(num_hidden_layers=5).eval().requires_grad_(False)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    layers = layers_of(model)
    assert layers is not None
    model.streamed_layers = streamed = StreamedLayers(layers, CPU, tmp_path if stored == "disk" else None)
    kept = sum(p.nbytes for each in own_parameters(layers) for p in each)
    assert kept <= streamed.num_bytes < 1.5 * kept + 256 * 100
    seen: list[set[int]] = []
    for layer, (parameter, *_) in zip(layers, own_parameters(layers), strict=True):
        layer.register_forward_pre_hook(lambda *_, p=parameter: seen.append({p.untyped_storage().data_ptr()}))
    for _ in range(3):
        assert torch.equal(logits(model), before)
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert len(set.union(*seen)) == 2  # pieces on the device, turn by turn
    assert streamed.fetched_bytes == pytest.approx(3 * streamed.num_bytes, rel=0.25)  # and the next pass's first
    assert list(tmp_path.iterdir()) == []  # the file has no name
    end_streaming(model)
    assert torch.equal(logits(model), before)
    assert model.streamed_layers is None


def test_a_layer_that_fails_leaves_its_weights_where_they_are_kept() -> None:
    model = FAMILIES["bert"].model(num_hidden_layers=4).eval()
    layers = layers_of(model)
    assert layers is not None
    before = logits(model)
    model.streamed_layers = StreamedLayers(layers, CPU)
    failing = layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    failing.remove()
    assert torch.equal(logits(model), before)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "packing"), [("fp32", "auto"), ("bf16", "off")])
def test_answers_are_the_same_bytes(precision: Any, packing: Any, tmp_path: Path) -> None:
    """And the comparison with the plain model, whose layers stream first, in another precision."""
    FAMILIES["bert"].model(num_hidden_layers=4, initializer_range=0.2).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": f"w{5 + number % 90} w7 w{20 + number % 9}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for asked in ("none", "host", "disk"):
        output = tmp_path / f"{asked}.jsonl"
        folder = str(tmp_path) if asked == "disk" else None
        done = brimful.classify(
            tmp_path / "model", tmp_path / "rows.jsonl", output=output, logits=True, device="cpu",
            stream_weights=asked, stream_folder=folder, precision=precision, packing=packing,
        )  # fmt: skip
        lines = {lever.name: lever for lever in done.recipe.levers}
        assert (asked == "none") == ("streaming" not in lines)
        found.append(output.read_bytes())
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(OptionError, match="no list of layers"):
        assembly_of(FAMILIES["albert"].model(), training=False, stream_weights="host").find(Streaming)
    with pytest.raises(OptionError, match="--stream-folder is for --stream-weights disk"):
        ClassifyOptions(model="", data="", stream_folder=tempfile.gettempdir())
    with pytest.raises(OptionError, match="cannot be made in /nowhere") as error:
        assembly_of(FAMILIES["bert"].model(), training=False, stream_weights="disk", stream_folder="/nowhere").find(
            Streaming
        )
    assert "--stream-folder" in (error.value.hint or "")


def own_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measured(folder: Path, file: Path | None) -> tuple[int, int, int, int]:
    """Bytes that loading a model takes, and streaming it in addition; of its weights, and of those of a layer."""
    facts = inspect_model(str(folder), trust_remote_code=False, allow_pickle=False)
    space = LabelSpace(task="single_label", names=("a", "b", "c"))
    give_back_freed_memory()
    before = own_bytes()
    loaded = load_model(facts, space, head="kept", seed=0, folder=file)
    after = own_bytes()
    layers = layers_of(loaded)
    assert layers is not None
    streamed = StreamedLayers(layers, torch.device("cpu"), file)
    whole = sum(p.nbytes for p in loaded.parameters())
    return after - before, own_bytes() - before, whole, streamed.num_bytes // len(layers)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory of a process is read where Linux tells it")
@pytest.mark.parametrize("stored", ["host", "disk"])
def test_loading_holds_weights_once_and_none_of_those_on_disk(stored: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    FAMILIES["bert"].model(hidden_size=512, num_hidden_layers=12, intermediate_size=2048).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    file = tmp_path if stored == "disk" else None
    ((loaded, moved, whole, layer),) = Forked(tmp_path / "fork", 1, lambda _: measured(folder, file)).results()
    assert whole > 100e6
    most = 0.1 * whole if stored == "disk" else 1.1 * whole
    assert loaded < most
    assert moved < most + 6 * layer  # two on the device, which is host memory here, and those that are read ahead
