"""Owns where things live: the socket and the user's data, cache, config and log directories.

Both sides import this module, so a client and a daemon of one user always agree. Nothing is created here.

Two environment variables override the platform's conventions: ``MLXBC_SOCKET`` names the socket, and
``MLXBC_DATA`` the directory of imported models.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlxbc.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from platformdirs.api import PlatformDirsABC

_APP = "mlxbc"
_SOCKET = "mlxbc.sock"


def socket_limit(platform: str = sys.platform) -> int:
    """Most bytes a socket's path may have: `sun_path` without its terminating zero."""
    return 107 if platform.startswith("linux") else 103


def socket_path(platform: str = sys.platform) -> Path:
    """The daemon's socket, absolute.

    On macOS it lies in the data directory, because the runtime directory there is one the system may purge;
    elsewhere in the user's runtime directory.

    Raises:
        ConfigError: the path is too long for a socket, or the runtime directory belongs to somebody else.
    """
    override = os.environ.get("MLXBC_SOCKET")
    if override:
        path = _absolute(override)
    elif platform == "darwin":
        path = _dirs(platform).user_data_path / _SOCKET
    else:
        path = _runtime_dir(platform) / _SOCKET
    return checked_socket_path(path, platform)


def checked_socket_path(path: Path, platform: str = sys.platform) -> Path:
    """`path`, if the kernel can bind and connect to a socket there.

    Raises:
        ConfigError: it is longer than `socket_limit`.
    """
    size, limit = len(os.fsencode(path)), socket_limit(platform)
    if size > limit:
        raise ConfigError(
            f"the socket path {path} has {size} bytes, but this system allows {limit}; "
            f"set MLXBC_SOCKET to a shorter one"
        )
    return path


def data_dir(platform: str = sys.platform) -> Path:
    """Models imported by `mlxbc pull`, and whatever else must outlive a cache."""
    override = os.environ.get("MLXBC_DATA")
    return _absolute(override) if override else _dirs(platform).user_data_path


def cache_dir(platform: str = sys.platform) -> Path:
    """What can be made again: it may vanish at any time."""
    return _dirs(platform).user_cache_path


def config_dir(platform: str = sys.platform) -> Path:
    """The user's settings."""
    return _dirs(platform).user_config_path


def log_dir(platform: str = sys.platform) -> Path:
    """The log of a daemon that has no terminal."""
    return _dirs(platform).user_log_path


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _dirs(platform: str) -> PlatformDirsABC:
    # The class is chosen here, not by platformdirs, so that each system's paths can be tested on any other.
    if platform == "darwin":
        from platformdirs.macos import MacOS

        return MacOS(_APP, appauthor=False)
    from platformdirs.unix import Unix

    return Unix(_APP, appauthor=False)


def _runtime_dir(platform: str) -> Path:
    import warnings

    from platformdirs import RuntimeDirWarning

    # Without XDG_RUNTIME_DIR (cron, some ssh sessions) platformdirs falls back to /run/user/UID or a
    # directory of /tmp that it has checked to be the user's own. Both sides fall back alike: nothing to warn
    # a person about.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeDirWarning)
        try:
            return _dirs(platform).user_runtime_path
        except PermissionError as error:
            raise ConfigError(f"{error}, or set MLXBC_SOCKET to a path of your own") from None
