"""What a checkpoint's model card says of it: README.md's front matter, as the Hub defines it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.files import compose_yaml, parse_yaml, read_text

CARD = "README.md"


@dataclass(frozen=True)
class ModelCard:
    """Empty where there is no card, or no front matter that can be read."""

    license: str = ""  # the Hub's name of it, such as apache-2.0
    datasets: tuple[str, ...] = ()


def card_files(directory: Path) -> list[Path]:
    """The card as an input of a build; empty where there is none."""
    file = directory / CARD
    return [file] if file.is_file() else []


def read_card(directory: Path) -> ModelCard:
    """A card is prose with some data: what is wrong with it costs its facts, never a build."""
    try:
        text = read_text(directory / CARD)
        _, front, _ = text.split("---\n", 2) if text.startswith("---\n") else ("", "", "")
        found = parse_yaml(compose_yaml(front))
    except (OSError, ValueError, yaml.YAMLError):
        return ModelCard()
    values: dict[str, Any] = found if isinstance(found, dict) else {}
    said = values.get("license_name") if values.get("license") == "other" else values.get("license")
    datasets = values.get("datasets")
    names = datasets if isinstance(datasets, list) else [datasets]
    return ModelCard(
        said if isinstance(said, str) else "", tuple(x for x in names if isinstance(x, str))
    )
