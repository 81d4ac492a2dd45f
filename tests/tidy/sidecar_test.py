"""The Kubernetes example asks for no privilege, and shares nothing with its host; nor does it with the patch for a GPU."""
import sys
from pathlib import Path

try:
    import yaml
except ImportError:
    print("skipped: no yaml module")
    sys.exit(77)


def problems(pod):
    spec = pod["spec"]
    for field in ("hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace"):
        if spec.get(field) is not False:
            yield f"{field} is not false"
    if spec["securityContext"].get("runAsNonRoot") is not True:
        yield "runs as root"
    if spec["securityContext"].get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "seccomp is not RuntimeDefault"
    for volume in spec["volumes"]:
        if "hostPath" in volume:
            yield f"volume {volume['name']} is a hostPath"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    if "emptyDir" not in volumes["sockets"]:
        yield "the sockets are in no emptyDir"
    for container in spec["initContainers"] + spec["containers"]:
        name, context = container["name"], container["securityContext"]
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield f"{name} may gain privileges"
        if context["capabilities"] != {"drop": ["ALL"]}:
            yield f"{name} keeps capabilities"
        if "memory" not in container["resources"].get("limits", {}):
            yield f"{name} has no memory limit"
        for mount in container["volumeMounts"]:
            if mount["name"] not in volumes:
                yield f"{name} mounts {mount['name']}, which is no volume"
            if mount["name"] == "models" and mount.get("readOnly") is not True:
                yield f"{name} can write the models"
    for container in spec["containers"]:
        if not any(mount["name"] == "sockets" for mount in container["volumeMounts"]):
            yield f"{container['name']} does not see the sockets"
        if "readinessProbe" not in container:
            yield f"{container['name']} has no readiness probe"


def patched(base, patch):
    """As `kubectl patch` does: maps are merged, lists of named things by name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: patched(base.get(key), value) for key, value in patch.items()}}
    if not isinstance(base, list) or not all(isinstance(item, dict) and "name" in item for item in base + patch):
        return patch
    changes = {item["name"]: item for item in patch}
    merged = [patched(item, changes.pop(item["name"], {})) for item in base]
    return merged + list(changes.values())


def gpu_problems(pod):
    containers = {container["name"]: container for container in pod["spec"]["containers"]}
    if set(containers) != {"moecached", "llama-server"}:
        yield "the patch names a container that the Pod does not have"
        return
    asks = [name for name, container in containers.items() if "nvidia.com/gpu" in container["resources"]["limits"]]
    if asks != ["llama-server"]:
        yield f"{asks} ask for GPUs: two containers that do get different ones"
    environment = {variable["name"]: variable["value"] for variable in containers["moecached"].get("env", [])}
    if environment.get("NVIDIA_VISIBLE_DEVICES") != "all":
        yield "the daemon does not see the GPU of its client"
    if not pod["spec"].get("runtimeClassName"):
        yield "no runtime that brings the driver"


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    found = list(problems(yaml.safe_load(text)))
    with open(Path(sys.argv[1]).with_name("gpu.yaml"), encoding="utf-8") as file:
        gpu_text = file.read()

    def gpu_found(patch_text):
        pod = patched(yaml.safe_load(text), yaml.safe_load(patch_text))
        return list(gpu_problems(pod)) or list(problems(pod))

    found += gpu_found(gpu_text)
    for good, bad in (("- name: moecached", "- name: moecache"), ("value: all", "value: none"),
                      ("limits: {memory: 32Gi}", "limits: {memory: 32Gi, nvidia.com/gpu: 1}"), ("runtimeClassName: nvidia", "hostPID: true")):
        if good not in gpu_text or not gpu_found(gpu_text.replace(good, bad)):
            found.append(f"not noticed: {bad}")
    # Each of these must be noticed, or the check above is worth nothing.
    for good, bad in (("hostPID: false", "hostPID: true"), ('drop: ["ALL"]', "drop: []"), ("mountPath: /models, readOnly: true", "mountPath: /models"),
                      ("type: RuntimeDefault", "type: Unconfined"), ("limits: {memory: 4Gi}", "limits: {}")):
        if good not in text or not list(problems(yaml.safe_load(text.replace(good, bad)))):
            found.append(f"not noticed: {bad}")
    for problem in found:
        print(problem)
    return 1 if found else 0


sys.exit(main())
