"""Settings: where they come from, and the one line that a bad one gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from plato.runtime.settings import Settings, SettingsError, dump, load


def written(folder: Path, text: str) -> Path:
    path = folder / "plato.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_stand_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(environ={})
    assert settings == Settings()
    assert (settings.gateway.tcp_port, settings.gateway.ws_port, settings.gateway.admin_port) == (8900, 8901, 8909)
    assert (settings.state.port, settings.msg.http_port) == (8902, 8903)
    assert (settings.ipconfig.port, settings.ipconfig.internal_port) == (8904, 8905)
    assert settings.gateway.host == settings.state.host == settings.msg.host == "127.0.0.1"
    assert not settings.auth.guests


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "gateway: {tcp_port: 1001, ws_port: 1002, admin_port: 1003}\n")
    settings = load(
        path,
        environ={"PLATO_GATEWAY__WS_PORT": "2002", "PLATO_GATEWAY__ADMIN_PORT": "2003"},
        flags={"gateway.admin_port": 3003},
    )
    assert (settings.gateway.tcp_port, settings.gateway.ws_port, settings.gateway.admin_port) == (1001, 2002, 3003)
    assert settings.gateway.workers == 2


def test_the_file_is_found_in_this_folder_or_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "log: {level: debug}\n")
    monkeypatch.chdir(tmp_path)
    assert load(environ={}).log.level == "debug"
    other = tmp_path / "other.yaml"
    other.write_text("log: {level: error}\n")
    assert load(environ={"PLATO_SETTINGS": str(other)}).log.level == "error"
    assert load(tmp_path / "plato.yaml", environ={"PLATO_SETTINGS": str(other)}).log.level == "debug"


def test_environment_values_take_the_type_of_the_key(tmp_path: Path) -> None:
    settings = load(
        written(tmp_path, ""),
        environ={
            "PLATO_AUTH__GUESTS": "true",
            "PLATO_AUTH__KEYS_DIR": "/somewhere/keys",
            "PLATO_GATEWAY__WS_ORIGINS": '["https://a.example", "https://b.example"]',
            "PLATO_STORE__URL": "redis://:p@127.0.0.1:1/0",
            "PLATO_PROCESS__NAME": "plato-s0",
        },
    )
    assert settings.auth.guests is True
    assert settings.auth.keys_dir == Path("/somewhere/keys")
    assert settings.gateway.ws_origins == ("https://a.example", "https://b.example")
    assert settings.store.url == "redis://:p@127.0.0.1:1/0"
    assert settings.process.name == "plato-s0"


def test_variables_of_others_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, "")
    assert load(path, environ={"PLATO_HOME": "x", "PLATO__X": "y", "OTHER__X": "z", "PLATO_": "w"}) == Settings()


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load(written(tmp_path, "gateway:\nlog:\n"), environ={}) == Settings()
    assert load(written(tmp_path, "gateway:\n"), environ={"PLATO_GATEWAY__WORKERS": "4"}).gateway.workers == 4


def test_what_is_dumped_is_read_back(tmp_path: Path) -> None:
    settings = load(
        written(tmp_path, "gateway: {ws_origins: [a, b], workers: 8}\nlocal: {data_dir: /x/ж}\n"), environ={}
    )
    assert load(written(tmp_path, dump(settings)), environ={}) == settings
    assert load(written(tmp_path, dump(Settings())), environ={}) == Settings()


def test_settings_never_change_after_reading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().gateway.tcp_port = 1  # type: ignore[misc]  # that it is refused is the test


def test_every_key_says_what_it_is_for() -> None:
    for section in Settings.model_fields.values():
        model = section.annotation
        assert model is not None
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


BAD = {
    "unknown-section": ("gatway: {}\n", {}, r"gatway: unknown section in .*plato.yaml; known here: .*gateway"),
    "unknown-key": (
        "gateway: {tcp_prot: 1}\n",
        {},
        r"gateway.tcp_prot: unknown key in .*plato.yaml; known here: .*tcp_port",
    ),
    "wrong-type": (
        "gateway: {tcp_port: many}\n",
        {},
        r"gateway.tcp_port: 'many' cannot be used: .*valid integer.*; correct it in /.*/plato.yaml$",
    ),
    "too-large": ("gateway: {tcp_port: 65536}\n", {}, "gateway.tcp_port: 65536 cannot be used: .*65535"),
    "not-among": ("log: {level: loud}\n", {}, "log.level: 'loud' cannot be used: .*debug"),
    "own-rule": ("gateway: {workers: 3}\n", {}, "gateway.workers: 3 cannot be used: must be 1, 2, 4, 8 or 16"),
    "null": ("gateway: {tcp_port: null}\n", {}, "gateway.tcp_port: None cannot be used"),
    "in-a-list": (
        "gateway: {ws_origins: [1]}\n",
        {},
        r"gateway.ws_origins.0: 1 cannot be used.*; correct it in /.*/plato.yaml$",
    ),
    "section-is-a-value": ("gateway: 5\n", {}, r"gateway: 5 in /.*/plato.yaml is no section"),
    "file-is-a-list": ("- 1\n", {}, "must hold sections"),
    "no-yaml": ("gateway: {\n", {}, "is no YAML"),
    "number-as-a-key": ("1: {a: 2}\n", {}, "1: unknown section"),
    "number-as-an-inner-key": ("gateway: {1: 2}\n", {}, "gateway.1"),
    "environment-section": ("", {"PLATO_NO__KEY": "1"}, "no: unknown section in PLATO_NO__KEY;"),
    "environment-key": ("", {"PLATO_GATEWAY__NO": "1"}, "gateway.no: unknown key in PLATO_GATEWAY__NO;"),
    "environment-value": (
        "",
        {"PLATO_STATE__PORT": "x"},
        "state.port: 'x' cannot be.*; correct it in PLATO_STATE__PORT$",
    ),
    "environment-json": ("", {"PLATO_GATEWAY__WS_ORIGINS": "[1"}, "gateway.ws_origins: '.1' cannot be used"),
    "twice": (
        "gateway: {tcp_port: 1}\nlog: {level: info}\ngateway: {ws_port: 2}\n",
        {},
        r"settings file /.*/plato.yaml: gateway is written twice, again in line 3; leave one of the two",
    ),
    "key-twice": ("gateway:\n  tcp_port: 1\n  tcp_port: 2\n", {}, "tcp_port is written twice, again in line 3"),
    "two-at-once": ("gateway: {tcp_port: x, ws_port: y}\n", {}, "gateway.tcp_port.*and 1 more"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_setting_gives_one_line_with_the_way_out(tmp_path: Path, name: str) -> None:
    text, environ, words = BAD[name]
    with pytest.raises(SettingsError, match=words) as caught:
        load(written(tmp_path, text), environ=environ)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SettingsError, match=r"settings file .*; name a readable file") as caught:
            load(path, environ={})
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is no YAML"):
        load(binary, environ={})


def test_a_bad_flag_is_called_as_the_user_wrote_it() -> None:
    with pytest.raises(SettingsError, match=r"local.port_offset: -1 cannot be used: .*; correct it in --port-offset$"):
        load(environ={}, flags={"local.port_offset": -1}, flag_names={"local.port_offset": "--port-offset"})


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    path = written(tmp_path, "store: {key_prefix: a}\n")
    settings = load(path, environ={"PLATO_LOCAL__DATA_DIR": "", "PLATO_STORE__KEY_PREFIX": "", "PLATO_NO__KEY": ""})
    assert settings.local.data_dir is None
    assert settings.store.key_prefix == "a"


def test_a_flag_without_a_section_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"tcp_port: names no key; write section\.key"):
        load(environ={}, flags={"tcp_port": 1})
