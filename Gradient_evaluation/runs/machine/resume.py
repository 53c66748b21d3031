"""What a run leaves on disk, and how the same command continues it.

The identity of a run is the settings that its numbers depend on (model, sampling law, seed, ...), not its paths, batch sizes
or device.
Every row of a table and every folder of Gram files stores it. A run with another identity stops with an error that names
the difference.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, write_json

# Entries of the identity that tables and folders of earlier versions lack -> what they were made with.
ADDED_LATER = {"chat_template_kwargs": None, "template_date": None, "reward_weights": None, "reward_digest": None}
IDENTITY, CHECKS = "run.json", "checks.json"  # beside the Gram files
PILOT = "pilot"  # in run.json: what the first prompts have shown (runs/pilot.py)
BESIDE_THE_IDENTITY = ("weights_digest", "flags", PILOT)  # what run.json has too
# Entries of an identity that are no flags: the flags that decide them, or what else does.
FROM_FLAGS = {
    "sketched": ("estimators",),
    "greedy": ("estimators",),
    "sketched_at": ("K_list",),
    "largest_block": ("K_list", "block_size"),
}
FROM_ELSEWHERE = {
    "template_date": "the clock, as the chat template prints the date",
    "prompt_format": "the tokenizer and chat template of --model",
    "model_fingerprint": "the weights and config of --model",
    "reward_digest": "the file of --reward, which has changed since",
    "rollouts": "the tokens of --rollouts",
    "ref_model": "--ref_model, its weights and --kl_type",
    "optimizer_state": "--optimizer_state and the --adam flags",
    "importance_weights": "--importance_weights, and the log-probs of --rollouts",
    "file_rewards": "the rewards in the files of --rollouts",
}


def output_folder(path: str | Path) -> Path:
    """Create a folder for results, parents included, and check that it can be written to."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot create this folder ({error.strerror}); choose another") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: this folder cannot be written to; choose another")
    return folder


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Inside, this process alone writes ``path`` (a file or a folder). Raises UserError that names a process that does.

    The lock is the kernel's, on ``.NAME.lock`` beside the path: it ends with the process, also with one that was killed.
    """
    lock_file = path.with_name(f".{path.name}.lock")
    with one_line_errors(lock_file, "write"):
        lock = _locked(lock_file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock_file.unlink()
        os.close(lock)


def _locked(lock_file: Path) -> int:
    """The descriptor of the locked file, which then says which process holds it."""
    while True:
        lock = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 200).decode(errors="replace") or "another process"
            os.close(lock)
            raise UserError(
                f"{lock_file.parent / lock_file.name[1 : -len('.lock')]}: {holder} is writing it; wait for it, or choose "
                "another output folder"
            ) from None
        except OSError as error:  # some network file systems know no locks
            print(f"warning: {lock_file}: cannot lock it ({error.strerror}); let no other run write there", file=sys.stderr)
        try:
            if os.path.samestat(os.stat(lock_file), os.fstat(lock)):
                os.truncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)  # its holder removed the file after we opened it


def parts_of(table: Path) -> list[Path]:
    """The files to which several processes append rows of a table."""
    return sorted(table.parent.glob(f".{glob.escape(table.name)}.rank*"))


@contextlib.contextmanager
def saved_on_interrupt(path: Path, overwrite: bool, first: bool) -> Iterator[None]:
    """On Ctrl-C inside, the first process says what is saved and how to continue.

    path: the table, or the folder of the Gram files.
    """
    try:
        yield
    except KeyboardInterrupt:
        if _has_a_prompt(path):
            command = "the same command without --overwrite" if overwrite else "the same command"
            text = f"interrupted; every finished prompt is saved in {path}, and {command} continues from there"
        else:
            text = "interrupted; no prompt was finished yet, so the same command starts from the beginning"
        raise KeyboardInterrupt(text if first else "") from None


def _has_a_prompt(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("*.npz"))
    return any(file.stat().st_size for file in (path, *parts_of(path)) if file.exists())


def refuse_difference(where: str, found: dict, identity: dict, flags: dict | None = None) -> None:
    """Raise UserError naming the first entry of ``identity`` that differs in what was ``found`` at ``where``.

    flags: {name: value} of those flags of this run that ``found["flags"]`` has of the earlier one. Where they say why an
    entry differs, the error names them.
    """
    for name, value in identity.items():
        if found.get(name, ADDED_LATER.get(name)) == value:
            continue
        then, now, fix = f"{name} = {found.get(name)!r}", f"{value!r}{_source(name)}", "use the same"
        earlier = found.get("flags") or {}
        if differing := _differing_flags(name, earlier, flags or {}):
            then, now = (" ".join(_as_typed(flag, values[flag]) for flag in differing) for values in (earlier, flags))
        if "K_list" in differing and "block_size" not in differing:
            fix = (
                f"keep {max(earlier['K_list'])} as the largest of --K_list, or compute other group sizes from these Grams "
                f"with --from_grams {Path(where).parent}; otherwise"
            )
        raise UserError(
            f"{where}: made with {then}, this run has {now}; {fix}, pass --overwrite to start afresh, "
            "or choose another output folder"
        )


def _differing_flags(name: str, earlier: dict, flags: dict) -> list[str]:
    """Of the flags that decide the entry ``name``, those that differ and are known of both runs."""
    return [
        flag
        for flag in FROM_FLAGS.get(name, ())
        if flag in earlier and flag in flags and _deciding(flag, earlier[flag]) != _deciding(flag, flags[flag])
    ]


def _deciding(flag: str, value: Any) -> Any:
    """The part of a flag's value that decides how Grams are made: of the group sizes, the largest."""
    return max(value) if flag == "K_list" else value


