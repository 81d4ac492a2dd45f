"""The Kubernetes example asks for no privilege, and shares nothing with its host."""
import sys

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


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    found = list(problems(yaml.safe_load(text)))
    # Each of these must be noticed, or the check above is worth nothing.
    for good, bad in (("hostPID: false", "hostPID: true"), ('drop: ["ALL"]', "drop: []"), ("mountPath: /models, readOnly: true", "mountPath: /models"),
                      ("type: RuntimeDefault", "type: Unconfined"), ("limits: {memory: 4Gi}", "limits: {}")):
        if good not in text or not list(problems(yaml.safe_load(text.replace(good, bad)))):
            found.append(f"not noticed: {bad}")
    for problem in found:
        print(problem)
    return 1 if found else 0


sys.exit(main())
