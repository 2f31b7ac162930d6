"""Keys for signatures of builds."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_keys(directory: Path, name: str = "key") -> None:
    """Write `name`.pem and `name`.pub: a new P-256 key pair as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (directory / f"{name}.pem").write_bytes(private)
    (directory / f"{name}.pub").write_bytes(public)
