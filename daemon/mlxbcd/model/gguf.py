"""Owns GGUF import: a llama-family GGUF file becomes an ordinary MLX model directory, weights kept as quantised.

Nothing is re-quantised. A GGUF block of 32 elements is an affine group of MLX with other names:

========  =======================  =====================================
GGUF      value of an element      MLX, groups of 32
========  =======================  =====================================
Q4_0      d · (q − 8)              4 bits, scale d, bias −8d
Q4_1      d · q + m                4 bits, scale d, bias m
Q8_0      d · q, q signed          8 bits of q + 128, scale d, bias −128d
========  =======================  =====================================

Two things differ between the formats besides names. GGUF stores the rows of q and k projections with the two rotary
halves interleaved; the rows are put back in order here, which is as valid for packed rows and their scales. And a GGUF
holds its norms as float32, which would promote every activation behind them; they are cast to the type of the scales.

This module is NumPy only and may run on any thread.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlxbcd.model import gguf_tokenizer, safetensors
from mlxbcd.model.gguf_file import GGUFFile, Kind, Tensor

Bytes = npt.NDArray[np.uint8]
Part = npt.NDArray[Any]

PARTIAL: Final = ".partial-"
"""What the name of an unfinished import begins with, beside its target; a killed process leaves it behind."""
_GROUP: Final = 32
_ARCHITECTURE: Final = "llama"
_ROOTS: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PROJECTIONS: Final[Mapping[str, str]] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BITS: Final[Mapping[Kind, int]] = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}
_FLOATS: Final[Mapping[Kind, str]] = {Kind.F32: "F32", Kind.F16: "F16", Kind.BF16: "BF16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The hyperparameters of a llama model that decide how its tensors are laid out."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


def import_gguf(src: Path, out: Path) -> None:
    """Make the model directory `out` from the GGUF file `src`.

    `out` gets config.json, model.safetensors, tokenizer.json, tokenizer_config.json (with the chat template) and
    generation_config.json. It appears whole or not at all; where `out` exists already it is left as it is, so that two
    importers of one file cannot harm each other.

    Raises:
        ServeError: `load_failed` where the file is damaged or holds something that cannot be imported exactly; the
            message says what.
    """
    if out.exists():
        return
    with GGUFFile(src) as file:
        shape = _shape(file)
        dtype = _float_dtype(file)
        _check_tensors(file, shape)
        config = _config(file, shape)
        tokenizer = gguf_tokenizer.build(file)
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=out.parent))
        try:
            safetensors.write(partial / "model.safetensors", _tensors(file, shape, dtype))
            _write_json(partial / "config.json", config)
            _write_json(partial / "generation_config.json", gguf_tokenizer.token_ids(file))
            _write_text(partial / "tokenizer.json", tokenizer.to_str())
            _write_json(
                partial / "tokenizer_config.json",
                gguf_tokenizer.settings(file, config["max_position_embeddings"]),
            )
            _publish(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _shape(file: GGUFFile) -> Shape:
    found = file.metadata.get("general.architecture")
    if found != _ARCHITECTURE:
        file.fail(f"holds a model of architecture {found!r}; only {_ARCHITECTURE!r} can be imported")
    if _integer(file, "expert_count", 0):
        file.fail("holds a mixture of experts, which cannot be imported")
    heads = _integer(file, "attention.head_count")
    hidden = _integer(file, "embedding_length")
    kv_heads = _integer(file, "attention.head_count_kv", heads)
    head_dim = _integer(file, "attention.key_length", hidden // max(heads, 1))
    if min(heads, kv_heads, hidden, head_dim) < 1 or heads % kv_heads or head_dim % 2:
        file.fail(f"is damaged: {heads} heads, {kv_heads} KV heads of {head_dim} over a width of {hidden}")
    if _integer(file, "attention.value_length", head_dim) != head_dim:
        file.fail("has values of another width than its keys, which cannot be imported")
    if _integer(file, "rope.dimension_count", head_dim) != head_dim:
        file.fail("rotates only a part of each head, which cannot be imported")
    return Shape(
        hidden=hidden,
        layers=_integer(file, "block_count"),
        intermediate=_integer(file, "feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=len(gguf_tokenizer.tokens(file)),
    )


def _config(file: GGUFFile, shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "max_position_embeddings": _integer(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **gguf_tokenizer.token_ids(file),
    }
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": _number(file, "rope.scaling.factor")}
    elif scaling != "none":
        file.fail(f"scales its rotary embedding by {scaling!r}, which cannot be imported")
    quantized = {_mlx_name(tensor.name): _BITS[tensor.kind] for tensor in file.tensors.values() if tensor.kind in _BITS}
    if quantized:
        bits = Counter(quantized.values()).most_common(1)[0][0]
        config["quantization"] = {"group_size": _GROUP, "bits": bits, "mode": "affine"} | {
            name: {"group_size": _GROUP, "bits": own} for name, own in quantized.items() if own != bits
        }
    return config


def _expected(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor the model must have."""
    width, query, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "output_norm.weight", (width,)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        yield f"{prefix}.attn_q.weight", (query, width)
        yield f"{prefix}.attn_k.weight", (keys, width)
        yield f"{prefix}.attn_v.weight", (keys, width)
        yield f"{prefix}.attn_output.weight", (width, query)
        yield f"{prefix}.ffn_gate.weight", (shape.intermediate, width)
        yield f"{prefix}.ffn_up.weight", (shape.intermediate, width)
        yield f"{prefix}.ffn_down.weight", (width, shape.intermediate)
        yield f"{prefix}.attn_norm.weight", (width,)
        yield f"{prefix}.ffn_norm.weight", (width,)


