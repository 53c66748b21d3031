"""Does a test fail for every mistake that matters? Break one thing at a time in a copy of the tree and see.

    .venv/bin/python tests/mutations.py            # all, about ten minutes on two cores
    .venv/bin/python tests/mutations.py eos pad    # those whose name holds one of these words

Prints a line per mutation and exits with 1 if any survives. pytest does not collect it: run it after you change a
formula. tests/mutations.jsonl has the mutations, and tests/test_house.py checks that their texts still exist.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    name: str
    file: str  # from the root of the repository
    old: str
    new: str
    tests: str  # words for pytest: the tests of which one must fail


MUTATIONS = [Mutation(**json.loads(line)) for line in (ROOT / "tests" / "mutations.jsonl").read_text().splitlines()]


def survives(mutation: Mutation) -> str | None:
    """Why the mutation was not caught, or None when a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", ".hypothesis"))
        path = tree / mutation.file
        source = path.read_text()
        if mutation.old not in source:
            return f"{mutation.file} has no such text any more: mend tests/mutations.jsonl"
        path.write_text(source.replace(mutation.old, mutation.new))
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow",
                *shlex.split(mutation.tests),
            ],
            cwd=tree,
            capture_output=True,
            text=True,
        )
        if run.returncode == 0:
            return "NO TEST FAILS"
        if run.returncode != 1:
            return f"pytest could not run: {run.stdout[-300:]}"
        failed = next((line for line in run.stdout.splitlines() if line.startswith("FAILED")), "FAILED")
        print(f"caught    {mutation.name:45} {failed.split(' - ')[0].removeprefix('FAILED ')}", flush=True)
        return None


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    missed = 0
    for mutation in chosen:
        why = survives(mutation)
        if why is not None:
            missed += 1
            print(f"SURVIVED  {mutation.name:45} {why}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
