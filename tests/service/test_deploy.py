"""The files in deploy/: valid by their schemas, and what they run are commands that there are."""

from __future__ import annotations

import configparser
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stager.cli.serve import serve
from stager.cli.top import top

DEPLOY = Path(__file__).parents[2] / "deploy"


def parsed(command, arguments):
    """The options that a command line gives, as the command itself reads them."""
    return command.make_context(command.name, list(arguments)).params


# ------------------------------------------------------------------------------ Kubernetes


@pytest.fixture(scope="module")
def job():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())


@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_the_manifest_is_valid_by_the_schema_of_kubernetes(job, version):
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(job, version, strict=True)
    broken = json.loads(json.dumps(job))
    broken["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


def test_the_pod_has_what_sharing_a_gpu_and_ending_in_order_need(job):
    pod = job["spec"]["template"]["spec"]
    (service,), (trainer,) = pod["initContainers"], pod["containers"]
    assert pod["shareProcessNamespace"] is True
    # The containers of a pod share the IPC namespace; nothing here takes another one.
    assert "hostIPC" not in pod
    assert service["restartPolicy"] == "Always"
    for container in (service, trainer):
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"packs": "/packs", "shared": "/run/shared", "scratch": "/tmp"}
        socket = {one["name"]: one["value"] for one in container["env"]}["STAGER_SERVICE_SOCKET"]
        # In a directory of its own, which the service makes with mode 0700: the volume's is open to the group.
        assert socket == "/run/shared/10001/service.sock"
    assert service["resources"]["requests"]["nvidia.com/gpu"] == service["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= service.keys()
    assert pod["terminationGracePeriodSeconds"] > 30
    assert {volume["name"] for volume in pod["volumes"]} == {"packs", "shared", "scratch"}


def test_the_manifest_runs_commands_that_there_are(job):
    (service,) = job["spec"]["template"]["spec"]["initContainers"]
    name, *arguments = service["args"]
    assert name == "serve"
    told = parsed(serve, arguments)
    assert told["packs"] == ("/packs/prices.pack",)
    port = service["ports"][0]["containerPort"]
    assert told["metrics"] == f"0.0.0.0:{port}"
    assert service["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert job["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    program, name, *arguments = service["livenessProbe"]["exec"]["command"]
    assert (program, name) == ("stager", "top")
    assert parsed(top, arguments)["as_json"]


# ------------------------------------------------------------------------------- container


SCHEMA = {
    "type": "array",
    "minItems": 2,
    "items": {
        "type": "object",
        "required": ["instruction", "value"],
        "properties": {
            "instruction": {
                "enum": ["ARG", "CMD", "COMMENT", "COPY", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "RUN",
                         "STOPSIGNAL", "USER", "WORKDIR"],
            },
            "value": {"type": "string"},
        },
    },
    "contains": {"properties": {"instruction": {"const": "ENTRYPOINT"}, "value": {"const": '["stager"]'}}},
}  # fmt: skip


def test_the_container_file_is_valid_and_runs_as_nobody_special(tmp_path):
    parse = pytest.importorskip("dockerfile_parse")
    jsonschema = pytest.importorskip("jsonschema")
    shutil.copy(DEPLOY / "Containerfile", tmp_path / "Dockerfile")
    parser = parse.DockerfileParser(path=str(tmp_path))
    jsonschema.validate(parser.structure, SCHEMA)
    found = {}
    for one in parser.structure:
        found.setdefault(one["instruction"], []).append(one["value"])
    assert all(":" in image.split()[0] for image in found["FROM"])
    assert found["USER"] == ["10001"]
    assert found["STOPSIGNAL"] == ["SIGTERM"]
    for value in found["COPY"]:
        if not value.startswith("--from"):
            *sources, _ = value.split()
            assert all((DEPLOY.parent / source).exists() for source in sources), value
    command = json.loads(found["HEALTHCHECK"][0].partition("CMD ")[2])
    assert command[:2] == ["stager", "top"]
    assert parsed(top, command[2:])["as_json"]
    assert json.loads(found["CMD"][0]) == ["serve", "--help"]


# --------------------------------------------------------------------------------- systemd


UNIT_SCHEMA = {
    "type": "object",
    "required": ["Unit", "Service", "Install"],
    "additionalProperties": False,
    "properties": {
        "Unit": {"type": "object", "required": ["Description", "After"]},
        "Install": {"type": "object", "required": ["WantedBy"]},
        "Service": {
            "type": "object",
            "required": ["ExecStart", "User", "EnvironmentFile", "MemoryHigh", "TasksMax"],
            "properties": {
                "Type": {"const": "exec"},
                "KillSignal": {"const": "SIGTERM"},
                "TimeoutStopSec": {"type": "string", "pattern": "^(3[0-9]|[4-9][0-9])$"},
                "Restart": {"const": "on-failure"},
                "RuntimeDirectoryMode": {"const": "0700"},
                "UMask": {"const": "0077"},
                "LimitMEMLOCK": {"const": "infinity"},
                "NoNewPrivileges": {"const": "yes"},
            },
            # CUDA shares memory between processes that see one another and the devices.
            "not": {"anyOf": [{"required": [name]} for name in ("PrivateDevices", "PrivateIPC", "PrivateTmp")]},
        },
    },
}


@pytest.fixture
def unit():
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters="=", comment_prefixes="#")
    parser.optionxform = str
    parser.read(DEPLOY / "stager@.service")
    return parser


def test_the_unit_is_valid_by_its_schema(unit):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate({name: dict(unit[name]) for name in unit.sections()}, UNIT_SCHEMA)


def test_the_unit_runs_a_command_that_there_is(unit):
    text = unit["Service"]["ExecStart"]
    text = text.replace("$STAGER_OPTIONS", "--device cuda:0 --metrics 9464").replace(
        "$STAGER_PACKS", "/data/a.pack b=/c"
    )
    program, name, *arguments = shlex.split(text)
    assert (program, name) == ("/opt/stager/bin/stager", "serve")
    assert parsed(serve, arguments)["packs"] == ("/data/a.pack", "b=/c")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_itself_finds_nothing_wrong(tmp_path):
    file = tmp_path / "stager@root.service"
    text = (DEPLOY / "stager@.service").read_text()
    file.write_text(text.replace("/opt/stager/bin/stager", sys.executable))

    def complaints():
        done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
        return [line for line in (done.stdout + done.stderr).splitlines() if str(file) in line]

    assert complaints() == []
    file.write_text(text.replace("UMask=", "Umsk="))
    assert len(complaints()) >= 1
