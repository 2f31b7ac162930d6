"""Signatures of directories in the OpenSSF Model Signing format (`model-signing`, an extra).

The signature is `model.sig` in the directory. It names every file that a server reads, with its
SHA-256, including the manifest, which covers the rest; any tool for the format can verify it.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_trt.builder.manifest import MANIFEST, SIGNATURE, Depth, check_build, served_files
from dflash_trt.errors import BuildError, RequestError
from dflash_trt.files import read_bytes, read_json

CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True)
class Signature:
    """What `model.sig` states; only `verify_signature` shows that it is true."""

    key: str  # SHA-256 of the signer's public key, as its PEM file has it
    of: str  # digest of the manifest that was signed
    time: str | None = None  # a signature by a key alone states none


def read_signature(directory: Path) -> Signature | None:
    """Return what the signature states; None without one, BuildError for a damaged one."""
    file = directory / SIGNATURE
    if not file.exists():
        return None
    try:
        bundle = read_json(file)
        payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        resources = payload["predicate"]["resources"]
        digests = {resource["name"]: resource["digest"] for resource in resources}
        hint = bundle["verificationMaterial"].get("publicKey", {}).get("hint", "")
        return Signature(key=str(hint), of=str(digests[MANIFEST]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{file} is not a signature of this build ({type(error).__name__}: {error})",
            "Sign it again with `dflash-trt sign`, or get the signature from its signer",
        ) from error


def sign(directory: Path, key: Path) -> Path:
    """Write `model.sig`; key: PEM of a private key on the curve P-256, P-384 or P-521."""
    directory = directory.resolve()  # the library accepts no link
    _check_key(key, "private")
    with _as_errors(f"cannot sign {directory}", "Give a readable PEM key, and an intact build"):
        from model_signing import signing  # noqa: PLC0415

        config = signing.Config().set_hashing_config(_hashing_config(directory))
        config.use_elliptic_key_signer(private_key=key)
        fresh = directory / f"{SIGNATURE}.new"  # written atomically
        try:
            config.sign(directory, fresh)
            fresh.replace(directory / SIGNATURE)
        finally:
            fresh.unlink(missing_ok=True)
    return directory / SIGNATURE


def check_signed(directory: Path, depth: Depth | None, key: Path | None) -> None:
    """Verify the signature if there is a key, then the build, hashing no file twice."""
    digested = verify_signature(directory, key) if key is not None else ()
    check_build(directory, depth, digested=digested)


def verify_signature(directory: Path, key: Path) -> frozenset[str]:
    """Return the signed files' names; BuildError unless they are intact and the key (PEM) fits."""
    directory = directory.resolve()
    _check_key(key, "public")
    if not (directory / SIGNATURE).is_file():
        raise BuildError(
            f"{directory} has no signature ({SIGNATURE})",
            "Sign it with `dflash-trt sign`, or get the signature from its signer",
        )
    fix = "Give the key of who signed it; if that is right, do not use these files"
    with _as_errors(f"the signature of {directory} does not hold", fix):
        from model_signing import verifying  # noqa: PLC0415

        # added files are ignored here, because the signed manifest lists all that belong
        config = verifying.Config().set_ignore_unsigned_files(True)
        config.use_elliptic_key_verifier(public_key=key)
        config.verify(directory, directory / SIGNATURE)
        envelope = json.loads((directory / SIGNATURE).read_bytes())["dsseEnvelope"]
        payload = json.loads(base64.b64decode(envelope["payload"]))
        return frozenset(resource["name"] for resource in payload["predicate"]["resources"])


def _check_key(file: Path, half: Literal["private", "public"]) -> None:
    """Raise RequestError for a file that holds no key of a kind that signs builds."""
    with _as_errors(f"cannot read the key {file}", f"Give the PEM file of a {half} key"):
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

        pem = read_bytes(file)
        key: object
        if half == "private":
            key = serialization.load_pem_private_key(pem, password=None)
        else:
            key = serialization.load_pem_public_key(pem)
    kinds = (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey)
    if not isinstance(key, kinds) or key.curve.name not in CURVES:
        kind = type(key).__name__.strip("_").removesuffix("Key")
        raise RequestError(
            f"the key {file} is of another kind ({kind}): builds are signed on the curves P-256, "
            "P-384 and P-521",
            "Make one: openssl ecparam -name prime256v1 -genkey -noout -out signer.pem",
        )


def _hashing_config(directory: Path) -> Any:
    from model_signing import hashing  # noqa: PLC0415

    listed = set(served_files(directory))
    left = [file for file in directory.rglob("*") if not file.is_dir() and file not in listed]
    ignored = [file.relative_to(directory) for file in (*left, directory / SIGNATURE)]
    config = hashing.Config().use_file_serialization(allow_symlinks=True)
    return config.set_ignored_paths(paths=ignored, ignore_git_paths=False)


@contextmanager
def _as_errors(problem: str, fix: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RequestError(
            "signatures need the package model-signing", "pip install 'dflash-trt[sign]'"
        ) from error
    except OSError as error:
        raise BuildError(f"{problem}: {error.strerror or error}", fix) from error
    except Exception as error:  # exceptions of the library, protobuf, JSON, cryptography and more
        raise BuildError(f"{problem}: {_reason(error)}", fix) from error


def _reason(error: Exception) -> str:
    """Return the files that differ, or the library's message."""
    message = str(error).strip()
    # quotes are escaped if a digest's bytes contain one
    differing = re.findall(r"Hash mismatch for \\?'([^'\\]+)", message)
    differing += re.findall(r"Missing files in model '[^']*': ([^'\"\]]+)", message)
    if differing:
        return f"{', '.join(differing)} changed since"
    return (message.splitlines() or [type(error).__name__])[0][:300]
