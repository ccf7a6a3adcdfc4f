"""The templates in `deploy/`: complete, consistent with JAX's cluster detection, and able to resume runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import envs
from fdg.errors import FdgError
from fdg.processes import distributed, peers

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def documents(name):
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / f"kubernetes-{name}.yaml").read_text())}


def job_spec(name):
    """The spec of the Job, standalone or in a JobSet."""
    found = documents(name)
    if "Job" in found:
        return found["Job"]["spec"]
    (hosts,) = found["JobSet"]["spec"]["replicatedJobs"]
    assert NAME.fullmatch(hosts["name"]) and hosts["replicas"] == 1
    return hosts["template"]["spec"]


@pytest.fixture
def joined(monkeypatch):
    """Returns the (address, count, index) that this process would join with; it joins nothing."""
    seen = []

    def peer(address, count, index, notes=None):
        seen.append((address, count, index))
        raise FdgError("far enough")

    monkeypatch.setattr(peers, "Peers", peer)
    monkeypatch.setattr(distributed.ports, "free_port", lambda host: 1)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)

    def join():
        with pytest.raises(FdgError, match="far enough"):
            distributed.initialize()
        return seen.pop()

    return join


def test_commands_name_environments_that_exist():
    pages = [*DEPLOY.iterdir(), DEPLOY.parent / "docs" / "launching.md"]
    named = {name for page in pages for name in re.findall(r"--env[ =]([\w:./@|-]+)", page.read_text())}
    closed = {name for name in named if not name.startswith("ray:")}  # accepts any environment name
    assert closed and not closed - set(envs.names())


# --- SLURM ---


@pytest.mark.parametrize("nodes", ["node[07-08]", "node07,node08", "node[07,11-12],other1"])
def test_slurm_detection(joined, monkeypatch, nodes):
    variables = {"JOB_ID": "70001", "STEP_NODELIST": nodes, "NTASKS": "16", "PROCID": "9", "LOCALID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert joined() == (f"node07:{70001 % 4096 + 61440}", 16, 9)


def sbatch(folder, status, **more):
    """Runs the script as SLURM would; returns its exit status, `srun`'s arguments, whether it requeues."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(f'#!/bin/sh\necho "$@" > srun\necho $FDG_AUTHKEY > key\nexit {status}\n')
    (tools / "scontrol").write_text('#!/bin/sh\necho "$@" > scontrol\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", **more}
    (folder / "scontrol").unlink(missing_ok=True)
    words = ["bash", str(DEPLOY / "slurm.sbatch"), "--env", "ant", "--seed", "3"]
    ended = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    assert not ended.stderr
    return ended.returncode, (folder / "srun").read_text().split(), (folder / "scontrol").exists()


def test_slurm_script(tmp_path):
    start = "--kill-on-bad-exit=1 .venv/bin/python -m fdg.train --distributed".split()
    flags = "--env ant --seed 3".split()
    new, old = [*start, "--out", "runs/slurm-7", *flags], [*start, "--resume", "runs/slurm-7", *flags]
    assert sbatch(tmp_path, 0) == (0, new, False)
    assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / "key").read_text())
    assert sbatch(tmp_path, 2) == (2, new, False)  # status 2 is an error of the user: no requeue
    (tmp_path / "runs/slurm-7").mkdir(parents=True)
    (tmp_path / "runs/slurm-7/config.json").write_text("{}")
    assert sbatch(tmp_path, 143) == (143, old, True)
    assert sbatch(tmp_path, 1, SLURM_RESTART_COUNT="20") == (1, old, False)
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (DEPLOY / "slurm.sbatch").read_text(), re.M)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal"} <= dict(options).keys()
    assert dict(options)["ntasks-per-node"] == dict(options)["gpus-per-node"]  # JAX: one device per process
    assert "/" not in dict(options)["output"]  # SLURM makes no folders, and a job without its log fails


# --- Kubernetes ---

