"""Owns the product of a few rows where MLX computes with CUDA: the weights are read once, and the host does little.

That back end has a kernel of its own for one row. From two rows on it asks cuBLAS, which takes the host far longer to
submit than a device needs for so few rows: a forward of an 8B model is host-bound then. `product` is one kernel for two
to eight rows; more of them keep the device busy for long enough.

Tensor cores multiply 16 rows of weights by 8 rows of inputs; which of the inputs' dimensions stands where does not
matter as long as both agree. So each lane reads 16 bytes in a row of both, just as they lie there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn

MOST: Final = 8
"""Rows of inputs that one instruction of the tensor cores takes."""
_TALL: Final = 16
"""Rows of weights that it takes."""
_DEEP: Final = 32
"""Dimensions that a warp reads at once."""
_WARPS: Final = 16
"""Warps that share out the dimensions: as many as can be, since a product waits for the one before it."""
_AHEAD: Final = 4
"""Reads that a warp begins before it computes with any."""
_OLDEST: Final = 8
"""Major compute capability from which devices have these instructions."""


def bind(model: nn.Module) -> None:
    """Make a model's plain layers use `product`, where the device can. Idempotent."""
    if int(mx.device_info().get("compute_capability_major", 0)) < _OLDEST:
        return
    for _, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = LeanLinear
        elif type(module) is nn.Embedding:
            module.__class__ = LeanEmbedding


class LeanLinear(nn.Linear):  # type: ignore[misc]  # mlx.nn has no types
    """A layer with a product of its own for a few rows."""

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs [..., out] of inputs [..., in]."""
        if not fits(x, self.weight):
            return cast(mx.array, super().__call__(x))
        out = product(x, self.weight)
        return out + self.bias if "bias" in self else out


class LeanEmbedding(nn.Embedding):  # type: ignore[misc]
    """An embedding with a product of its own for a few rows, where it is the head too."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocab] of hidden states [..., dim]."""
        return product(x, self.weight) if fits(x, self.weight) else cast(mx.array, super().as_linear(x))


def fits(x: mx.array, weight: mx.array) -> bool:
    """Whether `product` is for inputs [..., in] and weights [out, in]."""
    depth = x.shape[-1]
    return (
        1 < x.size // depth <= MOST
        and depth % _DEEP == 0
        and x.dtype == weight.dtype
        and x.dtype in (mx.bfloat16, mx.float16)
    )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """Outputs [..., out] of inputs [..., in] and weights [out, in] that fit, summed in float32."""
    depth, outputs = x.shape[-1], weight.shape[0]
    rows = x.size // depth
    (out,) = _kernel()(
        inputs=[x.reshape(rows, depth), weight],
        template=[("BF16", x.dtype == mx.bfloat16), ("T", x.dtype)],
        output_shapes=[(rows, outputs)],
        output_dtypes=[x.dtype],
        grid=(32 * _WARPS * -(-outputs // _TALL), 1, 1),
        threadgroup=(32 * _WARPS, 1, 1),
    )
    return cast(mx.array, out).reshape(*x.shape[:-1], outputs)


@cache
def _kernel() -> Any:
    sizes = f"  constexpr int WARPS = {_WARPS};\n  constexpr int AHEAD = {_AHEAD};\n"
    return mx.fast.cuda_kernel(
        name="mlxbc_product", input_names=["x", "w"], output_names=["out"], source=sizes + _SOURCE, header=_HEADER
    )


_HEADER: Final = """
template <bool BF16>
__device__ __forceinline__ void mlxbc_multiply(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
"""

# A block has 16 rows of weights, and its warps share out their dimensions, 32 at a time. In a warp, four lanes read 64
# bytes of a row of weights, of the one eight below it, and of a row of inputs.
_SOURCE: Final = """
  const int rows = x_shape[0];
  const int depth = x_shape[1];
  const int outputs = w_shape[0];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int across = lane / 4;
  const int along = (lane % 4) * 8;
  const int first = blockIdx.x * 16;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  const bool has_upper = first + across < outputs;
  const bool has_lower = first + across + 8 < outputs;
  const bool has_input = across < rows;
  const T* upper = w + static_cast<int64_t>(has_upper ? first + across : 0) * depth + along;
  const T* lower = w + static_cast<int64_t>(has_lower ? first + across + 8 : 0) * depth + along;
  const T* input = x + static_cast<int64_t>(has_input ? across : 0) * depth + along;

  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int begin = warp * 32; begin < depth; begin += AHEAD * WARPS * 32) {
    uint4 a[AHEAD], b[AHEAD], c[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int at = begin + i * WARPS * 32;
      const bool inside = at < depth;
      a[i] = inside && has_upper ? __ldcs(reinterpret_cast<const uint4*>(upper + at)) : nothing;
      b[i] = inside && has_lower ? __ldcs(reinterpret_cast<const uint4*>(lower + at)) : nothing;
      c[i] = inside && has_input ? *reinterpret_cast<const uint4*>(input + at) : nothing;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      mlxbc_multiply<BF16>(sum, a[i].x, b[i].x, a[i].y, b[i].y, c[i].x, c[i].y);
      mlxbc_multiply<BF16>(sum, a[i].z, b[i].z, a[i].w, b[i].w, c[i].z, c[i].w);
    }
  }

  __shared__ float sums[WARPS][8][16];
  const int column = (lane % 4) * 2;
  sums[warp][column][across] = sum[0];
  sums[warp][column + 1][across] = sum[1];
  sums[warp][column][across + 8] = sum[2];
  sums[warp][column + 1][across + 8] = sum[3];
  __syncthreads();
  const int row = threadIdx.x / 16;
  const int output = first + threadIdx.x % 16;
  if (row < rows && output < outputs) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += sums[i][row][threadIdx.x % 16];
    out[static_cast<int64_t>(row) * outputs + output] = static_cast<T>(total);
  }
"""
