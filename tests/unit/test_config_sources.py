"""Where settings come from: who wins, what is refused and how, and what a running daemon takes over."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlxbc.errors import ConfigError
from mlxbcd.config.settings import KEYS
from mlxbcd.config.sources import Config, entries, fixed, load, reload, user_file
from mlxbcd.serve.configuration import Configuration

Load = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """None but those that a test names."""
    for key in KEYS.values():
        monkeypatch.delenv(key.variable, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


@pytest.fixture
def loaded(file: Path) -> Load:
    """Load a file with a text, and nothing else."""

    def load_text(text: str, flags: Mapping[str, str] | None = None, **environ: str) -> Config:
        file.write_text(text)
        return load(flags, environ=environ, file=file)

    return load_text


def test_an_option_wins_over_a_variable_and_that_over_the_file_and_that_over_the_default(
    file: Path, loaded: Load
) -> None:
    text = 'model = "f"\n[log]\nlevel = "error"\n[requests]\nqueue = 7\n'
    config = loaded(text, {"requests.queue": "9"}, MLXBC_LOG_LEVEL="debug", MLXBC_REQUESTS_QUEUE="8")
    found = {key: config.origin[key] for key in ("model", "log.level", "requests.queue", "preload")}
    assert (config.settings.model, config.settings.log_level, config.settings.queue) == ("f", "debug", 9)
    assert found == {
        "model": str(file),
        "log.level": "MLXBC_LOG_LEVEL",
        "requests.queue": "--set requests.queue",
        "preload": "default",
    }


def test_every_key_can_be_set_in_each_way(loaded: Load) -> None:
    for key in KEYS.values():
        value = key.show(key.default)
        bare = value.strip('"')
        section, _, name = key.name.rpartition(".")
        by_file = loaded(f"[{section}]\n{name} = {value}\n" if section else f"{name} = {value}\n")
        ways = [by_file, loaded("", {key.name: bare})]
        if bare:  # an empty variable is none
            ways.append(loaded("", **{key.variable: bare}))
        for config in ways:
            assert getattr(config.settings, key.attribute) == key.default
            assert config.origin[key.name] != "default"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modell = 'x'", "unknown key 'modell'; did you mean model?"),
        ("[log]\nlevle = 'info'", "unknown key 'log.levle'; did you mean log.level?"),
        ("level = 'info'", "unknown key 'level'; did you mean log.level?"),
        ("[logs]\nlevel = 'info'", "unknown key 'logs'; did you mean log?"),
        ("zzz = 1", "unknown key 'zzz'; mlxbc config lists them all"),
        ("log = 3", "log is a table: [log]"),
        ("[log]\nlevel = 'loud'", 'log.level is "debug" or "info" or "warning" or "error", not \'loud\''),
        ("preload = 1", "preload is true or false, not '1'"),
        ("[requests]\nqueue = 0", "requests.queue is a whole number from 1 to 100000, not '0'"),
        ("preload = maybe", "at line 1"),
        ("[aliases]\n'a/b' = 'x'", "'a/b' can't be an alias"),
        ("[aliases]\na = 3", "the alias a needs a model's name"),
        ("aliases = 3", "aliases is a table"),
        ("drafts = 3", 'drafts is a table of names: "ORG/LARGE" = "ORG/SMALL"'),
        ("[drafts]\n'a/b' = ''", "what drafts for a/b needs a model's name"),
        ("[drafts]\n'' = 'a/b'", "what drafts for  needs a model's name"),
    ],
)
def test_a_wrong_file_is_refused_and_says_what_is_wrong(loaded: Load, file: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(text)
    assert str(file) in str(refused.value)
    assert said in str(refused.value)


def test_a_wrong_variable_and_a_wrong_option_are_named(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r"MLXBC_LOG_LEVEL: log.level is"):
        loaded("", MLXBC_LOG_LEVEL="loud")
    with pytest.raises(ConfigError, match=r"there is no setting 'log.levle'; did you mean log.level"):
        loaded("", {"log.levle": "info"})
    with pytest.raises(ConfigError, match="--set preload: preload is true or false, not 'maybe'"):
        loaded("", {"preload": "maybe"})


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd, said in (
        (tmp_path / "pipe", "is not a file of settings"),
        (tmp_path, "directory|not a file"),
        (tmp_path / "none", "there is no file"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(environ={}, file=odd)
    (tmp_path / "big").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="is not a file of settings"):
        load(environ={}, file=tmp_path / "big")
    (tmp_path / "latin").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load(environ={}, file=tmp_path / "latin")


def test_the_users_own_file_may_be_missing_but_a_named_one_may_not(tmp_path: Path) -> None:
    assert not user_file({}).exists()
    assert load(environ={}).settings == load(environ={"OTHER": "x"}).settings
    with pytest.raises(ConfigError, match=r"there is no file .*; mlxbc config init writes one"):
        load(environ={"MLXBC_CONFIG": str(tmp_path / "none")})


def test_aliases_are_the_users_own_names(loaded: Load) -> None:
    config = loaded("[aliases]\nfast = 'smollm2'\nhome = '~/models/x'\n")
    assert config.settings.aliases == {"fast": "smollm2", "home": os.path.expanduser("~/models/x")}
    shown = {entry["key"]: entry["value"] for entry in entries(config)}
    assert shown["aliases.fast"] == '"smollm2"'


def test_drafts_name_the_model_that_drafts_for_another(file: Path, loaded: Load) -> None:
    config = loaded("[drafts]\n'org/large-1.5' = 'org/small'\n'~/a' = '~/b'\n")
    home = os.path.expanduser("~")
    assert config.settings.drafts == {"org/large-1.5": "org/small", f"{home}/a": f"{home}/b"}
    shown = {entry["key"]: (entry["value"], entry["source"]) for entry in entries(config)}
    assert shown['drafts."org/large-1.5"'] == ('"org/small"', str(file))
    file.write_text("")
    again = reload(config, {})
    assert (again.changed, again.config.settings.drafts) == (("drafts",), {})


# -- reading again


def test_a_running_daemon_takes_over_what_it_can_and_says_what_needs_a_restart(file: Path, loaded: Load) -> None:
    before = loaded("[requests]\nqueue = 5\n", {"log.level": "error"})
    file.write_text("preload = false\n[requests]\nqueue = 6\n[log]\nlevel = 'debug'\n[aliases]\na = 'b'\n")
    found = reload(before, {})
    assert (found.changed, found.waiting) == (("requests.queue", "aliases"), ("preload",))
    settings = found.config.settings
    assert (settings.queue, settings.preload, settings.aliases) == (6, True, {"a": "b"})
    assert settings.log_level == "error", "an option of the start wins over the file"
    assert found.config.origin["preload"] == "default"
    again = reload(found.config, {})
    assert (again.changed, again.waiting) == ((), ("preload",)), "it still waits"


def test_a_wrong_file_changes_nothing_and_people_are_told(file: Path, loaded: Load) -> None:
    configuration = Configuration(loaded("[requests]\nqueue = 5\n"))
    seen: list[int] = []
    configuration.tell(lambda settings: seen.append(settings.queue))
    file.write_text("[requests]\nqueue = 6\n")
    configuration.reload()
    file.write_text("[requests]\nqueues = 7\n")
    configuration.reload()
    assert seen == [5, 6]
    (note,) = configuration.notes()
    assert "did you mean requests.queue?" in note
    assert configuration.report(1).error
    file.write_text("preload = false")
    configuration.reload()
    assert seen == [5, 6, 1024]
    assert configuration.notes() == ["restart the daemon for the new value of preload"]
    assert (configuration.report(1).waiting, configuration.report(1).loads) == (["preload"], 3)


def test_settings_without_a_file_stay() -> None:
    config = fixed(load(environ={}).settings)
    assert reload(config).changed == ()


def test_a_home_that_is_no_directory_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accounts of services have it."""
    monkeypatch.setattr("mlxbcd.config.sources.config_dir", lambda: Path("/dev/null/.config/mlxbc"))
    assert load(environ={}).settings.model is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs to see open files")
def test_a_directory_in_the_place_of_the_file_costs_nothing(tmp_path: Path) -> None:
    config = load(environ={})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError, match="Is a directory"):
            load(environ={}, file=tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert config.file is not None
