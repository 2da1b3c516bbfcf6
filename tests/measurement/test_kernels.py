"""Kernels by name, and the arithmetic of their intervals."""

# ruff: noqa: E501  (names of kernels are as long as they are)

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import brimful.kernels
from brimful.measurement.kernels import PARTS, Span, breakdown, exclusive_seconds, part_of, with_callers

#: Names as torch's profiler shows them on H100 and H200, those of templates shortened within their arguments.
NAMES = {
    "contractions": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_hsh_192x192_64x3_1x2_h_bz_coopB_NTT",
        "nvjet_tst_64x24_64x16_4x1_v_bz_splitK_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x8_kernel",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "ampere_sgemm_128x64_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nt_align4>(cutlass_80_tensorop_s1688gemm)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, false>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4, false>",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 10, 11, false, cublasGemvTensorStridedBatched<float const>>",
        "triton_tem_fused_addmm_gelu_2",
        "aten::addmm",
        "aten::bmm",
        "aten::linear",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>(pytorch_flash::Flash_bwd_params, int)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>::Params)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x64_1x1x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(cudnn::reduced_divisor, float const*)",
        "varlen_attention_forward",
        "varlen_attention_backward",
        "varlen_attention_delta",
        "relative_attention_forward",
        "relative_attention_backward",
        "first_token_attention_forward",
        "first_token_attention_backward",
        "triton_tem_fused_flex_attention_0",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*, float const*, int)",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::scaled_dot_product_attention",
        "autograd::engine::evaluate_function: SafeSoftmaxBackward0",
        "autograd::engine::evaluate_function: BmmBackward0",
    ],
    "normalisation": [
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float, float>(float const*)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u, 1u, 32u, true>",
        "void at::native::(anonymous namespace)::cuComputeGradInput<float, float>(float const*, float const*, long)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(long, float, float const*)",
        "triton_per_fused_add_native_dropout_native_layer_norm_3",
        "triton_red_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_sum_view_7",
        "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_4",
        "norm_forward",
        "norm_backward",
        "aten::native_layer_norm_backward",
    ],
    "element-wise": [
        "triton_poi_fused_gelu_2",
        "triton_poi_fused_addmm_gelu_gelu_backward_view_5",
        "triton_red_fused__to_copy_sum_1",
        "triton_poi_fused__to_copy_native_dropout_backward_6",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float>>>",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>",
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, sum>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 3, true, false>(float*, float const*, int)",
        "void at::native::(anonymous namespace)::nll_loss_forward_no_reduce_cuda_kernel<float>(long)",
        "aten::gelu",
        "aten::gelu_backward",
        "aten::mul_",
        "aten::sum",
        "aten::_log_softmax",
        "autograd::engine::evaluate_function: LogSoftmaxBackward0",
    ],
    "optimizer": [
        "adamw_norm",
        "adamw_update",
        "sum_parts",
        "sum_with_own",
        "gather_gradients",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
        "(at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, bool, float const*>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<1>, at::native::LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0>, float*, int>",
        "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float>(float const*, int)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, ZeroFunctor<float, 1>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float>>>",
        "aten::_fused_adamw_",
        "aten::_foreach_norm",
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)",
        "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*, float const*, long)",
        "void at::native::(anonymous namespace)::sum_and_scatter<float, long>(long const*, float*, long, long const*)",
        "void at::native::(anonymous namespace)::krn_partials_per_segment<long>(long*, long const*, long const*, long)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long>>",
        "triton_poi_fused_embedding_dense_backward_9",
        "triton_poi_fused_embedding_1",
        "aten::embedding_dense_backward",
        "aten::embedding",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<4u>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, "
        "at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, 1>, at::native::Copy<float, float>>",
        "triton_poi_fused__to_copy_0",
        "triton_poi_fused__to_copy_t_transpose_3",
        "aten::copy_",
        "aten::index_select",
    ],
    "other": ["somebody_elses_kernel", "aten::view", "autograd::engine::evaluate_function: TBackward0"],
}
EXAMPLES = [(part, name) for part, names in NAMES.items() for name in names]


@pytest.mark.parametrize(("part", "name"), EXAMPLES, ids=[name[:60] for _, name in EXAMPLES])
def test_names(part: str, name: str) -> None:
    assert part_of(name) == part


