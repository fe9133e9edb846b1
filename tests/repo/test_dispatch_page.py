"""docs/dispatch.md: the operator takes its overlay, what it names is there, its picture is what explain prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from plato.cli import dispatch
from plato.runtime.settings import Settings, load
from plato_ipconfig.core.rank import LOW, Group
from plato_operator.manifests.overlay import overlaid

from tests.repo.tracked import text

PAGE = text("docs/dispatch.md")


def test_the_overlay_is_taken_and_its_variables_are_settings() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    overlay: dict[str, Any] = yaml.safe_load(block)["spec"]["ipconfig"]["podOverlay"]
    golden = next(
        o
        for o in yaml.safe_load_all(text("operator/tests/golden/plain.yaml"))
        if (o["kind"], o["metadata"]["name"]) == ("Deployment", "demo-ipconfig")
    )
    pod = overlaid(golden["spec"]["template"], overlay)["spec"]
    (container,) = pod["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]} >= {"geo"}
    env = {e["name"]: e["value"] for e in container["env"] if "PLATO_IPCONFIG__" in e["name"]}
    read = load(Path("/dev/null"), environ=env).ipconfig
    assert (str(read.geoip_path), read.trusted_proxies) == ("/geo/GeoLite2-City.mmdb", ("10.0.0.0/8",))
    assert str(read.override_path) == "/run/plato/override.json"


def test_each_setting_metric_and_alert_that_it_names_is_there() -> None:
    for section, key in re.findall(r"`(ipconfig|gateway|auth|process|topology)\.([a-z_]+)`", PAGE):
        assert key in type(getattr(Settings(), section)).model_fields, f"{section}.{key}"
    code = text("images/ipconfig/plato_ipconfig/gauges.py")
    for metric in re.findall(r"`(plato_ipconfig_[a-z_]+)`", PAGE):
        assert metric in code
    alerts = {rule["alert"] for rule in yaml.safe_load(text("charts/plato/files/rules.yaml"))["groups"][0]["rules"]}
    assert set(re.findall(r"`(Plato[A-Z]\w+)`", PAGE)) - {"PlatoCluster"} <= alerts


def test_the_groups_stand_in_their_order() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| .* \|$", PAGE.split("## Where a caller is")[0], re.MULTILINE)
    assert rows[1:] == [group.name.lower() for group in sorted(Group)]
    assert LOW == 0.1


def test_the_picture_is_what_explain_prints() -> None:
    picture = re.search(r"\n((?: {4}.*\n|\n)+)\n## What the order", PAGE)
    assert picture
    lines = [line[4:] for line in picture[1].strip("\n").split("\n")]
    found: dict[str, Any] = {
        "caller": {"address": "198.51.100.7", "zone": "", "region": "", "map": [50.11, 8.68]},
        "map": {"loaded": True, "trouble": ""},
        "override": None,
        "gateways": [],
    }
    head = next(line for line in lines if "gateway" in line and "why" in line)
    starts = [0, *(head.index(word) for word in ("gateway", "zone", "group", "active", "static", "why"))]
    for line in lines[lines.index(head) + 1 :]:
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        place, name, zone, group, active, static, why = cells
        gateway = {"name": name, "zone": zone, "group": group, "active": float(active), "static": float(static)}
        found["gateways"].append({**gateway, "place": int(place) if place.isdecimal() else None, "why": why})
    assert dispatch.explained(json.loads(json.dumps(found))) == lines