def _check_tensors(file: GGUFFile, shape: Shape) -> None:
    """Every tensor is there, has its shape, and none is left over: a tensor not understood would change the model."""
    if shape.layers > len(file.tensors):
        file.fail(f"is damaged: {shape.layers} layers, but {len(file.tensors)} tensors")
    expected = dict(_expected(shape))
    for name, wanted in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            file.fail(f"lacks the tensor {name!r}")
        if tensor.shape != wanted:
            file.fail(f"is damaged: tensor {name!r} has shape {tensor.shape}, not {wanted}")
        if len(wanted) == 1 and tensor.kind in _BITS:
            file.fail(f"is damaged: the norm {name!r} is quantised")
    extra = sorted(file.tensors.keys() - expected.keys() - {"output.weight"})
    if extra:
        file.fail(f"holds tensors that a plain llama model has not, such as {extra[0]!r}; it cannot be imported")
    head = file.tensors.get("output.weight")
    if head is not None and head.shape != expected["token_embd.weight"]:
        file.fail(f"is damaged: tensor 'output.weight' has shape {head.shape}")


def _float_dtype(file: GGUFFile) -> str:
    """The type of norms, and of any other plain tensor that stands beside quantised ones."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    if any(tensor.kind in _BITS for tensor in matrices):
        return "F16"
    return Counter(_FLOATS[tensor.kind] for tensor in matrices).most_common(1)[0][0] if matrices else "F32"


def _tensors(file: GGUFFile, shape: Shape, dtype: str) -> Iterator[safetensors.Planned]:
    """The model's tensors, to be read and converted one at a time."""
    for tensor in file.tensors.values():
        name = _mlx_name(tensor.name)
        if tensor.kind not in _BITS:
            yield safetensors.Planned(f"{name}.weight", dtype, tensor.shape, _plain(file, shape, tensor, dtype))
            continue
        bits = _BITS[tensor.kind]
        rows, columns = tensor.shape
        groups = (rows, columns // _GROUP)
        packed = (rows, columns * bits // 32)
        parts: tuple[tuple[str, str, tuple[int, int], Callable[[GGUFFile, Tensor], Part]], ...] = (
            ("weight", "U32", packed, _packed),
            ("scales", "F16", groups, _scales),
            ("biases", "F16", groups, _biases),
        )
        for part, kind, size, read in parts:
            yield safetensors.Planned(f"{name}.{part}", kind, size, _ordered(file, shape, tensor, read))


def _mlx_name(name: str) -> str:
    """Module path of a GGUF tensor whose name `_check_tensors` knows."""
    match name.removesuffix(".weight").split("."):
        case ["blk", layer, part]:
            return f"model.layers.{layer}.{_PROJECTIONS[part]}"
        case [root]:
            return _ROOTS[root]
        case _:
            raise KeyError(name)


def _ordered(
    file: GGUFFile, shape: Shape, tensor: Tensor, read: Callable[[GGUFFile, Tensor], Part]
) -> Callable[[], Part]:
    """Reads a part of a tensor, with the rows of q and k in the order that MLX's rotary embedding wants."""
    heads = 0
    if tensor.name.endswith("attn_q.weight"):
        heads = shape.heads
    elif tensor.name.endswith("attn_k.weight"):
        heads = shape.kv_heads

    def make() -> Part:
        part = read(file, tensor)
        return _split_halves(part, heads) if heads else part

    return make


def _split_halves(rows: Part, heads: int) -> Part:
    """Undo the interleaving of each head's rotary halves; `rows` is [heads · head_dim, …]."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _packed(file: GGUFFile, tensor: Tensor) -> Part:
    """Elements of a quantised tensor in MLX's packing: [rows, columns · bits / 32] uint32, lowest bits first."""
    blocks = file.blocks(tensor)
    rows = blocks.shape[0]
    if tensor.kind is Kind.Q8_0:
        return (blocks[..., 2:] ^ np.uint8(0x80)).reshape(rows, -1).view("<u4")
    # A block holds elements 0…15 in its low nibbles and 16…31 in its high ones; MLX pairs neighbours.
    nibbles = blocks[..., 2:] if tensor.kind is Kind.Q4_0 else blocks[..., 4:]
    elements = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    pairs: Part = elements[..., 0::2] | elements[..., 1::2] << 4
    return pairs.reshape(rows, -1).view("<u4")


def _scales(file: GGUFFile, tensor: Tensor) -> Part:
    return _halves(file.blocks(tensor)[..., 0:2])


def _biases(file: GGUFFile, tensor: Tensor) -> Part:
    blocks = file.blocks(tensor)
    if tensor.kind is Kind.Q4_1:
        return _halves(blocks[..., 2:4])
    offset = np.float16(-8 if tensor.kind is Kind.Q4_0 else -128)
    scales = _halves(blocks[..., 0:2])
    # A power of two: exact unless it leaves the range of float16.
    with np.errstate(over="ignore"):
        biases = scales * offset
    if not np.isfinite(biases).all():
        file.fail(f"tensor {tensor.name!r} has a scale beyond what float16 groups can hold")
    return biases


def _halves(data: Bytes) -> Part:
    """Two bytes per block as float16 of [rows, blocks]."""
    halves: Part = np.ascontiguousarray(data).view("<f2")
    return halves[..., 0]


def _plain(file: GGUFFile, shape: Shape, tensor: Tensor, dtype: str) -> Callable[[], Part]:
    def read(file: GGUFFile, tensor: Tensor) -> Part:
        data = file.blocks(tensor).reshape(-1)
        if _FLOATS[tensor.kind] == dtype:
            return data.view("<u2" if dtype == "BF16" else "<f4" if dtype == "F32" else "<f2").reshape(tensor.shape)
        if tensor.kind is Kind.BF16:
            wide = (data.view("<u2").astype("<u4") << 16).view("<f4")
        else:
            wide = data.view("<f2" if tensor.kind is Kind.F16 else "<f4").astype("<f4")
        return _narrow(file, tensor, wide, dtype).reshape(tensor.shape)

    return _ordered(file, shape, tensor, read)


def _narrow(file: GGUFFile, tensor: Tensor, wide: Part, dtype: str) -> Part:
    """Round float32 to `dtype`, to nearest even; bfloat16 comes as its bits."""
    if dtype == "F32":
        return wide
    if dtype == "BF16":
        bits: Part = wide.view("<u4")
        rounded: Part = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return rounded.astype("<u2")
    with np.errstate(over="ignore"):
        half = wide.astype("<f2")
    if not np.isfinite(half).all():
        file.fail(f"tensor {tensor.name!r} has values beyond the range of float16")
    return half


def _integer(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(f"{_ARCHITECTURE}.{key}", default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        file.fail(f"lacks a usable {_ARCHITECTURE}.{key} (found {value!r})")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(f"{_ARCHITECTURE}.{key}", default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        file.fail(f"lacks a usable {_ARCHITECTURE}.{key} (found {value!r})")
    # float32 in the file: its shortest decimal form, so that 1e-5 does not read 9.999999747378752e-06.
    return float(str(np.float32(value)))


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Any) -> None:
    _write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _publish(partial: Path, out: Path) -> None:
    try:
        partial.rename(out)
    except OSError:
        # Renaming onto a directory with files in it fails: another import of this file was first.
        if not (out / "config.json").is_file():
            raise
        return
    directory = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
