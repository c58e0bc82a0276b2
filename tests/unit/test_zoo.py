"""The model zoo: its classes are found by a config, without the heavy package root and without running foreign code."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

from mlxbcd.errors import ServeError
from mlxbcd.model import zoo

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}


def python(script: str) -> Any:
    """What `script` prints as JSON, in a fresh interpreter where warnings are errors."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_zoo_imports_without_its_root_and_without_transformers() -> None:
    loaded, before, after = python(
        "import json, resource, sys\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "from mlxbcd.model import zoo\n"
        "zoo.bind(); zoo.bind()\n"
        "zoo.model_classes({'model_type': 'llama'})\n"
        "heavy = [name for name in ('transformers', 'mlx_lm.utils', 'mlx_lm.generate') if name in sys.modules]\n"
        "print(json.dumps([heavy, before, resource.getrlimit(resource.RLIMIT_NOFILE)]))"
    )
    assert loaded == []
    assert before == after


def test_the_stand_in_becomes_the_real_package_when_asked_for_what_only_that_has() -> None:
    same, tables_agree, kept = python(
        "import json, sys\n"
        "from mlxbcd.model import zoo\n"
        "zoo.bind()\n"
        "before = zoo.model_classes({'model_type': 'llama'})\n"
        "hasattr(sys.modules['mlx_lm'], '__wrapped__')\n"
        "assert 'transformers' not in sys.modules\n"
        "import mlx_lm\n"
        "assert callable(mlx_lm.load) and callable(mlx_lm.stream_generate)\n"
        "import mlx_lm.utils as utils\n"
        "same = before == utils._get_classes({'model_type': 'llama'}) == zoo.model_classes({'model_type': 'llama'})\n"
        "tables = zoo._aliases() == (utils.MODEL_REMAPPING, utils.MODEL_ARCHITECTURE_REMAPPING)\n"
        "zoo.bind()\n"
        "print(json.dumps([same, tables, sys.modules['mlx_lm'] is mlx_lm]))"
    )
    assert same
    assert tables_agree
    assert kept


def test_a_real_root_that_is_there_already_is_left_alone() -> None:
    assert python(
        "import json, sys, types\n"
        "from mlxbcd.model import zoo\n"
        "import importlib.util\n"
        "real = types.ModuleType('mlx_lm')\n"
        "real.__path__ = importlib.util.find_spec('mlx_lm').submodule_search_locations\n"
        "sys.modules['mlx_lm'] = real\n"
        "zoo.bind()\n"
        "zoo.model_classes({'model_type': 'llama'})\n"
        "print(json.dumps(sys.modules['mlx_lm'] is real))"
    )


def test_a_config_gives_classes_that_make_its_model() -> None:
    model_class, args_class = zoo.model_classes(LLAMA)
    assert len(model_class(args_class.from_dict(LLAMA)).layers) == 1


@pytest.mark.parametrize("model_type", ["Klear", "nemotron-nas", "lille-130m", "lfm2-vl"])
def test_architectures_with_unusual_names_are_found(model_type: str) -> None:
    model_class, _ = zoo.model_classes({"model_type": model_type})
    assert model_class is importlib.import_module(f"mlx_lm.models.{model_type}").Model


@pytest.mark.parametrize(
    ("config", "module"),
    [
        ({"model_type": "mistral"}, "llama"),
        ({"model_type": "kimi_k2", "architectures": None}, "deepseek_v3"),
        ({"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}, "bailing_moe_v3"),
        ({"model_type": "bailing_hybrid", "architectures": "BailingMoeV3ForCausalLM"}, "bailing_moe_v3"),
        ({"model_type": "bailing_hybrid", "architectures": ["Other"]}, "bailing_hybrid"),
    ],
)
def test_aliases_of_an_architecture_lead_to_its_module(config: dict[str, Any], module: str) -> None:
    assert zoo.module_name(config) == module


@pytest.mark.parametrize(
    "model_type",
    [
        "no_such_model",
        "",
        ".",
        "..",
        "../llama",
        "../../os",
        "/etc/passwd",
        "llama.Model",
        "models.llama",
        "llama/../llama",
        "llama\0",
        "llama\n",
        "LLAMA",
        "cache",  # modules of the zoo that hold no model
        "base",
        "__init__",
    ],
)
def test_what_is_no_architecture_of_the_zoo_is_refused(model_type: str) -> None:
    with pytest.raises(ServeError, match="not supported") as refused:
        zoo.model_classes({"model_type": model_type})
    assert refused.value.code == "load_failed"


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["llama"]}])
def test_a_config_without_a_model_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ServeError, match="model_type"):
        zoo.model_classes(config)


def test_a_model_that_brings_its_own_code_is_refused() -> None:
    with pytest.raises(ServeError, match="never run"):
        zoo.model_classes({**LLAMA, "model_file": "modeling.py"})