def spans(*rows: tuple[str, float, float]) -> list[Span]:
    return [Span(name=name, start_s=start, end_s=end) for name, start, end in rows]


def test_kernels_of_ours_are_told_apart() -> None:
    source = "\n".join(path.read_text("utf-8") for path in Path(brimful.kernels.__path__[0]).rglob("*.py"))
    launched = set(re.findall(r"^ +(\w+)\[\(?\w", source, re.M))
    kernels = {name for name in launched if f"\ndef {name}(" in source}
    parts = {name: part_of(name) for name in kernels}
    assert len(kernels) > 20
    assert not [name for name, part in parts.items() if part == "other"]
    assert (parts["prenorm_forward"], parts["gated_backward"]) == ("normalisation", "element-wise")
    assert parts["gelu_product"] == "contractions"


def test_time_that_kernels_share_counts_once_for_the_first_part() -> None:
    found = exclusive_seconds(spans(("nvjet_a", 0, 4), ("Memcpy HtoD", 1, 6), ("gelu", 8, 9), ("nvjet_b", 3, 5)))
    assert {part: seconds for part, seconds in found.items() if seconds} == {
        "contractions": 5,
        "copies": 1,
        "element-wise": 1,
    }


NAMED = st.sampled_from(["nvjet", "flash_fwd", "layer_norm", "gelu", "adamw", "embedding", "Memcpy", "unknown"])
GRID = 20


@given(st.lists(st.tuples(NAMED, st.integers(0, GRID), st.integers(0, GRID)), max_size=12))
def test_parts_add_up_to_the_union(rows: list[tuple[str, int, int]]) -> None:
    given_spans = spans(*((name, min(a, b), max(a, b)) for name, a, b in rows))
    cells = [{part_of(s.name) for s in given_spans if s.start_s <= t < s.end_s} for t in range(GRID)]
    found = exclusive_seconds(given_spans)
    for part in PARTS:
        assert found[part] == sum(bool(cell) and min(cell, key=PARTS.index) == part for cell in cells)


def test_what_an_operator_calls_counts_with_it() -> None:
    pieces, calls = with_callers(
        spans(
            ("Node", 0, 10),
            ("aten::scaled_dot_product_attention", 1, 6),
            ("aten::bmm", 2, 5),
            ("aten::empty", 7, 8),
            ("aten::mm", 12, 14),
            ("aten::view", 13, 13.5),
        )
    )
    assert pieces == spans(
        ("Node", 0, 1),
        ("aten::scaled_dot_product_attention", 1, 2),
        ("aten::scaled_dot_product_attention", 2, 5),
        ("aten::scaled_dot_product_attention", 5, 6),
        ("Node", 6, 7),
        ("aten::empty", 7, 8),
        ("Node", 8, 10),
        ("aten::mm", 12, 13),
        ("aten::mm", 13, 13.5),
        ("aten::mm", 13.5, 14),
    )
    assert [call.name for call in calls] == [
        "Node",
        "aten::scaled_dot_product_attention",
        "aten::empty",
        "aten::mm",
    ]


def test_what_no_kernel_fills_is_idle() -> None:
    kernels = spans(("nvjet", 0, 2), ("gelu", 2, 3), ("nvjet", 13, 15), ("gelu", 14, 16))
    found = breakdown(kernels, kernels, steps=2, step_s=4.0)
    assert found.stretch == 1
    assert sum(part.seconds for part in found.parts) == pytest.approx(4)
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    seconds = {part.name: part.seconds for part in found.parts if part.seconds}
    assert seconds == {"contractions": 2, "element-wise": 1, "idle": 1}
    assert [(k.name, k.part, k.seconds, k.count) for k in found.kernels] == [
        ("nvjet", "contractions", 2, 1),
        ("gelu", "element-wise", 1.5, 1),
    ]
    assert found.num_kernels == 2


def test_kernels_longer_than_the_step_are_shortened_alike() -> None:
    kernels = spans(("nvjet", 0, 3), ("gelu", 3, 4))
    found = breakdown(kernels, kernels, steps=1, step_s=2.0)
    assert found.stretch == 2
    assert {part.name: part.seconds for part in found.parts if part.count or part.name == "idle"} == {
        "contractions": 1.5,
        "element-wise": 0.5,
        "idle": 0,
    }
