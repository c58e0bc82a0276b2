"""Owns loading a model directory: config.json and safetensors become a module of the zoo with evaluated weights.

On the CPU a real BLAS exists for float32 alone, and every other type, quantised ones included, runs several times
slower. So there `dtype="auto"` means float32, and quantised weights are expanded. On a GPU it means what the checkpoint
holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlxbcd.errors import ServeError
from mlxbcd.model import heads, safetensors, zoo

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Weights: TypeAlias = dict[str, mx.array]
Quantization: TypeAlias = dict[str, Any]

_GROUP_BYTES: Final = 64 * 1024 * 1024
"""Bytes evaluated between two looks at `cancelled`."""
_NAMED_KEYS: Final = 3
"""Mismatching weights an error names."""
_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_positions",
    "n_ctx",
    "model_max_length",
)
DEFAULT_CONTEXT: Final = 4096
"""Tokens, where a config doesn't say."""
_FLOAT_TAG: Final = "__float__"
_MX_MODES: Final[Mapping[str, Quantization]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
_PACKED_FORMATS: Final[Mapping[str, Quantization]] = {
    "nvfp4-pack-quantized": _MX_MODES["nvfp4"],
    "mxfp4-pack-quantized": _MX_MODES["mxfp4"],
    "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
}
"""Container formats of compressed-tensors whose bits are MLX's own."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory.

    Attributes:
        model: the zoo's module, in evaluation mode, all parameters evaluated.
        config: config.json.
        dtype: type of its activations: float32, bfloat16 or float16.
        bytes: of all parameters as they are in memory.
        quantization: how the weights in memory are packed by default; None where none is.
        head: weights of a multi-token-prediction head, not evaluated; none where the checkpoint has none.
    """

    model: nn.Module
    config: dict[str, Any]
    dtype: str
    bytes: int
    quantization: Quantization | None
    head: Weights = field(default_factory=dict)

    def __repr__(self) -> str:
        packed = f", {self.quantization.get('bits')} bits" if self.quantization else ""
        return f"Loaded({self.config['model_type']}, {self.dtype}{packed}, {self.bytes / 1e6:.0f} MB)"


class Cancelled(Exception):
    """`cancelled` said so before all weights were read."""


def load(
    directory: Path,
    *,
    dtype: DType = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Loaded:
    """Load a model directory. Call it on the thread that will run the model.

    Args:
        directory: holds config.json and model*.safetensors.
        dtype: type of all floating-point parameters; packed weights stay packed. "auto" is what the checkpoint
            holds, but on the CPU everything as float32, packed weights too.
        progress: called with (done, total) bytes of the parameters as they will be in memory.
        cancelled: asked between groups of tensors.

    Raises:
        ServeError: `load_failed`, with what is wrong with the model.
        Cancelled: `cancelled` returned true.
    """
    config = read_config(directory)
    weights = _read_weights(directory)
    model_class, args_class = zoo.model_classes(config)
    quantization = _quantization(directory, config)
    expand = dtype == "auto" and expands()
    packing: dict[str, Quantization] = {}
    try:
        model: nn.Module = model_class(args_class.from_dict(config))
        head = heads.extract(str(config["model_type"]), weights)
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        if quantization:
            packing = _packing(model, weights)
        if expand:
            weights = _expanded(weights, packing)
            packing = {}
        _pack_modules(model, packing)
        weights = _cast(model, weights, "float32" if expand else dtype)
        _check_names(directory, model, weights)
        model.load_weights(list(weights.items()))
    except ServeError:
        raise
    except Exception as error:  # the zoo's own code, on files that nobody checked
        raise _failed(directory, f"its config.json does not fit its weights or its architecture: {error!r}") from error
    model.eval()
    del weights
    _evaluate(directory, model, progress, cancelled)
    parameters = dict(tree_flatten(model.parameters()))
    return Loaded(
        model=model,
        config=config,
        dtype=_activation_dtype(parameters),
        bytes=sum(array.nbytes for array in parameters.values()),
        quantization=quantization if packing else None,
        head=head,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """A model directory's config.json, with tagged non-finite floats as floats.

    Raises:
        ServeError: `load_failed` where there is none, or it is no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes(), object_hook=_untag)
    except FileNotFoundError:
        raise _failed(directory, "there is no config.json in it") from None
    except OSError as error:
        raise _failed(directory, f"config.json cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise _failed(directory, "its config.json is not JSON") from None
    if not isinstance(config, dict):
        raise _failed(directory, "its config.json is not an object")
    return config


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens that a model was made for, by its config; `DEFAULT_CONTEXT` where it doesn't say."""
    for part in (config, config.get("text_config"), config.get("llm_config"), config.get("language_config")):
        if not isinstance(part, Mapping):
            continue
        for key in _CONTEXT_KEYS:
            value = part.get(key)
            # Tokenizer-style "no limit" values are huge floats or integers, and say nothing.
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
    return DEFAULT_CONTEXT


def _untag(value: dict[str, Any]) -> Any:
    """`{"__float__": "Infinity"}` is how some writers keep a config with non-finite floats valid JSON."""
    if value.keys() == {_FLOAT_TAG} and value[_FLOAT_TAG] in ("Infinity", "-Infinity", "NaN"):
        return float(value[_FLOAT_TAG].replace("Infinity", "inf"))
    return value


def _read_weights(directory: Path) -> Weights:
    """All tensors by name, not yet read from the disk."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        other = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)), None)
        has = f"; it has {other}, which is never read" if other else ""
        raise _failed(directory, f"there is no model*.safetensors in it{has}")
    weights: Weights = {}
    for file in files:
        safetensors.data_bytes(file)
        try:
            weights.update(cast("Weights", mx.load(str(file))))
        except (RuntimeError, ValueError) as error:
            raise _failed(directory, f"{file.name} cannot be read: {error}") from error
    return weights


def _quantization(directory: Path, config: Mapping[str, Any]) -> Quantization | None:
    """How the checkpoint is packed, in MLX's words; None where it isn't, or where the model's own code unpacks it."""
    found = config.get("quantization")
    if found is not None and not isinstance(found, dict):
        raise _failed(directory, f"its config.json has a quantization that cannot be read: {found!r}")
    parts = (config, *(part for part in (found or {}).values() if isinstance(part, dict)))
    if any(part.get("quantize_activations") or part.get("quantize_input") for part in parts):
        raise _failed(directory, "it wants its activations quantised, which is not supported")
    if found is not None:
        return found
    foreign = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    sidecar = directory / "hf_quant_config.json"
    if not foreign and sidecar.exists():
        try:
            foreign = {"quant_method": "modelopt", **json.loads(sidecar.read_bytes())}
        except (OSError, ValueError, TypeError):
            raise _failed(directory, "its hf_quant_config.json is not JSON") from None
    if not foreign:
        return None
    return _translated(directory, foreign)


def _translated(directory: Path, foreign: Mapping[str, Any]) -> Quantization | None:
    """Other tools' quantisation in MLX's words, where the packed bits are the same."""
    match foreign:
        case {"quant_method": ("mxfp4" | "mxfp8") as method}:
            return dict(_MX_MODES[method])
        case {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}:
            # Powers of two over blocks of 32 × 32 are mxfp8 as they stand.
            return dict(_MX_MODES["mxfp8"])
        case {"quant_method": "fp8"}:
            return None
        case {"quant_method": "compressed-tensors", "format": str(form)} if form in _PACKED_FORMATS:
            return dict(_PACKED_FORMATS[form])
        case {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"} as settings}:
            return dict(_MX_MODES["nvfp4"]) | {"group_size": settings.get("group_size", 16)}
        case {"quant_method": "modelopt", "quant_algo": "NVFP4"}:
            return dict(_MX_MODES["nvfp4"]) | {"group_size": foreign.get("group_size", 16)}
    what = " ".join(
        str(foreign[key]) for key in ("quant_method", "format", "quant_algo") if isinstance(foreign.get(key), str)
    )
    raise _failed(
        directory, f"its weights are packed as {what or 'something unknown'!r}; take an MLX or unquantised copy of it"
    )


def _packing(model: nn.Module, weights: Weights) -> dict[str, Quantization]:
    """For each module whose weights are packed: its group size, bits and mode.

    The shapes tell these for every module, where a config's defaults need not be true of all.
    """
    packing: dict[str, Quantization] = {}
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and f"{path}.scales" in weights:
            packing[path] = _inferred(path, module, weights)
            if f"{path}.global_scale" in weights:
                packing[path]["global_scale"] = True
    return packing


def _inferred(path: str, module: nn.Module, weights: Weights) -> Quantization:
    scales, packed = weights[f"{path}.scales"], weights[f"{path}.weight"]
    columns = module.weight.shape[-1]
    group_size, bits = columns // scales.shape[-1], packed.shape[-1] * 32 // columns
    if scales.dtype != mx.uint8:
        return {"group_size": group_size, "bits": bits, "mode": "affine"}
    for mode in _MX_MODES.values():
        if (mode["group_size"], mode["bits"]) == (group_size, bits):
            return dict(mode)
    raise ServeError(
        "load_failed", f"the weights of {path} are packed in no known way ({bits} bits, groups of {group_size})"
    )


def _expanded(weights: Weights, packing: Mapping[str, Quantization]) -> Weights:
    """The same weights with every packed one as float32 (lazily)."""
    plain = dict(weights)
    for path, parameters in packing.items():
        packed, scales = plain.pop(f"{path}.weight"), plain.pop(f"{path}.scales")
        biases, global_scale = plain.pop(f"{path}.biases", None), plain.pop(f"{path}.global_scale", None)
        if parameters["mode"] == "affine":
            # Wide scales first: in float16 the sum would round.
            scales = scales.astype(mx.float32)
            biases = None if biases is None else biases.astype(mx.float32)
        unpack = partial(
            mx.dequantize,
            group_size=parameters["group_size"],
            bits=parameters["bits"],
            mode=parameters["mode"],
            dtype=mx.float32,
        )
        if global_scale is not None and global_scale.ndim:  # one for each expert
            experts = zip(packed, scales, global_scale, strict=True)
            plain[f"{path}.weight"] = mx.stack(
                [unpack(one, scale, global_scale=overall) for one, scale, overall in experts]
            )
        else:
            plain[f"{path}.weight"] = unpack(packed, scales, biases, global_scale=global_scale)
    return plain


def _pack_modules(model: nn.Module, packing: Mapping[str, Quantization]) -> None:
    """Replace modules by their packed kin. Not every one takes a mode; affine is the default of those that do."""
    kinds = {
        path: {key: value for key, value in parameters.items() if (key, value) != ("mode", "affine")}
        for path, parameters in packing.items()
    }
    nn.quantize(model, class_predicate=lambda path, module: kinds.get(path, False))


def _cast(model: nn.Module, weights: Weights, dtype: str) -> Weights:
    if dtype == "auto":
        return weights
    wanted: mx.Dtype = getattr(mx, dtype)
    # Some architectures name parameters that lose too much in half precision.
    may_narrow: Callable[[str], bool] = getattr(model, "cast_predicate", lambda name: True)
    return {
        name: array.astype(wanted)
        if mx.issubdtype(array.dtype, mx.floating) and (wanted == mx.float32 or may_narrow(name))
        else array
        for name, array in weights.items()
    }


def _check_names(directory: Path, model: nn.Module, weights: Weights) -> None:
    wanted = dict(tree_flatten(model.parameters()))
    missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & weights.keys() if wanted[name].shape != weights[name].shape)
    problems = [
        f"{len(names)} {what} ({', '.join(names[:_NAMED_KEYS])}{', …' if len(names) > _NAMED_KEYS else ''})"
        for what, names in (("missing", missing), ("unknown", extra), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise _failed(directory, f"its weights do not fit its config.json: {'; '.join(problems)}")


def _evaluate(
    directory: Path, model: nn.Module, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
) -> None:
    """Read, expand and cast the parameters, a group at a time: what was read is dropped before the next group."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    total, done = sum(array.nbytes for array in arrays), 0
    progress(0, total)
    for group in _groups(arrays):
        if cancelled():
            raise Cancelled
        try:
            mx.eval(group)
        except RuntimeError as error:
            if "allocate" in str(error):
                raise ServeError(
                    "out_of_memory", f"{directory.name} needs more memory than there is: {error}"
                ) from error
            raise _failed(directory, f"its weights cannot be read: {error}") from error
        done += sum(array.nbytes for array in group)
        progress(done, total)
    # Whatever the module holds beside its weights.
    mx.eval(model.parameters())


def _groups(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    group: list[mx.array] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _activation_dtype(parameters: Mapping[str, mx.array]) -> str:
    """The floating type that most parameters (of packed weights: the scales) have."""
    counts: Counter[str] = Counter()
    for array in parameters.values():
        if mx.issubdtype(array.dtype, mx.floating):
            counts[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return counts.most_common(1)[0][0] if counts else "bfloat16"


def expands() -> bool:
    """Whether every weight becomes float32 here, packed ones too. On the device thread."""
    return mx.default_device().type == mx.DeviceType.cpu


def _failed(directory: Path, problem: str) -> ServeError:
    return ServeError("load_failed", f"{directory.name} cannot be loaded: {problem}")
