"""Whether a host that waits belongs to this run, and has the policy of this run."""

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Any, Final

import torch

from vla_rl.reporting.whole_file import write_whole

logger = logging.getLogger(__name__)

KEY_FILE: Final = "hosts_key"
"""File of a run's directory by which its hosts know it."""


def run_key(run: Path) -> str:
    """Return the name by which hosts know a run, the same after a resume.

    It is written at the first call; if it cannot be, it is empty, with a warning.
    """
    file = run / KEY_FILE
    try:
        if not file.exists():
            # at random: two runs of one name are not one run
            write_whole(file, f"{run.name}-{secrets.token_hex(16)}\n".encode())
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        logger.warning(
            "%s cannot be used: %s. A resume will start everything on the hosts anew", file, error
        )
        return ""


def digest_of_fixed(model: Any) -> str:
    """Digest what publications do not carry of a policy: its files, frozen weights and buffers.

    Call it on the device lane.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(model.checkpoint_files().items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    weights = model.network.named_parameters()
    fixed = {name: each for name, each in weights if not each.requires_grad}
    for name, each in (*fixed.items(), *model.network.named_buffers()):
        digest.update(f"{name} {each.dtype} {list(each.shape)}".encode())
        flat = each.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
