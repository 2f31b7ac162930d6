"""The frame of named checks: of a pair (the modules here), of a bundle, of a machine.

A check is one decorated function. Its name is the check's, its docstring says what goes wrong
silently without it. It raises NotKnown where it cannot tell, and a DflashError where what it looks
at is wrong in itself.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec

from dflash_trt.config import Method
from dflash_trt.errors import DflashError

P = ParamSpec("P")
# error: cannot run, or never drafts well; warning: suspicious, or worse than it could be; note:
# what a user of the server may meet
Severity = Literal["error", "warning", "note"]


class NotKnown(Exception):
    """What a check asks for cannot be read."""


class Found(NamedTuple):
    """What a check says: a sentence that is true whether or not it is `ok`."""

    ok: bool
    what: str
    fix: str = ""  # for when it is not ok
    severity: Severity | None = None  # in place of the check's own


@dataclass(frozen=True)
class Finding:
    """The result of one check; `fix` is empty where it passed."""

    name: str
    result: Literal["passed", "note", "warning", "error", "not checked"]
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. {self.fix}."


@dataclass(frozen=True)
class Check(Generic[P]):
    """A named check; `look` is the decorated function."""

    look: Callable[P, Found]
    severity: Severity
    methods: tuple[Method, ...] = ()  # that it is for; empty: all

    @property
    def name(self) -> str:
        return self.look.__name__.replace("_", "-")

    def __call__(self, *subject: P.args, **options: P.kwargs) -> Finding:
        """Raises the DflashErrors of `look`; see `run`."""
        try:
            ok, what, fix, severity = self.look(*subject, **options)
        except NotKnown as missing:
            return Finding(self.name, "not checked", str(missing))
        return Finding(
            self.name, "passed" if ok else severity or self.severity, what, "" if ok else fix
        )


def check(severity: Severity, *methods: Method) -> Callable[[Callable[P, Found]], Check[P]]:
    """Make a function a check; what it returns when called is a Finding."""
    return lambda look: Check(look, severity, methods)


def checks_for(checks: Iterable[Check[P]], method: Method) -> list[Check[P]]:
    """Those for a method of decoding."""
    return [each for each in checks if not each.methods or method in each.methods]


def checks_of(*modules: ModuleType) -> list[Check[Any]]:
    """The checks that modules define, in the order of their files."""
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, Check) and found.look.__module__ == module.__name__
    ]


def run(checks: Iterable[Check[P]], *subject: P.args, **options: P.kwargs) -> Iterator[Finding]:
    """Each check's finding as it is made; a DflashError that one raises is an error."""
    for each in checks:
        try:
            yield each(*subject, **options)
        except DflashError as error:
            yield Finding(each.name, "error", error.problem, error.fix)
