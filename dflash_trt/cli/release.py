"""`dflash-trt sign`, `pack` and `unpack`: a build on its way to a registry, and from it."""
# ruff: noqa: PLC0415

from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_trt.cli.output import Built, Json, print_json, reporting
from dflash_trt.errors import RequestError


def sign(
    directory: Built,
    key: Annotated[
        Path | None, typer.Option(help="PEM of a private key: P-256, P-384 or P-521.")
    ] = None,
    keyless: Annotated[
        bool, typer.Option("--keyless", help="By Sigstore, with a login; needs the network.")
    ] = False,
    identity_token: Annotated[
        str | None,
        typer.Option(help="With --keyless: the login.", envvar="DFLASH_TRT_IDENTITY_TOKEN"),
    ] = None,
) -> None:
    """Sign every file of a build (OpenSSF Model Signing): writes model.sig into it."""
    from dflash_trt.build import check_build
    from dflash_trt.build.signing import sign as run

    if (key is None) != keyless:
        raise RequestError("who signs is not clear", "Give --key FILE or --keyless, one of them")
    with reporting() as report:
        check_build(directory, "full", report)
    print(f"signed: {run(directory, key, identity_token)}")


def pack(
    directory: Built,
    output: Annotated[Path, typer.Argument(help="Directory of the OCI image layout.")],
    layout: Annotated[
        Literal["modelpack", "modelcar"],
        typer.Option("--as", help="ModelPack's artifact, or an image with the files in /models."),
    ] = "modelpack",
    json_: Json = False,
) -> None:
    """Write a build as an OCI image layout, to be copied to any registry."""
    from dflash_trt.build import check_build
    from dflash_trt.build.pack import pack as run

    with reporting() as report:
        check_build(directory, "full", report)
        digest = run(directory, output, layout, report)
    if json_:
        print_json(directory=str(output), layout=layout, digest=digest)
    else:
        print(f"packed {output} ({layout}): {digest}")
        print(f"copy it: skopeo copy oci:{output} docker://REGISTRY/NAME:TAG")


def unpack(
    layout: Annotated[Path, typer.Argument(help="OCI image layout, as `pack` writes it.")],
    output: Annotated[Path, typer.Argument(help="Directory of the build.")],
) -> None:
    """Write the build that a layout holds, after a look at every digest."""
    from dflash_trt.build.unpack import unpack as run

    with reporting() as report:
        run(layout, output, report)
    print(f"unpacked {output}; check who signed it: dflash-trt check {output} --key KEY")
