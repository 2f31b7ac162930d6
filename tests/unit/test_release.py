"""What a pipeline does with a build: sign it, check it, describe it, pack it."""

import json
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from builds import config_of, contents, quiet
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from model_signing import signing
from pairs import make_pair

from dflash_trt.build.bom import BOM
from dflash_trt.build.manifest import SIGNATURE, check_build, differences, read_manifest
from dflash_trt.build.pack import pack
from dflash_trt.build.run import build
from dflash_trt.build.signing import sign, verify_signature
from dflash_trt.errors import BuildError, DflashError

CARD = "---\nlicense: apache-2.0\ndatasets:\n- org/texts\n---\n# A model\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a model card, its build under `built`, and two pairs of keys."""
    directory = tmp_path_factory.mktemp("release")
    make_pair(directory)
    (directory / "target" / "README.md").write_text(CARD)
    for name in ("key", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (directory / f"{name}.pem").write_bytes(private)
        (directory / f"{name}.pub").write_bytes(public)
    build(config_of(directory), directory / "built", quiet)
    sign(directory / "built", directory / "key.pem")
    return directory


@pytest.fixture
def built(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "built", tmp_path / "built"))


def test_a_signed_build_holds_and_its_signature_is_no_part_of_it(original: Path) -> None:
    verify_signature(original / "built", original / "key.pub")
    check_build(original / "built", "full")
    assert not build(config_of(original), original / "built", quiet).built
    assert (original / "built" / SIGNATURE).is_file()


def test_any_tool_of_the_format_reads_the_signature(original: Path) -> None:
    arguments = ["verify", "key", str(original / "built")]
    arguments += ["--signature", str(original / "built" / SIGNATURE)]
    arguments += ["--public_key", str(original / "key.pub")]
    code = "import sys; from model_signing._cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_another_key_and_a_missing_signature_are_refused(original: Path, built: Path) -> None:
    with pytest.raises(BuildError, match="does not hold"):
        verify_signature(built, original / "other.pub")
    (built / SIGNATURE).unlink()
    with pytest.raises(BuildError, match="has no signature"):
        verify_signature(built, original / "key.pub")


def test_one_flipped_bit_anywhere_is_named(original: Path, built: Path) -> None:
    chance = random.Random(1)
    signed = [file for file in sorted(built.rglob("*")) if file.is_file() and file.stat().st_size]
    signed.remove(built / SIGNATURE)
    for _ in range(200):
        file = chance.choice(signed)
        kept = file.read_bytes()
        place = chance.randrange(len(kept))
        flipped = kept[place] ^ 1 << chance.randrange(8)
        file.write_bytes(kept[:place] + bytes([flipped]) + kept[place + 1 :])
        name = file.relative_to(built).as_posix()
        with pytest.raises(BuildError, match=name.replace(".", r"\.")):
            verify_signature(built, original / "key.pub")
        if name != "manifest.json":
            assert name in differences(built, read_manifest(built), "full").changed
        file.write_bytes(kept)
    verify_signature(built, original / "key.pub")


