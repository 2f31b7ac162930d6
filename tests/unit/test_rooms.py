"""The package's rooms: imports point one way, through doors, in no circle; no file is long."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dflash_trt"
STRUCTURE = ROOT / "docs" / "structure.md"
LONGEST = 500  # lines of a file
# a room imports those after it, and modules that lie beside the rooms
ROOMS = [
    *("cli", "bench", "doctor", "serving", "build", "decoding", "tensorrt_llm"),
    *("chat", "engines", "graphs", "checkpoints", "config", "planning"),
]
# within `serving` the processes are rooms, too
PROCESSES = {"client", "front", "gateway", "openai", "server"}
# what takes long to load has a door of its own, and is imported where it is needed
SIDE_DOORS = {
    *("build.acceptance_probe", "build.built", "build.export", "build.run"),
    *(
        "build.settings",
        "checkpoints.checks",
        "build.signing",
        "cli.main",
        "engines.accuracy",
        "engines.cuda.kernels",
        "engines.onnxruntime",
        "engines.tensorrt.machine",
    ),
    *("engines.tensorrt.plan", "serving.client.fields", "tensorrt_llm.first_generation"),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def place_of(module: str) -> tuple[str, ...]:
    """The room, or the process of `serving`, that a module lies in; (): beside the rooms."""
    _, *parts = module.split(".")
    if not parts or parts[0] not in ROOMS:
        return ()
    return tuple(parts[: 2 if parts[:1] == ["serving"] and PROCESSES & {*parts[1:2]} else 1])


@cache
def exported(module: str) -> set[str]:
    """What a package's `__init__` binds."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


def imported(file: Path, *, typing: bool = True) -> list[str]:
    """The modules of ours that a file imports; typing: those for types alone, too."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            node.body = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash_trt"):
            module = str(node.module)
            names = [f"{module}.{alias.name}" for alias in node.names]
            # a door may give a function the name of its module
            found += [
                name
                if name in MODULES and name.rpartition(".")[2] not in exported(module)
                else module
                for name in names
            ]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
    return found


def room_of(module: str) -> str | None:
    """None: a module that lies beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def test_every_package_is_a_room() -> None:
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert packages == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    below = {None, *ROOMS[ROOMS.index(room) :]}
    for file in (PACKAGE / room).rglob("*.py"):
        for module in imported(file):
            assert room_of(module) in below, f"{file} imports {module}"


def test_modules_beside_the_rooms_import_no_room() -> None:
    for file in PACKAGE.glob("*.py"):
        if file.stem != "__main__":
            assert {room_of(module) for module in imported(file)} <= {None}, file


def is_door(module: str) -> bool:
    """A package of its own within another room is entered by its door, too."""
    return MODULES[module].stem == "__init__" or module.removeprefix("dflash_trt.") in SIDE_DOORS


def test_rooms_are_entered_by_their_doors() -> None:
    wrong = [
        f"{name_of(file)} imports {module}"
        for file in FILES
        for module in imported(file)
        if place_of(module) not in ((), ("serving",), place_of(name_of(file)))
        and not is_door(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle() -> None:
    graph = {
        name: [m for m in imported(file, typing=False) if m != name]
        for name, file in MODULES.items()
        if file.stem != "__init__"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("file", FILES, ids=[name_of(file) for file in FILES])
def test_no_file_is_long(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= LONGEST


def named(text: str) -> list[Path]:
    """The files that docs/structure.md names with their folder."""
    names = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|yaml))`", text)
    beside = [PACKAGE / name for name in re.findall(r"`(\w+\.py)`", text)]
    roots = ("tests", "scripts", "model_repository", "build_configs")
    return beside + [
        (ROOT if name.startswith(roots) else PACKAGE) / name for name in dict.fromkeys(names)
    ]


def test_the_page_names_files_that_are_there() -> None:
    text = STRUCTURE.read_text(encoding="utf-8")
    assert len(named(text)) > 100
    assert not [str(file) for file in named(text) if not file.is_file()]


def test_fifteen_files_are_read_in_an_evening() -> None:
    text = STRUCTURE.read_text(encoding="utf-8")
    files = named(text.partition("## Read these 15 files")[2].partition("## The rooms")[0])
    assert len(files) == 15
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert 2_900 <= lines <= 3_000  # as the page says
