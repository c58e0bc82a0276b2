"""Loading a model directory: the weights arrive as they were written, and what is wrong with one is said."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlxbcd.errors import ServeError
from mlxbcd.model import load as loading
from mlxbcd.model import zoo
from mlxbcd.model.load import Cancelled, Loaded, context_length, load

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TOKENS = mx.array([[1, 5, 9, 2, 90]])


def random_model(seed: int = 0) -> Any:
    mx.random.seed(seed)
    model_class, args_class = zoo.model_classes(CONFIG)
    model = model_class(args_class.from_dict(CONFIG))
    # Norms start as ones; make every parameter tell where it belongs.
    shaken = [(name, array + 0.1 * mx.random.normal(array.shape)) for name, array in tree_flatten(model.parameters())]
    return model.load_weights(shaken)


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def write(directory: Path, weights: dict[str, mx.array], config: dict[str, Any] = CONFIG) -> Path:
    directory.mkdir(exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantized(directory: Path, mode: str = "affine", dtype: mx.Dtype = mx.float32) -> tuple[Path, Any]:
    """A packed copy of the random model: its directory, and the model itself."""
    model = random_model()
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    group_size, bits = {"affine": (32, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    quantization: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
    if mode == "affine":
        quantization |= {"model.embed_tokens": {"group_size": 64, "bits": 8}, "lm_head": False}
    nn.quantize(
        model,
        group_size,
        bits,
        mode=mode,
        class_predicate=lambda path, module: hasattr(module, "to_quantized") and quantization.get(path, True),
    )
    return write(directory, parameters(model), {**CONFIG, "quantization": quantization}), model


def logits(model: Any) -> np.ndarray[Any, Any]:
    return np.array(model(TOKENS).astype(mx.float32))


def refused(directory: Path, **options: Any) -> str:
    with pytest.raises(ServeError) as caught:
        load(directory, **options)
    assert caught.value.code == "load_failed"
    return caught.value.message


def test_on_the_cpu_everything_is_float32_with_the_values_of_the_checkpoint(tmp_path: Path) -> None:
    weights = {name: array.astype(mx.bfloat16) for name, array in parameters(random_model()).items()}
    loaded = load(write(tmp_path / "m", weights))
    assert loaded.dtype == "float32"
    assert loaded.quantization is None
    got = parameters(loaded.model)
    assert got.keys() == weights.keys()
    for name, array in got.items():
        assert array.dtype == mx.float32
        assert mx.array_equal(array, weights[name].astype(mx.float32)).item(), name
    assert loaded.bytes == sum(4 * array.size for array in got.values())


def test_on_a_gpu_the_checkpoint_keeps_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "expands", lambda: False)
    directory, packed = quantized(tmp_path / "m", dtype=mx.bfloat16)
    loaded = load(directory)
    assert loaded.dtype == "bfloat16"
    assert loaded.quantization is not None
    assert {name: array.dtype for name, array in parameters(loaded.model).items()} == {
        name: array.dtype for name, array in parameters(packed).items()
    }


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_packed_weights_are_expanded_on_the_cpu_and_give_the_same_logits(tmp_path: Path, mode: str) -> None:
    directory, packed = quantized(tmp_path / "m", mode)
    loaded = load(directory)
    assert {str(array.dtype) for array in parameters(loaded.model).values()} == {"mlx.core.float32"}
    assert loaded.quantization is None
    # The fp modes' packed embedding comes out as bfloat16, so the peer's own activations are rounded.
    tolerance = 1e-4 if mode == "affine" else 3e-2
    np.testing.assert_allclose(logits(loaded.model), logits(packed), atol=tolerance * np.abs(logits(packed)).max())


def test_an_asked_dtype_keeps_packed_weights_packed(tmp_path: Path) -> None:
    directory, packed = quantized(tmp_path / "m", dtype=mx.float16)
    loaded = load(directory, dtype="float32")
    modules = dict(loaded.model.named_modules())
    assert isinstance(modules["model.layers.0.self_attn.q_proj"], nn.QuantizedLinear)
    assert modules["model.embed_tokens"].bits == 8
    assert modules["model.embed_tokens"].group_size == 64
    assert type(modules["lm_head"]) is nn.Linear
    assert loaded.quantization is not None
    assert loaded.dtype == "float32"
    for name, array in parameters(loaded.model).items():
        assert array.dtype == (mx.uint32 if parameters(packed)[name].dtype == mx.uint32 else mx.float32)
    np.testing.assert_allclose(logits(loaded.model), logits(load(directory).model), atol=1e-3)


def test_half_precision_scales_are_widened_before_they_are_used(tmp_path: Path) -> None:
    directory, packed = quantized(tmp_path / "m", dtype=mx.float16)
    module = dict(packed.named_modules())["model.layers.1.mlp.up_proj"]
    elements = np.array(module.weight)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    scales, biases = (np.array(part).astype(np.float64) for part in (module.scales, module.biases))
    exact = elements.reshape(*scales.shape, 32) * scales[..., None] + biases[..., None]
    got = np.array(dict(load(directory).model.named_modules())["model.layers.1.mlp.up_proj"].weight)
    np.testing.assert_array_equal(got, exact.reshape(got.shape).astype(np.float32))


def test_experts_with_a_scale_of_their_own_are_expanded_each_with_it() -> None:
    mx.random.seed(1)
    experts = mx.random.normal((3, 8, 32)) * mx.array([1.0, 10.0, 100.0])[:, None, None]
    largest = experts.abs().max(axis=(1, 2))
    packed = [
        mx.quantize(one, 16, 4, mode="nvfp4", global_scale=top) for one, top in zip(experts, largest, strict=True)
    ]
    weights = {
        "experts.weight": mx.stack([part[0] for part in packed]),
        "experts.scales": mx.stack([part[1] for part in packed]),
        "experts.global_scale": largest,
    }
    plain = loading._expanded(weights, {"experts": {"group_size": 16, "bits": 4, "mode": "nvfp4"}})
    assert plain.keys() == {"experts.weight"}
    error = (plain["experts.weight"] - experts).abs().max(axis=(1, 2)) / largest
    assert mx.all(error < 1 / 6).item()  # half of the gap between 4 and 6, of 6


def test_parameters_that_an_architecture_protects_are_not_narrowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path / "m", parameters(random_model()))
    model_class, args_class = zoo.model_classes(CONFIG)

    class Careful(model_class):
        @property
        def cast_predicate(self) -> Callable[[str], bool]:
            return lambda name: "norm" not in name

    monkeypatch.setattr(zoo, "model_classes", lambda config: (Careful, args_class))
    for name, array in parameters(load(directory, dtype="bfloat16").model).items():
        assert array.dtype == (mx.float32 if "norm" in name else mx.bfloat16)


def test_weights_may_be_spread_over_several_files(tmp_path: Path) -> None:
    weights = parameters(random_model())
    names = sorted(weights)
    directory = write(tmp_path / "m", {name: weights[name] for name in names[::2]})
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    second = directory / "model-00002-of-00002.safetensors"
    mx.save_safetensors(str(second), {name: weights[name] for name in names[1::2]})
    assert all(mx.array_equal(array, weights[name]) for name, array in parameters(load(directory).model).items())


def test_a_loaded_model_is_evaluated_so_that_any_thread_may_read_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", parameters(random_model()))
    found: list[Loaded] = []
    thread = threading.Thread(target=lambda: found.append(load(directory)))
    thread.start()
    thread.join()
    # A lazy array of another thread would raise here.
    np.testing.assert_allclose(logits(found[0].model), logits(random_model()), rtol=1e-5, atol=1e-5)


def test_progress_rises_to_the_bytes_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_GROUP_BYTES", 1000)
    seen: list[tuple[int, int]] = []
    loaded = load(write(tmp_path / "m", parameters(random_model())), progress=lambda *now: seen.append(now))
    assert seen[0] == (0, loaded.bytes)
    assert seen[-1] == (loaded.bytes, loaded.bytes)
    assert len(seen) > 5
    assert seen == sorted(seen)


def test_a_load_can_be_cancelled_between_groups_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_GROUP_BYTES", 1000)
    seen: list[int] = []
    with pytest.raises(Cancelled):
        load(
            write(tmp_path / "m", parameters(random_model())),
            progress=lambda done, total: seen.append(done),
            cancelled=lambda: len(seen) == 3,
        )
    assert len(seen) == 3


def test_a_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no model*.safetensors" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert "pytorch_model.bin, which is never read" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"model_type": "llama"', "\xff"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    directory = write(tmp_path / "m", parameters(random_model()))
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json is not" in refused(directory)


def test_a_config_without_its_numbers_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "m", parameters(random_model()), {"model_type": "llama"})
    assert "does not fit" in refused(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    directory = write(tmp_path / "m", parameters(random_model()))
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    assert "model.safetensors is damaged" in refused(directory)


@pytest.mark.parametrize(
    "head",
    [
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (12).to_bytes(8, "little") + b'{"a": {"b":1',
        (9).to_bytes(8, "little") + b'{"a": {}}',
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, head: bytes) -> None:
    directory = write(tmp_path / "m", parameters(random_model()))
    (directory / "model.safetensors").write_bytes(head + b"\0" * 64)
    assert "is damaged" in refused(directory)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    weights = parameters(random_model())
    weights["stranger"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:5]
    message = refused(write(tmp_path / "m", weights))
    assert "1 missing (model.norm.weight)" in message
    assert "1 unknown (stranger)" in message
    assert "1 of another shape (lm_head.weight)" in message


def test_many_weights_that_do_not_fit_are_counted_and_a_few_named(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "m", {"stranger": mx.zeros((2,))}))
    assert "21 missing (lm_head.weight, model.embed_tokens.weight, " in message
    assert "…" in message


@pytest.mark.parametrize("method", ["awq", "gptq", "bitnet", "bitsandbytes", "hqq", None])
def test_packings_of_other_tools_are_refused_by_name(tmp_path: Path, method: str | None) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": method, "bits": 4}}
    message = refused(write(tmp_path / "m", parameters(random_model()), config))
    assert (method or "something unknown") in message
    assert "take an MLX or unquantised copy" in message


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        ("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}),
        ("mxfp8", {"text_config": {"quantization_config": {"quant_method": "mxfp8"}}}),
        (
            "mxfp8",
            {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}},
        ),
        ("nvfp4", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}),
        (
            "nvfp4",
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
        ),
    ],
)
def test_packings_with_the_bits_of_mlx_are_taken_as_they_are(tmp_path: Path, mode: str, config: dict[str, Any]) -> None:
    directory, _ = quantized(tmp_path / "m", mode)
    wanted = logits(load(directory).model)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    np.testing.assert_array_equal(logits(load(directory).model), wanted)


def test_a_packing_described_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path / "m", "nvfp4")
    wanted = logits(load(directory).model)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    np.testing.assert_array_equal(logits(load(directory).model), wanted)


@pytest.mark.parametrize(
    "extra",
    [
        {"quantize_activations": True},
        {"quantization": {"group_size": 32, "bits": 4, "lm_head": {"quantize_input": True}}},
        {"quantization": "4bit"},
    ],
)
def test_quantisation_that_cannot_be_honoured_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    refused(write(tmp_path / "m", parameters(random_model()), {**CONFIG, **extra}))


def test_packed_weights_of_impossible_shapes_are_refused(tmp_path: Path) -> None:
    directory, packed = quantized(tmp_path / "m")
    weights = parameters(packed)
    weights["model.layers.0.self_attn.q_proj.scales"] = mx.zeros((64, 0))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    refused(directory)


@pytest.mark.parametrize("tag", ["Infinity", "-Infinity", "NaN"])
def test_tagged_floats_of_a_config_become_floats(tmp_path: Path, tag: str) -> None:
    config = {**CONFIG, "odd": {"limit": {"__float__": tag}}}
    value = load(write(tmp_path / "m", parameters(random_model()), config)).config["odd"]["limit"]
    assert math.isnan(value) if tag == "NaN" else value == float(tag.replace("Infinity", "inf"))


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 32768}}, 32768),
        ({"max_position_embeddings": None, "seq_length": 2048}, 2048),
        ({"model_max_length": 10**30}, 4096),
        ({"max_position_embeddings": 0}, 4096),
        ({"max_position_embeddings": True}, 4096),
        ({"text_config": "none"}, 4096),
        ({}, 4096),
    ],
)
def test_the_context_length_is_what_the_config_says_or_a_sane_default(config: dict[str, Any], tokens: int) -> None:
    assert context_length(config) == tokens
