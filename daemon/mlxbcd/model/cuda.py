"""Owns what makes the zoo's layers faster where MLX computes with CUDA. On other devices nothing here is used.

Two habits of that back end, seen in its sources and measured, decide a decode step there:

* a quantised product takes its row count from the second-last dimension alone, so [B, 1, D] runs as B products, each
  reading all weights; and below eight rows it reads them once per row. So the inputs of a bound model's quantised
  layers are flattened, and two to seven rows padded to eight;
* no fused attention takes a mask for a single query, so rows of different lengths fall back to five kernels over
  whole score matrices; and for a few queries it plans anew for every count of keys, so each round of a row that grows
  pays for a plan. `attention` is one kernel for both, which skips what a query doesn't see.

Neither is an effect of Apple's devices, where MLX does both by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model import cuda_linear

_FEWEST: Final = 8
"""Rows from which a quantised product reads its weights once."""

_DIMS: Final = (64, 128, 256)
"""Head dimensions of the kernel: eight lanes or more share a key, eight elements each."""
_TOGETHER: Final = 4
"""Query heads of one group that a block may compute together, reading their keys once."""
_BLOCKS: Final = 128
"""Blocks that occupy a large device, about one per multiprocessor."""
WIDEST: Final = 32
"""Queries of a row that the kernel answers, each reading the row's keys for itself: more are a prompt's."""
_SPLIT: Final = 1024
"""Positions that a block reads at least where several share one row: merging what they find costs a launch."""


@cache
def available() -> bool:
    """Whether MLX computes with CUDA by default."""
    return bool(mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available())


def bind(model: nn.Module) -> None:
    """Make a model's layers use the products of this module and of `cuda_linear`. Idempotent."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = FlatLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = FlatEmbedding
    cuda_linear.bind(model)


class FlatLinear(nn.QuantizedLinear):  # type: ignore[misc]  # mlx.nn has no types
    """A quantised layer whose product sees all rows at once."""

    def __call__(self, x: mx.array) -> mx.array:
        """Outputs [..., out] of inputs [..., in]."""
        flat, rows = flattened(x)
        return restored(cast(mx.array, super().__call__(flat)), x, rows)


class FlatEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantised embedding whose product, where it is the head too, sees all rows at once."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits [..., vocab] of hidden states [..., dim]."""
        flat, rows = flattened(x)
        return restored(cast(mx.array, super().as_linear(flat)), x, rows)


def flattened(x: mx.array) -> tuple[mx.array, int]:
    """x [..., D] as [R, D], two to seven rows padded to eight; and how many rows it had."""
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    if 1 < rows < _FEWEST:
        flat = mx.pad(flat, [(0, _FEWEST - rows), (0, 0)])
    return flat, rows


def restored(product: mx.array, x: mx.array, rows: int) -> mx.array:
    """The product of `flattened`'s rows, in the shape of x but for its last dimension."""
    return product[:rows].reshape(*x.shape[:-1], product.shape[-1])


