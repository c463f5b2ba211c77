"""
What we ship: `make supply`.

The wheel is built and installed with every extra, from the lock with hashes, into an environment
that holds nothing else (build/shipped). Of that environment:

    installed   it imports, and pip finds nothing missing
    licences    each is one that may be used with ours; docs/dependencies.md lists them
    materials   CycloneDX, checked against its schema: build/sbom.cdx.json
    known       pip-audit asks the vulnerability service of PyPI

Exit code 1 says that one of them is not as it should be. Where nobody answers for the last one,
that is said, and is no failure unless asked for (`--known`): all the others need no network.
"""

import argparse
import json
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from license_expression import AND, OR, Licensing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "build" / "shipped"
LOCK = ROOT / "requirements" / "all.txt"
PAGE = ROOT / "docs" / "dependencies.md"
BILL = ROOT / "build" / "sbom.cdx.json"
TOOLS = Path(sys.executable).parent

ALLOWED = {
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",  # by file, and we change none of theirs
    "PSF-2.0",
}
REFUSED = (
    "GPL-3.0-only",
    "MIT AND GPL-3.0-only",
    "(MIT OR Apache-2.0) AND GPL-3.0-only",
    "LGPL-2.1-only AND (MIT OR BSD-3-Clause)",
    "GPL-2.0-only WITH Classpath-exception-2.0",
    "MIT, GPL-3.0-only",
    "UNKNOWN",
)
"""What must not get through, whatever is installed."""
SPELLED = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""What is said in words where an expression is usual now."""


class Wrong(Exception):
    """What we ship is not as it should be."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Look at what we ship.")
    parser.add_argument("--known", action="store_true", help="fail if nobody could be asked")
    asked = parser.parse_args()
    try:
        install()
        shipped = {str(canonicalize_name(one.name)): one for one in found()}
        print(f"installed   {len(shipped)} packages, with every extra")
        check_the_check()
        terms = licences()
        print(f"licences    {told(terms)}")
        write_page(shipped, terms)
        print(f"materials   {bill(shipped)}")
        print(f"known       {known(must_ask=asked.known)}")
    except Wrong as wrong:
        print(f"wrong: {wrong}", file=sys.stderr)
        return 1
    return 0


