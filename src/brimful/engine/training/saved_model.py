"""The trained model on the disk: plain Hugging Face, or an adapter of peft beside the name of its model.

Frozen weights were kept in the precision of products. What is saved of them are those of the model's files, read again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from brimful.core.options.train import TrainOptions
from brimful.engine.assemble import Built
from brimful.engine.prepare import Prepared
from brimful.engine.target_scale import fold
from brimful.levers.parameter_efficient import choose_part
from brimful.models.hub.adapters import merge_adapter
from brimful.models.hub.load import load_model
from brimful.models.hub.save import save_adapted_model, save_model


def save_trained(built: Built, prepared: Prepared, options: TrainOptions, folder: Path, card: str) -> None:
    """Save what training left in `built`, whose step was released: all of the model, or its adapter.

    Raises: DiskFullError or OutputError naming `folder`; ModelError if the model's files are gone.
    """
    beside = (prepared.tokenizer, prepared.space, folder, card, prepared.inputs)
    if built.adapter is not None and not options.merge:
        save_adapted_model(built.adapter, *beside)
        return
    partly = options.peft is not None or options.freeze is not None
    model = whole_model(built, prepared, options) if partly else built.model
    if prepared.target_scale is not None:
        fold(model, prepared.target_scale)
    save_model(model, *beside)


def whole_model(built: Built, prepared: Prepared, options: TrainOptions) -> Any:
    """Return a plain model in fp32: trained weights in those of the files, an adapter merged."""
    facts = prepared.facts
    model = load_model(facts, prepared.space, head=prepared.alignment.head, seed=options.seed)
    wrapped = choose_part(model, options, new_parameters=facts.new_parameters, base=facts.base_name)
    trained = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    buffers = dict(built.model.named_buffers())
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if (found := trained.get(name, buffers.get(name))) is not None:
                tensor.copy_(found)
    return model if wrapped is None else merge_adapter(wrapped)