def prefers(width: int) -> bool:
    """Whether `attention` is better than the back end's own for rows of one length that add so many tokens."""
    return available() and 1 < width <= WIDEST


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Attention of a few queries per row [B, heads, N, dim], or None where the back end's own is better or must do.

    Args:
        keys, values: [B, kv heads, S, dim], slices of buffers along B and S included.
        mask: bool, broadcast to [B, 1, N, S], or "causal"; the back end has a kernel of its own for one query and none.
    """
    rows, heads, width, dim = queries.shape
    if not 1 <= width <= WIDEST or sinks is not None or not available() or dim not in _DIMS:
        return None
    if values.shape[-1] != dim or not (queries.dtype == keys.dtype == values.dtype):
        return None
    if queries.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        return None
    kv_heads, reach = keys.shape[1:3]
    inputs = [queries, keys, values]
    if isinstance(mask, mx.array):
        if mask.dtype != mx.bool_ or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, width):
            return None
        inputs.append(mx.broadcast_to(mask, (rows, 1, width, reach)))
    elif mask != "causal" or width == 1:
        return None
    repeats = heads // kv_heads
    together, splits, warps, ahead = arrangement(rows * width, heads, repeats, reach)
    template: list[tuple[str, Any]] = [
        ("D", dim),
        ("G", together),
        ("REPEATS", repeats),
        ("WARPS", warps),
        ("AHEAD", ahead),
        ("SPLITS", splits),
        ("T", queries.dtype),
    ]
    # Positions before heads, as the layer goes on with them; it asks for heads first and turns them back itself.
    shape = (rows, width, heads, dim)
    launch = {"grid": (32 * warps * splits, heads // together, rows * width), "threadgroup": (32 * warps, 1, 1)}
    masked = len(inputs) > 3
    if splits == 1:
        (out,) = _kernel("whole", masked, float(scale))(
            inputs=inputs, template=template, output_shapes=[shape], output_dtypes=[queries.dtype], **launch
        )
        return cast(mx.array, out).swapaxes(1, 2)
    partial = _kernel("split", masked, float(scale))(
        inputs=inputs,
        template=template,
        output_shapes=[(rows * width, heads, splits, dim), (rows * width, heads, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
        **launch,
    )
    (out,) = _kernel("merge")(
        inputs=partial,
        template=[("D", dim), ("SPLITS", splits), ("T", queries.dtype)],
        output_shapes=[shape],
        output_dtypes=[queries.dtype],
        grid=(dim, heads, rows * width),
        threadgroup=(dim, 1, 1),
    )
    return cast(mx.array, out).swapaxes(1, 2)


def arrangement(queries: int, heads: int, repeats: int, reach: int) -> tuple[int, int, int, int]:
    """How many query heads a block takes, how many blocks share a query's positions, the warps of a block, and the keys
    that a team loads before it computes: first as many blocks as occupy the device, then as little read twice as can
    be.

    Args:
        queries: of all rows.
        repeats: query heads per key head.
    """
    sizes = [n for n in range(min(_TOGETHER, repeats), 0, -1) if repeats % n == 0]
    together = next((n for n in sizes if queries * heads // n >= _BLOCKS), 1)
    blocks = queries * heads // together
    splits = max(1, min(reach // _SPLIT, 2 * _BLOCKS // blocks))
    return together, splits, 16 if together == 1 else 8, 4


@cache
def _kernel(name: str, masked: bool = False, scale: float = 1.0) -> Any:
    inputs = ["partials", "stats"] if name == "merge" else ["q", "k", "v", *(["mask"] if masked else [])]
    # Written into the source: a number in an array of its own would be fetched from the host by every call.
    attend = f"  constexpr float SCALE = {scale!r};\n{_MASKED if masked else _CAUSAL}{_ATTEND}"
    source = {"whole": attend + _WRITE, "split": attend + _STORE, "merge": _MERGE}[name]
    outputs = ["partials", "stats"] if name == "split" else ["out"]
    return mx.fast.cuda_kernel(
        name=f"mlxbc_attention_{name}{'_masked' if masked else ''}",
        input_names=inputs,
        output_names=outputs,
        source=source,
        header=_HEADER,
        ensure_row_contiguous=False,
    )


_HEADER: Final = """
template <typename T>
struct alignas(16) MlxbcEight {
  T at[8];
};

template <typename T>
__device__ __forceinline__ MlxbcEight<T> mlxbc_load(const T* from, bool wanted) {
  MlxbcEight<T> loaded;
  uint4* raw = reinterpret_cast<uint4*>(&loaded);
#pragma unroll
  for (int i = 0; i < sizeof(loaded) / sizeof(uint4); ++i) {
    raw[i] = wanted ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
  }
  return loaded;
}
"""

# What a position sees: up to where there are keys for it, and which of them.
_MASKED: Final = """
  const int width = q_shape[2];
  const bool* allowed = mask + (blockIdx.z / width) * mask_strides[0] + (blockIdx.z % width) * mask_strides[2];
  const int64_t allowed_step = mask_strides[3];
  const int reach = k_shape[2];
  const auto seen = [&](int at) { return allowed[at * allowed_step]; };
"""

_CAUSAL: Final = """
  const int width = q_shape[2];
  // What the query at the end sees is all there is; each one before it a position less.
  const int reach = k_shape[2] - (width - 1 - blockIdx.z % width);
  const auto seen = [](int) { return true; };
