"""An environment of its own for packages that would change versions in the project's."""

import subprocess
import sysconfig
import venv
from pathlib import Path


def layered_environment(folder: Path, *packages: str) -> Path:
    """Return the interpreter of an environment that is made if it is not there.

    It has the packages, installed as pip resolves them, and sees those of this interpreter.
    """
    python = folder / "bin" / "python"
    made = folder / ".installed"
    if not made.exists():
        venv.create(folder, with_pip=True)
        (site_packages,) = (folder / "lib").glob("python*/site-packages")
        # read after the environment's own packages, which therefore come first
        (site_packages / "zz_vla_rl.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        made.touch()
    return python
