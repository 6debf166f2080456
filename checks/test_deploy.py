"""The files in deploy/, as far as they can be checked without a cluster or Docker.

The dashboard is compared with the metrics of a server in tests/serve/test_metrics.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from packhorse.cli import main

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOY = REPOSITORY / "deploy"
KUBERNETES_VERSIONS = ("1.31", "1.34")
MAIN_PORT = 8080
METRICS_PORT = 9090


def settings_of(words: list[str], environment: dict[str, str], monkeypatch, capsys) -> Any:
    """The settings that `packhorse serve` would run with, which must accept these arguments."""
    for name, value in environment.items():
        if name.startswith("PACKHORSE_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACKHORSE_API_KEY", "secret")
    assert main(["serve", *words, "--print-config", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def image_user() -> int:
    return int(re.findall(r"--uid (\d+)", (REPOSITORY / "Dockerfile").read_text())[0])


# Kubernetes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    return {document["kind"]: document for document in documents}


@pytest.fixture
def pod(objects) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


def variables(container: Any) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_knows_every_field(objects, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kinds = {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    assert set(objects) == kinds
    for document in objects.values():
        kubernetes_validate.validate(document, version, strict=True)
    objects["Deployment"]["spec"]["template"]["spec"]["enableServiceLink"] = False  # a typo
    try:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(objects["Deployment"], version, strict=True)
    finally:
        del objects["Deployment"]["spec"]["template"]["spec"]["enableServiceLink"]


def test_the_pod_starts_a_server_that_its_probes_reach(pod, monkeypatch, capsys) -> None:
    (container,) = pod["containers"]
    settings = settings_of(container["args"], variables(container), monkeypatch, capsys)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": settings["port"], "metrics": settings["metrics_port"]}
    assert settings["host"] == "0.0.0.0"  # and so any address in a probe's Host header is its own
    paths = {}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["port"] == "metrics"
        paths[kind] = probe["path"]
    assert paths == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > sleep + settings["drain_seconds"] + 10
    assert pod["enableServiceLinks"] is False


def test_the_pod_may_do_little(pod) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == image_user()
    assert pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    for container in (*pod["initContainers"], *pod["containers"]):
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] is True
        assert limits["allowPrivilegeEscalation"] is False
        assert limits["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    environment = variables(container)
    assert "/tmp" in mounts and Path(environment["HF_HOME"]).parent.as_posix() in mounts
    # Compiled code lies in a folder that the first container made with mode 700.
    cache = mounts[environment["PACKHORSE_CACHE"]]
    (first,) = pod["initContainers"]
    (work,) = first["volumeMounts"]
    assert first["command"] == [
        "mkdir",
        "-p",
        "-m",
        "700",
        f"{work['mountPath']}/{cache['subPath']}",
    ]
    assert work["name"] == cache["name"]
    (key,) = [entry for entry in container["env"] if entry["name"] == "PACKHORSE_API_KEY"]
    assert "value" not in key and key["valueFrom"]["secretKeyRef"]["name"]


def test_the_other_objects_are_about_this_pod(objects, pod) -> None:
    deployment = objects["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    names = {port["name"] for port in pod["containers"][0]["ports"]}
    exposed = [port["targetPort"] for port in objects["Service"]["spec"]["ports"]]
    assert exposed == ["http"] and "http" in names  # what needs no key stays inside
    scaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["minReplicas"] > objects["PodDisruptionBudget"]["spec"]["minAvailable"]
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(METRICS_PORT)
    assert annotations["prometheus.io/path"] == "/metrics"


# Compose and systemd ---------------------------------------------------------------------------


def test_compose_starts_a_server_that_its_health_check_reaches(monkeypatch, capsys) -> None:
    document = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    ((name, service),) = document["services"].items()
    environment = service["environment"]
    assert environment["PACKHORSE_API_KEY"].startswith("${PACKHORSE_API_KEY:?")  # never a default
    settings = settings_of(service["command"], environment, monkeypatch, capsys)
    assert service["ports"] == [f"127.0.0.1:{settings['port']}:{settings['port']}"]
    assert service["expose"] == [str(settings["metrics_port"])]
    assert (
        f"http://127.0.0.1:{settings['metrics_port']}/health" in service["healthcheck"]["test"][-1]
    )
    assert name in settings["allow_host"]  # the name that Prometheus asks for
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    (cache,) = [entry for entry in service["tmpfs"] if ":" in entry]
    path, _, options = cache.partition(":")
    assert path == environment["PACKHORSE_CACHE"]
    assert f"uid={image_user()}" in options and "mode=0700" in options
    volumes = {entry.split(":")[0] for entry in service["volumes"]}
    assert volumes == set(document["volumes"])
    assert int(service["stop_grace_period"].rstrip("s")) > settings["drain_seconds"] + 10


def unit() -> dict[str, list[str]]:
    """The assignments of the systemd unit by name."""
    values: dict[str, list[str]] = {}
    for line in (DEPLOY / "packhorse.service").read_text("utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            values.setdefault(name, []).append(value)
    return values


def test_the_unit_starts_a_server(monkeypatch, capsys, tmp_path) -> None:
    values = unit()
    program, command, *words = shlex.split(values["ExecStart"][0])
    assert (Path(program).name, command) == ("packhorse", "serve")
    (tmp_path / "api-key").write_text("secret\n")
    (tmp_path / "api-key").chmod(0o400)
    words = [word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in words]
    settings = settings_of(words, {}, monkeypatch, capsys)
    assert (settings["port"], settings["metrics_port"]) == (MAIN_PORT, METRICS_PORT)
    assert values["LoadCredential"] == ["api-key:/etc/packhorse/api-key"]
    assert int(values["TimeoutStopSec"][0]) > settings["drain_seconds"] + 10
    folders = dict(word.split("=") for word in values["Environment"][0].split())
    # In folders that systemd makes; each in a folder of its own below, because with DynamicUser
    # systemd's own are links.
    assert folders["PACKHORSE_CACHE"].startswith(f"%C/{values['CacheDirectory'][0]}/")
    assert folders["PACKHORSE_RUNTIME"].startswith(f"%t/{values['RuntimeDirectory'][0]}/")


def test_the_unit_can_listen_on_a_socket(monkeypatch, capsys) -> None:
    text = (DEPLOY / "packhorse.service").read_text("utf-8")
    comment = re.search(r"# For nginx on this machine: (.+) in place of", text)
    assert comment is not None
    settings = settings_of(comment[1].split(), {}, monkeypatch, capsys)
    folder = f"/run/{unit()['RuntimeDirectory'][0]}/"
    assert settings["unix_socket"].startswith(folder) and settings["unix_socket_mode"] == "660"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path) -> None:
    text = (DEPLOY / "packhorse.service").read_text("utf-8")
    # It must find the program, which is not installed there.
    text = text.replace("/opt/packhorse/bin/packhorse", str(shutil.which("true")))
    (file := tmp_path / "packhorse.service").write_text(text)
    check = ["systemd-analyze", "verify", "--man=no"]
    result = subprocess.run([*check, str(file)], capture_output=True, text=True)
    assert "packhorse.service" not in result.stderr, result.stderr
    file.write_text(text.replace("ProtectHome=yes", "ProtectHomes=yes\nRestartSec=soon"))
    result = subprocess.run([*check, str(file)], capture_output=True, text=True)
    assert "ProtectHomes" in result.stderr and "soon" in result.stderr, "the check cannot fail"