"""

# A block has one position of one row, G query heads over one key head, and one of SPLITS spans of the keys. D / 8 lanes
# share a key, so a warp reads 256 / D keys at once, AHEAD times over before it computes with any. Each such team keeps
# a running maximum, sum and output of its own (the usual online softmax, in powers of two), and they are merged at the
# end: in a warp by shuffles, over warps in shared memory.
_ATTEND: Final = """
  constexpr int LANES = D / 8;
  constexpr int TEAMS = 32 / LANES;
  constexpr int STRIDE = WARPS * TEAMS;
  constexpr float NOTHING = -1e30f;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int team = lane / LANES;
  const int part = (lane % LANES) * 8;
  const int row = blockIdx.z / width;
  const int position = blockIdx.z % width;
  const int head = blockIdx.y * G;
  const int span = (reach + SPLITS - 1) / SPLITS;
  const int begin = blockIdx.x * span;
  const int end = min(reach, begin + span);
  const T* keys = k + row * k_strides[0] + (head / REPEATS) * k_strides[1] + part;
  const T* values = v + row * v_strides[0] + (head / REPEATS) * v_strides[1] + part;
  const int64_t key_step = k_strides[2];
  const int64_t value_step = v_strides[2];

  const int64_t query_from = row * q_strides[0] + position * q_strides[2];
  float query[G][8];
  constexpr float factor = SCALE * 1.44269504088896340736f;
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto at = query_from + (head + g) * q_strides[1] + (part + i) * q_strides[3];
      query[g][i] = static_cast<float>(q[at]) * factor;
    }
  }

  float best[G], sum[G], acc[G][8];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    best[g] = NOTHING;
    sum[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[g][i] = 0.0f;
  }

  bool next[AHEAD];
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    const int at = begin + warp * TEAMS + a * STRIDE + team;
    next[a] = at < end && seen(at);
  }
  for (int first = begin + warp * TEAMS; first < end; first += AHEAD * STRIDE) {
    bool live[AHEAD];
    MlxbcEight<T> key[AHEAD], value[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int64_t at = first + a * STRIDE + team;
      live[a] = next[a];
      key[a] = mlxbc_load(keys + at * key_step, live[a]);
      value[a] = mlxbc_load(values + at * value_step, live[a]);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int at = first + (AHEAD + a) * STRIDE + team;
      next[a] = at < end && seen(at);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float score[AHEAD];
      float top = best[g];
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        score[a] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) score[a] += query[g][i] * static_cast<float>(key[a].at[i]);
      }
#pragma unroll
      for (int far = LANES / 2; far > 0; far /= 2) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) score[a] += __shfl_xor_sync(0xffffffffu, score[a], far);
      }
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) top = live[a] ? fmaxf(top, score[a]) : top;
      const float kept = exp2f(best[g] - top);
      best[g] = top;
      sum[g] *= kept;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[g][i] *= kept;
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        const float weight = live[a] ? exp2f(score[a] - top) : 0.0f;
        sum[g] += weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[g][i] += weight * static_cast<float>(value[a].at[i]);
      }
    }
  }

#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int far = LANES; far < 32; far *= 2) {
      const float top = fmaxf(best[g], __shfl_xor_sync(0xffffffffu, best[g], far));
      const float kept = exp2f(best[g] - top);
      sum[g] *= kept;
      sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], far);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        acc[g][i] *= kept;
        acc[g][i] += __shfl_xor_sync(0xffffffffu, acc[g][i], far);
      }
      best[g] = top;
    }
  }

  __shared__ float outs[WARPS][G][D];
  __shared__ float tops[WARPS][G];
  __shared__ float sums[WARPS][G];
  if (team == 0) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) outs[warp][g][part + i] = acc[g][i];
      if (part == 0) {
        tops[warp][g] = best[g];
        sums[warp][g] = sum[g];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += 32 * WARPS) {
    const int g = i / D;
    const int d = i % D;
    float top = NOTHING;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][g]);
    float total = 0.0f, out_d = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float kept = exp2f(tops[w][g] - top);
      total += sums[w][g] * kept;
      out_d += outs[w][g][d] * kept;
    }
    const int64_t slot = static_cast<int64_t>(blockIdx.z) * gridDim.y * G + head + g;
"""

_WRITE: Final = """
    out[slot * D + d] = static_cast<T>(total > 0.0f ? out_d / total : 0.0f);
  }
"""

_STORE: Final = """
    const int64_t piece = slot * SPLITS + blockIdx.x;
    partials[piece * D + d] = out_d;
    if (d == 0) {
      stats[piece * 2] = top;
      stats[piece * 2 + 1] = total;
    }
  }
"""

_MERGE: Final = """
  const int64_t slot = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int d = threadIdx.x;
  float top = -1e30f;
  for (int s = 0; s < SPLITS; ++s) top = fmaxf(top, stats[(slot * SPLITS + s) * 2]);
  float total = 0.0f, out_d = 0.0f;
  for (int s = 0; s < SPLITS; ++s) {
    const float kept = exp2f(stats[(slot * SPLITS + s) * 2] - top);
    total += stats[(slot * SPLITS + s) * 2 + 1] * kept;
    out_d += partials[(slot * SPLITS + s) * D + d] * kept;
  }
  out[slot * D + d] = static_cast<T>(total > 0.0f ? out_d / total : 0.0f);
"""
