"""What a pipeline does with a build: sign it, check it, describe it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from dflash_trt.builder.manifest import SIGNATURE, check_build, read_manifest
from dflash_trt.builder.pipeline import build
from dflash_trt.builder.provenance import BOM
from dflash_trt.builder.signing import sign, verify_signature
from dflash_trt.errors import BuildError
from dflash_trt.serving.client import Client
from dflash_trt.serving.ports import free_ports
from tests.support.builds import config_of, contents, quiet
from tests.support.commands import program, run
from tests.support.pairs import make_pair
from tests.support.servers import serving
from tests.support.signing_keys import write_keys

CARD = "---\nlicense: apache-2.0\ndatasets:\n- org/texts\n---\n# A model\n"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("release")
    make_pair(directory)
    (directory / "target" / "README.md").write_text(CARD)
    for name in ("key", "other"):
        write_keys(directory, name)
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
    done = program(sys.executable, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr


def test_another_key_and_a_missing_signature_are_refused(original: Path, built: Path) -> None:
    with pytest.raises(BuildError, match="does not hold"):
        verify_signature(built, original / "other.pub")
    (built / SIGNATURE).unlink()
    with pytest.raises(BuildError, match="has no signature"):
        verify_signature(built, original / "key.pub")


def test_a_signature_is_whole_or_not_there(original: Path, built: Path) -> None:
    """On a full disk the old one stays."""
    code = """
import resource, sys
from dflash_trt.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
sys.exit(main())
"""
    before = contents(built)
    done = program(sys.executable, "-c", code, "sign", built, "--key", original / "other.pem")
    assert (done.returncode, "cannot sign" in done.stderr) == (1, True), done.stderr
    assert contents(built) == before


def test_the_bill_of_materials_is_valid_and_complete(original: Path) -> None:
    text = (original / "built" / BOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom, manifest = json.loads(text), read_manifest(original / "built")
    target, drafter, *packages = bom["components"]
    pins = (original / "built" / "requirements.txt").read_text().split()
    assert [f"{each['name']}=={each['version']}" for each in packages] == pins
    assert target["type"] == drafter["type"] == "machine-learning-model"
    assert target["licenses"] == [{"license": {"name": "apache-2.0"}}]
    assert target["modelCard"]["modelParameters"]["datasets"][0]["name"] == "org/texts"
    assert "licenses" not in drafter
    for component in (target, drafter):
        listed = {each["name"]: each["hashes"][0]["content"] for each in component["components"]}
        inputs = manifest["inputs"][component["bom-ref"]]
        assert listed == {name: entry["sha256"] for name, entry in inputs.items()}
    assert {"onnx-ir", "numpy"} <= {x["name"] for x in bom["metadata"]["tools"]["components"]}
    assert BOM in manifest["files"]


@pytest.mark.models
def test_sign_copy_check_serve(original: Path, built: Path, tmp_path: Path) -> None:
    texts, moved = [], tmp_path / "elsewhere" / "build"
    (built / SIGNATURE).unlink()
    code, _, err = run("sign", built, "--key", original / "key.pem")
    assert code == 0, err
    # an image leaves out what deploys it
    shutil.copytree(built, moved, ignore=shutil.ignore_patterns("deploy"))
    code, _, err = run("check", moved, "--key", original / "key.pub")
    assert code == 0, err
    for directory in (original / "built", moved):
        ports = free_ports()
        with (
            serving(directory, ports, f"--require-signature={original / 'key.pub'}"),
            Client(f"127.0.0.1:{ports.grpc}") as client,
        ):
            texts.append(client.generate("def main():", max_tokens=24).text)
    assert texts[0] == texts[1] != ""
