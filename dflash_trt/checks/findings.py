"""Framework of named checks: of a pair (beside this file), of a bundle, of a machine.

A check is a decorated function. Its name is the check's name; its docstring says what it prevents.
It raises NotKnown if it cannot tell, and a DflashError if its input is invalid.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, ParamSpec

from dflash_trt.checkpoints import NotKnown
from dflash_trt.config import Method
from dflash_trt.errors import DflashError

P = ParamSpec("P")
# error: cannot run, or drafts never match; warning: suspicious or suboptimal; note: what users of
# the server may notice
Severity = Literal["error", "warning", "note"]


class Found(NamedTuple):
    """A check's result: a sentence that is true whether or not it is `ok`."""

    ok: bool
    what: str
    fix: str = ""  # if not ok
    severity: Severity | None = None  # overrides the check's own


@dataclass(frozen=True)
class Finding:
    name: str
    result: Literal["passed", "note", "warning", "error", "not checked"]
    found: str
    fix: str = ""  # if not passed

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. {self.fix}."


@dataclass(frozen=True)
class Check(Generic[P]):
    look: Callable[P, Found]  # the decorated function
    severity: Severity
    methods: tuple[Method, ...] = ()  # methods it applies to; empty: all

    @property
    def name(self) -> str:
        return self.look.__name__.replace("_", "-")

    def __call__(self, *subject: P.args, **options: P.kwargs) -> Finding:
        try:
            seen = self.look(*subject, **options)
        except NotKnown as missing:
            return Finding(self.name, "not checked", str(missing))
        if seen.ok:
            return Finding(self.name, "passed", seen.what)
        return Finding(self.name, seen.severity or self.severity, seen.what, seen.fix)


def check(severity: Severity, *methods: Method) -> Callable[[Callable[P, Found]], Check[P]]:
    return lambda look: Check(look, severity, methods)


def checks_for(checks: Iterable[Check[P]], method: Method) -> list[Check[P]]:
    return [check for check in checks if not check.methods or method in check.methods]


def run(checks: Iterable[Check[P]], *subject: P.args, **options: P.kwargs) -> Iterator[Finding]:
    """Yield each check's finding; a DflashError becomes an error."""
    for check in checks:
        try:
            yield check(*subject, **options)
        except DflashError as error:
            yield Finding(check.name, "error", error.problem, error.fix)


def warnings_of(findings: Iterable[Finding], error: type[DflashError]) -> list[Finding]:
    """Return the warnings and notes among findings; raises the first error."""
    warnings = []
    for finding in findings:
        if finding.result == "error":
            raise error(f"{finding.name}: {finding.found}", finding.fix)
        if finding.result in ("warning", "note"):
            warnings.append(finding)
    return warnings
