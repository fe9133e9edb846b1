"""How Kafka is reached: settings, and files of client properties as Java clients and librdkafka take them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from plato.adapters.bus_kafka_config import KafkaConfig, properties
from plato.runtime.settings import BusSettings, SettingsError, load


def config(**settings: Any) -> KafkaConfig:
    return KafkaConfig(BusSettings(type="kafka", **settings))


def written(folder: Path, text: str) -> Path:
    path = folder / "client.properties"
    path.write_text(text)
    return path


def test_plain_servers() -> None:
    assert config(servers="a:9092, b:9092").options() == {
        "bootstrap_servers": ["a:9092", "b:9092"],
        "security_protocol": "PLAINTEXT",
        "client_id": "plato",
    }


def test_a_password_is_read_from_its_file_each_time(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("one\n")
    found = config(
        servers="a:1", security_protocol="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-512", username="plato",
        password_file=secret,
    )  # fmt: skip
    options = found.options()
    assert (options["sasl_mechanism"], options["sasl_plain_username"]) == ("SCRAM-SHA-512", "plato")
    assert options["sasl_plain_password"] == "one"
    secret.write_text("two\n")
    assert found.options()["sasl_plain_password"] == "two"
    assert "two" not in repr(found) + found.where()


def test_properties_of_a_java_client(tmp_path: Path) -> None:
    ca = trustme.CA()
    pem = ca.cert_pem.bytes().decode().replace("\n", "\\n")
    path = written(
        tmp_path,
        f"""# ours
bootstrap.servers=k1:9093,k2:9093
security.protocol = SASL_SSL
sasl.mechanism: SCRAM-SHA-256
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\
    username="plato" password="p=\\\\"x";
ssl.truststore.type=PEM
ssl.truststore.certificates={pem}
ssl.endpoint.identification.algorithm=
""",
    )
    options = config(properties_file=path).options()
    assert options["bootstrap_servers"] == ["k1:9093", "k2:9093"]
    assert options["sasl_mechanism"] == "SCRAM-SHA-256"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("plato", 'p="x')
    context = options["ssl_context"]
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert not context.check_hostname
    assert len(context.get_ca_certs()) == 1


def test_properties_of_librdkafka_and_our_own_certificate(tmp_path: Path) -> None:
    ca = trustme.CA()
    own = ca.issue_cert("plato")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    path = written(
        tmp_path,
        f"metadata.broker.list=k:9093\nsecurity.protocol=ssl\nssl.ca.location={tmp_path}/ca.crt\n"
        f"ssl.certificate.location={tmp_path}/own.pem\n",
    )
    context = config(properties_file=path).options()["ssl_context"]
    assert context.check_hostname


def test_what_the_settings_say_wins_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "bootstrap.servers=file:1\nsasl.username=file\nsasl.password=file\n")
    options = config(
        properties_file=path, servers="said:1", security_protocol="SASL_PLAINTEXT", username="me"
    ).options()
    assert options["bootstrap_servers"] == ["said:1"]
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("me", "file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bootstrap.servers=a:1\ngroup.id=x\n", r"group\.id is not known here; known: bootstrap\.servers"),
        ("security.protocol=SSL\n", r"bus\.servers: empty"),
        ("bootstrap.servers=a:1\nsecurity.protocol=TLS\n", "'TLS' cannot be used: must be PLAINTEXT"),
        ("bootstrap.servers=a:1\nsecurity.protocol=SASL_SSL\nsasl.mechanism=GSSAPI\n", "'GSSAPI' cannot be used"),
        ("bootstrap.servers=a:1\nsecurity.protocol=SASL_SSL\n", r"bus\.username, bus\.password_file: SASL_SSL needs"),
        ("bootstrap.servers=a:1\nsasl.jaas.config=x required;\n", r"sasl\.jaas\.config must hold username"),
        ("bootstrap.servers=a:1\nssl.truststore.type=JKS\n", "only PEM stores can be read, not JKS"),
        ("bootstrap.servers=a:1\nsecurity.protocol=SSL\nssl.ca.location=/nowhere\n", r"bus\.ca_file"),
        ("bootstrap.servers\n", "has no value; write key=value"),
    ],
)
def test_what_cannot_work_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        config(properties_file=written(tmp_path, text)).options()


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"bus\.properties_file: .*nowhere cannot be used: No such file"):
        config(properties_file=tmp_path / "nowhere").options()
    with pytest.raises(SettingsError, match=r"bus\.password_file"):
        config(servers="a:1", password_file=tmp_path / "nowhere").options()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"PLATO_BUS__TYPE": "kafka"}, r"type kafka needs bus\.servers"),
        ({"PLATO_BUS__SERVERS": "a:1"}, r"but bus\.type is postgres; set it to kafka"),
        ({"PLATO_BUS__TYPE": "kafka", "PLATO_BUS__SERVERS": "a:1", "PLATO_BUS__TOPIC": "a b"}, r"bus\.topic"),
    ],
)
def test_a_bus_that_is_half_said_is_refused(said: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(Path("/dev/null"), environ=said)


@given(st.text(max_size=200))
def test_any_text_is_properties_or_refused(text: str) -> None:
    try:
        found = properties(text)
    except ValueError:
        return
    assert all(isinstance(key, str) and key for key in found)
