"""An uninstall is refused while PlatoClusters are left, in words that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from plato_operator import uninstall


@pytest.fixture(autouse=True)
def no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads a kubeconfig."""
    monkeypatch.setattr("kubernetes.config.load_config", lambda: None)


def test_nothing_left_lets_it_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(uninstall, "list_clusters", lambda namespace: [])
    assert uninstall.main(["a", "b"]) == 0
    assert "no PlatoCluster is left" in capsys.readouterr().out


@pytest.mark.planner
def test_o12_each_cluster_left_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(uninstall, "list_clusters", {"a": [], "b": ["b/one", "b/two"]}.__getitem__)
    assert uninstall.main(["a", "b"]) == 1
    said = capsys.readouterr().out
    assert "kubectl -n b delete platocluster one\n" in said
    assert "kubectl -n b delete platocluster two\n" in said
    assert "--no-hooks" in said


def test_what_cannot_be_listed_is_not_taken_for_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(namespace: str) -> list[str]:
        raise ApiException(status=403, reason="Forbidden")

    monkeypatch.setattr(uninstall, "list_clusters", forbidden)
    assert uninstall.main(["a"]) == 1
    assert "403 Forbidden" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "left"), [(404, []), (200, ["a/demo"])])
def test_a_definition_that_is_gone_leaves_no_cluster(
    monkeypatch: pytest.MonkeyPatch, status: int, left: list[str]
) -> None:
    def listed(self: Any, *asked: str) -> dict[str, Any]:
        assert asked == ("plato.im", "v1alpha1", "a", "platoclusters")
        if status == 404:
            raise ApiException(status=404, reason="Not Found")
        return {"items": [{"metadata": {"name": "demo", "namespace": "a"}}]}

    monkeypatch.setattr("kubernetes.client.CustomObjectsApi.list_namespaced_custom_object", listed)
    assert uninstall.list_clusters("a") == left


def test_all_namespaces_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(self: Any, *asked: str) -> dict[str, Any]:
        assert asked == ("plato.im", "v1alpha1", "platoclusters")
        return {"items": [{"metadata": {"name": "demo", "namespace": n}} for n in ("a", "b")]}

    monkeypatch.setattr("kubernetes.client.CustomObjectsApi.list_cluster_custom_object", listed)
    assert uninstall.left(["*"], uninstall.list_clusters) == ["a/demo", "b/demo"]
