"""transformers' plans of how processes have one model's weights together: read, checked, and carried out.

A plan gives modules a style. A layer has two products after one another: the first is cut by its outputs (`colwise`:
heads of attention, units of the feed-forward part), the second by its inputs (`rowwise`), and sums of what each process
has are the layer's output, the same in all. What no style names is whole in each process.

Weights that are whole, and whose gradient each process has a part of alone (norms of heads), are left to the update,
which sums them once a step: transformers' own hooks would sum those of earlier micro-batches again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Styles that training is tested with, and the dimension of a Linear layer that each cuts: of its outputs or inputs.
_OUTPUTS = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
_INPUTS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
#: Styles of embeddings: of rows of the table, as many as there are.
_ROWS = frozenset({"embedding_rowwise"})
#: Style of weights that are whole, with gradients in parts.
_PARTIAL = "replicated_with_grad_allreduce"
#: Names of numbers of heads in configurations.
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The plan of one model. styles: by the names of its modules and parameters."""

    styles: Mapping[str, str]

    @classmethod
    def of(cls, model: Any) -> TensorPlan | None:
        """Read the plan that a model comes with; None where it has none, or none that names anything in it."""
        given = dict(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {})
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        styles = {name: given[key] for name in names if (key := _numbered(name)) in given}
        return cls(styles=styles) if any(style != _PARTIAL for style in styles.values()) else None

    def why_not(self, model: Any, size: int) -> str | None:
        """Say why so many processes cannot have the model together; None where they can."""
        known = _OUTPUTS | _INPUTS | _ROWS | {_PARTIAL}
        if other := sorted(set(self.styles.values()) - known):
            return f"transformers' plan has parts of kind {other[0]}, which are not trained in parts here"
        config = model.config.get_text_config()
        for name in _HEADS:
            number = getattr(config, name, None)
            if isinstance(number, int) and number % size:
                return f"{name} is {number}, which {size} processes cannot share"
        for name, module in model.named_modules():
            style = self.styles.get(name)
            if style in _OUTPUTS | _INPUTS and isinstance(module, nn.Linear):
                width = module.out_features if style in _OUTPUTS else module.in_features
                if width % size:
                    return f"{name} is {width} wide, which {size} processes cannot share"
        return None

    def is_cut(self, name: str) -> bool:
        """True for a parameter of which each process has a part."""
        style, bias = self._style(name), name.endswith(".bias")
        return style in _OUTPUTS | _ROWS or (style in _INPUTS and not bias)

    def is_partial(self, name: str) -> bool:
        """True for a whole parameter of whose gradient each process has an addend."""
        return self._style(name) == _PARTIAL

    def _style(self, name: str) -> str | None:
        return self.styles.get(name, self.styles.get(name.rpartition(".")[0]))

    def carry_out(self, model: nn.Module, mesh: Any) -> None:
        """Cut the model's weights on a mesh of one dimension, in place, and have its modules compute with parts.

        Parts are on the mesh's device, where one whole weight at a time is; what is not cut stays where it is.
        """
        # Of transformers 5.17 and later; loaded with the model, not before.
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        for name, module in list(model.named_modules()):
            for own in list(dict(module.named_parameters(recurse=False))):
                if (style := self._style(f"{name}.{own}")) not in (None, _PARTIAL):
                    ALL_PARALLEL_STYLES[style].validate_param(module, own, mesh, parameter_name=f"{name}.{own}")
                    ALL_PARALLEL_STYLES[style].shard_param(module, own, mesh)
                    module._parameters[own] = _alone(module._parameters[own])
            if self.styles.get(name) not in (None, _PARTIAL):
                ALL_PARALLEL_STYLES[self.styles[name]].install_forward(module, mesh)


class Undo:
    """Modules of a model as they were before a plan was carried out."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, module.__dict__.get("forward"), dict(module._forward_pre_hooks), dict(module._forward_hooks))
            for module in model.modules()
        ]

    def modules(self) -> None:
        """Give modules their own forward again, and no hooks but those that they had. Weights stay as they are."""
        for module, forward, before, after in self._kept:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
            for hooks, kept in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
                for key in [key for key in hooks if key not in kept]:
                    del hooks[key]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, or the tensor where it is whole."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)  # what `to_local` returns, in a tenth of its time
    return part.detach()


def _alone(parameter: Any) -> nn.Parameter:
    """The same parameter, whose part is no view of the whole."""
    if local(parameter).untyped_storage().nbytes() == local(parameter).nbytes:
        return parameter  # type: ignore[no-any-return]
    return nn.Parameter(like(local(parameter).clone(), parameter), requires_grad=parameter.requires_grad)


def like(part: Tensor, parameter: Any) -> Tensor:
    """Return a tensor of parts that are cut as a parameter's; the tensor itself where that is whole."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def cut_as(gradient: Any, parameter: Any) -> Tensor:
    """Return this process's part of a gradient, cut as its parameter is: that of embeddings may be an addend."""
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient).contiguous()


def part_like(whole: Tensor, parameter: Any) -> Tensor:
    """Return this process's part of a whole tensor that is cut as a parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole
    return local(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def starts_of(tensor: Any) -> tuple[int, ...] | None:
    """Return where this process's part begins along each dimension; None of a tensor that is whole."""
    placements = getattr(tensor, "placements", None)
    if placements is None or not placements[0].is_shard():
        return None
    mesh, cut = tensor.device_mesh, placements[0].dim % tensor.ndim
    size = -(-tensor.shape[cut] // mesh.size())
    return tuple(mesh.get_local_rank() * size if dim == cut else 0 for dim in range(tensor.ndim))


def together(tensor: Tensor) -> Tensor:
    """Return a tensor put together of the parts of all processes, which all ask for it."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _numbered(name: str) -> str:
    """A name as plans have it: with `*` for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