def _source(name: str) -> str:
    source = FROM_ELSEWHERE.get(name) or ", ".join(f"--{flag}" for flag in FROM_FLAGS.get(name, ()))
    return f" (from {source})" if source else ""


def _as_typed(flag: str, value: Any) -> str:
    if value is None or value == []:
        return f"no --{flag}"
    return f"--{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def check_fingerprint(rows: Iterable[dict], fingerprint: str, path: str | Path, fix: str) -> None:
    """Raise UserError when a row was made with other weights. Rows of the published script do not say; they pass."""
    for row in rows:
        found = row.get("model_fingerprint")
        if found is not None and found != fingerprint:
            raise UserError(f"{path}: made with other weights (fingerprint {found}, this model has {fingerprint}); {fix}")


def check_same_weights(fingerprints: Sequence[str]) -> None:
    """Raise UserError when processes of one job have loaded different models."""
    if len(set(fingerprints)) > 1:
        raise UserError(
            f"the processes of this job have loaded different weights (fingerprints "
            f"{', '.join(sorted(set(fingerprints)))}); give every machine the same --model"
        )


def check_identity(path: Path, stored: dict, overwrite: bool) -> None:
    """Compare the identity in ``path`` with this run's, and write ``stored``: this run's, with ``BESIDE_THE_IDENTITY``.

    Raises UserError when they differ, and when there are Gram files without an identity. With ``overwrite`` the Gram files
    are removed instead.
    """
    if path.exists() and not overwrite:
        found = read_identity(path)
        identity = {name: value for name, value in stored.items() if name not in BESIDE_THE_IDENTITY}
        refuse_difference(str(path), found, identity, stored["flags"])
        if PILOT in found:
            stored = {**stored, PILOT: found[PILOT]}
        if found != stored:
            write_json(path, stored)
        return
    grams = list(path.parent.glob("*.npz"))
    if grams and not overwrite:
        raise UserError(
            f"{path.parent}: holds .npz files but no {path.name} that says what made them; pass --overwrite "
            "to remove them, or choose another --save_json"
        )
    for old in grams:
        old.unlink()
    (path.parent / CHECKS).unlink(missing_ok=True)
    write_json(path, stored)


def read_identity(path: Path, fix: str = "pass --overwrite to start this run afresh") -> dict:
    """The identity beside a folder of Gram files. fix: what to do where there is none, for the message."""
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path}: missing or damaged; {fix}") from None
    if not isinstance(identity, dict) or not isinstance(identity.get("model"), str):
        raise UserError(f"{path}: not the identity of a run_tracecov.py run; {fix}")
    if not identity.get("largest_block") and identity.get("block_sizes"):  # an earlier version stored the sizes instead
        flags = identity.get("flags") or {}
        identity["largest_block"] = flags.get("block_size") or max(identity["block_sizes"])
    return identity


def read_checks(grams: Path) -> dict:
    """The checks of the run that made a folder of Gram files; {} where it stored none."""
    try:
        return json.loads((grams / CHECKS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
