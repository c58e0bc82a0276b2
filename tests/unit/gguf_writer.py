"""A minimal writer of GGUF files for tests, and a tiny llama model to write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, BF16 = 0, 1, 2, 3, 8, 12, 30


@dataclass(frozen=True)
class Encoded:
    """Bytes of a tensor beside the shape and encoding they are to be read with."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def plain(array: Array, kind: int = F32) -> Encoded:
    if kind == BF16:
        data = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = array.astype("<f4" if kind == F32 else "<f2").tobytes()
    return Encoded(kind, array.shape, data)


def blocks(scales: Array, offsets: Array, elements: Array, kind: int) -> Encoded:
    """A quantised tensor from its parts: scales and offsets [rows, groups], elements [rows, groups, 32]."""
    rows, groups, _ = elements.shape
    out = bytearray()
    for row in range(rows):
        for group in range(groups):
            out += struct.pack("<e", scales[row, group])
            if kind == Q4_1:
                out += struct.pack("<e", offsets[row, group])
            values = elements[row, group]
            if kind == Q8_0:
                out += values.astype(np.int8).tobytes()
            else:
                low, high = values[:16].astype(np.uint8), values[16:].astype(np.uint8)
                out += (low | high << 4).astype(np.uint8).tobytes()
    return Encoded(kind, (rows, groups * 32), bytes(out))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case np.ndarray():
            return struct.pack("<IIQ", 9, 5, len(value)) + value.astype("<i4").tobytes()
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
        case _:
            raise TypeError(value)


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Encoded], version: int = 3, alignment: int = 32) -> bytes:
    """The bytes of a GGUF file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        head += _text(name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        head += struct.pack("<IQ", tensor.kind, len(data))
        data += tensor.data
    return head + b"\0" * (-len(head) % alignment) + data


def byte_alphabet() -> list[str]:
    """The printable characters that stand for the 256 bytes in byte-level BPE, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


SPECIAL = ["<|end|>", "<|start|>", "<pad>"]
WORDS = ["he", "ll", "hell", "hello", "Ġw", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
USER = ["<tool>"]
VOCABULARY = [*SPECIAL, *byte_alphabet(), *WORDS, *USER]
TYPES = np.array([3] * len(SPECIAL) + [1] * (256 + len(WORDS)) + [4] * len(USER))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 96, 4, 2, 16


def metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of the tiny model; a change to None leaves the key out, `__` in its name is a dot."""
    found: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 256,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    found |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def weights(seed: int = 0) -> dict[str, Array]:
    """Random weights of the tiny model by their names in MLX, float32."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32) * 0.2

    found = {
        "model.embed_tokens.weight": matrix(len(VOCABULARY), HIDDEN),
        "model.norm.weight": 1 + matrix(HIDDEN),
        "lm_head.weight": matrix(len(VOCABULARY), HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": 1 + matrix(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": 1 + matrix(HIDDEN),
        }
    return found


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file from its name in MLX."""
    module = name.removesuffix(".weight")
    if module in _GGUF_NAMES:
        return f"{_GGUF_NAMES[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def interleaved(name: str, rows: Array) -> Array:
    """Rows of a q or k projection in the order a GGUF keeps them: the two halves of each head taken in turn."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def tensors(kind: int = F32, skip: Sequence[str] = ()) -> dict[str, Encoded]:
    """The tiny model's tensors as a GGUF has them; norms are float32 always."""
    return {
        gguf_name(name): plain(interleaved(name, array), kind if array.ndim > 1 else F32)
        for name, array in weights().items()
        if name not in skip
    }


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
