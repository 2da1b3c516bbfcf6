"""cuDNN's variable-length attention of packed rows, forward and backward, through nvidia-cudnn-frontend.

Source: its documentation of the attention operations, https://docs.nvidia.com/deeplearning/cudnn/frontend/latest.
"""

from __future__ import annotations

from typing import Any

import cudnn
import torch
from torch import Tensor

_BF16, _FP32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
_INT32, _INT64 = cudnn.data_type.INT32, cudnn.data_type.INT64
#: What both passes take, what only the backward pass does, and what only dropout does.
_OF_BOTH = ("q", "k", "v", "out", "statistics", "rows", "out_rows", "lengths")
_OF_BACKWARD = ("gradient", "dq", "dk", "dv")
_OF_DROPOUT = ("seed", "draw")
_NUMBERS = {name: number for number, name in enumerate(_OF_BOTH + _OF_BACKWARD + _OF_DROPOUT, 1)}


class RaggedAttention:
    """Both passes for N sequences of at most `longest` tokens, `tokens` in all, whose q, k and v are (T, 3, H, D)."""

    def __init__(self, sequences: int, heads: int, longest: int, head_dim: int, tokens: int, dropout: float) -> None:
        self._shape, self._dropout = (sequences, heads, longest, head_dim), dropout
        row = heads * head_dim
        self._wide = (longest * 3 * row, head_dim, 3 * row, 1)
        self._narrow = (longest * row, head_dim, row, 1)
        self._handle = cudnn.create_handle()
        self._graphs = [self._forward_graph(), self._backward_graph(tokens)]
        self._work = [self._built(graph) for graph in self._graphs]

    def tensors(
        self, packed: Tensor, gradient: Tensor, out: Tensor, found: Tensor, lengths: Tensor, starts: Tensor
    ) -> dict[str, Tensor]:
        """Buffers of both passes. found: (T, 3, H, D), the gradients. starts: (N + 1,) int64."""
        sequences, heads, longest, head_dim = self._shape
        return {
            **dict(zip(("q", "k", "v"), packed.unbind(1), strict=True)),
            **dict(zip(("dq", "dk", "dv"), found.unbind(1), strict=True)),
            "out": out,
            "gradient": gradient,
            "statistics": torch.zeros(sequences, heads, longest, device=packed.device),
            "rows": starts * 3 * heads * head_dim,
            "out_rows": starts * heads * head_dim,
            "lengths": lengths,
            "seed": torch.tensor([7], device=packed.device),
            "draw": torch.tensor([0], device=packed.device),
        }

    def forward(self, tensors: dict[str, Tensor]) -> None:
        self._run(0, tensors)

    def backward(self, tensors: dict[str, Tensor]) -> None:
        self._run(1, tensors)

    def _run(self, which: int, tensors: dict[str, Tensor]) -> None:
        cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        names = _OF_BOTH + (_OF_BACKWARD if which else ()) + (_OF_DROPOUT if self._dropout > 0 else ())
        used = {_NUMBERS[name]: tensors[name] for name in names}
        self._graphs[which].execute(used, self._work[which], handle=self._handle)

    def _graph(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """A graph, its inputs by name, and what both passes are told."""
        graph = cudnn.pygraph(
            io_data_type=_BF16, intermediate_data_type=_FP32, compute_data_type=_FP32, handle=self._handle
        )
        sequences = self._shape[0]

        def numbers(name: str, count: int, kind: Any) -> Any:
            return graph.tensor(uid=_NUMBERS[name], dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind)

        inputs = {name: self._input(graph, name, self._wide) for name in ("q", "k", "v")}
        inputs |= {name: numbers(name, sequences + 1, _INT64) for name in ("rows", "out_rows")}
        for name in ("q", "k", "v"):
            inputs[name].set_ragged_offset(inputs["rows"])
        lengths = numbers("lengths", sequences, _INT32)
        told = {"attn_scale": self._shape[3] ** -0.5, "use_padding_mask": True}
        told |= {"seq_len_q": lengths, "seq_len_kv": lengths}
        if self._dropout > 0:
            told["dropout"] = (self._dropout, numbers("seed", 1, _INT64), numbers("draw", 1, _INT64))
        return graph, inputs, told

    def _input(self, graph: Any, name: str, strides: tuple[int, ...]) -> Any:
        return graph.tensor(uid=_NUMBERS[name], dim=self._shape, stride=strides, data_type=_BF16)

    def _output(self, tensor: Any, name: str, strides: tuple[int, ...], rows: Any) -> None:
        tensor.set_uid(_NUMBERS[name]).set_output(True).set_dim(self._shape).set_stride(strides)
        tensor.set_ragged_offset(rows)

    def _forward_graph(self) -> Any:
        graph, inputs, told = self._graph()
        sequences, heads, longest, _ = self._shape
        out, statistics = graph.sdpa(q=inputs["q"], k=inputs["k"], v=inputs["v"], generate_stats=True, **told)
        self._output(out, "out", self._narrow, inputs["out_rows"])
        statistics.set_uid(_NUMBERS["statistics"]).set_output(True).set_data_type(_FP32)
        statistics.set_dim((sequences, heads, longest, 1)).set_stride((heads * longest, longest, 1, 1))
        return graph

    def _backward_graph(self, tokens: int) -> Any:
        graph, inputs, told = self._graph()
        sequences, heads, longest, _ = self._shape
        out, gradient = (self._input(graph, name, self._narrow) for name in ("out", "gradient"))
        for tensor in (out, gradient):
            tensor.set_ragged_offset(inputs["out_rows"])
        statistics = graph.tensor(
            uid=_NUMBERS["statistics"],
            dim=(sequences, heads, longest, 1),
            stride=(heads * longest, longest, 1, 1),
            data_type=_FP32,
        )
        found = graph.sdpa_backward(
            q=inputs["q"], k=inputs["k"], v=inputs["v"], o=out, dO=gradient, stats=statistics,
            max_total_seq_len_q=tokens, max_total_seq_len_kv=tokens, **told,
        )  # fmt: skip
        for name, tensor in zip(("dq", "dk", "dv"), found, strict=True):
            self._output(tensor, name, self._wide, inputs["rows"])
        return graph

    def _built(self, graph: Any) -> Tensor:
        """The memory that it works in."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)
