"""A model's layers compiled or recorded in place: onto fused kernels, ours or torch.compile's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from brimful.models.model_stats import embeddings_of, layer_lists, layers_of
from brimful.models.packed.layer_calls import as_they_were
from brimful.models.packed.packed_forward import LayoutModel, PackedModel


def compile_padded_layers(execution: LayoutModel, *, note: Callable[[str], None]) -> None:
    """Compile the layers of a model on padded rows in place, by torch's own compiler: once for all of one kind.

    The first shape has a trace of its own; a later one has another, for any size of what differs. Layers whose code
    asks much of shapes (XLNet, Funnel) take five to fifteen times as long to be traced for any; dense rows have one.
    """
    from brimful.models.fusion import inductor_backend  # Triton is missing beside torch for CPUs

    backend = partial(inductor_backend, note=note)  # one object: what was compiled with another is not used again
    for layers in layer_lists(execution.model):
        for layer in layers:
            layer.compile(dynamic=None, backend=backend)


def fuse_padded_layers(model: nn.Module, lists: Iterable[nn.ModuleList]) -> None:
    """Have layers on padded rows run on our kernels where these cover parts of them, without a compiler.

    Not where a parameter of theirs is anywhere else in the model, too: its gradients meet before the update.
    """
    try:
        from brimful.models.fusion import fuse_parts
        from brimful.models.fusion.recording import record_calls
    except ImportError:  # without Triton
        return
    everywhere = Counter(id(p) for each in model.modules() for p in each._parameters.values() if p is not None)
    for layers in lists:
        if all(everywhere[id(parameter)] == 1 for parameter in layers.parameters()):
            record_calls(layers, fuse_parts, fixed=True)


def record_layers(execution: LayoutModel) -> None:
    """Have the model's layers run on our kernels where their code can be recorded, and as they are where not."""
    layers = layers_of(execution.model)
    if layers is None or not _own_parameters(layers):
        return
    if isinstance(execution, PackedModel):
        execution.run_whole()
    from brimful.models.fusion import fuse
    from brimful.models.fusion.recording import record_calls

    record_calls(layers, fuse)


def compile_layers(
    execution: LayoutModel, *, fused: bool, note: Callable[[str], None], forward_only: bool = False
) -> None:
    """Compile the model's layers and embeddings in place: recorded where our kernels cover them, else by dynamo.

    fused: whether layers can be fused around the attention that they will be given. Then, where the head reads the
    first token only, the last layer leaves out what it does not read. note: hears of layers that turn out not to
    compile. forward_only: for a model that is only read.
    """
    model = execution.model
    layers = layers_of(model)
    if layers is None:
        return
    if isinstance(execution, PackedModel):
        execution.run_whole()  # one trace for all layers
    # Imported where it is needed: Triton comes with torch for GPUs, and is missing beside torch for CPUs.
    from brimful.models.fusion import cover_embeddings, embedding_backend, fuse, layer_backend
    from brimful.models.fusion.last_layer import ShorteningBackend
    from brimful.models.fusion.recording import record_calls

    own = _own_parameters(layers)
    fusible = own or forward_only
    cover: Any = fuse if fusible else _uncovered
    backend: Any = partial(layer_backend, note=note) if fusible else "inductor"
    if own and fused and isinstance(execution, PackedModel) and execution.form.pooling == "first":
        backend = execution.last = ShorteningBackend(layers[-1], note)
        cover = backend.cover
    record_calls(layers, cover, backend=backend)
    embeddings = embeddings_of(model)
    if embeddings is not None:
        before = fusible and fused
        cover = partial(cover_embeddings, before_fused=before)
        record_calls([embeddings], cover, backend=partial(embedding_backend, before_fused=before))


def _uncovered(_: GraphModule) -> None:
    """No graph on our functions: gradients of what two layers share must meet where autograd adds them."""


@contextmanager
def compiled_for_a_while(execution: LayoutModel, *, note: Callable[[str], None]) -> Iterator[None]:
    """Within, the layers of a model are fused around our attention, to be measured."""
    last = execution.last if isinstance(execution, PackedModel) else None
    with as_they_were(execution.model):
        compile_layers(execution, fused=True, note=note)
        try:
            yield
        finally:
            if isinstance(execution, PackedModel):
                execution.last = last


def _own_parameters(layers: Iterable[nn.Module]) -> bool:
    """Return whether no parameter is in two layers: gradients of one that is meet before the update."""
    found = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return len(found) == len(set(found))
