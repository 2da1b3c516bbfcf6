"""Weights of which each process keeps a part (FSDP2, `torch.distributed.fsdp.fully_shard`).

A few layers' weights are put together for their turn, in the forward pass and again in the backward pass, in which sums
of their gradients are scattered. All processes therefore run each pass together, with as many micro-batches.

Embeddings, what is around the layers and the head are sharded by themselves: a packed pass calls the base model and the
head one after the other, not the whole. Where GPUs reach one another's memory, rows of large tables of words are read
there, and tables are not put together.

In half precision weights of layers' products are sent as the products read them, half as many bytes, and need no casts
then. Vectors (norms, biases) are whole in each process, in fp32. Not where weights are in host memory, nor where layers
have matrices of other modules than `nn.Linear`, as GPT-2's have: all is sent in fp32 then.
Source: Zhao et al. 2023, arXiv 2304.11277; Rajbhandari et al. 2020, arXiv 1910.02054 (stage 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from brimful.core.errors import DeviceError, first_line
from brimful.hardware.peers import Peers, peers_for
from brimful.hardware.process_settings import give_back_freed_memory
from brimful.hardware.ranks import Ranks
from brimful.measurement.memory import Kept
from brimful.models.fsdp_hooks import forget_cut, forget_order, forget_pass
from brimful.models.model_stats import layers_of, linear_parameters
from brimful.models.tensor_plan import local, starts_of
from brimful.step.reduce.layer_copies import send_by_copies
from brimful.step.reduce.table_rows import TableRows, reads_rows
from brimful.step.updates.parts import PartsUpdate, sum_together
from brimful.step.updates.update import used_by_all

#: Most bytes of the weights of several layers that are put together at once, and the fewest groups of a model's layers.
#: A step of 16 tiny layers takes 160 ms on a CPU in 16 groups, 105 in four; nothing hides the way of the first group.
_GROUP_BYTES, _FEWEST_GROUPS = 1 << 30, 4


class FullyShardedUpdate(PartsUpdate):
    """AdamW, or SGD without momentum, of this process's parts.

    offload: whether weights, gradients and states are in host memory, and weights come to the device for their turn.
    product_dtype: of the products of Linear layers, where it is not that of the weights.
    """

    #: A second use's cast would be the first's, whose gradient then comes after its weight was summed: a pooler's.
    casts_once = False
    #: Finds memory of the other processes, for copies there instead of what NCCL sends; None to send.
    find_peers: Callable[[Ranks, torch.device], tuple[Peers | None, str]] | None = None
    #: Whether to end where there is none, and not to send: by the process that leads.
    must_copy = False

    def __init__(
        self, model: nn.Module, schedule: Tensor, *, offload: bool, product_dtype: torch.dtype | None = None,
        **given: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, schedule, **given)
        self._offload, self._product_dtype = offload, product_dtype
        self._classes: dict[nn.Module, type] = {}
        self._tables: dict[nn.Module, TableRows] = {}  # whose rows are read, and that are not put together
        self._last: Any = None  # a layer of the last group
        self._roots: list[list[nn.Module]] = []  # what is cut, by the module that a pass calls, which is the first
        self._layers: list[nn.Module] = []  # the first one of each group

    def _cut(self, ranks: Ranks, *, half: bool) -> None:
        self._classes = {module: type(module) for module in self.model.modules()}
        groups = layer_groups(list(layers_of(self.model) or ()))
        dtype = None if self._offload else self._product_dtype
        given: dict[str, Any] = {"half": half, "offload": self._offload, "product_dtype": dtype}
        self._layers = [group[0] for group in groups]
        self._roots = _cut(self.model, groups, ranks, self.device, **given)
        trains = any(p.requires_grad for group in groups[-1:] for layer in group for p in layer.parameters())
        self._last = groups[-1][-1] if trains else None

    def meet(self) -> str:
        """As `Update` has it: with `find_peers`, what FSDP2 sends is copied. Raises: what `peers_for` raises."""
        if self.find_peers is None:
            return ""
        peers, warning = peers_for(self.find_peers, self._shared_ranks, self.device, must=self.must_copy)
        if peers is None:
            return warning
        failed = ""  # without the error, which holds memory of what failed
        ways: list[Callable[[], None]] = [partial(self._read_rows, peers)]
        ways += [
            partial(send_by_copies, modules, peers, self._shared_ranks, layers=self._layers) for modules in self._roots
        ]
        for way in ways:
            try:
                way()
            except DeviceError as error:  # in all processes; what the others do not need may have place
                failed = failed or first_line(error)
        if not failed:
            return ""
        if self._shared_ranks.spread("must" if self.must_copy else ""):
            raise DeviceError(failed, hint="leave --peer-copies out")
        return f"weights are sent by NCCL, or some of them: {failed}; --no-peer-copies does not try"

    @property
    def how_sent(self) -> str:
        """As `Update` has it."""
        return "rows of large tables of words are read where they are" if self._tables else ""

    def _read_rows(self, peers: Peers) -> None:
        """Have rows of large tables read, which are not put together any more: where the leader's passes have so few
        tokens that it pays."""
        num_tokens = self._shared_ranks.count * int(self._shared_ranks.spread(str(self.pass_tokens)))
        for table in [each for each in self._roots[0] if reads_rows(each, self._classes[each], num_tokens)]:
            rows = TableRows(table, peers, self._shared_ranks)  # type: ignore[arg-type]
            forget_cut(table, self._classes[table])
            table.forward, self._tables[table] = rows, rows
            self._roots[0].remove(table)

    def kept(self) -> Kept:
        """As `Update` has it, without rows of tables that others read: these are outside of torch's memory."""
        outside = {rows.own.data_ptr() for rows in self._tables.values()}
        weights = [part for p in self.model.parameters() if (part := local(p)).data_ptr() not in outside]
        gradients = (local(p.grad) for p in self.parameters if p.grad is not None)
        return Kept.of(self.device, [*weights, *self.model.buffers()], gradients, self._state_tensors())

    def before(self) -> None:
        """As `Update` has it. The last layers stay whole after this forward pass: theirs is the next turn, too."""
        super().before()
        for root, *_ in self._roots:
            forget_order(root)
        self._keep_last(whole=True)

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """As `Update` has it."""
        with super().around_backward():
            yield
        self._keep_last(whole=False)

    def _keep_last(self, *, whole: bool) -> None:
        if self._last is not None:
            self._last.set_reshard_after_forward(not whole, recurse=False)

    def reduce(self) -> None:
        """As `Update` has it; parts' gradients were summed in the backward passes, those of whole weights are here."""
        ranks, whole = self._shared_ranks, [self.loss]
        used = used_by_all(ranks, [parameter.grad is not None for parameter in self.parameters], self._used)
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if is_used and starts_of(parameter) is None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                whole.append(parameter.grad)
        sum_together(ranks, whole)

    def _counts(self, index: int) -> bool:
        return self._shared_ranks.leads or starts_of(self.parameters[index]) is not None

    def abandon(self) -> None:
        """As `Update` has it; where a capture was refused, weights are whole in the midst of its pass."""
        super().abandon()
        forget_pass(self.model)

    def _undo(self) -> None:
        for module, kind in self._classes.items():
            forget_cut(module, kind)
        for table in self._tables:
            del table.forward
        self._tables = {}

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """As `PartsUpdate` has it, cut along the first dimension as torch cuts it."""
        if starts_of(self.named[name]) is None:
            return whole
        own, size = local(self.named[name]), -(-whole.shape[0] // self._shared_ranks.count)
        first = self._shared_ranks.rank * size
        part = whole[first : first + size]
        if part.shape != own.shape:
            raise ValueError(f"a part of {tuple(whole.shape)} is {tuple(own.shape)}, and {tuple(part.shape)} is loaded")
        return part


def layer_groups(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return neighbouring layers whose weights are put together at once: each alone where layers are computed again,
    each in a backward pass of its own, at whose end torch gives up the weights of the whole group."""
    if not layers or any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        return [[layer] for layer in layers]
    largest = max(sum(4 * p.numel() for p in layer.parameters()) for layer in layers)
    size = max(1, min(_GROUP_BYTES // max(1, largest), -(-len(layers) // _FEWEST_GROUPS)))
    return [list(layers[at : at + size]) for at in range(0, len(layers), size)]


def _whole_beside(model: nn.Module, groups: Sequence[list[nn.Module]]) -> set[nn.Parameter] | None:
    """Return the vectors that layers have, to be whole in each process; None where a layer has other weights than those
    of products beside them."""
    linear = linear_parameters(model)
    every = {p for group in groups for layer in group for p in layer.parameters()}
    found = {p for p in every if p.ndim < 2}
    return found if all(id(p) in linear for p in every - found) else None


def _cut(
    model: Any, groups: Sequence[list[nn.Module]], ranks: Ranks, device: torch.device, *, half: bool, offload: bool,
    product_dtype: torch.dtype | None,
) -> list[list[nn.Module]]:  # fmt: skip
    """Shard groups of layers, each module beside them, which may be called by itself, the rest, and the head's
    modules. Return them by the module that a pass calls, which is the first. product_dtype: that layers' weights are
    sent in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (ranks.count,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    given: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": policy,
        "mp_policy": reduced,
        "reshard_after_forward": True,
    }
    whole = None if product_dtype is None else _whole_beside(model, groups)
    of_layers = dict(given)
    if whole is not None:
        given["ignored_params"] = of_layers["ignored_params"] = whole
        of_layers["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=product_dtype, reduce_dtype=torch.bfloat16 if half else torch.float32, cast_forward_inputs=False
        )
        for parameter in whole:
            parameter.data = parameter.data.to(device)
    base = model.base_model
    heads = [each for each in model.children() if each is not base and any(True for _ in each.parameters())]
    own = {id(layer) for group in groups for layer in group}
    around = [each for each in base.children() if any(True for _ in each.parameters())]
    around = [each for each in around if not any(id(module) in own for module in each.modules())]
    for group in groups:
        fully_shard(group[0] if len(group) == 1 else group, **of_layers)
    for module in [*around, base, *heads]:
        fully_shard(module, **given)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if isinstance(module, nn.Embedding):
                module.set_unshard_in_backward(False)  # type: ignore[operator]  # its gradient is of ids alone
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    give_back_freed_memory()  # the whole weights that each process had loaded
    return [[base, *around, *(group[0] for group in groups)], *([head] for head in heads)]
