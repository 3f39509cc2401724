"""Checks that Python and the installed packages are as new as this package requires."""

from __future__ import annotations

import importlib.metadata
import platform

from hetero_framework.errors import UserError

PACKAGE = "hetero-framework"
LIBRARIES = ("torch", "transformers", "peft")
"""Libraries that must have the required versions for anything to work."""


def too_old() -> list[tuple[str, str, str]]:
    """(name, versions needed, version here) of Python and each of LIBRARIES that is too old or
    absent. Empty if this package is run from its sources without being installed."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return []
    old = []
    python = SpecifierSet(about["Requires-Python"] or "")
    if not python.contains(platform.python_version(), prereleases=True):
        old.append(("Python", str(python), platform.python_version()))
    for needed in map(Requirement, about.get_all("Requires-Dist") or ()):
        here = installed(needed.name) or "absent"
        if needed.name in LIBRARIES and not (
            here != "absent" and needed.specifier.contains(here, prereleases=True)
        ):
            old.append((needed.name, str(needed.specifier), here))
    return old


def check() -> None:
    """Raise UserError, which names the versions needed and found, if something is too old."""
    if old := too_old():
        listed = ", ".join(f"{name} {here} (needed: {needed})" for name, needed, here in old)
        names = " ".join(f"'{name}{needed}'" for name, needed, _ in old if name != "Python")
        upgrade = f"pip install --upgrade {names}" if names else "install a newer Python"
        raise UserError(f"this is too old for hetero_framework: {listed}", hint=upgrade)


def has(requirement: str) -> bool:
    """Whether the package that a requirement of pip names is installed in a version that fits."""
    from packaging.requirements import Requirement

    needed = Requirement(requirement)
    here = installed(needed.name)
    return here is not None and needed.specifier.contains(here, prereleases=True)


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