# (required, optional) fields of each object, from the references of kubernetes.io and jobset.sigs.k8s.io.
FIELDS = {
    "Job spec": ({"template"}, {"completionMode", "parallelism", "completions", "backoffLimit"}),
    "Pod spec": (
        {"containers", "restartPolicy"},
        {"subdomain", "serviceAccountName", "terminationGracePeriodSeconds", "volumes"},
    ),
    "Container": ({"name", "image"}, {"command", "args", "env", "ports", "resources", "volumeMounts"}),
    "JobSet spec": ({"replicatedJobs"}, {"failurePolicy", "network"}),
    "Network": (set(), {"enableDNSHostnames", "publishNotReadyAddresses"}),
    "Service spec": ({"clusterIP", "selector"}, {"publishNotReadyAddresses"}),
    "Role": ({"apiVersion", "kind", "metadata", "rules"}, set()),
    "RoleBinding": ({"apiVersion", "kind", "metadata", "roleRef", "subjects"}, set()),
    "Claim spec": ({"accessModes", "resources"}, set()),
}


def check_fields(kind, part):
    required, optional = FIELDS[kind]
    assert required <= part.keys() <= required | optional, (kind, part.keys())


@pytest.mark.parametrize("name", ["jobset", "indexed-job"])
def test_kubernetes_jobs(name):
    spec, found = job_spec(name), documents(name)
    check_fields("Job spec", spec)
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    check_fields("Pod spec", pod)
    assert pod["restartPolicy"] == "Never"  # after a failure all pods are replaced
    (container,) = pod["containers"]
    check_fields("Container", container)
    claims = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == claims.keys()
    access = documents("access")
    assert [access["PersistentVolumeClaim"]["metadata"]["name"]] == list(claims.values())
    assert pod["serviceAccountName"] == access["ServiceAccount"]["metadata"]["name"]
    assert all(NAME.fullmatch(one["metadata"]["name"]) for one in [*found.values(), *access.values()])
    if name == "jobset":
        assert found["JobSet"]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        check_fields("JobSet spec", found["JobSet"]["spec"])
        check_fields("Network", found["JobSet"]["spec"]["network"])
        assert "subdomain" not in pod  # JAX uses the set's name, JobSet's default
    else:
        assert found["Job"]["apiVersion"] == "batch/v1"
        check_fields("Service spec", found["Service"]["spec"])
        assert found["Service"]["spec"]["clusterIP"] == "None"  # a headless service, which gives pods names
        assert found["Service"]["metadata"]["name"] == pod["subdomain"]
        assert found["Service"]["spec"]["selector"] == {"job-name": found["Job"]["metadata"]["name"]}


def test_kubernetes_access():
    access = documents("access")
    check_fields("Role", access["Role"])
    check_fields("RoleBinding", access["RoleBinding"])
    check_fields("Claim spec", access["PersistentVolumeClaim"]["spec"])
    assert access["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert access["RoleBinding"]["roleRef"]["name"] == access["Role"]["metadata"]["name"]
    allowed = {
        (resource, verb)
        for rule in access["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed >= {("pods", "list"), ("jobs", "get"), ("services", "list")}  # JAX's requests


@pytest.mark.parametrize("name", ["jobset", "indexed-job"])
def test_pod_command(tmp_path, name):
    """Resumes the run if it exists, otherwise starts it."""
    (container,) = job_spec(name)["template"]["spec"]["containers"]
    (script,) = container["args"]
    (mount,) = container["volumeMounts"]
    assert script.startswith(f"run={mount['mountPath']}/")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)

    def arguments():
        words = [*container["command"], script.replace(mount["mountPath"], str(tmp_path))]
        environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout

    flags = "--env brax:ant --num-envs 4096 --total-steps 5e8\n"
    assert arguments() == f"-m fdg.train --distributed --out {tmp_path}/ant {flags}"
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "config.json").touch()
    assert arguments() == f"-m fdg.train --distributed --resume {tmp_path}/ant {flags}"