def run(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Wrong(f"{Path(str(command[0])).name}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def install() -> None:
    """Install the wheel as a user would, and nothing that a user would not have."""
    built = ROOT / "build" / "wheel"
    for old in built.glob("*.whl"):
        old.unlink()
    python = SHIPPED / "bin" / "python"
    run(ROOT / ".venv/bin/python", "-m", "hatchling", "build", "-t", "wheel", "-d", built)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", SHIPPED)
    pip = TOOLS / "pip", "--python", python, "--disable-pip-version-check"
    run(*pip, "install", "--quiet", "--require-hashes", "-r", LOCK)
    (wheel,) = built.glob("*.whl")
    run(*pip, "install", "--quiet", "--no-deps", wheel)
    run(*pip, "check")
    run(python, "-c", "import oncebridge")


def found() -> list[Distribution]:
    libraries = [str(path) for path in SHIPPED.glob("lib/python*/site-packages")]
    return list(distributions(path=libraries))


# --- licences -----------------------------------------------------------------------------


def licences() -> dict[str, str]:
    """Give the licence of each package, or say which may not be shipped."""
    python = SHIPPED / "bin" / "python"
    listed = json.loads(run(TOOLS / "pip-licenses", "--python", python, "--format", "json"))
    by_name = {str(canonicalize_name(one["Name"])): spelled(one["License"]) for one in listed}
    refused = {name: terms for name, terms in by_name.items() if not is_allowed(terms)}
    if refused:
        raise Wrong(f"may not be shipped, or says nothing we know: {refused}")
    return by_name


def spelled(terms: str) -> str:
    """Write *terms* as expressions: where several are listed, all of them count."""
    return ", ".join(SPELLED.get(part.strip(), part.strip()) for part in terms.split(";"))


def is_allowed(terms: str) -> bool:
    """Tell whether all of what is listed is allowed: any side of an OR, both of an AND."""
    return all(_is_allowed(Licensing().parse(one)) for one in terms.split(", "))


def _is_allowed(expression: Any) -> bool:
    match expression:
        case OR():
            return any(map(_is_allowed, expression.args))
        case AND():
            return all(map(_is_allowed, expression.args))
    return str(expression) in ALLOWED


def check_the_check() -> None:
    """Refuse to go on with a check that would let everything pass."""
    for terms in REFUSED:
        if is_allowed(terms):
            raise Wrong(f"the check of licences lets {terms!r} pass")


def told(by_name: dict[str, str]) -> str:
    kinds = "; ".join(sorted(set(by_name.values())))
    return f"{len(by_name)} packages: {kinds}"


# --- the page -----------------------------------------------------------------------------


def write_page(shipped: dict[str, Distribution], terms: dict[str, str]) -> None:
    """Write the tables of the page: what each extra brings, and under which licence."""
    ours = shipped["oncebridge"]
    extras = ["", *sorted(ours.metadata.get_all("Provides-Extra") or ())]
    brought = {extra: closure(shipped, extra) for extra in extras}
    core = brought[""]
    rows = [
        f"| {f'`{extra}`' if extra else '(none)'} | "
        f"{', '.join(sorted(brought[extra] - (core if extra else set()))) or 'nothing more'} |"
        for extra in extras
    ]
    listed = [
        f"| {name} | {one.version} | {terms[name]} |"
        for name, one in sorted(shipped.items())
        if name != "oncebridge"
    ]
    text = PAGE.read_text()
    for mark, table in (
        ("extras", ["| extra | brings |", "| --- | --- |", *rows]),
        ("licences", ["| package | version | licence |", "| --- | --- | --- |", *listed]),
    ):
        begins, ends = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = text.partition(begins)
        _, end, after = rest.partition(ends)
        if not end:
            raise Wrong(f"{PAGE.name} has no place for {mark}")
        text = before + begins + "\n" + "\n".join(table) + "\n\n" + ends + after
    if text != PAGE.read_text():
        PAGE.write_text(text)
        raise Wrong(f"docs/{PAGE.name} was behind and is written anew: look at it, and try again")


def closure(shipped: dict[str, Distribution], extra: str) -> set[str]:
    """Follow what oncebridge needs with *extra*, and what that needs."""
    seen: set[str] = set()
    open_ends = [("oncebridge", extra)]
    walked = set(open_ends)
    while open_ends:
        name, wanted = open_ends.pop()
        for line in shipped[name].requires or ():
            needs = Requirement(line)
            if needs.marker and not needs.marker.evaluate({"extra": wanted}):
                continue
            other = str(canonicalize_name(needs.name))
            if other not in shipped:
                raise Wrong(f"{name} needs {other}, which is not in {LOCK.name}")
            seen.add(other)
            steps = {(other, more) for more in ("", *needs.extras)} - walked
            walked |= steps
            open_ends += steps
    return seen


# --- materials, and what is known against them --------------------------------------------


def bill(shipped: dict[str, Distribution]) -> str:
    python = SHIPPED / "bin" / "python"
    made = "--output-reproducible", "--mc-type", "library", "--pyproject", ROOT / "pyproject.toml"
    run(TOOLS / "cyclonedx-py", "environment", *made, "--validate", "-o", BILL, python)
    whole = json.loads(BILL.read_text())
    whole["components"] = [one for one in whole["components"] if one["name"] != "oncebridge"]
    BILL.write_text(json.dumps(whole, indent=1))
    names = {str(canonicalize_name(one["name"])) for one in whole["components"]}
    if missing := set(shipped) - names - {"oncebridge"}:
        raise Wrong(f"not in the bill: {', '.join(sorted(missing))}")
    return f"{BILL.relative_to(ROOT)}, {len(names)} components beside ours"


def known(*, must_ask: bool) -> str:
    command = TOOLS / "pip-audit", "-r", LOCK, "--disable-pip", "--format", "json"
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        judged = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        judged = []
        print((done.stderr.strip() or "pip-audit said nothing").splitlines()[-1], file=sys.stderr)
    bad = {one["name"]: [v["id"] for v in one["vulns"]] for one in judged if one.get("vulns")}
    if bad:
        raise Wrong(f"known to be vulnerable: {bad}")
    asked = [one for one in judged if "vulns" in one]
    if len(asked) < len(judged) or not judged:
        said = f"NOT ASKED for {len(judged) - len(asked) or 'all'} packages: nobody answers here"
        if must_ask:
            raise Wrong(said)
        return said
    return f"nothing, of {len(asked)} packages"


if __name__ == "__main__":
    sys.exit(main())