def test_mutated_signatures_are_refused_with_a_sentence(original: Path, built: Path) -> None:
    kept, chance = (built / SIGNATURE).read_bytes(), random.Random(2)
    refused = 0
    for _ in range(300):
        mutated = bytearray(kept)
        for _ in range(chance.randrange(1, 4)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        cut = chance.choice([len(mutated), chance.randrange(len(mutated))])
        (built / SIGNATURE).write_bytes(mutated[:cut])
        try:
            verify_signature(built, original / "key.pub")
        except DflashError as error:
            said = str(error)
        else:  # white space, or a byte put in the place of itself
            assert json.loads(mutated[:cut]).keys() == json.loads(kept).keys()
            continue
        assert said.startswith("the signature of")
        assert "\n" not in said
        refused += 1
    assert refused > 290


def test_a_source_is_used_only_if_its_signer_signed_it(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "pair")
    pair, made = tmp_path / "pair", tmp_path / "made"
    signed = signing.Config().use_elliptic_key_signer(private_key=pair / "key.pem")
    signed.sign(pair / "target", pair / "target" / SIGNATURE)
    result = build(config_of(pair), made, quiet)
    assert result.warnings[-1].name == "signature-not-checked"
    target = {"path": pair / "target", "signed_by": pair / "key.pub"}
    checked = build(config_of(pair, target=target), made, quiet)
    assert "signature-not-checked" not in [finding.name for finding in checked.warnings]
    with pytest.raises(BuildError, match="does not hold"):
        build(config_of(pair, target={**target, "signed_by": pair / "other.pub"}), made, quiet)
    drafter = {"path": pair / "drafter", "signed_by": pair / "key.pub"}
    with pytest.raises(BuildError, match="has no signature"):
        build(config_of(pair, drafter=drafter), made, quiet)
    (pair / "target" / "tokenizer.json").write_text("{}")
    with pytest.raises(BuildError, match=r"tokenizer\.json changed"):
        build(config_of(pair, target=target), made, quiet)


def test_the_bill_of_materials_is_valid_and_complete(original: Path) -> None:
    text = (original / "built" / BOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom, manifest = json.loads(text), read_manifest(original / "built")
    target, drafter = bom["components"]
    assert target["type"] == drafter["type"] == "machine-learning-model"
    assert target["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert target["modelCard"]["modelParameters"]["datasets"][0]["name"] == "org/texts"
    assert "licenses" not in drafter
    for component in (target, drafter):
        listed = {each["name"]: each["hashes"][0]["content"] for each in component["components"]}
        inputs = manifest["inputs"][component["bom-ref"]]
        assert listed == {name: entry["sha256"] for name, entry in inputs.items()}
    assert {"onnx-ir", "numpy"} <= {x["name"] for x in bom["metadata"]["tools"]["components"]}
    assert BOM in manifest["files"]


@pytest.mark.parametrize("card", ["", "---\n", "---\n[\n---\n", "---\n- 1\n---\n", "\udcff"])
def test_a_broken_card_costs_its_facts_only(original: Path, tmp_path: Path, card: str) -> None:
    pair = Path(shutil.copytree(original, tmp_path / "pair"))
    (pair / "target" / "README.md").write_bytes(card.encode(errors="surrogateescape"))
    build(config_of(pair), pair / "again", quiet)
    target, _ = json.loads((pair / "again" / BOM).read_text())["components"]
    assert "licenses" not in target


@pytest.mark.parametrize("layout", ["modelpack", "modelcar"])
def test_a_pack_repeats_and_holds_the_build(original: Path, tmp_path: Path, layout: str) -> None:
    digests = [pack(original / "built", tmp_path / each, layout, quiet) for each in "ab"]
    assert digests[0] == digests[1]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    blobs = tmp_path / "a" / "blobs" / "sha256"
    top = json.loads((blobs / digests[0].removeprefix("sha256:")).read_text())
    for layer in top["layers"]:
        blob = blobs / layer["digest"].removeprefix("sha256:")
        assert blob.stat().st_size == layer["size"]
        with tarfile.open(blob) as archive:
            archive.extractall(tmp_path / "out", filter="data")
    unpacked = tmp_path / "out" / "models" if layout == "modelcar" else tmp_path / "out"
    assert contents(unpacked) == contents(original / "built")
    verify_signature(unpacked, original / "key.pub")


def test_a_pack_takes_no_links_and_nobody_elses_directory(original: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    engine = {"kind": "onnxruntime", "weights": "link"}
    build(config_of(original, engine=engine), linked, quiet)
    with pytest.raises(BuildError, match="is a link"):
        pack(linked, tmp_path / "out", "modelpack", quiet)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    with pytest.raises(BuildError, match="not an OCI layout"):
        pack(original / "built", tmp_path / "mine", "modelpack", quiet)
    assert (tmp_path / "mine" / "file").read_text() == "kept"
