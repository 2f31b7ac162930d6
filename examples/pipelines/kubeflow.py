"""Kubeflow Pipelines: with `kfp` and `kfp-kubernetes` installed, this writes release.yaml.

The Secret `signer` has signer.pem and signer.pub, the Secret `registry` a config.json of
registries. `before` is the URI of the last release's figures; the first one takes its own.
"""

from kfp import compiler, dsl, kubernetes

TOOLS = "registry.example.com/dflash-trt-tools:0.1.0"
BUILD = """
dflash-trt build "$0" --output "$1"
dflash-trt check "$1"
"""
BENCH = """
dflash-trt bench engine "$0" --output "$1"
"""
COMPARE = """
dflash-trt bench compare "$0" "$1"
"""
SIGN = """
cp -r "$0" "$1"
dflash-trt sign "$1" --key /signer/signer.pem
dflash-trt check "$1" --key /signer/signer.pub
"""
PUSH = """
dflash-trt pack "$0" /tmp/layout --as modelcar
skopeo copy --preserve-digests --authfile /registry/config.json oci:/tmp/layout "docker://$1"
"""
ROLL_OUT = """
kubectl patch "inferenceservice/$0" --type merge --patch "{\\"spec\\": {\\"predictor\\": {
  \\"canaryTrafficPercent\\": 10, \\"model\\": {\\"storageUri\\": \\"oci+native://$1\\"}}}}"
kubectl wait --for=condition=LatestDeploymentReady "inferenceservice/$0" --timeout=30m
"""


def shell(script: str, *arguments: object) -> dsl.ContainerSpec:
    return dsl.ContainerSpec(image=TOOLS, command=["sh", "-euc", script], args=list(arguments))


@dsl.container_component
def build(config: str, model: dsl.Output[dsl.Model]):
    return shell(BUILD, config, model.path)


@dsl.container_component
def bench(model: dsl.Input[dsl.Model], figures: dsl.Output[dsl.Metrics]):
    return shell(BENCH, model.path, figures.path)


@dsl.container_component
def compare(before: dsl.Input[dsl.Metrics], after: dsl.Input[dsl.Metrics]):
    return shell(COMPARE, before.path, after.path)


@dsl.container_component
def sign(model: dsl.Input[dsl.Model], signed: dsl.Output[dsl.Model]):
    return shell(SIGN, model.path, signed.path)


@dsl.container_component
def push(model: dsl.Input[dsl.Model], image: str):
    return shell(PUSH, model.path, image)


@dsl.container_component
def roll_out(service: str, image: str):
    return shell(ROLL_OUT, service, image)


@dsl.pipeline(name="release")
def release(config: str, service: str, image: str, before: str):
    built = build(config=config)
    measured = bench(model=built.outputs["model"])
    last = dsl.importer(artifact_uri=before, artifact_class=dsl.Metrics)
    compared = compare(before=last.output, after=measured.outputs["figures"])
    signed = sign(model=built.outputs["model"]).after(compared)
    kubernetes.use_secret_as_volume(signed, secret_name="signer", mount_path="/signer")
    pushed = push(model=signed.outputs["signed"], image=image)
    kubernetes.use_secret_as_volume(pushed, secret_name="registry", mount_path="/registry")
    roll_out(service=service, image=image).after(pushed)


if __name__ == "__main__":
    compiler.Compiler().compile(release, "release.yaml")
