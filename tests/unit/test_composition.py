"""What a model's layers hold, and what rows of it may do together, with the reason for every no."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from tiny import CONFIGS, make_model

from mlxbcd.model.forward import bind_attention
from mlxbcd.state.attention import AttentionLayout
from mlxbcd.state.composition import Composition, KvScheme, inspect
from mlxbcd.state.nested import NestedLayout
from mlxbcd.state.recurrent import RecurrentLayout
from mlxbcd.state.schemes import Quantised

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}
WINDOWED = BASE | {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
SINKS = BASE | {
    "model_type": "gpt_oss",
    "head_dim": 32,
    "sliding_window": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}
SOFT_CAPPED = BASE | {"model_type": "gemma2", "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 2,
}
NESTED: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 2,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
EIGHT_BITS = KvScheme(Quantised(bits=8, group_size=32), start=100)


def inspected(config: dict[str, Any], kv: KvScheme | None = None) -> Composition:
    model = make_model(config)
    bind_attention(model)
    return inspect(model, config["model_type"], kv=kv)


def test_a_model_of_full_attention_does_everything_together() -> None:
    composition = inspected(CONFIGS["qwen3"])
    assert composition.batches
    assert composition.opaque
    assert composition.kinds == ("KVCache",) * 2
    assert composition.recorder is None
    assert (composition.reason, composition.rollback_reason, composition.kv_reason) == ("", "", "")


def test_sliding_layers_have_their_window() -> None:
    composition = inspected(WINDOWED)
    assert composition.kinds == ("RotatingKVCache", "KVCache")
    windows = [layout.window for layout in composition.layouts(4) if isinstance(layout, AttentionLayout)]
    assert windows == [8, None]


def test_recurrent_layers_are_recorded_to_be_taken_back() -> None:
    composition = inspected(RECURRENT)
    assert composition.kinds == ("ArraysCache",) * 2
    assert composition.recorder is not None
    assert all(isinstance(layout, RecurrentLayout) for layout in composition.layouts(4))


def test_a_layer_with_several_caches_has_several_layouts() -> None:
    composition = inspected(NESTED)
    assert composition.kinds == ("CacheList(ArraysCache, KVCache)",)
    (layout,) = composition.layouts(4)
    assert isinstance(layout, NestedLayout)
    assert [type(inner) for inner in layout.inner] == [RecurrentLayout, AttentionLayout]


def test_a_model_that_computes_with_its_keys_keeps_rows_in_one_class_and_plain() -> None:
    composition = inspected(SOFT_CAPPED)
    assert composition.batches
    assert not composition.opaque
    assert "itself" in composition.kv_reason


def test_a_state_without_a_layout_runs_alone_and_says_why() -> None:
    composition = inspected(
        {
            "model_type": "llama4",
            "text_config": BASE
            | {
                "attention_bias": False,
                "attention_chunk_size": 8,
                "head_dim": 32,
                "interleave_moe_layer_step": 1,
                "intermediate_size_mlp": 64,
                "max_position_embeddings": 64,
                "model_type": "llama4",
                "num_experts_per_tok": 1,
                "num_local_experts": 2,
                "rope_scaling": None,
                "rope_theta": 1000,
                "use_qk_norm": True,
            },
        }
    )
    assert not composition.batches
    assert "ChunkedKVCache" in composition.reason
    assert composition.reason == composition.rollback_reason == composition.kv_reason
    with pytest.raises(ValueError, match="ChunkedKVCache"):
        composition.layouts(4)


def test_a_kv_scheme_belongs_to_the_layers_that_keep_every_position() -> None:
    composition = inspected(WINDOWED, EIGHT_BITS)
    assert composition.kv == EIGHT_BITS
    assert composition.kv_reason == ""


@pytest.mark.parametrize(
    ("config", "kv", "why"),
    [
        (SINKS, EIGHT_BITS, "sinks"),
        (SOFT_CAPPED, EIGHT_BITS, "itself"),
        (RECURRENT, EIGHT_BITS, "no layer keeps"),
        (CONFIGS["qwen3"], KvScheme(Quantised(8, 64), 100), "heads of 32"),
    ],
    ids=["sinks", "soft-capped", "recurrent", "narrow-heads"],
)
def test_a_kv_scheme_that_a_model_cant_run_with_is_refused_at_load(
    config: dict[str, Any], kv: KvScheme, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        inspected(config, kv)


def test_inspection_computes_nothing() -> None:
    model = make_model(CONFIGS["llama"])
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    inspect(model, "llama")
    assert mx.get_peak_memory() - before < 200_000
