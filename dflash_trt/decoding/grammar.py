"""What a text has to be, whatever the model would rather say."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Grammar:
    """A grammar that a text follows, as a request asks for it.

    kind, text: a JSON schema, a regular expression, or a grammar in llguidance's Lark (which
    may hold both: `%json {..}`, `/../`, and special tokens: `<|name|>`).
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
